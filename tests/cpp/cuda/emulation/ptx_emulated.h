#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/kernels/types.h"
#include "emulation/grid.h"
#include "emulation/hopper_machine.h"
#include "emulation/race_detector.h"

// Host version of cpp/src/cuda/kernels/ptx.h, which documents the functions.
namespace adaptrt::cuda {

namespace detail {
inline std::uint32_t shared_address(const void* shared) {
  return emulation::shared_window_address(shared);
}
}  // namespace detail

inline unsigned char* shared_memory() {
  return emulation::shared_memory();
}

namespace emulation {

struct LoadMatrix {
  const void* row;
  std::uint32_t result[4];
};

template <bool kTransposed>
void load_matrices(const WarpArguments& arguments) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    std::uint16_t elements[8][8];
    for (int row = 0; row < 8; ++row) {
      const void* address = static_cast<const LoadMatrix*>(arguments.of_lane[8 * matrix + row])->row;
      std::memcpy(elements[row], address, 16);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4;
      const int column = 2 * (lane % 4);
      const std::uint32_t low = kTransposed ? elements[column][row] : elements[row][column];
      const std::uint32_t high = kTransposed ? elements[column + 1][row] : elements[row][column + 1];
      static_cast<LoadMatrix*>(arguments.of_lane[lane])->result[matrix] = low | high << 16;
    }
  }
}

template <bool kTransposed>
void load_matrix(std::uint32_t (&r)[4], const void* shared_row, Site site) {
  check_shared(shared_row, 16, 16, "a row of ldmatrix");
  race_detector::note_read(shared_row, 16);
  LoadMatrix own{shared_row, {}};
  warp_collective(kAllLanes, &own, &load_matrices<kTransposed>, site);
  std::memcpy(r, own.result, sizeof(r));
}

struct Multiply {
  float* d;
  const std::uint32_t* a;
  const std::uint32_t* b;
};

template <typename T>
void multiply_matrices(const WarpArguments& arguments) {
  float a[16][16];
  float b[16][8];
  float d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto* call = static_cast<const Multiply*>(arguments.of_lane[lane]);
    const int group = lane / 4;
    const int pair = 2 * (lane % 4);
    for (int i = 0; i < 4; ++i) {
      const FloatPair values = unpack_pair<T>(call->a[i]);
      const int row = group + 8 * (i % 2);
      const int column = pair + 8 * (i / 2);
      a[row][column] = values.first;
      a[row][column + 1] = values.second;
      d[group + 8 * (i / 2)][pair + i % 2] = call->d[i];
    }
    for (int i = 0; i < 2; ++i) {
      const FloatPair values = unpack_pair<T>(call->b[i]);
      b[pair + 8 * i][group] = values.first;
      b[pair + 8 * i + 1][group] = values.second;
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto* call = static_cast<const Multiply*>(arguments.of_lane[lane]);
    for (int i = 0; i < 4; ++i) call->d[i] = d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
  }
}

}  // namespace emulation

inline void load_matrix_x4(std::uint32_t (&r)[4], const void* shared_row, const char* file = __builtin_FILE(),
                           int line = __builtin_LINE()) {
  emulation::load_matrix<false>(r, shared_row, {file, line});
}

inline void load_matrix_x4_transposed(std::uint32_t (&r)[4], const void* shared_row,
                                      const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::load_matrix<true>(r, shared_row, {file, line});
}

template <typename T>
void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                 const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::Multiply own{d, a, b};
  emulation::warp_collective(kAllLanes, &own, &emulation::multiply_matrices<T>, {file, line});
}

inline void copy_async_16(void* shared, const void* global, bool valid) {
  emulation::check_shared(shared, 16, 16, "the destination of cp.async");
  emulation::check_aligned(global, 16, "the source of cp.async");
  emulation::begin_copy(shared, global, 16, valid);
}

inline void commit_copies() {
  emulation::commit_copy_group();
}

template <int kPending>
void wait_copies() {
  emulation::wait_for_copy_groups(kPending);
}

inline void prefetch(const void* /*global*/) {}

// Emulated kernels run one after another.
inline void allow_next_kernel() {}
inline void wait_for_previous_kernel() {}

// Blocks run one after another, so all of them see what earlier ones wrote.
inline std::uint32_t count_block(std::uint32_t* counter, std::uint32_t most) {
  const std::uint32_t old = *counter;
  *counter = old >= most ? 0 : old + 1;
  return old;
}

inline Vector16 load_read_only_16(const void* address) {
  emulation::check_aligned(address, 16, "a load of 16 bytes");
  Vector16 vector;
  std::memcpy(&vector, address, sizeof(vector));
  return vector;
}

}  // namespace adaptrt::cuda
