// A table of kernel rows: selecting by problem or by name, and saying why. Every operation's table
// works in the same way; dispatch.cpp and dispatch_verify.cpp hold the tables.
#pragma once

#include <cstring>

#include "core/arguments.h"
#include "core/dispatch.h"
#include "core/status.h"

namespace gdn {

#if defined(GDN_WITH_CUDA)
inline constexpr bool kWithCuda = true;
#else
inline constexpr bool kWithCuda = false;
#endif

// Rows in the order of preference, and the names that only other builds have.
template <class Problem>
struct Table {
  const char* operation;
  const Row<Problem>* const* rows;
  int32_t count;
  const char* const* unbuilt;  // null-terminated
};

inline const char* pool_dtype(const Pool& first, const Pool& second) {
  const Pool& pool = first ? first : second;
  return pool ? dtype_name(static_cast<gdn_dtype_t>(pool.dtype)) : "none";
}

template <class Problem>
const char* state_dtype(const Problem& p) {
  return pool_dtype(p.initial, p.output_state);
}

// What rows decide by: a refusal states the rule, this states what came.
template <class Problem>
void describe(const Problem& p, Text* text) {
  const Heads& h = p.heads;
  text->add(
      "num_q_heads = %d, num_k_heads = %d, num_v_heads = %d, head_dim_k = %d, head_dim_v = %d", h.q,
      h.k, h.v, h.dim_k, h.dim_v);
  text->add(", io %s, state %s, ", dtype_name(static_cast<gdn_dtype_t>(p.io)), state_dtype(p));
  if (p.device.type == GDN_CPU) return text->add("on the CPU");
  text->add("on CUDA device %d", p.device.id);
}

inline void require_backend(const Device& device) {
  if (device.type == GDN_CUDA_DEVICE && !kWithCuda) {
    throw Error(GDN_NOT_BUILT,
                "device_type: GDN_CUDA_DEVICE (2) given, but this build has no CUDA backend; "
                "GDN_CPU (1) expected");
  }
}

template <class Problem>
const Row<Problem>& row_by_name(const Table<Problem>& table, const char* name) {
  for (int32_t i = 0; i < table.count; ++i) {
    if (std::strcmp(table.rows[i]->name, name) == 0) return *table.rows[i];
  }
  char storage[512];
  Text names(storage, sizeof storage);
  for (int32_t i = 0; i < table.count; ++i) names.add(", '%s'", table.rows[i]->name);
  for (const char* const* unbuilt = table.unbuilt; *unbuilt != nullptr; ++unbuilt) {
    if (std::strcmp(*unbuilt, name) == 0) {
      throw Error(GDN_NOT_BUILT,
                  "backend: '%s' given, but this build does not hold it; 'auto'%s "
                  "expected",
                  name, names.c_str());
    }
  }
  throw Error(GDN_INVALID_ARGUMENT, "backend: '%.64s' given, a row of %s expected: 'auto'%s", name,
              table.operation, names.c_str());
}

template <class Problem>
const Row<Problem>& forced_row(const Table<Problem>& table, const Problem& problem) {
  const Row<Problem>& row = row_by_name(table, problem.backend);
  require_backend(problem.device);
  const char* reason = row.refuse(problem);
  if (reason == nullptr) return row;
  char storage[512];
  Text call(storage, sizeof storage);
  describe(problem, &call);
  throw Error(reason == kNoCodeForDevice ? GDN_NO_KERNEL_FOR_DEVICE : GDN_UNSUPPORTED,
              "backend: '%s' refuses this %s (%s): %s", row.name, table.operation, call.c_str(),
              reason);
}

template <class Problem>
[[noreturn]] void refuse_all(const Table<Problem>& table, const Problem& problem) {
  char storage[1536];
  Text reasons(storage, sizeof storage);
  describe(problem, &reasons);
  reasons.add("):");
  bool no_code = false;
  for (int32_t i = 0; i < table.count; ++i) {
    const char* reason = table.rows[i]->refuse(problem);
    no_code = no_code || reason == kNoCodeForDevice;
    reasons.add("%s %s: %s", i == 0 ? "" : ";", table.rows[i]->name, reason ? reason : "serves");
  }
  throw Error(no_code ? GDN_NO_KERNEL_FOR_DEVICE : GDN_UNSUPPORTED,
              "no kernel row serves this %s (%s", table.operation, reasons.c_str());
}

template <class Problem>
const Row<Problem>& select_row(const Table<Problem>& table, const Problem& problem) {
  if (problem.backend != nullptr) return forced_row(table, problem);
  require_backend(problem.device);
  for (int32_t i = 0; i < table.count; ++i) {
    if (table.rows[i]->refuse(problem) == nullptr) return *table.rows[i];
  }
  refuse_all(table, problem);
}

template <class Problem>
void explain_row(const Table<Problem>& table, const Problem& problem, Text* text) {
  const Row<Problem>& row = select_row(table, problem);
  text->add("%s: served by %s (%s)%s; workspace %zu bytes\n", table.operation, row.name,
            row.description(), problem.backend ? ", forced by name" : "", row.workspace(problem));
  text->add("  call: ");
  describe(problem, text);
  text->add("\n");
  if (row.explain != nullptr) row.explain(problem, text);
  for (int32_t i = 0; i < table.count && table.rows[i] != &row; ++i) {
    const char* reason = table.rows[i]->refuse(problem);
    text->add("  %s refuses: %s\n", table.rows[i]->name, reason ? reason : "not asked");
  }
  for (const char* const* name = table.unbuilt; *name != nullptr; ++name) {
    text->add("  %s refuses: not in this build\n", *name);
  }
}

template <class Problem>
RowText row_text(const Table<Problem>& table, int32_t index) {
  if (index < 0 || index >= table.count) return {};
  return {.name = table.rows[index]->name, .description = table.rows[index]->description()};
}

}  // namespace gdn
