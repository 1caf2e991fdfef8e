#pragma once

#include <cstddef>
#include <cstdint>

#include "emulation/grid.h"
#include "emulation/tensor_map_emulated.h"

// Barriers with phases (mbarrier), named barriers, the copy engine (TMA) and products of warpgroups (wgmma),
// as PTX documents them. Addresses are in the shared window.
//
// Everything asynchronous becomes visible as late as allowed, so that a missing wait gives wrong results. A
// copied box is NaN until no thread of the block can go on without it; a few boxes come early instead. A
// product is computed when its group is waited for; until then, its result is NaN, and its operands may still
// change.
//
// Products and copies access shared memory through another proxy than threads. Every 16 bytes therefore have
// a state, and EmulationError names a product that reads bytes
//  - that a thread wrote, and did not fence (fence.proxy.async);
//  - that a box copy writes, unless each lane has waited for the phase of the copy's barrier.
// It also names writes of threads and copies to bytes that a running product may read.
namespace adaptrt::cuda::emulation {

/// The address of the block's shared memory in the shared window: a multiple of 16, and of nothing more.
std::uint32_t shared_window_address(const void* address);

void init_phase_barrier(std::uint32_t barrier, int arrivals);
void fence_phase_barriers();
/// Arrives, and makes the phase wait for `bytes` bytes of copies.
void arrive_at_phase(std::uint32_t barrier, int bytes);
void wait_for_phase(std::uint32_t barrier, std::uint32_t parity, Site site);

void begin_box_copy(std::uint32_t shared, const CUtensorMap& map, std::uint32_t barrier, int column, int row);
/// Number of box copies that this OS thread's blocks have begun.
std::size_t count_box_copies();
void fence_async_proxy();
/// Records a thread's write to shared memory; other addresses are ignored.
void note_thread_write(const void* address, std::size_t bytes);

/// `threads`: of all calls that belong together, with and without waiting.
void named_barrier(int number, int threads, bool waits, Site site);

/// A thread's part of a product. d has columns / 2 elements.
struct WgmmaCall {
  float* d;
  const std::uint32_t* a;  ///< nullptr: in shared memory, K-major
  std::uint64_t a_descriptor;
  std::uint64_t b_descriptor;
  int columns;
  bool b_is_transposed;  ///< MN-major
  bool accumulate;
  bool is_half;
};
/// Warp: computes 16 rows of a product. That the four warps of a warpgroup call it alike is not checked.
void begin_wgmma(const WgmmaCall& call, Site site);
void fence_wgmma(Site site);
void commit_wgmma(Site site);
void wait_for_wgmma(std::size_t pending, Site site);

// Called by run_grid:

void begin_hopper_block();
/// Completes the oldest running copy. Returns false if there is none.
bool complete_oldest_copy();
/// Throws EmulationError if something is still running, or threads came to a barrier for which none waited.
void end_hopper_block();

}  // namespace adaptrt::cuda::emulation
