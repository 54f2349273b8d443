// The kernels as compiled for the including file's instruction set.
#pragma once

#include "cpu/advance.h"
#include "cpu/decode_step.h"
#include "cpu/prepare.h"
#include "cpu/state.h"
#include "cpu/verify_step.h"

namespace gdn::cpu {
namespace {

#if defined(__AVX512F__)
constexpr const char* kIsa = "AVX-512";
#elif defined(__AVX2__)
constexpr const char* kIsa = "AVX2";
#elif defined(__aarch64__)
constexpr const char* kIsa = "AArch64 baseline";
#elif defined(__x86_64__)
constexpr const char* kIsa = "x86-64 baseline";
#else
constexpr const char* kIsa = "baseline";
#endif

constexpr Kernels kTable = {
    .isa = kIsa,
    .load_tiles = load_tiles,
    .store_tiles = store_tiles,
    .finish_streaming = finish_streaming,
    .prepare = prepare,
    .advance = advance,
    .decode = decode,
    .verify = verify,
};

}  // namespace
}  // namespace gdn::cpu
