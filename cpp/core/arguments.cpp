#include "core/arguments.h"

#include <cmath>
#include <cstring>

namespace gdn {
namespace {

// A struct_size beyond this is an uninitialised field, not a newer caller.
constexpr size_t kMaxStructSize = 1 << 16;
constexpr int64_t kMaxCount = INT32_MAX;

bool multiply(int64_t a, int64_t b, int64_t* product) {
  return !__builtin_mul_overflow(a, b, product);
}

// The stride in elements that a given one stands for.
int64_t resolve_stride(const Operand& o, const char* which, int64_t given, int64_t dense) {
  if (given == 0) return dense;
  if (given == GDN_STRIDE_BROADCAST) return 0;
  GDN_REQUIRE(given > 0,
              "%s_%s_stride: %lld given, 0 (dense), a positive number of elements or "
              "GDN_STRIDE_BROADCAST expected",
              o.name, which, static_cast<long long>(given));
  return given;
}

// Rows and heads of a written operand must not share elements.
void check_disjoint(const Operand& o, int64_t row_stride, int64_t head_stride) {
  if (o.rows <= 1 && o.heads <= 1) return;
  const bool rows_outside = o.rows <= 1 || row_stride >= (o.heads - 1) * head_stride + o.dim;
  const bool heads_inside = o.heads <= 1 || head_stride >= o.dim;
  const bool heads_outside = o.heads <= 1 || head_stride >= (o.rows - 1) * row_stride + o.dim;
  const bool rows_inside = o.rows <= 1 || row_stride >= o.dim;
  GDN_REQUIRE((rows_outside && heads_inside) || (heads_outside && rows_inside),
              "%s: %s stride %lld and head stride %lld overlap for [%lld, %lld, %lld], a written "
              "array expects distinct elements",
              o.name, o.row_name, static_cast<long long>(row_stride),
              static_cast<long long>(head_stride), static_cast<long long>(o.rows),
              static_cast<long long>(o.heads), static_cast<long long>(o.dim));
}

void check_aligned(const char* name, const void* data, int64_t bytes) {
  GDN_REQUIRE(reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0,
              "%s: address %p given, a multiple of its element size %lld expected", name, data,
              static_cast<long long>(bytes));
}

}  // namespace

void read_struct_bytes(const char* name, const void* given, void* copy, size_t size) {
  GDN_REQUIRE(given != nullptr, "%s: NULL given, a pointer to a struct expected", name);
  size_t given_size;
  std::memcpy(&given_size, given, sizeof given_size);
  GDN_REQUIRE(given_size > sizeof given_size && given_size <= kMaxStructSize &&
                  given_size % alignof(void*) == 0,
              "%s: struct_size %zu given, sizeof of the struct expected (here %zu)", name,
              given_size, size);
  const auto* bytes = static_cast<const unsigned char*>(given);
  for (size_t i = size; i < given_size; ++i) {
    GDN_REQUIRE(bytes[i] == 0,
                "%s: struct_size %zu given with a non-zero byte at %zu, this library (%d.%d.%d) "
                "knows %zu bytes: the caller sets a field of a newer version",
                name, given_size, i, GDN_VERSION_MAJOR, GDN_VERSION_MINOR, GDN_VERSION_PATCH, size);
  }
  std::memcpy(copy, given, given_size < size ? given_size : size);
}

const char* dtype_name(gdn_dtype_t dtype) {
  switch (dtype) {
    case GDN_DTYPE_DEFAULT: return "default";
    case GDN_INT32: return "int32";
    case GDN_INT64: return "int64";
    case GDN_FLOAT16: return "fp16";
    case GDN_FLOAT32: return "fp32";
    case GDN_BFLOAT16: return "bf16";
    default: return "unknown";
  }
}

int64_t element_size(DType dtype) { return (static_cast<int32_t>(dtype) & 0xff) / 8; }

DType check_float_dtype(const char* name, gdn_dtype_t dtype, bool or_default) {
  if (dtype == GDN_DTYPE_DEFAULT && or_default) return DType::kFloat32;
  GDN_REQUIRE(dtype == GDN_FLOAT32 || dtype == GDN_BFLOAT16 || dtype == GDN_FLOAT16,
              "%s: 0x%x (%s) given, GDN_FLOAT32, GDN_BFLOAT16 or GDN_FLOAT16 expected", name,
              static_cast<unsigned>(dtype), dtype_name(dtype));
  return static_cast<DType>(dtype);
}

Tensor check_operand(const Operand& o) {
  GDN_REQUIRE(o.data != nullptr || !o.required, "%s: NULL given, [%lld, %lld, %lld] expected",
              o.name, static_cast<long long>(o.rows), static_cast<long long>(o.heads),
              static_cast<long long>(o.dim));
  check_aligned(o.name, o.data, element_size(o.dtype));
  int64_t head_stride = resolve_stride(o, "head", o.head_stride, o.dim);
  // The stride of one row, or of one head, is never taken: whatever it is, it must not overflow.
  if (o.heads == 1) head_stride = o.dim;
  int64_t row_stride = 0, row_span = 0, head_span = 0, bytes = 0;
  const bool one_head = o.heads == 1 || head_stride == 0;
  bool fits = multiply(one_head ? 1 : o.heads, one_head ? o.dim : head_stride, &row_stride);
  const int64_t given_stride = resolve_stride(o, o.row_name, o.row_stride, row_stride);
  if (o.rows > 1) row_stride = given_stride;
  fits = fits && multiply(o.rows > 0 ? o.rows - 1 : 0, row_stride, &row_span) &&
         multiply(o.heads - 1, head_stride, &head_span) &&
         !__builtin_add_overflow(row_span, head_span, &bytes) &&
         !__builtin_add_overflow(bytes, o.dim, &bytes) &&
         multiply(bytes, element_size(o.dtype), &bytes);
  GDN_REQUIRE(fits,
              "%s: [%lld, %lld, %lld] with %s stride %lld and head stride %lld given, fewer "
              "than 2^63 bytes expected",
              o.name, static_cast<long long>(o.rows), static_cast<long long>(o.heads),
              static_cast<long long>(o.dim), o.row_name, static_cast<long long>(row_stride),
              static_cast<long long>(head_stride));
  if (o.written) check_disjoint(o, row_stride, head_stride);
  return {.data = o.data, .dtype = o.dtype, .row_stride = row_stride, .head_stride = head_stride};
}

IndexTable check_table(const TableArgument& t) {
  GDN_REQUIRE(t.dtype == GDN_DTYPE_DEFAULT || t.dtype == GDN_INT32 || t.dtype == GDN_INT64,
              "%s_dtype: 0x%x (%s) given, GDN_INT32 or GDN_INT64 expected", t.name,
              static_cast<unsigned>(t.dtype), dtype_name(t.dtype));
  GDN_REQUIRE(t.data != nullptr || !t.required, "%s: NULL given, [%lld] expected", t.name,
              static_cast<long long>(t.size));
  check_aligned(t.name, t.data, t.dtype == GDN_INT64 ? 8 : 4);
  return {.data = t.data, .size = t.size, .is_int64 = t.dtype == GDN_INT64};
}

Pool check_pool(const PoolArgument& a) {
  if (a.pool == nullptr) {
    GDN_REQUIRE(!a.required, "%s: NULL given, a gdn_pool_t expected", a.name);
    return {};
  }
  const gdn_pool_t given = read_struct(a.name, a.pool);
  Pool pool = {.data = given.data, .num_rows = given.num_rows, .row_stride = given.row_stride};
  GDN_REQUIRE(given.dtype == GDN_DTYPE_DEFAULT || given.dtype == GDN_FLOAT32 ||
                  given.dtype == GDN_BFLOAT16 || given.dtype == GDN_FLOAT16,
              "%s.dtype: 0x%x (%s) given, GDN_FLOAT32, GDN_BFLOAT16 or GDN_FLOAT16 expected",
              a.name, static_cast<unsigned>(given.dtype), dtype_name(given.dtype));
  if (given.dtype != GDN_DTYPE_DEFAULT) pool.dtype = static_cast<DType>(given.dtype);
  GDN_REQUIRE(given.reserved == 0, "%s.reserved: %d given, 0 expected", a.name, given.reserved);
  GDN_REQUIRE(given.num_rows >= 0 && given.num_rows <= kMaxCount,
              "%s.num_rows: %lld given, 0 to 2^31 - 1 expected", a.name,
              static_cast<long long>(given.num_rows));
  if (pool.row_stride == 0) pool.row_stride = a.elements;
  GDN_REQUIRE(pool.row_stride >= a.elements,
              "%s.row_stride: %lld given, at least H * V * K = %lld expected", a.name,
              static_cast<long long>(pool.row_stride), static_cast<long long>(a.elements));
  if (pool.num_rows <= 1) pool.row_stride = a.elements;  // never taken
  int64_t bytes = 0;
  GDN_REQUIRE(multiply(pool.num_rows, pool.row_stride, &bytes) &&
                  multiply(bytes, element_size(pool.dtype), &bytes),
              "%s: %lld rows of stride %lld given, fewer than 2^63 bytes expected", a.name,
              static_cast<long long>(pool.num_rows), static_cast<long long>(pool.row_stride));
  GDN_REQUIRE(pool.data != nullptr || !a.data_required, "%s.data: NULL given, %lld rows expected",
              a.name, static_cast<long long>(pool.num_rows));
  check_aligned(a.name, pool.data, element_size(pool.dtype));
  return pool;
}

}  // namespace gdn
