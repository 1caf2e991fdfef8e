#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>

#include "cuda/kernels/warp.h"

namespace adaptrt::cuda::emulation {

/// An error that on a GPU would be a hang, undefined results or an error code.
class EmulationError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Index {
  std::uint32_t x = 0;
  std::uint32_t y = 0;
  std::uint32_t z = 0;
};

/// CUDA's variables of these names, for the running emulated thread.
struct Coordinates {
  Index thread;
  Index block;
  Index block_size;
  Index grid_size;
};
inline thread_local constinit Coordinates coordinates;

/// Source location of a collective call.
struct Site {
  const char* file;
  int line;
};

/// While it exists, run_grid arranges the blocks of the calling OS thread's grids with `arrange`, which gets
/// their numbers (x first, then y, then z) in ascending order. One at a time.
class BlockOrder {
 public:
  explicit BlockOrder(std::function<void(std::span<std::uint32_t>)> arrange);
  ~BlockOrder();
  BlockOrder(const BlockOrder&) = delete;
  BlockOrder& operator=(const BlockOrder&) = delete;
};

/// Runs `kernel` once for each thread of `grid` blocks of `threads` threads (a multiple of 32, at most 1024),
/// one block after another, on the calling OS thread. Their numbers ascend if there is no BlockOrder. When
/// the threads of a block wait for each other, they take turns in an order that changes from wait to wait, so
/// that order-dependent results come out wrong. Before each block, shared memory is filled with NaN (as
/// float32, float16 and bfloat16). When the block ends, the bytes that follow the memory are checked. Throws
/// EmulationError, with the block and the source locations, if a block's threads wait at different barriers,
/// if some of them end before a barrier, or if race_detector.h found a race. Rethrows the exception of a
/// thread.
void run_grid(Index grid, std::uint32_t threads, std::size_t shared_bytes,
              const std::function<void()>& kernel);

/// The block's shared memory.
unsigned char* shared_memory();
std::size_t shared_memory_bytes();

/// Suspends the thread until `is_done` returns true.
void wait_until(const std::function<bool()>& is_done, Site site);

/// Random bits, which are the same in each run of a block.
std::uint32_t random_bits();

/// Called after an event for which others may wait: in some cases, they run before this thread goes on.
void may_yield_to_waiting();

/// Throws EmulationError unless `bytes` bytes at `address` are in the block's shared memory, with this
/// alignment.
void check_shared(const void* address, std::size_t bytes, std::size_t alignment, const char* what);

/// Throws EmulationError unless `address` is a multiple of `alignment`.
void check_aligned(const void* address, std::size_t alignment, const char* what);

/// Waits for all threads of the block.
void block_barrier(Site site);

/// Waits for the lanes in `mask`.
void warp_barrier(std::uint32_t mask, Site site);

/// Arguments of a warp's threads to a collective call: `arguments[lane]`, nullptr if a lane takes no part.
struct WarpArguments {
  void* of_lane[kWarpSize];
};

/// Waits until all lanes in `mask` have made the same call; then the last one runs `operation` for all.
/// Throws EmulationError if the caller is not in `mask`.
void warp_collective(std::uint32_t mask, void* arguments, void (*operation)(const WarpArguments&), Site site);

/// Records a copy to shared memory, of zeros unless `valid`. The destination is NaN until
/// wait_for_copy_groups runs the copy, so that an early read gets neither the old nor the new bytes.
void begin_copy(void* destination, const void* source, std::size_t bytes, bool valid);
void commit_copy_group();
/// Runs the calling thread's copies, except those of its `pending` latest groups.
void wait_for_copy_groups(std::size_t pending);

}  // namespace adaptrt::cuda::emulation
