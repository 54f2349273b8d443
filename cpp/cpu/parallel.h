// Threads of the CPU backend: the caller's parallel_for, else OpenMP, else the calling thread.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/problem.h"

namespace gdn::cpu {

// Threads that a call may use, at least 1.
int32_t thread_count(const Threads& threads);

// Runs body(arg, i) for i in [0, n); bodies must not throw.
void parallel_for(const Threads& threads, int64_t n, void (*body)(void* arg, int64_t i), void* arg);

template <class Body>
void parallel_for(const Threads& threads, int64_t n, Body&& body) {
  using Callable = std::remove_reference_t<Body>;
  auto call = [](void* arg, int64_t i) { (*static_cast<Callable*>(arg))(i); };
  parallel_for(threads, n, call, const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace gdn::cpu
