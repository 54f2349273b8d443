// Operands whose rows are tokens, as prefill and verify take them.
#pragma once

#include "call.h"

namespace gdn::python {

// q, k and v; returns the heads.
template <class Params>
HeadCounts set_token_operands(Call& call, nb::handle q_array, nb::handle k_array,
                              nb::handle v_array, Params& p) {
  const ArrayView q =
      call.array("q", q_array, {{kAny, kAny, kAny}, "[tokens, num_q_heads, head_dim_k]"});
  const int64_t tokens = q.shape[0];
  const ArrayView k = call.array(
      "k", k_array, {{tokens, kAny, q.shape[2]}, "[tokens, num_k_heads, head_dim_k] as in q"});
  const ArrayView v =
      call.array("v", v_array, {{tokens, kAny, kAny}, "[tokens, num_v_heads, head_dim_v] as in q"});
  check_io(q);
  for (const ArrayView* view : {&k, &v}) check_same_dtype(*view, q);
  for (const ArrayView* view : {&q, &k, &v}) call.refuse_grad(*view);
  const HeadCounts heads = check_heads(q, k, v);
  const Operand oq = call.operand(q, 1), ok = call.operand(k, 1), ov = call.operand(v, 1);
  set_heads(heads, q.dtype, p);
  p.num_tokens = tokens;
  p.q = oq.data;
  p.q_token_stride = oq.row_stride;
  p.q_head_stride = oq.head_stride;
  p.k = ok.data;
  p.k_token_stride = ok.row_stride;
  p.k_head_stride = ok.head_stride;
  p.v = ov.data;
  p.v_token_stride = ov.row_stride;
  p.v_head_stride = ov.head_stride;
  return heads;
}

// The caller's output, or one that is allocated: last of the checks.
template <class Params>
nb::object set_token_output(Call& call, nb::handle given, const HeadCounts& heads, Params& p) {
  const int64_t tokens = p.num_tokens;
  nb::object array = nb::borrow(given);
  if (array.is_none()) array = call.empty({tokens, heads.state, heads.dim_v});
  const ArrayView output =
      call.array("output", array, {{tokens, heads.state, heads.dim_v}, "[tokens, H, head_dim_v]"},
                 Access::kWrite);
  check_same_dtype(output, call.first());
  const Operand o = call.operand(output, 1);
  p.output = o.data;
  p.output_token_stride = o.row_stride;
  p.output_head_stride = o.head_stride;
  return array;
}

}  // namespace gdn::python
