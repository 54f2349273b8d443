// Views of Python arrays: pointer, dtype, shape, strides and device of any DLPack array, taken
// without a copy, a synchronisation or an import of the framework.
#pragma once

#include <dlpack/dlpack.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "gdn_paged/gdn_paged.h"

namespace gdn::python {

namespace nb = nanobind;

inline constexpr int kMaxRank = 8;

// Who made an array, hence who allocates its results and knows the current stream.
enum class Framework : uint8_t { kTorch, kNumpy, kCupy, kJax, kOther };

enum class Access : uint8_t { kRead, kWrite };

struct ArrayView {
  const char* name = nullptr;  // of the argument
  nb::handle object;           // borrowed from the caller
  nb::object owner;            // holds a __dlpack__ capsule alive
  Framework framework = Framework::kOther;
  const DLPackExchangeAPI* api = nullptr;  // of exact torch tensors
  void* data = nullptr;
  gdn_dtype_t dtype = 0;
  gdn_device_type_t device_type = 0;
  int32_t device_id = 0;
  int32_t rank = 0;
  int64_t shape[kMaxRank] = {};
  int64_t strides[kMaxRank] = {};  // elements
};

// A tensor that stands for memory without having any: fake, functional or distributed. In Python
// UnbackedTensorError, a ValueError, so that gdn_paged.torch can trace the call instead.
struct UnbackedTensor : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Views `object`, the argument called `name`. Raises ValueError if it is no array, lies on a
// device that is neither CPU nor CUDA, or is to be written and cannot be.
ArrayView view_array(const char* name, nb::handle object, Access access);

// The interned Python string of a literal; `slot` is a static of the caller.
inline PyObject* interned(PyObject*& slot, const char* text) {
  if (slot == nullptr) slot = PyUnicode_InternFromString(text);
  return slot;
}

// "bfloat16 [10, 2, 64] on cuda:0", as error messages say it.
std::string describe(const ArrayView& view);
std::string dtype_name(gdn_dtype_t dtype);
std::string type_of(nb::handle object);

// Raises ValueError. Messages read "argument: what came; what is expected".
[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char* format, ...);

}  // namespace gdn::python
