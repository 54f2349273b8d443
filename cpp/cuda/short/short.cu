// Launches of the kernel of short sequences, and its instantiations.
#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/short/short.cuh"
#include "cuda/short/short.h"

namespace gdn {
namespace {

bool lies_on(const Tensor& t, int elements) {
  return reinterpret_cast<uintptr_t>(t.data) % (2 * elements) == 0 &&
         t.row_stride % elements == 0 && t.head_stride % elements == 0;
}

// Four elements on their size.
bool lies_on_fours(const Pool& pool) {
  const uintptr_t bytes = pool.dtype == DType::kFloat32 ? 16 : 8;
  return !pool || (reinterpret_cast<uintptr_t>(pool.data) % bytes == 0 && pool.row_stride % 4 == 0);
}

ShortParams short_params(const PrefillProblem& p) {
  const Heads& heads = p.heads;
  ShortParams params = {.problem = p};
  params.heads_per_q = small_divisor(heads.state / heads.q);
  params.heads_per_k = small_divisor(heads.state / heads.k);
  params.heads_per_v = small_divisor(heads.state / heads.v);
  params.vector_qk = lies_on(p.q, 8) && lies_on(p.k, 8);
  params.vector_v = lies_on(p.v, 4) && lies_on(p.output, 4);
  params.vector_state =
      lies_on_fours(p.initial) && lies_on_fours(p.output_state) && lies_on_fours(p.checkpoints);
  return params;
}

template <class Function>
void for_kernel(DType io, int dim, Function function) {
  const bool wide = dim == 128;
  if (io == DType::kBFloat16) {
    return wide ? function(ShortTraits<bf16, 128>()) : function(ShortTraits<bf16, 64>());
  }
  return wide ? function(ShortTraits<fp16, 128>()) : function(ShortTraits<fp16, 64>());
}

void launch_items(const PrefillProblem& p, ShortParams params) {
  const DeviceInfo& device = device_info(p.device.id);
  for_kernel(p.io, p.heads.dim_k, [&](auto traits) {
    using Traits = decltype(traits);
    const bool alone = params.plan == nullptr;
    const int64_t sequences = alone ? p.num_seqs : std::min(p.num_seqs, p.num_tokens);
    const int64_t tiles = sequences * p.heads.state * Traits::kTiles;
    // Few states: more blocks, and with them more loads in flight, for the price of k and q read
    // and related to each other more often.
    int warps = Traits::kMaxWarps;
    while (warps > 2 && tiles / warps < device.num_sms) warps /= 2;
    params.parts = Traits::kTiles / warps;
    int64_t blocks = tiles / warps;
    // Most calls have far fewer short sequences than sequences. NOTE: two turns, so that blocks
    // that find no room beside the scan have little to do behind it.
    if (!alone) blocks = std::min(blocks, int64_t{2} * Traits::kBlocksPerSm * device.num_sms);
    launch(short_kernel<Traits>,
           {.blocks = blocks,
            .threads = 32 * warps,
            .stream = p.device.stream,
            .early_start = device.has_dependent_launch()},
           params, "short_prefill");
  });
}

}  // namespace

void launch_short(const PrefillProblem& p) {
  const LaunchScope scope(p.device);
  launch_items(p, short_params(p));
}

void launch_listed_short(const PrefillProblem& p, const PlanHeader* plan, const ShortEntry* last) {
  ShortParams params = short_params(p);
  params.plan = plan;
  params.entries = last;
  launch_items(p, params);
}

void explain_short(const PrefillProblem& p, Text* text) {
  const auto most = static_cast<int>(kShortTokens);
  switch (short_regime(p)) {
    case ShortRegime::kAll:
      return text->add(
          "  short: no sequence has more than %d new tokens: one pass over each state, no chunks, "
          "no workspace\n",
          most);
    case ShortRegime::kMixed:
      return text->add(
          "  short: sequences of 1 to %d new tokens take one pass over their state beside the "
          "chunks of the others; true lengths decide\n",
          most);
    case ShortRegime::kNone:
      return text->add("  short: every sequence in chunks (%s)\n",
                       p.batch_invariant ? "batch-invariant"
                       : p.num_seqs == 1 ? "a single sequence"
                                         : "too many heads");
  }
}

void load_short_kernels() {
  for (const DType io : {DType::kBFloat16, DType::kFloat16}) {
    for (const int dim : {64, 128}) {
      for_kernel(io, dim,
                 [](auto traits) { load_kernel(short_kernel<decltype(traits)>, "short_prefill"); });
    }
  }
}

}  // namespace gdn
