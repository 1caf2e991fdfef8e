#pragma once

#include <cstdint>

#include "cuda/kernels/hopper/tensor_map.h"
#include "cuda/kernels/ptx.h"

// Instructions of compute capability 9.0. Addresses of shared memory are relative to the shared window. The
// host's implementations are in tests/cpp/cuda/emulation/hopper_emulated.h.
namespace adaptrt::cuda {

/// Eviction policy of the L2 cache for loaded data, encoded as by createpolicy.
enum class CachePolicy : std::uint64_t {
  kNormal = 0x1000000000000000,
  kEvictFirst = 0x12F0000000000000,
};

#ifdef __CUDACC__

/// One thread: creates a barrier whose phase ends after `arrivals` arrivals and all expected bytes.
__device__ inline void init_barrier(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(barrier), "r"(arrivals) : "memory");
}

/// Makes barriers visible to the copy engine.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

/// Arrives, and makes the phase wait for `bytes` bytes of copies.
__device__ inline void arrive_and_expect(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(barrier), "r"(bytes)
               : "memory");
}

__device__ inline void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

/// Waits until the phase of this parity has ended. A new barrier's phase of parity 1 counts as ended.
__device__ inline void wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}"
      :
      : "r"(barrier), "r"(parity)
      : "memory");
}

/// Starts copying a box of a matrix to shared memory; elements outside of the matrix become zeros.
__device__ inline void copy_box(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier,
                                int column, int row, CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;"
      :
      : "r"(shared), "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(static_cast<std::uint64_t>(policy))
      : "memory");
}

/// Starts copying a box from shared memory to a matrix; elements outside of the matrix are dropped.
__device__ inline void store_box(const CUtensorMap* map, std::uint32_t shared, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];\n"
      "cp.async.bulk.commit_group;"
      :
      : "l"(map), "r"(shared), "r"(column), "r"(row)
      : "memory");
}

/// Waits until the thread's stores have read shared memory.
__device__ inline void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" : : : "memory");
}

/// Waits until the thread's stores are complete.
__device__ inline void wait_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" : : : "memory");
}

/// Makes the thread's writes to shared memory visible to the copy engine, after a barrier.
__device__ inline void fence_for_copy_engine() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

/// Waits at barrier `number` (1 to 15) until `threads` threads have come there. Each warp comes as a whole.
__device__ inline void named_barrier_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" : : "r"(number), "r"(threads) : "memory");
}
/// Comes to a barrier for which other threads wait with named_barrier_sync(), and goes on.
__device__ inline void named_barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" : : "r"(number), "r"(threads) : "memory");
}

/// Warpgroup: sets how many registers each of its threads may use.
template <int kRegisters>
__device__ inline void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

/// Warp: stores two or four transposed 8x8 matrices of 2-byte elements. Threads 8i .. 8i+7 pass the addresses
/// of the rows of matrix i. Thread t holds elements t / 4 of rows 2 (t % 4) and 2 (t % 4) + 1 of matrix i.
__device__ inline void store_matrix_x2_transposed(std::uint32_t shared_row, const std::uint32_t (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               :
               : "r"(shared_row), "r"(r[0]), "r"(r[1])
               : "memory");
}
__device__ inline void store_matrix_x4_transposed(std::uint32_t shared_row, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(shared_row), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

#endif

}  // namespace adaptrt::cuda

#ifndef __CUDACC__
#include "emulation/hopper_emulated.h"
#endif

namespace adaptrt::cuda {

/// Waits for the 128 threads of a warpgroup. Each warpgroup has its own barrier number.
__device__ inline void warpgroup_barrier(int warpgroup) {
  named_barrier_sync(warpgroup + 1, 128);
}

}  // namespace adaptrt::cuda
