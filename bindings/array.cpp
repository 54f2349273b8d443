#include "array.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <vector>

namespace gdn::python {
namespace {

enum class Protocol : uint8_t { kExchangeApi, kArrayStruct, kDlpack, kUnbacked };

struct TypeInfo {
  PyTypeObject* type;
  const DLPackExchangeAPI* api;
  Protocol protocol;
  Framework framework;
};

// What NumPy's __array_struct__ capsule points to (numpy.org, "The array interface protocol").
struct ArrayStruct {
  enum : int { kNotSwapped = 0x200, kWriteable = 0x400 };
  int two;
  int rank;
  char kind;
  int itemsize;
  int flags;
  Py_ssize_t* shape;
  Py_ssize_t* strides;  // bytes
  void* data;
  PyObject* description;
};

std::string text_attribute(nb::handle object, const char* name) {
  nb::object value = nb::getattr(object, name, nb::none());
  return nb::isinstance<nb::str>(value) ? nb::cast<std::string>(value) : std::string();
}

const DLPackExchangeAPI* exchange_api(nb::handle type) {
  nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  auto* api = static_cast<const DLPackExchangeAPI*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  const bool known = api->header.version.major == DLPACK_MAJOR_VERSION;
  return known && api->dltensor_from_py_object_no_sync ? api : nullptr;
}

// The exchange API skips a framework's own checks, so it serves the types it was written for and
// not their subclasses (fake or distributed tensors).
TypeInfo inspect(PyTypeObject* type) {
  TypeInfo info{type, nullptr, Protocol::kDlpack, Framework::kOther};
  nb::handle self(reinterpret_cast<PyObject*>(type));
  bool exact =
      nb::cast<bool>(self.attr("__dict__").attr("__contains__")("__dlpack_c_exchange_api__"));
  for (nb::handle base : nb::borrow<nb::tuple>(self.attr("__mro__"))) {
    const std::string module = text_attribute(base, "__module__");
    const std::string name = text_attribute(base, "__name__");
    if (module == "torch" && name == "Tensor") {
      info.framework = Framework::kTorch;
      const bool wrapper = !nb::getattr(self, "__torch_dispatch__", nb::none())
                                .is(nb::getattr(base, "__torch_dispatch__", nb::none()));
      if (wrapper) info.protocol = Protocol::kUnbacked;
      exact = base.is(self) || (text_attribute(self, "__module__") == "torch.nn.parameter" &&
                                text_attribute(self, "__name__") == "Parameter");
    } else if (module == "numpy" && name == "ndarray") {
      info.framework = Framework::kNumpy;
      info.protocol = Protocol::kArrayStruct;
    } else if (module.rfind("cupy", 0) == 0 && name == "ndarray") {
      info.framework = Framework::kCupy;
    } else if (module.rfind("jax", 0) == 0) {
      info.framework = Framework::kJax;
    }
  }
  if (exact && (info.api = exchange_api(self)) != nullptr) info.protocol = Protocol::kExchangeApi;
  return info;
}

// Thread-local, so that neither the GIL nor a lock is needed. An entry keeps its type alive.
const TypeInfo& type_info(PyTypeObject* type) {
  static thread_local TypeInfo cache[8] = {};
  static thread_local unsigned next = 0;
  for (const TypeInfo& entry : cache) {
    if (entry.type == type) return entry;
  }
  const TypeInfo info = inspect(type);
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  TypeInfo& entry = cache[next++ % 8];
  Py_XDECREF(reinterpret_cast<PyObject*>(entry.type));
  entry = info;
  return entry;
}

void set_rank(ArrayView& view, int rank) {
  if (rank > kMaxRank) fail("%s: rank %d; expected at most %d", view.name, rank, kMaxRank);
  view.rank = rank;
}

void take_dltensor(ArrayView& view, const DLTensor& tensor) {
  set_rank(view, tensor.ndim);
  int64_t dense = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.shape[i] = tensor.shape[i];
    view.strides[i] = tensor.strides ? tensor.strides[i] : dense;
    dense *= tensor.shape[i];
  }
  if (tensor.dtype.lanes != 1) fail("%s: a vector dtype; expected a scalar one", view.name);
  view.dtype = tensor.dtype.code << 8 | tensor.dtype.bits;
  view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  view.device_id = tensor.device.device_id;
  switch (tensor.device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
      view.device_type = GDN_CPU;
      view.device_id = 0;
      break;
    case kDLCUDA:
    case kDLCUDAManaged: view.device_type = GDN_CUDA_DEVICE; break;
    default:
      fail("%s: DLPack device type %d; expected CPU or CUDA", view.name,
           static_cast<int>(tensor.device.device_type));
  }
}

void view_exchange(ArrayView& view, const DLPackExchangeAPI* api) {
  DLTensor tensor;
  view.api = api;
  if (api->dltensor_from_py_object_no_sync(view.object.ptr(), &tensor) != 0) {
    nb::python_error error;
    nb::raise_from(error, PyExc_ValueError, "%s: a tensor without plain dense or strided memory",
                   view.name);
  }
  take_dltensor(view, tensor);
}

// ml_dtypes.bfloat16 is a user dtype of kind 'V'. It is known by name, and remembered.
bool is_bfloat16(nb::handle array) {
  static thread_local PyObject* known = nullptr;
  static PyObject* name = nullptr;
  PyObject* dtype = PyObject_GetAttr(array.ptr(), interned(name, "dtype"));
  if (dtype == nullptr) throw nb::python_error();
  const bool same = dtype == known || text_attribute(dtype, "name") == "bfloat16";
  if (!same || dtype == known) {
    Py_DECREF(dtype);
    return same;
  }
  Py_XDECREF(known);
  known = dtype;
  return true;
}

gdn_dtype_t numpy_dtype(const ArrayView& view, const ArrayStruct& array) {
  const int bits = 8 * array.itemsize;
  switch (array.kind) {
    case 'i': return kDLInt << 8 | bits;
    case 'u': return kDLUInt << 8 | bits;
    case 'f': return kDLFloat << 8 | bits;
    case 'b': return kDLBool << 8 | bits;
    case 'c': return kDLComplex << 8 | bits;
    default: break;
  }
  if (array.itemsize == 2 && is_bfloat16(view.object)) return GDN_BFLOAT16;
  const std::string dtype = nb::cast<std::string>(nb::str(nb::object(view.object.attr("dtype"))));
  fail("%s: NumPy dtype %s; expected float32, float16, ml_dtypes.bfloat16, int32 or int64",
       view.name, dtype.c_str());
}

// __array_struct__ costs as little as __dlpack__ and also tells of bfloat16 and read-only arrays.
void view_numpy(ArrayView& view, Access access) {
  static PyObject* name = nullptr;
  nb::object capsule =
      nb::steal(PyObject_GetAttr(view.object.ptr(), interned(name, "__array_struct__")));
  if (!capsule.is_valid()) throw nb::python_error();
  auto* array = static_cast<const ArrayStruct*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (array == nullptr) throw nb::python_error();
  set_rank(view, array->rank);
  view.dtype = numpy_dtype(view, *array);
  view.data = array->data;
  view.device_type = GDN_CPU;
  if (!(array->flags & ArrayStruct::kNotSwapped)) fail("%s: byte-swapped data", view.name);
  if (access == Access::kWrite && !(array->flags & ArrayStruct::kWriteable)) {
    fail("%s: a read-only array; expected a writable one, it is written in place", view.name);
  }
  for (int i = 0; i < view.rank; ++i) {
    view.shape[i] = array->shape[i];
    view.strides[i] = array->strides[i] / array->itemsize;
    if (array->strides[i] % array->itemsize != 0 && array->shape[i] > 1) {
      fail("%s: stride of %zd bytes in dimension %d; expected a multiple of %d", view.name,
           array->strides[i], i, array->itemsize);
    }
  }
}

// A stream of -1 asks the producer not to synchronise: the launch is on the stream that the caller
// names, and anything else would break graph capture. max_version is younger than the protocol.
nb::object dlpack_capsule(const ArrayView& view, bool on_cuda) {
  nb::object method = nb::getattr(view.object, "__dlpack__");
  nb::dict arguments;
  if (on_cuda) arguments["stream"] = -1;
  arguments["max_version"] = nb::make_tuple(1, 1);
  try {
    try {
      return method(**arguments);
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;
    }
    nb::str key("max_version");
    PyDict_DelItem(arguments.ptr(), key.ptr());
    return method(**arguments);
  } catch (nb::python_error& error) {
    const std::string reason = nb::cast<std::string>(nb::str(error.value()));
    nb::raise_from(error, PyExc_ValueError, "%s: %s cannot be shared by DLPack: %s", view.name,
                   type_of(view.object).c_str(), reason.c_str());
  }
}

int dlpack_device_type(const ArrayView& view) {
  try {
    nb::object device = view.object.attr("__dlpack_device__")();
    return nb::cast<int>(nb::int_(device[0]));
  } catch (nb::python_error& error) {
    nb::raise_from(error, PyExc_ValueError, "%s: %s.__dlpack_device__() gave no device type",
                   view.name, type_of(view.object).c_str());
  }
}

void view_dlpack(ArrayView& view, Access access) {
  if (!nb::hasattr(view.object, "__dlpack__") || !nb::hasattr(view.object, "__dlpack_device__")) {
    fail("%s: got %s; expected an array (PyTorch, NumPy, CuPy or any other with __dlpack__)",
         view.name, type_of(view.object).c_str());
  }
  const bool is_jax = view.framework == Framework::kJax;
  if (is_jax && access == Access::kWrite) {
    fail(
        "%s: a jax.Array is immutable and cannot be written; expected a PyTorch, NumPy or CuPy "
        "array",
        view.name);
  }
  const int device_type = dlpack_device_type(view);
  const bool on_cuda = device_type == kDLCUDA || device_type == kDLCUDAManaged;
  if (is_jax && on_cuda) {
    fail(
        "%s: a jax.Array on CUDA has no stream to order this call on; expected a PyTorch or CuPy "
        "array (torch.from_dlpack(x))",
        view.name);
  }
  view.owner = dlpack_capsule(view, on_cuda);
  if (PyCapsule_IsValid(view.owner.ptr(), "dltensor_versioned")) {
    auto* managed = static_cast<const DLManagedTensorVersioned*>(
        PyCapsule_GetPointer(view.owner.ptr(), "dltensor_versioned"));
    const uint64_t refused = DLPACK_FLAG_BITMASK_READ_ONLY | DLPACK_FLAG_BITMASK_IS_COPIED;
    if (access == Access::kWrite && (managed->flags & refused)) {
      fail(
          "%s: %s gives a read-only or copied view; expected a writable array, it is written in "
          "place",
          view.name, type_of(view.object).c_str());
    }
    take_dltensor(view, managed->dl_tensor);
  } else if (PyCapsule_IsValid(view.owner.ptr(), "dltensor")) {
    take_dltensor(view, static_cast<const DLManagedTensor*>(
                            PyCapsule_GetPointer(view.owner.ptr(), "dltensor"))
                            ->dl_tensor);
  } else {
    fail("%s: %s.__dlpack__() returned no DLPack capsule", view.name, type_of(view.object).c_str());
  }
}

// A wrapper of exact type (torch.func) shows no base pointer, but still adds its offset to it.
void require_memory(const ArrayView& view) {
  constexpr uintptr_t kFirstPage = 4096;
  if (reinterpret_cast<uintptr_t>(view.data) >= kFirstPage) return;
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] == 0) return;
  }
  throw UnbackedTensor(std::string(view.name) + ": " + type_of(view.object) +
                       " without memory of its own; expected a plain tensor, or `import "
                       "gdn_paged.torch`, which traces the call");
}

}  // namespace

ArrayView view_array(const char* name, nb::handle object, Access access) {
  ArrayView view;
  view.name = name;
  view.object = object;
  if (object.is_none()) fail("%s: None; expected an array", name);
  const TypeInfo& info = type_info(Py_TYPE(object.ptr()));
  view.framework = info.framework;
  switch (info.protocol) {
    case Protocol::kExchangeApi: view_exchange(view, info.api); break;
    case Protocol::kArrayStruct: view_numpy(view, access); break;
    case Protocol::kDlpack: view_dlpack(view, access); break;
    case Protocol::kUnbacked: view.rank = 0; break;
  }
  require_memory(view);
  const int64_t item = (view.dtype & 0xff) / 8;
  if (item > 0 && reinterpret_cast<uintptr_t>(view.data) % item != 0) {
    fail("%s: data at %p; expected a multiple of %d bytes", name, view.data,
         static_cast<int>(item));
  }
  return view;
}

std::string dtype_name(gdn_dtype_t dtype) {
  static const char* const kNames[] = {"int", "uint", "float", "opaque", "bfloat", "complex"};
  const int code = dtype >> 8;
  if (code == kDLBool) return "bool";
  if (code >= 0 && code < 6) return kNames[code] + std::to_string(dtype & 0xff);
  return (dtype & 0xff) == 8 ? "an 8-bit float (DLPack code " + std::to_string(code) + ")"
                             : "DLPack dtype code " + std::to_string(code);
}

std::string type_of(nb::handle object) {
  return nb::cast<std::string>(nb::str(object.type().attr("__name__")));
}

std::string describe(const ArrayView& view) {
  std::string text = dtype_name(view.dtype) + " [";
  for (int i = 0; i < view.rank; ++i) {
    text += (i ? ", " : "") + std::to_string(view.shape[i]);
  }
  text += "] on ";
  return text + (view.device_type == GDN_CPU ? "cpu" : "cuda:" + std::to_string(view.device_id));
}

void fail(const char* format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  throw nb::value_error(text);
}

}  // namespace gdn::python
