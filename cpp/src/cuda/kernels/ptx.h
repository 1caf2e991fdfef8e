#pragma once

#include <cstdint>

#include "cuda/kernels/platform.h"
#include "cuda/kernels/types.h"

// Machine instructions that C++ cannot express. A function whose comment says "Warp:" must be called by all
// 32 threads of a warp at once. The host's implementations are in tests/cpp/cuda/emulation/ptx_emulated.h.
#ifdef __CUDACC__

namespace adaptrt::cuda {

namespace detail {
__device__ inline std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}
}  // namespace detail

/// The block's dynamic shared memory, aligned to 16 bytes. Kernels use no static shared memory; each lays out
/// what it needs here.
__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return memory;
}

/// Warp: loads four 8x8 matrices of 2-byte elements. Threads 8i .. 8i+7 pass the addresses, in shared memory
/// and aligned to 16 bytes, of the rows of matrix i. Thread t gets elements 2 (t % 4) and 2 (t % 4) + 1 of
/// row t / 4 of matrix i in r[i].
__device__ inline void load_matrix_x4(std::uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(detail::shared_address(shared_row))
               : "memory");
}

/// Warp: loads the transposed matrices: thread t gets elements t / 4 of rows 2 (t % 4) and 2 (t % 4) + 1.
__device__ inline void load_matrix_x4_transposed(std::uint32_t (&r)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(detail::shared_address(shared_row))
               : "memory");
}

/// Warp: d[16, 8] += a[16, 16] b[16, 8], summed in float32. With g = thread / 4 and p = 2 (thread % 4), a
/// thread holds of a: rows g, g + 8, g, g + 8 at columns p, p, p + 8, p + 8 (and the next); of b: rows p and
/// p + 8 (and the next) of column g; of d: row g at columns p, p + 1, then row g + 8.
template <typename T>
__device__ void mma_16x8x16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]);

template <>
__device__ inline void mma_16x8x16<Half>(float (&d)[4], const std::uint32_t (&a)[4],
                                         const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ inline void mma_16x8x16<BFloat16>(float (&d)[4], const std::uint32_t (&a)[4],
                                             const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// Starts copying 16 bytes to shared memory; both addresses are aligned to 16. If not `valid`, the 16 bytes
/// become zero and `global` is not read. This thread sees the bytes after wait_copies, other threads after a
/// subsequent barrier.
__device__ inline void copy_async_16(void* shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(detail::shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(bytes)
               : "memory");
}

/// Groups the copies that this thread started since the last group; a group may be empty.
__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;" : : : "memory");
}

/// Waits until at most this thread's `kPending` latest groups are still running.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

/// Loads the cache line of a global address into the L2 cache.
__device__ inline void prefetch(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" : : "l"(__cvta_generic_to_global(global)));
}

/// Lets the stream's next kernel begin when multiprocessors are free, if it was launched that way. Before
/// sm_90 this does nothing, and so does the next function.
__device__ inline void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}

/// Waits until the kernels before this one are complete and their writes are visible. If the launch overlaps
/// the previous kernel, every block must call this before it ends.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

/// Adds 1 to a counter in global memory, or sets it to 0 if it is `most`. Returns the old value. After a
/// barrier, a block sees what others wrote before a barrier that their calls followed, if these calls changed
/// the counter earlier.
__device__ inline std::uint32_t count_block(std::uint32_t* counter, std::uint32_t most) {
  std::uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(__cvta_generic_to_global(counter)), "r"(most)
               : "memory");
  return old;
}

/// 16 bytes of global memory that no thread writes while the kernel runs. `address` is aligned to 16.
__device__ inline Vector16 load_read_only_16(const void* address) {
  Vector16 v;
  asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
      : "l"(__cvta_generic_to_global(address)));
  return v;
}

}  // namespace adaptrt::cuda

#else
#include "emulation/ptx_emulated.h"
#endif
