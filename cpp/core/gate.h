// One gate and one beta from every form they may come in; all in fp32. Host and device.
#pragma once

#include <cmath>

#include "core/problem.h"

namespace gdn {

// ln(1 + exp(x)); for large x the naive form overflows and alpha would become 0.
GDN_HOST_DEVICE inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

GDN_HOST_DEVICE inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// ln alpha = -exp(A_log) softplus(x + dt_bias). exp(A_log) = inf times softplus = 0 is alpha = 1.
GDN_HOST_DEVICE inline float raw_log_alpha(float x, float A_log, float dt_bias) {
  const float s = softplus(x + dt_bias);
  return s == 0.0f ? 0.0f : -expf(A_log) * s;
}

// ln alpha of any form; -inf is alpha = 0. `g` is the value read, A_log and dt_bias raw only.
GDN_HOST_DEVICE inline float log_alpha(GateForm form, float g, float A_log, float dt_bias) {
  switch (form) {
    case GateForm::kNone: return 0.0f;
    case GateForm::kLinear: return logf(g);
    case GateForm::kLog: return g;
    case GateForm::kRaw: return raw_log_alpha(g, A_log, dt_bias);
  }
  return 0.0f;
}

// alpha of any form. A linear gate passes through untouched.
GDN_HOST_DEVICE inline float alpha(GateForm form, float g, float A_log, float dt_bias) {
  return form == GateForm::kLinear ? g : expf(log_alpha(form, g, A_log, dt_bias));
}

}  // namespace gdn
