// The gated delta rule, one token on one state, as it is defined: the text that the kernels of this
// folder compute faster, and what their test holds them to.
#pragma once

namespace gdn::cpu {

struct Token {
  const float* q;  // [K], normalised if the call asks for it
  const float* k;  // [K]
  const float* v;  // [V]
  float alpha;     // 0 discards the old state, whatever it holds
  float beta;
  float scale;
};

// S := alpha S;  S := S + beta (v - S k) k^T;  o := scale S q.  S is [V, K], o is [V].
inline void recurrence(const Token& token, int dim_k, int dim_v, float* S, float* o) {
  for (int v = 0; v < dim_v; ++v) {
    float* row = S + static_cast<long>(v) * dim_k;
    float predicted = 0.0f;
    for (int k = 0; k < dim_k; ++k) {
      row[k] = token.alpha == 0.0f ? 0.0f : token.alpha * row[k];
      predicted += row[k] * token.k[k];
    }
    const float change = token.beta * (token.v[v] - predicted);
    o[v] = 0.0f;
    for (int k = 0; k < dim_k; ++k) {
      row[k] += change * token.k[k];
      o[v] += token.scale * row[k] * token.q[k];
    }
  }
}

}  // namespace gdn::cpu
