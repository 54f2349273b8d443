#include "call.h"

#include <cstring>
#include <iterator>

namespace gdn::python {
namespace {

std::string shape_text(const std::initializer_list<int64_t>& dims) {
  std::string text = "[";
  for (int64_t dim : dims) {
    if (text.size() > 1) text += ", ";
    text += dim == kAny ? "any" : std::to_string(dim);
  }
  return text + "]";
}

bool has_shape(const ArrayView& view, const std::initializer_list<int64_t>& dims) {
  if (view.rank != static_cast<int>(dims.size())) return false;
  int i = 0;
  for (int64_t dim : dims) {
    if (dim != kAny && dim != view.shape[i]) return false;
    ++i;
  }
  return true;
}

bool is_float(gdn_dtype_t dtype) {
  return dtype == GDN_FLOAT32 || dtype == GDN_BFLOAT16 || dtype == GDN_FLOAT16;
}

// Strides of dimensions that do not move are free in every framework; the C API calls them dense.
int64_t stride_of(const ArrayView& view, int dim) {
  if (view.shape[dim] <= 1) return 0;
  return view.strides[dim] == 0 ? GDN_STRIDE_BROADCAST : view.strides[dim];
}

bool is_empty(const ArrayView& view) {
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] == 0) return true;
  }
  return false;
}

// Strides of an array without elements are whatever its framework likes.
bool is_dense_row(const ArrayView& view, int from) {
  if (is_empty(view)) return true;
  int64_t dense = 1;
  for (int i = view.rank - 1; i >= from; --i) {
    if (view.shape[i] > 1 && view.strides[i] != dense) return false;
    dense *= view.shape[i];
  }
  return true;
}

CUstream_st* stream_pointer(nb::handle address) {
  return reinterpret_cast<CUstream_st*>(to_address("stream", address));
}

CUstream_st* explicit_stream(nb::handle stream) {
  if (PyLong_Check(stream.ptr()) && !PyBool_Check(stream.ptr())) {
    return stream_pointer(stream);
  }
  if (nb::hasattr(stream, "__cuda_stream__")) {  // (protocol version, pointer)
    return stream_pointer(stream.attr("__cuda_stream__")()[1]);
  }
  if (nb::hasattr(stream, "cuda_stream")) {  // torch before the protocol
    return stream_pointer(stream.attr("cuda_stream"));
  }
  fail("stream: got %s; expected an int or an object with __cuda_stream__",
       type_of(stream).c_str());
}

CUstream_st* current_stream(const ArrayView& first) {
  const int device = first.device_id;
  if (first.api != nullptr && first.api->current_work_stream != nullptr) {
    void* stream = nullptr;
    if (first.api->current_work_stream(kDLCUDA, device, &stream) != 0) throw nb::python_error();
    return static_cast<CUstream_st*>(stream);
  }
  if (first.framework == Framework::kTorch) {
    nb::object stream = nb::module_::import_("torch.cuda").attr("current_stream")(device);
    return stream_pointer(stream.attr("cuda_stream"));
  }
  if (first.framework == Framework::kCupy) {
    nb::object stream = nb::module_::import_("cupy.cuda").attr("get_current_stream")(device);
    return stream_pointer(stream.attr("ptr"));
  }
  fail(
      "stream: None, and %s on CUDA has no known current stream; expected an int or an object "
      "with __cuda_stream__",
      type_of(first.object).c_str());
}

// torch.uint8 and the like, looked up once per thread and dtype.
nb::handle torch_dtype(const char* name) {
  static const char* const kNames[] = {"uint8", "int32", "int64", "float32"};
  static thread_local PyObject* dtypes[std::size(kNames)] = {};
  size_t i = 0;
  while (std::strcmp(kNames[i], name) != 0) ++i;
  if (dtypes[i] == nullptr) {
    dtypes[i] = nb::object(nb::module_::import_("torch").attr(name)).release().ptr();
  }
  return dtypes[i];
}

}  // namespace

ManagedMemory::~ManagedMemory() {
  if (tensor_ != nullptr && tensor_->deleter != nullptr) tensor_->deleter(tensor_);
}

void* ManagedMemory::allocate(const ArrayView& like, int64_t bytes) {
  if (like.api == nullptr || like.api->managed_tensor_allocator == nullptr) return nullptr;
  DLTensor prototype{};
  prototype.device = {like.device_type == GDN_CPU ? kDLCPU : kDLCUDA, like.device_id};
  prototype.ndim = 1;
  prototype.dtype = {kDLUInt, 8, 1};
  prototype.shape = &bytes;
  const auto ignore = [](void*, const char*, const char*) {};
  if (like.api->managed_tensor_allocator(&prototype, &tensor_, nullptr, ignore) != 0) {
    PyErr_Clear();
    tensor_ = nullptr;
    return nullptr;
  }
  return static_cast<char*>(tensor_->dl_tensor.data) + tensor_->dl_tensor.byte_offset;
}

Call::Call(const char* name, nb::handle first) : first_(view_array(name, first, Access::kRead)) {}

void Call::use_stream(nb::handle stream) {
  stream_given_ = !stream.is_none();
  CUstream_st* given = stream_given_ ? explicit_stream(stream) : nullptr;
  if (on_cuda()) stream_ = stream_given_ ? given : current_stream(first_);
}

ArrayView Call::array(const char* name, nb::handle object, const Shape& shape, Access access) {
  ArrayView view = object.is(first_.object) ? first_ : view_array(name, object, access);
  if (object.is(first_.object) && access == Access::kWrite) {
    view = view_array(name, object, access);
  }
  view.name = name;
  if (!has_shape(view, shape.dims)) {
    fail("%s: %s; expected shape %s, %s", name, describe(view).c_str(),
         shape_text(shape.dims).c_str(), shape.meaning);
  }
  if (view.device_type != first_.device_type || view.device_id != first_.device_id) {
    fail("%s: %s; expected the device of %s: %s", name, describe(view).c_str(), first_.name,
         describe(first_).c_str());
  }
  if (view.owner.is_valid()) kept_.push_back(view.owner);
  return view;
}

Operand Call::operand(const ArrayView& view, int head_dim) const {
  const int last = view.rank - 1;
  if (view.shape[last] > 1 && view.strides[last] != 1 && !is_empty(view)) {
    fail("%s: stride %lld in the last dimension; expected 1 (make it contiguous)", view.name,
         static_cast<long long>(view.strides[last]));
  }
  return {.data = view.data,
          .row_stride = stride_of(view, 0),
          .head_stride = stride_of(view, head_dim),
          .dtype = view.dtype};
}

Operand Call::gate(const char* name, nb::handle object, const Shape& shape) {
  if (object.is_none()) return {};
  const ArrayView view = array(name, object, shape);
  check_io(view);
  refuse_grad(view);
  return {.data = view.data,
          .row_stride = stride_of(view, 0),
          .head_stride = stride_of(view, view.rank - 1),
          .dtype = view.dtype};
}

Operand Call::per_head(const char* name, nb::handle object, int64_t heads) {
  if (object.is_none()) return {};
  const ArrayView view = array(name, object, {{heads}, "one value per head"});
  check_io(view);
  if (!is_dense_row(view, 0)) fail("%s: strided; expected a contiguous array", name);
  return {.data = view.data, .dtype = view.dtype};
}

Table Call::table(const char* name, nb::handle object, int64_t size) {
  const ArrayView view = array(name, object, {{size}, "a 1-D table"});
  if (view.dtype != GDN_INT32 && view.dtype != GDN_INT64) {
    fail("%s: %s; expected int32 or int64", name, describe(view).c_str());
  }
  if (!is_dense_row(view, 0)) {
    fail("%s: stride %lld; expected a contiguous table", name,
         static_cast<long long>(view.strides[0]));
  }
  // An empty table of a framework may have no memory; the C API knows an absent one by NULL.
  static const int64_t kEmpty = 0;
  return {view.data ? view.data : &kEmpty, view.dtype, view.shape[0]};
}

const void* Call::slot_array(const char* name, nb::handle object, int64_t size) {
  const Table slots = table(name, object, size);
  if (slots.dtype != GDN_INT32) fail("%s: int64; expected int32", name);
  return slots.data;
}

gdn_pool_t Call::pool(const char* name, nb::handle object, const HeadCounts& heads, Access access,
                      int64_t rows) {
  const ArrayView view =
      array(name, object,
            {{rows, heads.state, heads.dim_v, heads.dim_k}, "rows of states [H, V, K]"}, access);
  if (!is_float(view.dtype)) {
    fail("%s: %s; expected float32, bfloat16 or float16", name, describe(view).c_str());
  }
  if (!is_dense_row(view, 1)) {
    fail(
        "%s: strides [%lld, %lld, %lld, %lld]; expected dense [H, V, K] rows (the row stride is "
        "free)",
        name, static_cast<long long>(view.strides[0]), static_cast<long long>(view.strides[1]),
        static_cast<long long>(view.strides[2]), static_cast<long long>(view.strides[3]));
  }
  const int64_t row = heads.state * heads.dim_v * heads.dim_k;
  if (view.shape[0] > 1 && view.strides[0] < row && row > 0) {
    fail("%s: row stride %lld; expected at least %lld, rows must not overlap", name,
         static_cast<long long>(view.strides[0]), static_cast<long long>(row));
  }
  gdn_pool_t pool = GDN_POOL_INIT;
  pool.data = view.data;
  pool.dtype = view.dtype;
  pool.num_rows = view.shape[0];
  pool.row_stride = stride_of(view, 0);
  return pool;
}

// A result has no gradient, so an input that asks for one must not pass in silence.
void Call::refuse_grad(const ArrayView& view) {
  static PyObject* name = nullptr;
  if (view.framework != Framework::kTorch || grad_enabled_ == 0) return;
  nb::object requires_grad =
      nb::steal(PyObject_GetAttr(view.object.ptr(), interned(name, "requires_grad")));
  if (!requires_grad.is_valid()) throw nb::python_error();
  if (!requires_grad.is(Py_True)) return;
  if (grad_enabled_ < 0) {
    grad_enabled_ = nb::cast<bool>(nb::module_::import_("torch").attr("is_grad_enabled")());
  }
  if (grad_enabled_) {
    fail(
        "%s: requires grad, and gdn_paged has no backward; expected a tensor without it (call "
        "under torch.no_grad() or pass %s.detach())",
        view.name, view.name);
  }
}

// On torch's current stream this is one method call; other frameworks and streams go through
// Python.
nb::object Call::empty(std::initializer_list<int64_t> shape, const char* dtype) {
  nb::object dims = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(shape.size())));
  Py_ssize_t i = 0;
  for (int64_t dim : shape) PyTuple_SetItem(dims.ptr(), i++, PyLong_FromLongLong(dim));
  if (first_.framework == Framework::kTorch && !stream_given_) {
    nb::object new_empty = first_.object.attr("new_empty");
    if (dtype == nullptr) return new_empty(dims);
    return new_empty(dims, nb::arg("dtype") = torch_dtype(dtype));
  }
  nb::object dtype_object = dtype ? nb::object(nb::str(dtype)) : nb::none();
  return nb::module_::import_("gdn_paged._frameworks")
      .attr("empty")(first_.object, dims, dtype_object, stream_object());
}

nb::object Call::stream_object() const {
  if (!stream_given_ || !on_cuda()) return nb::none();
  return nb::int_(reinterpret_cast<uintptr_t>(stream_));
}

void* Call::scratch(const char* name, nb::handle given, size_t* bytes) {
  constexpr uintptr_t kAlignment = 256;
  if (given.is_none()) {
    if (*bytes == 0) return nullptr;
    const int64_t room = static_cast<int64_t>(*bytes + kAlignment);
    void* memory = stream_given_ ? nullptr : scratch_.allocate(first_, room);
    if (memory == nullptr) {
      kept_.push_back(empty({room}, "uint8"));
      memory = array(name, kept_.back(), {{kAny}, "scratch memory"}, Access::kWrite).data;
    }
    const uintptr_t base = reinterpret_cast<uintptr_t>(memory);
    return reinterpret_cast<void*>((base + kAlignment - 1) / kAlignment * kAlignment);
  }
  const ArrayView view = array(name, given, {{kAny}, "scratch memory"}, Access::kWrite);
  if (view.dtype != (kDLUInt << 8 | 8) || !is_dense_row(view, 0)) {
    fail("%s: %s; expected a contiguous uint8 array", name, describe(view).c_str());
  }
  *bytes = static_cast<size_t>(view.shape[0]);
  return *bytes ? view.data : nullptr;
}

HeadCounts check_heads(const ArrayView& q, const ArrayView& k, const ArrayView& v) {
  const int dim = q.rank - 1;
  HeadCounts h{q.shape[dim - 1], k.shape[dim - 1], v.shape[dim - 1], 0, q.shape[dim], v.shape[dim]};
  const bool gva = h.q > 0 && h.q == h.k && h.v % h.q == 0 && h.v > 0;
  const bool gqa = h.v > 0 && h.v == h.k && h.q % h.v == 0 && h.q > 0;
  if (!gva && !gqa) {
    fail(
        "v: %lld heads, with %lld of q and %lld of k; expected v heads a multiple of q heads = k "
        "heads, or q heads a multiple of k heads = v heads",
        static_cast<long long>(h.v), static_cast<long long>(h.q), static_cast<long long>(h.k));
  }
  h.state = h.q > h.v ? h.q : h.v;
  return h;
}

void check_io(const ArrayView& view) {
  if (!is_float(view.dtype)) {
    fail("%s: %s; expected float32, bfloat16 or float16", view.name, describe(view).c_str());
  }
}

void check_same_dtype(const ArrayView& view, const ArrayView& q) {
  if (view.dtype != q.dtype) {
    fail("%s: %s; expected the dtype of q: %s", view.name, describe(view).c_str(),
         dtype_name(q.dtype).c_str());
  }
}

}  // namespace gdn::python
