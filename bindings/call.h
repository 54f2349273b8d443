// What the arguments of one Python call share: the device, the stream, the framework that
// allocates, and the checks that name an argument, what came and what is expected.
#pragma once

#include <initializer_list>
#include <vector>

#include "array.h"
#include "scalars.h"

namespace gdn::python {

inline constexpr int64_t kAny = -1;  // a dimension of any size

// A required shape, with its meaning in words.
struct Shape {
  std::initializer_list<int64_t> dims;
  const char* meaning;
};

// Heads of a call, checked: state heads are H = max(num_q_heads, num_v_heads).
struct HeadCounts {
  int64_t q, k, v, state, dim_k, dim_v;
};

// Where an operand lies, in the C API's terms (a stride of 0 is dense).
struct Operand {
  void* data = nullptr;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
  gdn_dtype_t dtype = 0;
};

struct Table {
  const void* data = nullptr;
  gdn_dtype_t dtype = 0;
  int64_t size = 0;
};

// Memory of a framework by its C exchange API, in less time than by a Python object.
class ManagedMemory {
 public:
  ManagedMemory() = default;
  ~ManagedMemory();
  ManagedMemory(const ManagedMemory&) = delete;
  ManagedMemory& operator=(const ManagedMemory&) = delete;

  // Memory on `like`'s device for its framework's current stream; null: only Python can tell why
  // there is none. Once per object.
  void* allocate(const ArrayView& like, int64_t bytes);

 private:
  DLManagedTensorVersioned* tensor_ = nullptr;
};

// The arguments of a call as Python packs them: one tuple, in the order of an enum.
class Arguments {
 public:
  Arguments(nb::tuple tuple, Py_ssize_t count) : tuple_(tuple.ptr()) {
    if (PyTuple_Size(tuple_) != count) throw nb::type_error("wrong number of arguments");
  }
  nb::handle operator[](int i) const { return PyTuple_GetItem(tuple_, i); }

 private:
  PyObject* tuple_;
};

class Call {
 public:
  // `first` decides the device and the framework.
  Call(const char* name, nb::handle first);

  const ArrayView& first() const { return first_; }
  bool on_cuda() const { return first_.device_type == GDN_CUDA_DEVICE; }
  CUstream_st* stream() const { return stream_; }

  // An explicit stream, else the current stream of the framework.
  void use_stream(nb::handle stream);

  // An array on the call's device, of the given shape.
  ArrayView array(const char* name, nb::handle object, const Shape& shape,
                  Access access = Access::kRead);
  // q, k, v and output: rows are tokens or batch rows, heads are dimension `head_dim`.
  Operand operand(const ArrayView& view, int head_dim) const;
  // g, beta, a, b (may be None: null data).
  Operand gate(const char* name, nb::handle object, const Shape& shape);
  // A_log and dt_bias: dense [H] (may be None).
  Operand per_head(const char* name, nb::handle object, int64_t heads);
  // A dense int32 or int64 table of `size` entries (kAny: any number).
  Table table(const char* name, nb::handle object, int64_t size);
  // The optional array of the params that have a page table.
  template <class Params>
  void initial_pages(nb::handle object, int64_t size, Params& p) {
    if (object.is_none()) return;
    const Table pages = table("initial_page_indices", object, size);
    p.initial_page_indices = pages.data;
    p.initial_page_indices_dtype = pages.dtype;
  }
  // int32 alone, as the slots functions return them.
  const void* slot_array(const char* name, nb::handle object, int64_t size);
  // [rows, H, V, K] with dense rows.
  gdn_pool_t pool(const char* name, nb::handle object, const HeadCounts& heads, Access access,
                  int64_t rows = kAny);

  void refuse_grad(const ArrayView& view);

  // An array of the caller's framework on the call's device and stream; `dtype` null: as first.
  nb::object empty(std::initializer_list<int64_t> shape, const char* dtype = nullptr);
  // The explicit stream as an int, None for the framework's own.
  nb::object stream_object() const;
  // 256-byte aligned scratch memory: the caller's array, or `bytes` allocated here.
  void* scratch(const char* name, nb::handle given, size_t* bytes);

 private:
  ArrayView first_;
  CUstream_st* stream_ = nullptr;
  bool stream_given_ = false;
  int grad_enabled_ = -1;         // unknown
  std::vector<nb::object> kept_;  // alive until the call returns
  ManagedMemory scratch_;
};

HeadCounts check_heads(const ArrayView& q, const ArrayView& k, const ArrayView& v);
void check_io(const ArrayView& view);  // float32, bfloat16 or float16
void check_same_dtype(const ArrayView& view, const ArrayView& q);

template <class Params>
void set_heads(const HeadCounts& heads, gdn_dtype_t io_dtype, Params& p) {
  p.num_q_heads = static_cast<int32_t>(heads.q);
  p.num_k_heads = static_cast<int32_t>(heads.k);
  p.num_v_heads = static_cast<int32_t>(heads.v);
  p.head_dim_k = static_cast<int32_t>(heads.dim_k);
  p.head_dim_v = static_cast<int32_t>(heads.dim_v);
  p.io_dtype = io_dtype;
}

// Where and how: the fields that the params of all operations share.
struct LaunchOptions {
  nb::handle stream, deterministic, num_threads, backend;
};
template <class Params>
void set_launch(Params& p, Call& call, const LaunchOptions& options) {
  call.use_stream(options.stream);
  p.device_type = call.first().device_type;
  p.device_id = call.first().device_id;
  p.stream = call.stream();
  p.backend = to_backend(options.backend);
  if (is_batch_invariant(options.deterministic)) p.flags |= GDN_BATCH_INVARIANT;
  p.num_threads = to_int32("num_threads", options.num_threads);
}

// The text of gdn_explain.
template <class Params>
nb::str explain(gdn_op_t op, const Params& p) {
  char text[8192];
  const gdn_status_t status = gdn_explain(op, &p, text, sizeof text, nullptr);
  if (status == GDN_INVALID_ARGUMENT) check_status(status);
  return nb::str(text);
}

void define_prefill(nb::module_& m);
void define_decode(nb::module_& m);
void define_slots(nb::module_& m);
void define_verify(nb::module_& m);
void define_segment(nb::module_& m);

}  // namespace gdn::python
