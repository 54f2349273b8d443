// Checks of scalars: heads, device, threads, flags, counts.
#include <cmath>
#include <cstring>

#include "core/arguments.h"

namespace gdn {
namespace {

constexpr int32_t kMaxThreads = 1024;  // OpenMP ends the process when it cannot start a thread

}  // namespace

Heads check_heads(const Heads& given) {
  Heads h = given;
  GDN_REQUIRE(h.q >= 1, "num_q_heads: %d given, at least 1 expected", h.q);
  GDN_REQUIRE(h.k >= 1, "num_k_heads: %d given, at least 1 expected", h.k);
  GDN_REQUIRE(h.v >= 1, "num_v_heads: %d given, at least 1 expected", h.v);
  GDN_REQUIRE(h.dim_k >= 1, "head_dim_k: %d given, at least 1 expected", h.dim_k);
  GDN_REQUIRE(h.dim_v >= 1, "head_dim_v: %d given, at least 1 expected", h.dim_v);
  if (h.v >= h.q) {
    GDN_REQUIRE(h.k == h.q, "num_k_heads: %d given, num_q_heads = %d expected (num_v_heads = %d)",
                h.k, h.q, h.v);
    GDN_REQUIRE(h.v % h.q == 0, "num_v_heads: %d given, a multiple of num_q_heads = %d expected",
                h.v, h.q);
  } else {
    GDN_REQUIRE(h.k == h.v, "num_k_heads: %d given, num_v_heads = %d expected (num_q_heads = %d)",
                h.k, h.v, h.q);
    GDN_REQUIRE(h.q % h.v == 0, "num_q_heads: %d given, a multiple of num_v_heads = %d expected",
                h.q, h.v);
  }
  h.state = h.q > h.v ? h.q : h.v;
  int64_t elements = 0;
  GDN_REQUIRE(!__builtin_mul_overflow(static_cast<int64_t>(h.state) * h.dim_v,
                                      static_cast<int64_t>(h.dim_k) * 8, &elements),
              "head_dim_k: a state of %d x %d x %d given, fewer than 2^60 elements expected",
              h.state, h.dim_v, h.dim_k);
  return h;
}

Device check_device(gdn_device_type_t type, int32_t id, CUstream_st* stream) {
  if (type == 0) type = GDN_CPU;
  GDN_REQUIRE(type == GDN_CPU || type == GDN_CUDA_DEVICE,
              "device_type: %d given, GDN_CPU (1) or GDN_CUDA_DEVICE (2) expected", type);
  GDN_REQUIRE(id >= 0, "device_id: %d given, at least 0 expected", id);
  return {.type = type, .id = id, .stream = stream};
}

Threads check_threads(gdn_parallel_for_t parallel_for, void* context, int32_t count) {
  GDN_REQUIRE(count >= 0 && count <= kMaxThreads, "num_threads: %d given, 0 (all) to %d expected",
              count, kMaxThreads);
  return {.parallel_for = parallel_for, .context = context, .count = count};
}

const char* check_backend(const char* backend) {
  return backend == nullptr || std::strcmp(backend, "auto") == 0 ? nullptr : backend;
}

void check_flags(uint64_t flags, uint64_t known) {
  GDN_REQUIRE((flags & ~known) == 0, "flags: 0x%llx given, only bits of 0x%llx expected here",
              static_cast<unsigned long long>(flags), static_cast<unsigned long long>(known));
}

void check_count(const char* name, int64_t count) {
  GDN_REQUIRE(count >= 0 && count <= INT32_MAX, "%s: %lld given, 0 to 2^31 - 1 expected", name,
              static_cast<long long>(count));
}

void check_page_size(int64_t page_size, uint64_t flags) {
  const bool any = flags & GDN_ALLOW_UNALIGNED_PAGES;
  GDN_REQUIRE(page_size > 0 && page_size <= INT32_MAX && (any || page_size % kChunk == 0),
              "page_size: %lld given, a positive multiple of 64 expected%s",
              static_cast<long long>(page_size),
              any             ? ", or any positive number below 2^31"
              : page_size > 0 ? ", or allow_unaligned_pages"
                              : "");
}

void check_absent(const char* name, const void* given, const char* form) {
  GDN_REQUIRE(given == nullptr, "%s: %p given, NULL expected in the %s form", name, given, form);
}

void check_no_slots(const void* initial_page_indices, bool slots_given) {
  GDN_REQUIRE(initial_page_indices == nullptr || !slots_given,
              "initial_page_indices: given with slots, NULL expected (the call that computes the "
              "slots takes it)");
}

float check_scale(double scale, bool is_explicit, int32_t head_dim_k) {
  if (scale == 0.0 && !is_explicit) return static_cast<float>(1.0 / std::sqrt(head_dim_k));
  const auto value = static_cast<float>(scale);
  GDN_REQUIRE(std::isfinite(value), "scale: %g given, a finite number of fp32 expected", scale);
  return value;
}

}  // namespace gdn
