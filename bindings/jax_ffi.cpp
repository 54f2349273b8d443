// XLA FFI handlers for JAX, on the CPU and on CUDA: the extension module gdn_paged._jax_ffi.
// python/gdn_paged/_jax_ops.py packs operands in the order of the enums here. An operand that may
// be absent is left out; bit i of the attribute `present` says that operand i is there.
//
// No scratch allocator: XLA may put a call in a command buffer, which replays it after scratch
// memory has gone back. The workspace is a result instead, whose size is known when JAX traces.
#include <nanobind/nanobind.h>
#include <xla/ffi/api/c_api.h>
#include <xla/ffi/api/ffi.h>

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

#include "gdn_paged/gdn_paged.h"

namespace gdn::jax {
namespace {

namespace nb = nanobind;
namespace ffi = xla::ffi;

// clang-format off
enum Prefill : int {
  kQ, kK, kV, kG, kBeta, kALog, kDtBias, kCuSeqlens, kPageIndices, kPageIndptr, kLastPageLen,
  kStatePool, kStateIndices, kOutputStateIndices, kCheckpointCuStarts, kPrefixLens, kPlan,
  kInitialPages
};
enum Decode : int {
  kDecodeQ, kDecodeK, kDecodeV, kDecodeALog, kDecodeA, kDecodeDtBias, kDecodeB, kDecodePageIndices,
  kDecodePageIndptr, kDecodeLastPageLen, kDecodeStatePool, kDecodeReads, kDecodeWrites,
  kDecodeInitialPages
};
enum Table : int {
  kTableCuSeqlens, kTablePageIndices, kTablePageIndptr, kTableLastPageLen, kTableInitialPages
};
enum Size : int {
  kNumTokens, kNumPages, kPageSize, kNumQHeads, kNumKHeads, kNumVHeads, kHeadDimK, kHeadDimV,
  kIoDtype, kStateDtype, kFlags, kSizeCount
};
// clang-format on

constexpr uintptr_t kAlignment = 256;  // of workspace and plan

struct Failure {
  ffi::ErrorCode code;
  std::string text;
};

[[noreturn]] void fail(std::string text) {
  throw Failure{ffi::ErrorCode::kInvalidArgument, std::move(text)};
}

void check(gdn_status_t status) {
  switch (status) {
    case GDN_OK: return;
    case GDN_INVALID_ARGUMENT:
    case GDN_PAGE_TABLE: fail(gdn_last_error());
    case GDN_UNSUPPORTED: throw Failure{ffi::ErrorCode::kUnimplemented, gdn_last_error()};
    case GDN_CUDA:
    case GDN_INTERNAL: throw Failure{ffi::ErrorCode::kInternal, gdn_last_error()};
    default: throw Failure{ffi::ErrorCode::kFailedPrecondition, gdn_last_error()};
  }
}

gdn_dtype_t dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32: return GDN_FLOAT32;
    case ffi::DataType::BF16: return GDN_BFLOAT16;
    case ffi::DataType::F16: return GDN_FLOAT16;
    case ffi::DataType::S32: return GDN_INT32;
    case ffi::DataType::S64: return GDN_INT64;
    default: return 0;
  }
}

// A dense buffer; null data stands for an absent operand alone.
struct Array {
  void* data = nullptr;
  gdn_dtype_t dtype = 0;
  ffi::AnyBuffer::Dimensions dims;
};

Array view(const ffi::AnyBuffer& buffer, size_t rank) {
  static char no_elements[kAlignment] = {};  // XLA has no address for them
  if (buffer.dimensions().size() != rank) {
    fail("an operand has rank " + std::to_string(buffer.dimensions().size()) + ", expected " +
         std::to_string(rank));
  }
  void* data = buffer.untyped_data();
  return {data ? data : no_elements, dtype_of(buffer.element_type()), buffer.dimensions()};
}

struct Place {
  gdn_device_type_t device_type = GDN_CPU;
  int32_t device_id = 0;
  CUstream_st* stream = nullptr;
};

// One execution: where it runs, its operands, results and attributes.
class Call {
 public:
  Call(const Place& place, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs)
      : place_(place), args_(args), rets_(rets), attrs_(attrs),
        present_(attribute<int64_t>("present")), backend_(attribute<std::string_view>("backend")) {}

  Array operand(int i, size_t rank) const {
    if (!(present_ >> i & 1)) return {};
    const auto before = static_cast<uint64_t>(present_) & ((uint64_t{1} << i) - 1);
    const auto buffer = args_.get<ffi::AnyBuffer>(static_cast<size_t>(std::popcount(before)));
    if (buffer.has_error()) fail(buffer.error().message());
    return view(buffer.value(), rank);
  }

  Array result(size_t i, size_t rank) const {
    auto buffer = rets_.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) fail(buffer.error().message());
    return view(*buffer.value(), rank);
  }

  template <class T>
  T attribute(std::string_view name) const {
    const auto value = attrs_.get<T>(name);
    if (value.has_error()) fail(std::string(name) + ": " + value.error().message());
    return value.value();
  }

  // The fields that all params share.
  template <class Params>
  void set_launch(Params* p) const {
    p->device_type = place_.device_type;
    p->device_id = place_.device_id;
    p->stream = place_.stream;
    p->num_threads = static_cast<int32_t>(attribute<int64_t>("num_threads"));
  }
  const char* backend() const { return backend_.c_str(); }

 private:
  Place place_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  ffi::Dictionary attrs_;
  int64_t present_;
  std::string backend_;
};

// The pool, which result 1 is: XLA copies it first where the caller did not donate it.
gdn_pool_t pool_of(const Call& call, int operand) {
  const Array given = call.operand(operand, 4), returned = call.result(1, 4);
  if (given.data != returned.data) {
    throw Failure{ffi::ErrorCode::kInternal, "state_pool: operand and result differ in memory"};
  }
  gdn_pool_t pool = GDN_POOL_INIT;
  pool.data = given.data;
  pool.dtype = given.dtype;
  pool.num_rows = given.dims[0];
  return pool;
}

// [..., heads, head_dim]
template <class Params>
void set_qkv(const Array& q, const Array& k, const Array& v, Params* p) {
  p->num_q_heads = static_cast<int32_t>(q.dims[q.dims.size() - 2]);
  p->num_k_heads = static_cast<int32_t>(k.dims[k.dims.size() - 2]);
  p->num_v_heads = static_cast<int32_t>(v.dims[v.dims.size() - 2]);
  p->head_dim_k = static_cast<int32_t>(q.dims[q.dims.size() - 1]);
  p->head_dim_v = static_cast<int32_t>(v.dims[v.dims.size() - 1]);
  p->io_dtype = q.dtype;
  p->q = q.data;
  p->k = k.data;
  p->v = v.data;
}

struct TablePlaces {
  int page_indices;  // page_indptr and last_page_len come behind it
  int initial_pages;
};

template <class Params>
void set_page_table(const Call& call, const TablePlaces& at, Params* p) {
  const int page_indices = at.page_indices;
  const Array indices = call.operand(page_indices, 1), indptr = call.operand(page_indices + 1, 1);
  const Array last = call.operand(page_indices + 2, 1);
  p->page_indices = indices.data;
  p->page_indices_dtype = indices.dtype;
  p->num_indices = indices.dims[0];
  p->page_indptr = indptr.data;
  p->page_indptr_dtype = indptr.dtype;
  p->last_page_len = last.data;
  p->last_page_len_dtype = last.dtype;
  const Array initial = call.operand(at.initial_pages, 1);
  p->initial_page_indices = initial.data;
  p->initial_page_indices_dtype = initial.dtype;
}

void set_sequences(const Call& call, gdn_prefill_params_t* p) {
  call.set_launch(p);
  p->backend = call.backend();
  const Array cu_seqlens = call.operand(kCuSeqlens, 1);
  p->num_seqs = cu_seqlens.dims[0] - 1;
  p->cu_seqlens = cu_seqlens.data;
  p->cu_seqlens_dtype = cu_seqlens.dtype;
  set_page_table(call, {kPageIndices, kInitialPages}, p);
  p->state_indices = call.operand(kStateIndices, 1).data;
  p->output_state_indices = call.operand(kOutputStateIndices, 1).data;
  p->checkpoint_cu_starts = call.operand(kCheckpointCuStarts, 1).data;
  p->prefix_lens = call.operand(kPrefixLens, 1).data;
}

void set_operands(const Call& call, gdn_prefill_params_t* p) {
  const Array q = call.operand(kQ, 3), k = call.operand(kK, 3), v = call.operand(kV, 3);
  p->num_tokens = q.dims[0];
  set_qkv(q, k, v, p);
  p->output = call.result(0, 3).data;
  const Array g = call.operand(kG, 2), beta = call.operand(kBeta, 2);
  const Array A_log = call.operand(kALog, 1), dt_bias = call.operand(kDtBias, 1);
  p->g = g.data;
  p->g_dtype = g.dtype;
  p->beta = beta.data;
  p->beta_dtype = beta.dtype;
  p->A_log = A_log.data;
  p->A_log_dtype = A_log.dtype;
  p->dt_bias = dt_bias.data;
  p->dt_bias_dtype = dt_bias.dtype;
}

// XLA aligns to 128 bytes at least; the result is larger by what is lost here.
void set_workspace(const Array& memory, gdn_prefill_params_t* p) {
  const auto given = reinterpret_cast<uintptr_t>(memory.data);
  const uintptr_t aligned = (given + kAlignment - 1) / kAlignment * kAlignment;
  const int64_t lost = static_cast<int64_t>(aligned - given);
  p->workspace = reinterpret_cast<void*>(aligned);
  p->workspace_bytes = memory.dims[0] > lost ? static_cast<size_t>(memory.dims[0] - lost) : 0;
}

void prefill_paged(const Call& call) {
  gdn_prefill_params_t p = GDN_PREFILL_PARAMS_INIT;
  set_sequences(call, &p);
  set_operands(call, &p);
  p.flags = static_cast<uint64_t>(call.attribute<int64_t>("flags"));
  p.gate = static_cast<gdn_gate_t>(call.attribute<int64_t>("gate"));
  p.scale = call.attribute<double>("scale");
  p.page_size = call.attribute<int64_t>("page_size");
  const gdn_pool_t pool = pool_of(call, kStatePool);
  p.state_pool = &pool;
  const Array plan = call.operand(kPlan, 1);
  if (plan.data != nullptr && plan.dims[0] > 0) {
    p.plan = plan.data;
    p.plan_bytes = static_cast<size_t>(plan.dims[0]);
  }
  set_workspace(call.result(2, 1), &p);
  check(gdn_prefill_paged(&p));
}

// What a plan and the sizes of scratch memory depend on, beside the tables.
void set_sizes(ffi::Span<const int64_t> sizes, gdn_prefill_params_t* p, gdn_pool_t* pool) {
  if (sizes.size() != kSizeCount) fail("sizes: wrong number of entries");
  p->num_tokens = sizes[kNumTokens];
  p->page_size = sizes[kPageSize];
  p->num_q_heads = static_cast<int32_t>(sizes[kNumQHeads]);
  p->num_k_heads = static_cast<int32_t>(sizes[kNumKHeads]);
  p->num_v_heads = static_cast<int32_t>(sizes[kNumVHeads]);
  p->head_dim_k = static_cast<int32_t>(sizes[kHeadDimK]);
  p->head_dim_v = static_cast<int32_t>(sizes[kHeadDimV]);
  p->io_dtype = static_cast<gdn_dtype_t>(sizes[kIoDtype]);
  p->flags = static_cast<uint64_t>(sizes[kFlags]);
  pool->dtype = static_cast<gdn_dtype_t>(sizes[kStateDtype]);
  pool->num_rows = sizes[kNumPages];
  p->state_pool = pool;
}

void prefill_plan(const Call& call) {
  gdn_prefill_params_t p = GDN_PREFILL_PARAMS_INIT;
  gdn_pool_t pool = GDN_POOL_INIT;
  set_sequences(call, &p);
  set_sizes(call.attribute<ffi::Span<const int64_t>>("sizes"), &p, &pool);
  const Array plan = call.result(0, 1);
  p.plan = plan.data;
  p.plan_bytes = static_cast<size_t>(plan.dims[0]);
  check(gdn_prefill_plan(&p));
}

void set_operands(const Call& call, gdn_decode_params_t* p) {
  const Array q = call.operand(kDecodeQ, 4), k = call.operand(kDecodeK, 4);
  const Array v = call.operand(kDecodeV, 4);
  p->batch_size = q.dims[0];
  set_qkv(q, k, v, p);
  p->output = call.result(0, 4).data;
  const Array A_log = call.operand(kDecodeALog, 1), dt_bias = call.operand(kDecodeDtBias, 1);
  const Array a = call.operand(kDecodeA, 3), b = call.operand(kDecodeB, 3);
  p->A_log = A_log.data;
  p->A_log_dtype = A_log.dtype;
  p->dt_bias = dt_bias.data;
  p->dt_bias_dtype = dt_bias.dtype;
  p->a = a.data;
  p->a_dtype = a.dtype;
  p->b = b.data;
  p->b_dtype = b.dtype;
}

void decode_paged(const Call& call) {
  gdn_decode_params_t p = GDN_DECODE_PARAMS_INIT;
  call.set_launch(&p);
  p.backend = call.backend();
  set_operands(call, &p);
  p.flags = static_cast<uint64_t>(call.attribute<int64_t>("flags"));
  p.scale = call.attribute<double>("scale");
  set_page_table(call, {kDecodePageIndices, kDecodeInitialPages}, &p);
  p.initial_state_indices = call.operand(kDecodeReads, 1).data;
  p.output_state_indices = call.operand(kDecodeWrites, 1).data;
  const gdn_pool_t pool = pool_of(call, kDecodeStatePool);
  p.state_pool = &pool;
  check(gdn_decode_paged(&p));
}

// Prefill slots with cu_seqlens, decode slots without.
void slots(const Call& call) {
  gdn_page_table_params_t p = GDN_PAGE_TABLE_PARAMS_INIT;
  call.set_launch(&p);
  p.page_size = call.attribute<int64_t>("page_size");
  p.flags = static_cast<uint64_t>(call.attribute<int64_t>("flags"));
  set_page_table(call, {kTablePageIndices, kTableInitialPages}, &p);
  p.num_seqs = call.operand(kTableLastPageLen, 1).dims[0];
  const auto result = [&](size_t i) { return static_cast<int32_t*>(call.result(i, 1).data); };
  p.state_indices = result(0);
  p.output_state_indices = result(1);
  const Array cu_seqlens = call.operand(kTableCuSeqlens, 1);
  if (cu_seqlens.data == nullptr) return check(gdn_decode_slots(&p));
  p.cu_seqlens = cu_seqlens.data;
  p.cu_seqlens_dtype = cu_seqlens.dtype;
  p.checkpoint_cu_starts = result(2);
  p.prefix_lens = result(3);
  check(gdn_prefill_slots(&p));
}

// ---- One body, two bindings ------------------------------------------------------------------
using Body = void (*)(const Call&);

template <class Function>
ffi::Error fence(const Function& function) {
  try {
    function();
    return ffi::Error::Success();
  } catch (const Failure& failure) {
    return ffi::Error(failure.code, "gdn_paged: " + failure.text);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

template <Body kBody>
ffi::Error on_cpu(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return fence([&] { kBody(Call(Place{}, args, rets, attrs)); });
}

template <Body kBody>
ffi::Error on_cuda(CUstream_st* stream, int32_t device, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, ffi::Dictionary attrs) {
  const Place place{.device_type = GDN_CUDA_DEVICE, .device_id = device, .stream = stream};
  return fence([&] { kBody(Call(place, args, rets, attrs)); });
}

template <Body kBody>
nb::tuple handlers() {
  XLA_FFI_DEFINE_HANDLER(cpu, on_cpu<kBody>,
                         ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
  XLA_FFI_DEFINE_HANDLER(cuda, on_cuda<kBody>,
                         ffi::Ffi::Bind()
                             .Ctx<ffi::PlatformStream<CUstream_st*>>()
                             .Ctx<ffi::DeviceOrdinal>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs(),
                         {ffi::Traits::kCmdBufferCompatible});
  return nb::make_tuple(nb::capsule(reinterpret_cast<void*>(cpu)),
                        nb::capsule(reinterpret_cast<void*>(cuda)));
}

// (bytes of workspace, bytes of plan) of a prefill on one device, from host integers.
nb::tuple prefill_sizes(const nb::tuple& values, int32_t device_type, int32_t device_id,
                        int64_t num_seqs, const char* backend) {
  int64_t sizes[kSizeCount];
  if (values.size() != kSizeCount) throw nb::type_error("wrong number of sizes");
  for (int i = 0; i < kSizeCount; ++i) sizes[i] = nb::cast<int64_t>(values[i]);
  gdn_prefill_params_t p = GDN_PREFILL_PARAMS_INIT;
  gdn_pool_t pool = GDN_POOL_INIT;
  set_sizes({sizes, kSizeCount}, &p, &pool);
  p.device_type = device_type;
  p.device_id = device_id;
  p.num_seqs = num_seqs;
  p.backend = backend;
  size_t workspace = 0, plan = 0;
  gdn_status_t status = gdn_prefill_workspace_size(&p, &workspace);
  if (status == GDN_OK) status = gdn_prefill_plan_size(&p, &plan);
  if (status != GDN_OK) {
    PyErr_SetString(status == GDN_INVALID_ARGUMENT ? PyExc_ValueError
                    : status == GDN_UNSUPPORTED    ? PyExc_NotImplementedError
                                                   : PyExc_RuntimeError,
                    gdn_last_error());
    throw nb::python_error();
  }
  return nb::make_tuple(workspace ? workspace + kAlignment : 0, plan);
}

}  // namespace
}  // namespace gdn::jax

NB_MODULE(_jax_ffi, m) {
  using namespace gdn::jax;
  m.doc() = "XLA FFI handlers; gdn_paged.jax holds the public functions.";
  nb::dict targets;  // name -> (handler on the CPU, handler on CUDA)
  targets["gdn_paged_prefill_paged"] = handlers<prefill_paged>();
  targets["gdn_paged_prefill_plan"] = handlers<prefill_plan>();
  targets["gdn_paged_decode_paged"] = handlers<decode_paged>();
  targets["gdn_paged_slots"] = handlers<slots>();
  m.attr("targets") = targets;
  m.attr("api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("prefill_sizes", &prefill_sizes, nb::arg("sizes"), nb::arg("device_type"),
        nb::arg("device_id"), nb::arg("num_seqs"), nb::arg("backend"));
}
