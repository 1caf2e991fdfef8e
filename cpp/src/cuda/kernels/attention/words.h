#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/kernels/platform.h"
#ifndef __CUDACC__
#include "emulation/grid.h"
#include "emulation/hopper_machine.h"
#endif

namespace adaptrt::cuda {

/// 4, 8 or 16 bytes that a thread loads or stores at once: pairs of 2-byte elements, or float32.
template <int kWords>
struct alignas(4 * kWords) Words {
  std::uint32_t words[kWords];
};

/// Loads kWords words; `address` is aligned to their size.
template <int kWords>
__device__ inline Words<kWords> load_words(const void* address) {
#ifdef __CUDACC__
  return *static_cast<const Words<kWords>*>(address);
#else
  emulation::check_aligned(address, 4 * kWords, "a load of words");
  Words<kWords> result;
  std::memcpy(&result, address, sizeof(result));
  return result;
#endif
}

/// Stores kWords words; `address` is aligned to their size.
template <int kWords>
__device__ inline void store_words(void* address, const Words<kWords>& value) {
#ifdef __CUDACC__
  *static_cast<Words<kWords>*>(address) = value;
#else
  emulation::check_aligned(address, 4 * kWords, "a store of words");
  emulation::note_thread_write(address, sizeof(value));
  std::memcpy(address, &value, sizeof(value));
#endif
}

}  // namespace adaptrt::cuda
