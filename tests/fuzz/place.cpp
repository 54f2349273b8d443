#include "place.h"

namespace gdn_fuzz {
namespace {

// Far more than any region holds; products of two such numbers still fit.
constexpr Wide kHuge = Wide{1} << 56;

Wide clamp(Wide x) { return std::min(std::max(x, -kHuge), kHuge); }

Wide span(Wide count, Wide stride) { return count > 0 ? clamp(count - 1) * clamp(stride) : 0; }

void run_in_order(void*, int64_t n, void (*fn)(void*, int64_t), void* arg) {
  for (int64_t i = 0; i < n; ++i) fn(arg, i);
}

void run_backwards(void*, int64_t n, void (*fn)(void*, int64_t), void* arg) {
  for (int64_t i = n; i > 0; --i) fn(arg, i - 1);
}

}  // namespace

int64_t Shape::head_step() const {
  return head_stride == 0 ? dim : head_stride == GDN_STRIDE_BROADCAST ? 0 : head_stride;
}

int64_t Shape::row_step() const {
  if (row_stride == GDN_STRIDE_BROADCAST) return 0;
  if (row_stride != 0) return row_stride;
  const bool one_head = heads == 1 || head_step() == 0;
  int64_t dense;
  if (__builtin_mul_overflow(one_head ? 1 : heads, one_head ? dim : head_step(), &dense)) return 0;
  return dense;
}

Wide Shape::bytes() const {
  if (rows <= 0 || heads <= 0 || dim <= 0 || row_step() < 0 || head_step() < 0) return 0;
  return (span(rows, row_step()) + span(heads, head_step()) + dim) * Wide{size()};
}

char* Place::at(Region& region, Wide bytes, size_t alignment) {
  const size_t shift = misaligned();
  if (bytes < 0 || bytes + static_cast<Wide>(shift) > static_cast<Wide>(region.size())) {
    oversized = true;
    return region.begin();
  }
  const size_t size = static_cast<size_t>(bytes) + shift;
  const bool end = at_end();
  return region.place(size, alignment, end) + (end && shift == 0 ? 0 : shift);
}

void Place::table(const void** field, gdn_dtype_t dtype, Wide entries,
                  const std::vector<int64_t>& values) {
  if (*field == nullptr) return;
  Region& region = *memory().tables[static_cast<size_t>(tables_used++)];
  const size_t size = dtype == GDN_INT64 ? 8 : 4;
  char* begin = at(region, entries * static_cast<Wide>(size), size);
  if (entries * static_cast<Wide>(size) > static_cast<Wide>(region.size())) long_tables = true;
  const Wide capacity = (region.begin() + region.size() - begin) / static_cast<Wide>(size);
  const auto count = static_cast<size_t>(std::max(std::min(entries, capacity), Wide{0}));
  for (size_t i = 0; i < count; ++i) {
    const int64_t value = i < values.size() ? values[i] : 0;
    std::memcpy(begin + i * size, &value, size);
  }
  *field = begin;
}

void Place::pool(const gdn_pool_t** field, gdn_pool_t pool, int index, Wide elements) {
  if (*field == nullptr) return;
  const gdn_pool_t seen = visible(pool);
  const Wide stride = seen.row_stride != 0 ? Wide{seen.row_stride} : elements;
  const int64_t size = seen.dtype == GDN_FLOAT16 || seen.dtype == GDN_BFLOAT16 ? 2 : 4;
  Wide bytes = 0;
  if (seen.num_rows > 0 && elements > 0 && stride >= 0) {
    bytes = (span(seen.num_rows, stride) + elements) * size;
  }
  if (seen.data != nullptr) {
    pool.data = at(memory().pools[index], bytes, static_cast<size_t>(size));
  }
  Region& region = memory().nested[pools_used++];
  *field = reinterpret_cast<gdn_pool_t*>(struct_at(region, &pool, sizeof pool));
}

void Place::scratch(void** field, size_t bytes) {
  if (*field != nullptr) *field = at(memory().scratch, static_cast<Wide>(bytes), 256);
}

void Place::matrices(const float** field, Wide elements) {
  if (*field != nullptr) *field = reinterpret_cast<float*>(at(input(), 4 * elements, 16));
}
void Place::matrices(float** field, Region& region, Wide elements) {
  if (*field != nullptr) *field = reinterpret_cast<float*>(at(region, 4 * elements, 16));
}

void Place::name(const char** field) {
  static constexpr const char* kNames[] = {"auto", "cpu", "cuda", "cuda_sm90", "cuda_portable", ""};
  if (*field == nullptr) return;
  if (!in.one_in(4)) {
    *field = kNames[in.below(6)];
    return;
  }
  static char arbitrary[64];
  for (char& c : arbitrary) c = in.take<char>();
  arbitrary[63] = '\0';
  *field = arbitrary;
}

void Place::threads(gdn_parallel_for_t* field) {
  if (*field != nullptr) *field = in.flag() ? run_in_order : run_backwards;
}

char* Place::struct_at(Region& region, const void* given, size_t size) {
  size_t claimed;
  std::memcpy(&claimed, given, sizeof claimed);
  if (claimed > region.size()) claimed = size;  // beyond any struct: refused at the first look
  char* begin = region.place(std::max(claimed, sizeof(size_t)), 8, true);
  std::memset(begin, 0, static_cast<size_t>(region.begin() + region.size() - begin));
  std::memcpy(begin, given, std::max(std::min(claimed, size), sizeof(size_t)));
  if (claimed > size && in.one_in(4)) begin[size + in.take<uint16_t>() % (claimed - size)] = 1;
  return begin;
}

void allow_row(const Shape& shape, void* data, int64_t row) {
  char* begin = static_cast<char*>(data) + row * shape.row_step() * shape.size();
  for (int64_t head = 0; head < shape.heads; ++head) {
    memory().output.allow(begin + head * shape.head_step() * shape.size(),
                          static_cast<size_t>(shape.dim * shape.size()));
  }
}

void allow_pool_row(const gdn_pool_t* given, Wide elements, int64_t row) {
  if (given == nullptr) return;
  const gdn_pool_t pool = visible(*given);
  if (pool.data == nullptr || row < 0 || row >= pool.num_rows) return;
  const int64_t size = pool.dtype == GDN_FLOAT16 || pool.dtype == GDN_BFLOAT16 ? 2 : 4;
  const auto count = static_cast<int64_t>(elements);
  const int64_t stride = pool.row_stride != 0 ? pool.row_stride : count;
  char* begin = static_cast<char*>(pool.data) + row * stride * size;
  for (Region& region : memory().pools) {
    if (region.contains(begin)) region.allow(begin, static_cast<size_t>(count * size));
  }
}

void check_status(gdn_status_t status) {
  FUZZ_CHECK(status >= GDN_OK && status < GDN_INTERNAL);
  FUZZ_CHECK((status == GDN_OK) == (gdn_last_error()[0] == '\0'));
}

}  // namespace gdn_fuzz
