// Prefill on the CPU: independent tasks over (sequence, head, range of V), each of which carries
// its part of the state through the sequence in segments of kChunk tokens.
#include <algorithm>
#include <atomic>
#include <cstring>

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
constexpr int64_t kMaxTileBytes = 1 << 20;      // of one task
constexpr int64_t kSerialElements = 1 << 18;    // tokens H K V below which threads cost more
constexpr int64_t kTasksPerThread = 4;          // enough for an even load

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
  float* tiles;
  float* kq;
  MiniChunk* minis;
  float* alpha;  // [kSegmentTokens]
  float* beta;

  static size_t bytes(const Heads& heads, const Split& split) {
    const size_t floats = static_cast<size_t>(heads.dim_k) * split.rows +
                          static_cast<size_t>(heads.dim_k) * 2 * kSegmentTokens +
                          2 * kSegmentTokens;
    return floats * sizeof(float) + kSegmentMinis * sizeof(MiniChunk);
  }
  Buffers(void* base, const Heads& heads, const Split& split) {
    tiles = static_cast<float*>(base);
    kq = tiles + static_cast<int64_t>(heads.dim_k) * split.rows;
    alpha = kq + static_cast<int64_t>(heads.dim_k) * 2 * kSegmentTokens;
    beta = alpha + kSegmentTokens;
    minis = reinterpret_cast<MiniChunk*>(beta + kSegmentTokens);
  }
};

// One task: `dim_v` V rows from `offset` of one head of one sequence.
struct Task {
  const PrefillProblem& p;
  const Kernels& kernels;
  Sequence sequence;
  int64_t head;
  int64_t offset;
  int32_t dim_v;

  StateRows rows(const Pool& pool, int64_t row) const {
    return {.data = state_address(pool, p.heads, row, head, offset),
            .dtype = pool.dtype,
            .dim_k = p.heads.dim_k,
            .dim_v = dim_v};
  }

  void zero_outputs() const {
    for (int64_t t = 0; t < sequence.length; ++t) {
      std::memset(writable(p.output, sequence.begin + t, head, offset), 0,
                  dim_v * element_bytes(p.io));
    }
  }

  void store(const Buffers& b, const Pool& pool, int64_t row) const {
    const StateRows to = rows(pool, row);
    if (to.data != nullptr) kernels.store_tiles(b.tiles, to);
  }

  void run_segment(const Buffers& b, int64_t done, int32_t tokens) const {
    const int64_t token = sequence.begin + done;
    for (int32_t t = 0; t < tokens; ++t) {
      b.alpha[t] = read_alpha(p.gates, token + t, head);
      b.beta[t] = read_beta(p.gates, token + t, head);
    }
    Segment segment{.kq = b.kq, .minis = b.minis, .num_minis = 0, .dim_k = 0, .phase = 0};
    const int32_t h = static_cast<int32_t>(head);
    kernels.prepare({.q = address(p.q, token, p.heads.q_of(h)),
                     .k = address(p.k, token, p.heads.k_of(h)),
                     .q_stride = p.q.row_stride,
                     .k_stride = p.k.row_stride,
                     .io = p.io,
                     .dim_k = p.heads.dim_k,
                     .tokens = tokens,
                     .phase = static_cast<int32_t>((sequence.prefix + done) % kMini),
                     .l2norm = p.qk_l2norm,
                     .scale = p.scale,
                     .alpha = b.alpha,
                     .beta = b.beta},
                    &segment);
    kernels.advance(segment,
                    {.v = address(p.v, token, p.heads.v_of(h), offset),
                     .output = writable(p.output, token, head, offset),
                     .v_stride = p.v.row_stride,
                     .output_stride = p.output.row_stride,
                     .io = p.io,
                     .dim_v = dim_v},
                    b.tiles);
  }

  void run(const Buffers& b) const {
    const Sequence& s = sequence;
    kernels.load_tiles(rows(p.initial, s.read_row), b.tiles);
    int64_t checkpoint = 0;
    for (int64_t done = 0; done < s.length;) {
      const int64_t position = s.prefix + done;
      const int64_t room = kSegmentTokens - position % kSegmentTokens;
      const int64_t tokens = std::min(room, s.length - done);
      run_segment(b, done, static_cast<int32_t>(tokens));
      done += tokens;
      if (p.checkpoint_every > 0 && (s.prefix + done) % p.checkpoint_every == 0) {
        if (p.checkpoints) store(b, p.checkpoints, checkpoint_row(p, s, checkpoint));
        ++checkpoint;
      }
    }
    store(b, p.output_state, s.write_row);
  }
};

void launch(const PrefillProblem& p) {
  const int64_t elements =
      p.num_tokens * p.heads.state * static_cast<int64_t>(p.heads.dim_k) * p.heads.dim_v;
  Threads threads = p.threads;
  if (elements <= kSerialElements) threads.count = 1;
  const Split split = split_heads(p, thread_count(threads));
  const size_t bytes = Buffers::bytes(p.heads, split);
  const Kernels& table = kernels();
  std::atomic<bool> out_of_memory{false};
  const int64_t per_sequence = static_cast<int64_t>(p.heads.state) * split.parts;
  parallel_for(threads, p.num_seqs * per_sequence, [&](int64_t i) {
    const int64_t offset = i % split.parts * split.rows;
    const Task task{.p = p,
                    .kernels = table,
                    .sequence = resolve_sequence(p, i / per_sequence),
                    .head = i % per_sequence / split.parts,
                    .offset = offset,
                    .dim_v = static_cast<int32_t>(std::min<int64_t>(
                        split.rows, p.heads.dim_v - offset))};
    if (task.sequence.length == 0) return;
    if (!task.sequence.live) return task.zero_outputs();
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
  if (p.device.type != GDN_CPU) return "the operands are not in host memory";
  if (p.heads.dim_k % 8 != 0 || p.heads.dim_v % 8 != 0) {
    return "head_dim_k and head_dim_v must be multiples of 8";
  }
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
