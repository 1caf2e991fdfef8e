#include "adaptrt/measure/machine_limits.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "adaptrt/core/huge_array.h"
#include "adaptrt/cpu/amx.h"
#include "machine_limits_amx.h"

namespace adaptrt {
namespace {

/// One slot a cache line, so that threads do not share lines.
constexpr std::size_t kSlot = 8;
constexpr std::int64_t kLine = 64;

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

/// Sums [data, data + bytes) with loads of a cache line where there are any; the sum only keeps them from
/// being dropped.
std::uint64_t sum_lines(const std::byte* data, std::int64_t bytes) {
  std::array<std::uint64_t, kSlot> partial{};
  for (std::int64_t i = 0; i < bytes; i += kLine) {
    std::array<std::uint64_t, kSlot> line;
    std::memcpy(line.data(), data + i, sizeof(line));
    for (std::size_t j = 0; j < kSlot; ++j) partial[j] += line[j];
  }
  return std::accumulate(partial.begin(), partial.end(), std::uint64_t{0});
}

#ifdef __x86_64__
__attribute__((target("avx512f"))) std::uint64_t sum_lines_avx512(const std::byte* data, std::int64_t bytes) {
  // Two streams, each fetched ahead: more than one keeps more of the memory's banks busy.
  constexpr std::int64_t kAhead = 4096;
  const std::byte* second = data + bytes / 2;
  __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (std::int64_t i = 0; i < bytes / 2; i += kLine) {
    __builtin_prefetch(data + i + kAhead);
    __builtin_prefetch(second + i + kAhead);
    sums[0] = _mm512_add_epi64(sums[0], _mm512_loadu_si512(data + i));
    sums[1] = _mm512_add_epi64(sums[1], _mm512_loadu_si512(second + i));
  }
  std::array<std::uint64_t, kSlot> partial;
  _mm512_storeu_si512(partial.data(), _mm512_add_epi64(sums[0], sums[1]));
  return std::accumulate(partial.begin(), partial.end(), std::uint64_t{0});
}
#endif

double measure_read_bandwidth(ThreadPool* threads, int rounds) {
  constexpr std::int64_t kBytes = std::int64_t{1} << 30;
  constexpr std::int64_t kChunk = std::int64_t{1} << 22;
  auto* sum = &sum_lines;
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f")) sum = &sum_lines_avx512;
#endif
  const HugeArray array(kBytes);
  std::memset(array.data(), 1, kBytes);
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(threads->num_threads()) * kSlot);
  const double seconds = least_seconds(rounds, [&] {
    threads->parallel_for(kBytes, kChunk, [&](std::int64_t begin, std::int64_t end, int thread) {
      sums[static_cast<std::size_t>(thread) * kSlot] += sum(array.data() + begin, end - begin);
    });
  });
  return kBytes / seconds;
}

/// Independent sums, more than a multiply-add takes cycles times how many begin in one.
constexpr int kChains = 12;
constexpr std::int64_t kIterations = 1000000;

#ifdef __clang__
#define ADAPTRT_UNROLL_CHAINS _Pragma("unroll")
#else
#define ADAPTRT_UNROLL_CHAINS _Pragma("GCC unroll 12")
#endif

// Multiply-adds on registers alone, kChains an iteration; the results only keep them from being dropped.

float multiply_add_portable(std::int64_t iterations) {
  constexpr int kLanes = 4;
  float sums[kChains][kLanes] = {};
  for (std::int64_t i = 0; i < iterations; ++i) {
    ADAPTRT_UNROLL_CHAINS
    for (auto& sum : sums) {
      for (float& lane : sum) lane = lane * 0.999F + 1.0F;
    }
  }
  float total = 0.0F;
  for (const auto& sum : sums) total += std::accumulate(std::begin(sum), std::end(sum), 0.0F);
  return total;
}

#ifdef __x86_64__

__attribute__((target("avx2,fma"))) float multiply_add_avx2(std::int64_t iterations) {
  __m256 sums[kChains];
  for (auto& sum : sums) sum = _mm256_set1_ps(1.0F);
  const __m256 factor = _mm256_set1_ps(0.999F);
  for (std::int64_t i = 0; i < iterations; ++i) {
    ADAPTRT_UNROLL_CHAINS
    for (auto& sum : sums) sum = _mm256_fmadd_ps(sum, factor, factor);
  }
  float total = 0.0F;
  for (const auto& sum : sums) total += _mm256_cvtss_f32(sum);
  return total;
}

__attribute__((target("avx512f"))) float multiply_add_avx512(std::int64_t iterations) {
  __m512 sums[kChains];
  for (auto& sum : sums) sum = _mm512_set1_ps(1.0F);
  const __m512 factor = _mm512_set1_ps(0.999F);
  for (std::int64_t i = 0; i < iterations; ++i) {
    ADAPTRT_UNROLL_CHAINS
    for (auto& sum : sums) sum = _mm512_fmadd_ps(sum, factor, factor);
  }
  float total = 0.0F;
  for (const auto& sum : sums) total += _mm512_cvtss_f32(sum);
  return total;
}

__attribute__((target("avx512f,avx512bf16"))) float multiply_add_bfloat16(std::int64_t iterations) {
  __m512 sums[kChains];
  for (auto& sum : sums) sum = _mm512_set1_ps(1.0F);
  const auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi32(0x3f803f80));
  for (std::int64_t i = 0; i < iterations; ++i) {
    ADAPTRT_UNROLL_CHAINS
    for (auto& sum : sums) sum = _mm512_dpbf16_ps(sum, ones, ones);
  }
  float total = 0.0F;
  for (const auto& sum : sums) total += _mm512_cvtss_f32(sum);
  return total;
}

__attribute__((target("avx512f,avx512vnni"))) float multiply_add_int8(std::int64_t iterations) {
  __m512i sums[kChains];
  for (auto& sum : sums) sum = _mm512_set1_epi32(1);
  const __m512i ones = _mm512_set1_epi8(1);
  for (std::int64_t i = 0; i < iterations; ++i) {
    ADAPTRT_UNROLL_CHAINS
    for (auto& sum : sums) sum = _mm512_dpbusd_epi32(sum, ones, ones);
  }
  __m512i total = _mm512_setzero_si512();
  for (const auto& sum : sums) total = _mm512_add_epi32(total, sum);
  std::array<std::int32_t, 16> lanes;
  _mm512_storeu_si512(lanes.data(), total);
  return static_cast<float>(lanes[0]);
}

#endif

#undef ADAPTRT_UNROLL_CHAINS

/// Calls body(thread) for chunks of `multiply_adds` multiply-adds each; returns how many operations a second
/// that makes.
template <class Body>
double measure_rate(ThreadPool* threads, int rounds, double multiply_adds, const Body& body) {
  const std::int64_t chunks = 8 * threads->num_threads();
  const double seconds = least_seconds(rounds, [&] {
    threads->parallel_for(chunks, 1, [&](std::int64_t, std::int64_t, int thread) { body(thread); });
  });
  return 2.0 * static_cast<double>(chunks) * multiply_adds / seconds;
}

/// `multiply_add` does kChains instructions an iteration, each of `multiply_adds` multiply-adds.
double measure_multiply_adds(ThreadPool* threads, int rounds, float (*multiply_add)(std::int64_t),
                             int multiply_adds) {
  std::vector<float> sums(static_cast<std::size_t>(threads->num_threads()) * kSlot * 2);
  return measure_rate(
      threads, rounds, static_cast<double>(kIterations) * kChains * multiply_adds,
      [&](int thread) { sums[static_cast<std::size_t>(thread) * kSlot * 2] = multiply_add(kIterations); });
}

#ifdef __x86_64__

constexpr std::int64_t kAmxIterations = 50000;

double measure_amx(ThreadPool* threads, int rounds, void (*multiply)(std::int64_t), int multiply_adds) {
  return measure_rate(threads, rounds, static_cast<double>(kAmxIterations) * kAmxProducts * multiply_adds,
                      [&](int) { multiply(kAmxIterations); });
}

double measure_amx_from_l2(ThreadPool* threads, int rounds, void (*multiply)(const std::byte*, std::int64_t),
                           int multiply_adds) {
  const HugeArray operands(static_cast<std::size_t>(threads->num_threads() * kAmxBytes));
  std::memset(operands.data(), 0, operands.bytes());
  return measure_rate(threads, rounds, static_cast<double>(kAmxIterations) * kAmxProducts * multiply_adds,
                      [&](int thread) { multiply(operands.data() + thread * kAmxBytes, kAmxIterations); });
}

#endif

double measure_bfloat16_flops(ThreadPool* threads, int rounds) {
#ifdef __x86_64__
  if (amx_is_permitted()) {
    return measure_amx(threads, rounds, &multiply_amx_bfloat16, kAmxBfloat16MultiplyAdds);
  }
  if (__builtin_cpu_supports("avx512bf16")) {
    return measure_multiply_adds(threads, rounds, &multiply_add_bfloat16, 32);
  }
#endif
  static_cast<void>(threads);
  static_cast<void>(rounds);
  return 0.0;
}

double measure_int8_ops(ThreadPool* threads, int rounds) {
#ifdef __x86_64__
  if (amx_is_permitted()) {
    return measure_amx(threads, rounds, &multiply_amx_int8, kAmxInt8MultiplyAdds);
  }
  if (__builtin_cpu_supports("avx512vnni")) {
    return measure_multiply_adds(threads, rounds, &multiply_add_int8, 64);
  }
#endif
  static_cast<void>(threads);
  static_cast<void>(rounds);
  return 0.0;
}

double measure_float32_flops(ThreadPool* threads, int rounds) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f")) {
    return measure_multiply_adds(threads, rounds, &multiply_add_avx512, 16);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return measure_multiply_adds(threads, rounds, &multiply_add_avx2, 8);
  }
#endif
  return measure_multiply_adds(threads, rounds, &multiply_add_portable, 4);
}

}  // namespace

MachineLimits measure_machine_limits(ThreadPool* threads, int rounds) {
  MachineLimits limits{.read_bandwidth = measure_read_bandwidth(threads, rounds),
                       .int8_ops = measure_int8_ops(threads, rounds),
                       .bfloat16_flops = measure_bfloat16_flops(threads, rounds),
                       .float32_flops = measure_float32_flops(threads, rounds)};
#ifdef __x86_64__
  if (amx_is_permitted()) {
    limits.int8_from_l2_ops =
        measure_amx_from_l2(threads, rounds, &multiply_amx_int8_from, kAmxInt8MultiplyAdds);
    limits.bfloat16_from_l2_flops =
        measure_amx_from_l2(threads, rounds, &multiply_amx_bfloat16_from, kAmxBfloat16MultiplyAdds);
  }
#endif
  return limits;
}

}  // namespace adaptrt
