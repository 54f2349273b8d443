// Prefill on the CPU: independent tasks over (sequence, head, range of V), each of which carries
// its part of the state through the sequence in segments of kChunk tokens.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/chunks.h"
#include "core/kernel.h"
#include "core/slots.h"
#include "core/status.h"
#include "cpu/kernels.h"
#include "cpu/operand.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace gdn {
namespace {

using namespace cpu;

constexpr int64_t kSegmentTokens = kChunk;
constexpr int64_t kMaxTileBytes = 1 << 19;    // of one head in a task
constexpr int64_t kSerialElements = 1 << 18;  // tokens H K V below which threads cost more
constexpr int64_t kTasksPerThread = 4;        // enough for an even load
constexpr int64_t kHeadsInFlight = 4;         // of one task, segment by segment
constexpr int64_t kShortHeads = 16;           // the same, of sequences inside one segment
constexpr int64_t kStreamBytes = 32 << 20;    // of states, past the caches from here on

// How V is cut into tasks. Multiples of kTileV: the cut does not change a byte of the result.
struct Split {
  int32_t rows = 0;   // V rows of a task
  int32_t parts = 0;  // tasks of a head
};

Split split_heads(const PrefillProblem& p, int32_t threads) {
  const int64_t tiles = (p.heads.dim_v + kTileV - 1) / kTileV;
  const int64_t heads = std::max<int64_t>(p.num_seqs * p.heads.state, 1);
  const int64_t wanted = threads == 1 ? 1 : (kTasksPerThread * threads + heads - 1) / heads;
  const int64_t tile_bytes = static_cast<int64_t>(p.heads.dim_k) * kTileV * 4;
  int64_t per_task = std::max<int64_t>(tiles / std::min(wanted, tiles), 1);
  per_task = std::min(per_task, std::max<int64_t>(kMaxTileBytes / tile_bytes, 1));
  return {.rows = static_cast<int32_t>(per_task * kTileV),
          .parts = static_cast<int32_t>((tiles + per_task - 1) / per_task)};
}

// Scratch of one task.
struct Buffers {
  float* tiles;  // [kHeadsInFlight][tile_floats]
  float* kq;
  MiniChunk* minis;
  float* alpha;  // [kSegmentTokens]
  float* beta;
  int64_t tile_floats;

  static size_t bytes(const Heads& heads, const Split& split) {
    const size_t floats = static_cast<size_t>(heads.dim_k) * split.rows * kHeadsInFlight +
                          static_cast<size_t>(heads.dim_k) * 2 * kSegmentTokens +
                          2 * kSegmentTokens;
    return floats * sizeof(float) + kSegmentMinis * sizeof(MiniChunk);
  }
  Buffers(void* base, const Heads& heads, const Split& split) {
    tiles = static_cast<float*>(base);
    tile_floats = static_cast<int64_t>(heads.dim_k) * split.rows;
    kq = tiles + tile_floats * kHeadsInFlight;
    alpha = kq + static_cast<int64_t>(heads.dim_k) * 2 * kSegmentTokens;
    beta = alpha + kSegmentTokens;
    minis = reinterpret_cast<MiniChunk*>(beta + kSegmentTokens);
  }
  float* tiles_of(int32_t head) const { return tiles + head % kHeadsInFlight * tile_floats; }
};

// The tokens of a sequence in segments: the chunks of the grid.
struct Segments {
  ChunkGrid grid;
  int64_t prefix, length;

  // The row in its chunk of the token after `done` ones.
  int64_t row(int64_t done) const { return chunk_place(grid, prefix + done).row; }
  // Tokens from `done` on that share a segment.
  int64_t tokens(int64_t done) const {
    const ChunkPlace place = chunk_place(grid, prefix + done);
    const int64_t rows = place.to_page_end == 1 ? kSegmentTokens - grid.gap : kSegmentTokens;
    return std::min(rows - place.row, length - done);
  }
};

Segments segments_of(const PrefillProblem& p, const Sequence& s) {
  return {.grid = chunk_grid(p.checkpoint_every), .prefix = s.prefix, .length = s.length};
}

// `dim_v` V rows from `offset` of some heads of one sequence, head by head.
struct Task {
  const PrefillProblem& p;
  const Kernels& kernels;
  Sequence sequence;
  Segments segments;
  int64_t offset;
  int32_t dim_v;
  int32_t first_head, end_head;
  bool streams;  // so much is stored that caches cannot hold it

  StateRows rows(const Pool& pool, int64_t row, int32_t head) const {
    return {.data = state_address(pool, p.heads, row, head, offset),
            .dtype = pool.dtype,
            .dim_k = p.heads.dim_k,
            .dim_v = dim_v};
  }

  void zero_outputs(int32_t head) const {
    for (int64_t t = 0; t < sequence.length; ++t) {
      std::memset(writable(p.output, sequence.begin + t, head, offset), 0,
                  dim_v * element_bytes(p.io));
    }
  }

  StateStore store_to(const StateRows& to) const {
    const bool streaming = streams && to.dtype == DType::kFloat32 && to.dim_k % 16 == 0 &&
                           reinterpret_cast<uintptr_t>(to.data) % 64 == 0;
    return {.to = to, .streaming = streaming};
  }

  void run_segment(const Buffers& b, int32_t head, int64_t done, int32_t tokens,
                   const Upcoming& upcoming, const StateStore& store) const {
    const int64_t token = sequence.begin + done;
    for (int32_t t = 0; t < tokens; ++t) {
      b.alpha[t] = read_alpha(p.gates, token + t, head);
      b.beta[t] = read_beta(p.gates, token + t, head);
    }
    Segment segment{.kq = b.kq, .minis = b.minis, .num_minis = 0, .dim_k = 0, .phase = 0};
    kernels.prepare({.q = address(p.q, token, p.heads.q_of(head)),
                     .k = address(p.k, token, p.heads.k_of(head)),
                     .q_stride = p.q.row_stride,
                     .k_stride = p.k.row_stride,
                     .io = p.io,
                     .dim_k = p.heads.dim_k,
                     .tokens = tokens,
                     .phase = static_cast<int32_t>(segments.row(done) % kMini),
                     .from_zero = done == 0 && !reads_state(),
                     .l2norm = p.qk_l2norm,
                     .scale = p.scale,
                     .alpha = b.alpha,
                     .beta = b.beta},
                    &segment);
    kernels.advance(segment,
                    {.v = address(p.v, token, p.heads.v_of(head), offset),
                     .output = writable(p.output, token, head, offset),
                     .v_stride = p.v.row_stride,
                     .output_stride = p.output.row_stride,
                     .tokens_left = sequence.length - done,
                     .io = p.io,
                     .dim_v = dim_v},
                    upcoming, store, b.tiles_of(head));
  }

  bool reads_state() const { return p.initial && sequence.read_row >= 0; }

  // What the task touches after `head`'s tokens up to `end`: the state it stores then, and the
  // tokens of the next head or, after the last one, of the next segment.
  Upcoming upcoming(int32_t head, int64_t done, int64_t end, const StateStore& store) const {
    Upcoming work{};
    const auto add = [&](const void* base, int64_t stride, int64_t count, int32_t elements,
                         DType dtype) {
      if (base == nullptr) return;
      const int64_t bytes = element_bytes(dtype);
      work.streams[work.count++] = {.base = base,
                                    .stride = stride * bytes,
                                    .rows = static_cast<int32_t>(count),
                                    .bytes = static_cast<int32_t>(elements * bytes)};
    };
    const Heads& heads = p.heads;
    if (!store.streaming) {
      add(store.to.data, heads.dim_k, dim_v, heads.dim_k, store.to.dtype);
    }
    if (++head == end_head) {
      head = first_head;
      done = end;
      if (done == sequence.length) return work;
    }
    const int64_t token = sequence.begin + done, tokens = segments.tokens(done);
    const int64_t first = std::min<int64_t>(tokens, 2 * kMini);  // `advance` looks that far ahead
    add(address(p.q, token, heads.q_of(head)), p.q.row_stride, tokens, heads.dim_k, p.io);
    add(address(p.k, token, heads.k_of(head)), p.k.row_stride, tokens, heads.dim_k, p.io);
    add(address(p.v, token, heads.v_of(head), offset), p.v.row_stride, first, dim_v, p.io);
    add(address(p.output, token, head, offset), p.output.row_stride, first, dim_v, p.io);
    if (done > 0) return work;
    const StateRows from = rows(p.initial, sequence.read_row, head);
    add(from.data, heads.dim_k, dim_v, heads.dim_k, from.dtype);
    return work;
  }

  // Advances the segment [done, end) of one head and stores where it ends a page or the sequence.
  void run_head(const Buffers& b, int32_t head, int64_t done, int64_t end, int64_t page) const {
    float* tiles = b.tiles_of(head);
    if (done == 0 && reads_state()) {
      kernels.load_tiles(rows(p.initial, sequence.read_row, head), tiles);
    }
    const int64_t last = end == sequence.length ? sequence.write_row : -1;
    const StateStore page_store = store_to(rows(p.checkpoints, page, head));
    const StateStore final_store = store_to(rows(p.output_state, last, head));
    const bool ends_page = page_store.to.data != nullptr;
    const StateStore& first = ends_page ? page_store : final_store;
    run_segment(b, head, done, static_cast<int32_t>(end - done), upcoming(head, done, end, first),
                first);
    if (ends_page && final_store.to.data != nullptr) kernels.store_tiles(tiles, final_store);
  }

  void run(const Buffers& b) const {
    const Sequence& s = sequence;
    int64_t checkpoint = 0;
    for (int64_t done = 0, end; done < s.length; done = end) {
      end = done + segments.tokens(done);
      const bool ends_page =
          p.checkpoints && p.checkpoint_every > 0 && (s.prefix + end) % p.checkpoint_every == 0;
      const int64_t page = ends_page ? checkpoint_row(p, s, checkpoint++) : -1;
      for (int32_t h = first_head; h < end_head; ++h) run_head(b, h, done, end, page);
    }
    if (streams) kernels.finish_streaming();
  }
};

// Whether the states that a call stores are too many to stay in caches.
bool stores_much(const PrefillProblem& p) {
  const int64_t pages = p.checkpoint_every > 0 ? p.num_tokens / p.checkpoint_every : 0;
  return (p.num_seqs + pages) * p.heads.state_elements() * 4 > kStreamBytes;
}

// Heads of a sequence that one task takes together: their token rows share pages of memory, and
// the next one's rows are requested while one advances.
int32_t heads_per_task(const PrefillProblem& p, const Sequence& s, int64_t most) {
  const bool is_short = segments_of(p, s).tokens(0) == s.length;
  const int64_t wanted = is_short ? kShortHeads : kHeadsInFlight;
  return static_cast<int32_t>(std::clamp<int64_t>(std::min(wanted, most), 1, p.heads.state));
}

void launch(const PrefillProblem& p) {
  const int64_t elements = p.num_tokens * p.heads.state_elements();
  Threads threads = p.threads;
  if (elements <= kSerialElements) threads.count = 1;
  const int32_t count = thread_count(threads);
  const Split split = split_heads(p, count);
  const size_t bytes = Buffers::bytes(p.heads, split);
  const Kernels& table = kernels();
  const int64_t per_sequence = static_cast<int64_t>(p.heads.state) * split.parts;
  const int64_t tasks = p.num_seqs * per_sequence;
  const int64_t most_heads = count == 1 ? tasks : tasks / (kTasksPerThread * count);
  const bool streams = stores_much(p);
  std::atomic<bool> out_of_memory{false};
  parallel_for(threads, tasks, [&](int64_t i) {
    const Sequence sequence = resolve_sequence(p, i / per_sequence);
    if (sequence.length == 0) return;
    const int32_t group = sequence.live ? heads_per_task(p, sequence, most_heads) : 1;
    const int32_t head = static_cast<int32_t>(i % p.heads.state);
    if (head % group != 0) return;  // served by the group's first head
    const int64_t offset = i % per_sequence / p.heads.state * split.rows;
    const Task task{
        .p = p,
        .kernels = table,
        .sequence = sequence,
        .segments = segments_of(p, sequence),
        .offset = offset,
        .dim_v = static_cast<int32_t>(std::min<int64_t>(split.rows, p.heads.dim_v - offset)),
        .first_head = head,
        .end_head = std::min(head + group, p.heads.state),
        .streams = streams};
    if (!sequence.live) return task.zero_outputs(head);
    void* base = thread_scratch().reserve(bytes);
    if (base == nullptr) {
      out_of_memory = true;
      return;
    }
    task.run(Buffers(base, p.heads, split));
  });
  if (out_of_memory) throw Error(GDN_INTERNAL, "out of host memory: %zu bytes of scratch", bytes);
}

const char* refuse(const PrefillProblem& p) {
  if (const char* reason = refuse_operands(p.device, p.heads)) return reason;
  if (p.use_cp == GDN_CP_ON) return "use_cp demands the context-parallel regime of CUDA rows";
  return nullptr;
}

const char* description() { return kernels().isa; }

size_t workspace(const PrefillProblem&) { return 0; }

}  // namespace

const PrefillRow kPrefillCpu = {.name = "cpu",
                                .description = description,
                                .refuse = refuse,
                                .workspace = workspace,
                                .launch = launch};

}  // namespace gdn
