#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/types.h"
#include "emulation/hopper_machine.h"

// Host version of cpp/src/cuda/kernels/hopper/wgmma.h, which documents the functions.
namespace adaptrt::cuda {

inline void wgmma_fence(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::fence_wgmma({file, line});
}
inline void wgmma_commit(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::commit_wgmma({file, line});
}
template <int kPending>
void wgmma_wait(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::wait_for_wgmma(kPending, {file, line});
}

/// wgmma_wait changes the registers in the emulation, and the compiler knows that.
template <int kCount>
void keep_behind_wait(float (& /*d*/)[kCount]) {}

template <typename T, int kTokens>
struct Wgmma {
  static void run(float (&d)[kTokens / 2], std::uint64_t weights, std::uint64_t x, bool accumulate,
                  const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    emulation::begin_wgmma({.d = d,
                            .a = nullptr,
                            .a_descriptor = weights,
                            .b_descriptor = x,
                            .columns = kTokens,
                            .b_is_transposed = false,
                            .accumulate = accumulate,
                            .is_half = std::is_same_v<T, Half>},
                           {file, line});
  }
};

template <typename T, int kColumns>
struct WgmmaOfRegisters {
  static void run(float (&d)[kColumns / 2], const std::uint32_t (&a)[4], std::uint64_t b, bool accumulate,
                  const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    emulation::begin_wgmma({.d = d,
                            .a = a,
                            .a_descriptor = 0,
                            .b_descriptor = b,
                            .columns = kColumns,
                            .b_is_transposed = true,
                            .accumulate = accumulate,
                            .is_half = std::is_same_v<T, Half>},
                           {file, line});
  }
};

}  // namespace adaptrt::cuda
