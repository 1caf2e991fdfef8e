#include "adaptrt/kernels/machine_limits.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#ifdef ADAPTRT_X86_KERNELS
#include <immintrin.h>
#endif

#include "adaptrt/core/huge_array.h"

namespace adaptrt {
namespace {

/// One slot a cache line, so that threads do not share lines.
constexpr std::size_t kSlot = 8;

template <class Body>
double least_seconds(int rounds, const Body& body) {
  double least = std::numeric_limits<double>::infinity();
  for (int round = 0; round < rounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    body();
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return least;
}

double measure_read_bandwidth(ThreadPool* threads, int rounds) {
  constexpr std::int64_t kBytes = std::int64_t{1} << 30;
  constexpr std::int64_t kChunk = std::int64_t{1} << 20;
  constexpr std::int64_t kAhead = 4096;
  const HugeArray array(kBytes);
  std::memset(array.data(), 1, kBytes);
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(threads->num_threads()) * kSlot);
  const double seconds = least_seconds(rounds, [&] {
    threads->parallel_for(kBytes, kChunk, [&](std::int64_t begin, std::int64_t end, int thread) {
      std::array<std::uint64_t, kSlot> partial{};
      for (std::int64_t i = begin; i < end; i += 64) {
        std::array<std::uint64_t, kSlot> line;
        std::memcpy(line.data(), array.data() + i, sizeof(line));
        if (i + kAhead < end) __builtin_prefetch(array.data() + i + kAhead);
        for (std::size_t j = 0; j < kSlot; ++j) partial[j] += line[j];
      }
      sums[static_cast<std::size_t>(thread) * kSlot] +=
          std::accumulate(partial.begin(), partial.end(), std::uint64_t{0});
    });
  });
  return kBytes / seconds;
}

#ifdef ADAPTRT_X86_KERNELS

constexpr int kChains = 12;

/// Dot products on registers alone; the result only keeps them from being dropped.
__attribute__((target("avx512f,avx512bf16"))) float multiply_add_repeatedly(std::int64_t iterations) {
  __m512 sums[kChains];
  for (auto& sum : sums) sum = _mm512_set1_ps(1.0F);
  const auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f803f80));
  for (std::int64_t i = 0; i < iterations; ++i) {
#ifdef __clang__
#pragma unroll
#else
#pragma GCC unroll 12
#endif
    for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, ones, ones);
  }
  float total = 0.0F;
  for (const auto& sum : sums) total += _mm512_cvtss_f32(sum);
  return total;
}

double measure_bfloat16_flops(ThreadPool* threads, int rounds) {
  if (!__builtin_cpu_supports("avx512bf16")) return 0.0;
  constexpr std::int64_t kIterations = 1000000;
  constexpr double kFlopsPerIteration = kChains * 16 * 2 * 2;
  const std::int64_t chunks = 8 * threads->num_threads();
  std::vector<float> sums(static_cast<std::size_t>(chunks) * kSlot * 2);
  const double seconds = least_seconds(rounds, [&] {
    threads->parallel_for(chunks, 1, [&](std::int64_t begin, std::int64_t, int) {
      sums[static_cast<std::size_t>(begin) * kSlot * 2] = multiply_add_repeatedly(kIterations);
    });
  });
  return static_cast<double>(chunks * kIterations) * kFlopsPerIteration / seconds;
}

#else

double measure_bfloat16_flops(ThreadPool* /*threads*/, int /*rounds*/) {
  return 0.0;
}

#endif

}  // namespace

MachineLimits measure_machine_limits(ThreadPool* threads, int rounds) {
  return {measure_read_bandwidth(threads, rounds), measure_bfloat16_flops(threads, rounds)};
}

}  // namespace adaptrt
