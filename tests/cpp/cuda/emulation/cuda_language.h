#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>

#include "emulation/grid.h"

// Defines CUDA C++ keywords for a host compiler, for kernels that run_grid runs. Static shared memory is not
// supported, because it could be neither poisoned nor bounds-checked.
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __restrict__ __restrict

#define threadIdx (::adaptrt::cuda::emulation::coordinates.thread)
#define blockIdx (::adaptrt::cuda::emulation::coordinates.block)
#define blockDim (::adaptrt::cuda::emulation::coordinates.block_size)
#define gridDim (::adaptrt::cuda::emulation::coordinates.grid_size)

namespace adaptrt::cuda {

using std::max;
using std::min;

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::block_barrier({file, line});
}

inline void __syncwarp(std::uint32_t mask = kAllLanes, const char* file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
  emulation::warp_barrier(mask, {file, line});
}

namespace emulation {

template <typename T>
struct Shuffle {
  T value;
  int source;
  T result;
};

/// Every lane gets the value of its source lane. If that lane takes no part, it gets its own value; a GPU may
/// return anything.
template <typename T>
T shuffle(std::uint32_t mask, T value, int source, Site site) {
  Shuffle<T> own{value, source, value};
  warp_collective(
      mask, &own,
      [](const WarpArguments& arguments) {
        for (void* of_lane : arguments.of_lane) {
          if (of_lane == nullptr) continue;
          auto* call = static_cast<Shuffle<T>*>(of_lane);
          const void* from = arguments.of_lane[call->source];
          if (from == nullptr) throw EmulationError("a shuffle reads a lane that takes no part in it");
          call->result = static_cast<const Shuffle<T>*>(from)->value;
        }
      },
      site);
  return own.result;
}

inline int lane_of_thread() {
  return static_cast<int>(coordinates.thread.x) % kWarpSize;
}

}  // namespace emulation

template <typename T>
T __shfl_sync(std::uint32_t mask, T value, int source, int width = 32, const char* file = __builtin_FILE(),
              int line = __builtin_LINE()) {
  const int lane = emulation::lane_of_thread();
  return emulation::shuffle(mask, value, (lane & ~(width - 1)) + (source & (width - 1)), {file, line});
}

template <typename T>
T __shfl_xor_sync(std::uint32_t mask, T value, int bits, int width = 32, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
  const int lane = emulation::lane_of_thread();
  const int source = lane ^ bits;
  const bool inside = (source & ~(width - 1)) <= (lane & ~(width - 1));
  return emulation::shuffle(mask, value, inside ? source : lane, {file, line});
}

template <typename T>
T __shfl_down_sync(std::uint32_t mask, T value, int delta, int width = 32,
                   const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const int lane = emulation::lane_of_thread();
  const bool inside = (lane & (width - 1)) + delta < width;
  return emulation::shuffle(mask, value, inside ? lane + delta : lane, {file, line});
}

inline std::uint32_t __ballot_sync(std::uint32_t mask, bool predicate, const char* file = __builtin_FILE(),
                                   int line = __builtin_LINE()) {
  struct Vote {
    bool predicate;
    std::uint32_t result;
  } own{predicate, 0};
  emulation::warp_collective(mask, &own,
                             [](const emulation::WarpArguments& arguments) {
                               std::uint32_t votes = 0;
                               for (std::uint32_t lane = 0; lane < static_cast<std::uint32_t>(kWarpSize);
                                    ++lane) {
                                 const auto* vote = static_cast<const Vote*>(arguments.of_lane[lane]);
                                 if (vote != nullptr && vote->predicate) votes |= 1U << lane;
                               }
                               for (void* of_lane : arguments.of_lane) {
                                 if (of_lane != nullptr) static_cast<Vote*>(of_lane)->result = votes;
                               }
                             },
                             {file, line});
  return own.result;
}

template <typename T>
T atomicAdd(T* address, T value) {
  return std::atomic_ref<T>(*address).fetch_add(value, std::memory_order_relaxed);
}

inline int __popc(std::uint32_t bits) {
  return std::popcount(bits);
}
inline float __uint_as_float(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}
inline std::uint32_t __float_as_uint(float value) {
  return std::bit_cast<std::uint32_t>(value);
}

// Without contraction, a host's operations are rounded to nearest too.
inline float __fmul_rn(float x, float y) {
  return x * y;
}
inline float __fadd_rn(float x, float y) {
  return x + y;
}
inline float __fsub_rn(float x, float y) {
  return x - y;
}

// A GPU's results of these differ by a few units in the last place.
inline float __expf(float x) {
  return std::exp(x);
}
inline float __fdividef(float x, float y) {
  return x / y;
}
inline float rsqrtf(float x) {
  return 1.0F / std::sqrt(x);
}

}  // namespace adaptrt::cuda
