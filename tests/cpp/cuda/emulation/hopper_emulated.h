#pragma once

#include <cstdint>

#include "emulation/hopper_machine.h"

// Host version of cpp/src/cuda/kernels/hopper/ptx.h, which documents the functions, and of map_of().
namespace adaptrt::cuda {

inline CUtensorMap map_of(DType /*dtype*/, const void* matrix, std::int64_t rows, std::int64_t columns,
                          int box_rows) {
  constexpr std::int64_t kMostRows = std::int64_t{1} << 32;
  constexpr int kMostBoxRows = 256;
  constexpr int kPiece = 16;
  emulation::check_aligned(matrix, kPiece, "the matrix of a tensor map");
  if (rows < 1 || rows > kMostRows || columns < 1 || columns * 2 % kPiece != 0 || box_rows < 1 ||
      box_rows > kMostBoxRows) {
    throw emulation::EmulationError("the driver refuses the tensor map");
  }
  return {static_cast<const unsigned char*>(matrix), rows, columns, box_rows};
}

inline void init_barrier(std::uint32_t barrier, int arrivals) {
  emulation::init_phase_barrier(barrier, arrivals);
}
inline void fence_barrier_init() {
  emulation::fence_phase_barriers();
}
inline void arrive_and_expect(std::uint32_t barrier, int bytes) {
  emulation::arrive_at_phase(barrier, bytes);
}
inline void arrive(std::uint32_t barrier) {
  emulation::arrive_at_phase(barrier, 0);
}
inline void wait(std::uint32_t barrier, std::uint32_t parity, const char* file = __builtin_FILE(),
                 int line = __builtin_LINE()) {
  emulation::wait_for_phase(barrier, parity, {file, line});
}
inline void copy_box(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier, int column, int row,
                     CachePolicy /*policy*/) {
  emulation::begin_box_copy(shared, *map, barrier, column, row);
}
inline void fence_for_copy_engine() {
  emulation::fence_async_proxy();
}
inline void named_barrier_sync(int number, int threads, const char* file = __builtin_FILE(),
                               int line = __builtin_LINE()) {
  emulation::named_barrier(number, threads, /*waits=*/true, {file, line});
}
inline void named_barrier_arrive(int number, int threads, const char* file = __builtin_FILE(),
                                 int line = __builtin_LINE()) {
  emulation::named_barrier(number, threads, /*waits=*/false, {file, line});
}

// Emulated threads have registers without number.
template <int kRegisters>
void release_registers() {}
template <int kRegisters>
void take_registers() {}

}  // namespace adaptrt::cuda
