#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>

#include "plugins/kernels/warp.h"

namespace adaptrt::cuda::emulation {

/// What a GPU would answer with a hang, with undefined results or with an error.
class EmulationError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Index {
  std::uint32_t x = 0;
  std::uint32_t y = 0;
  std::uint32_t z = 0;
};

/// CUDA's variables of those names, for the emulated thread that runs.
struct Coordinates {
  Index thread;
  Index block;
  Index block_size;
  Index grid_size;
};
inline thread_local constinit Coordinates coordinates;

/// Where a collective call stands in the source.
struct Site {
  const char* file;
  int line;
};

/// Runs `kernel` once for each thread of `grid` blocks of `threads` (a multiple of 32, at most 1024), one
/// block after another, on the calling OS thread. The threads of a block take turns where they wait for one
/// another, in an order that differs from wait to wait, so that results which depend on the order come out
/// wrong. Shared memory is filled with NaN (as float32, float16 and bfloat16) before each block, and the
/// bytes behind it are checked after it. Throws EmulationError, naming the block and the places in the
/// source, when a block's threads wait at different barriers or some of them ended before one, or where
/// race_detector.h found a race, and whatever a thread throws.
void run_grid(Index grid, std::uint32_t threads, std::size_t shared_bytes,
              const std::function<void()>& kernel);

/// The block's shared memory.
unsigned char* shared_memory();

/// Throws EmulationError unless `bytes` bytes at `address` are the block's shared memory and aligned so.
void check_shared(const void* address, std::size_t bytes, std::size_t alignment, const char* what);

/// Throws EmulationError unless `address` is a multiple of `alignment`.
void check_aligned(const void* address, std::size_t alignment, const char* what);

/// Waits for all threads of the block.
void block_barrier(Site site);

/// Waits for the lanes of `mask`.
void warp_barrier(std::uint32_t mask, Site site);

/// What the threads of a warp gave to a collective call: `arguments[lane]`, nullptr where a lane takes no
/// part.
struct WarpArguments {
  void* of_lane[kWarpSize];
};

/// Waits until the lanes of `mask` have made the same call, then has the last of them do `operation` for all.
/// Throws EmulationError when the caller is not of `mask`.
void warp_collective(std::uint32_t mask, void* arguments, void (*operation)(const WarpArguments&), Site site);

/// Notes a copy to shared memory, of zeros unless `valid`. Its destination is NaN until wait_for_copy_groups
/// makes it, so that whoever reads either the old or the new bytes in between gets neither.
void begin_copy(void* destination, const void* source, std::size_t bytes, bool valid);
void commit_copy_group();
/// Makes the calling thread's copies, except those of its `pending` latest groups.
void wait_for_copy_groups(std::size_t pending);

}  // namespace adaptrt::cuda::emulation
