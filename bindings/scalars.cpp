#include "scalars.h"

#include <cstring>

namespace gdn::python {

int64_t to_int64(const char* name, nb::handle object) {
  nb::object index = nb::steal(PyBool_Check(object.ptr()) ? nullptr : PyNumber_Index(object.ptr()));
  if (!index.is_valid()) {
    PyErr_Clear();
    const std::string text = nb::cast<std::string>(nb::repr(object));
    fail("%s: got %s (%s); expected an int", name, text.c_str(), type_of(object).c_str());
  }
  const int64_t value = PyLong_AsLongLong(index.ptr());
  if (value == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    fail("%s: %s; expected a 64-bit integer", name, nb::cast<std::string>(nb::str(index)).c_str());
  }
  return value;
}

uintptr_t to_address(const char* name, nb::handle object) {
  nb::object index = nb::steal(PyBool_Check(object.ptr()) ? nullptr : PyNumber_Index(object.ptr()));
  if (index.is_valid()) {
    const uint64_t address = PyLong_AsUnsignedLongLong(index.ptr());
    if (!PyErr_Occurred()) return static_cast<uintptr_t>(address);
  }
  PyErr_Clear();
  fail("%s: got %s; expected an address", name, nb::cast<std::string>(nb::repr(object)).c_str());
}

int32_t to_int32(const char* name, nb::handle object) {
  const int64_t value = to_int64(name, object);
  if (value != static_cast<int32_t>(value)) {
    fail("%s: %lld; expected a 32-bit integer", name, static_cast<long long>(value));
  }
  return static_cast<int32_t>(value);
}

bool to_bool(const char* name, nb::handle object) {
  if (object.is(Py_True)) return true;
  if (object.is(Py_False)) return false;
  const int value = PyObject_IsTrue(object.ptr());
  if (value < 0 || object.is_none()) {
    PyErr_Clear();
    fail("%s: got %s; expected a bool", name, type_of(object).c_str());
  }
  return value != 0;
}

double to_double(const char* name, nb::handle object) {
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    fail("%s: got %s; expected a float", name, type_of(object).c_str());
  }
  return value;
}

const char* to_text(const char* name, nb::handle object) {
  if (object.is_none()) return nullptr;
  if (!nb::isinstance<nb::str>(object)) {
    fail("%s: got %s; expected a str", name, type_of(object).c_str());
  }
  return nb::borrow<nb::str>(object).c_str();
}

const char* to_backend(nb::handle object) {
  const char* name = to_text("backend", object);
  if (name == nullptr || !std::strcmp(name, "auto") || !std::strcmp(name, "flashinfer")) {
    return nullptr;
  }
  return name;
}

bool is_batch_invariant(nb::handle deterministic) {
  const char* text = deterministic.is_none() ? nullptr : to_text("deterministic", deterministic);
  if (text == nullptr) return false;
  if (std::strcmp(text, "batch") != 0) {
    fail("deterministic: \"%s\"; expected None or \"batch\"", text);
  }
  return true;
}

void check_status(gdn_status_t status) {
  switch (status) {
    case GDN_OK: return;
    case GDN_INVALID_ARGUMENT:
    case GDN_WORKSPACE:
    case GDN_PAGE_TABLE: throw nb::value_error(gdn_last_error());
    case GDN_UNSUPPORTED:
      PyErr_SetString(PyExc_NotImplementedError, gdn_last_error());
      throw nb::python_error();
    default:
      PyErr_Format(PyExc_RuntimeError, "%s: %s", gdn_status_string(status), gdn_last_error());
      throw nb::python_error();
  }
}

}  // namespace gdn::python
