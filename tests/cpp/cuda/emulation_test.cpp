#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cuda/kernels/launch.h"
#include "fails_with.h"

namespace adaptrt::cuda::emulation_test {
namespace {

using emulation::EmulationError;
using emulation::run_grid;

BOOST_AUTO_TEST_SUITE(emulation_suite)

BOOST_AUTO_TEST_CASE(every_thread_of_every_block_runs_once) {
  std::vector<int> counts(3 * 2 * 64);
  run_grid({3, 2, 1}, 64, 0,
           [&] { ++counts[(blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x]; });
  for (const int count : counts) BOOST_TEST(count == 1);
}

BOOST_AUTO_TEST_CASE(blocks_run_in_the_order_that_a_test_asks_for) {
  std::vector<std::uint32_t> order;
  const auto note = [&] {
    if (threadIdx.x == 0) order.push_back((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x);
  };
  {
    const emulation::BlockOrder reversed([](auto blocks) { std::ranges::reverse(blocks); });
    run_grid({2, 3, 2}, 32, 0, note);
  }
  run_grid({2, 3, 2}, 32, 0, note);
  BOOST_REQUIRE_EQUAL(order.size(), 24U);
  for (std::uint32_t i = 0; i < 12; ++i) {
    BOOST_TEST(order[i] == 11 - i);
    BOOST_TEST(order[12 + i] == i);
  }
}

BOOST_AUTO_TEST_CASE(a_barrier_makes_the_writes_of_others_seen) {
  std::vector<int> seen(128);
  run_grid({1, 1, 1}, 128, 128 * sizeof(int), [&] {
    auto* values = reinterpret_cast<int*>(shared_memory());
    for (int round = 0; round < 3; ++round) {
      values[threadIdx.x] = static_cast<int>(threadIdx.x) + round;
      __syncthreads();
      seen[threadIdx.x] += values[(threadIdx.x + 77) % 128];
      __syncthreads();
    }
  });
  for (int i = 0; i < 128; ++i) BOOST_TEST(seen[static_cast<std::size_t>(i)] == 3 * ((i + 77) % 128) + 3);
}

#ifndef ADAPTRT_RACE_DETECTOR
BOOST_AUTO_TEST_CASE(a_missing_barrier_shows) {
  int wrong = 0;
  run_grid({4, 1, 1}, 64, 64 * sizeof(int), [&] {
    auto* values = reinterpret_cast<int*>(shared_memory());
    values[threadIdx.x] = 1;
    if (values[threadIdx.x ^ 1U] != 1) ++wrong;
  });
  BOOST_TEST(wrong > 0);
}
#else
/// Each kernel has a race, although the order of emulated threads may give right results.
BOOST_AUTO_TEST_CASE(the_race_detector_finds_what_the_turns_hide) {
  const auto fails = [](const std::function<void(unsigned char* memory)>& kernel) {
    return fails_with([&] { run_grid({1, 1, 1}, 64, 16, [&] { kernel(shared_memory()); }); }, "a race");
  };
  const auto write = [](unsigned char* memory) { *static_cast<volatile unsigned char*>(memory) = 1; };
  const auto read = [](const unsigned char* memory) {
    static_cast<void>(*static_cast<const volatile unsigned char*>(memory));
  };
  alignas(16) const unsigned char source[16] = {};
  const auto copy = [&source](unsigned char* memory) {
    copy_async_16(memory, source, true);
    commit_copies();
    wait_copies<0>();
  };
  // There is a barrier before a value is read, but none before it is written again.
  BOOST_TEST(fails([&](unsigned char* memory) {
    if (threadIdx.x == 0) write(memory);
    __syncthreads();
    if (threadIdx.x == 1) read(memory);
    if (threadIdx.x == 0) write(memory);
  }));
  // A warp barrier is used for a value of another warp.
  BOOST_TEST(fails([&](unsigned char* memory) {
    if (threadIdx.x == 0) write(memory);
    __syncwarp();
    if (threadIdx.x == 32) read(memory);
  }));
  // A shuffle does not order memory accesses.
  BOOST_TEST(fails([&](unsigned char* memory) {
    if (threadIdx.x == 0) write(memory);
    static_cast<void>(__shfl_sync(kAllLanes, 1, 0));
    if (threadIdx.x == 1) read(memory);
  }));
  // A thread's own copies have arrived, but those of other threads may not.
  BOOST_TEST(fails([&](unsigned char* memory) {
    if (threadIdx.x == 0) copy(memory);
    if (threadIdx.x == 1) read(memory);
  }));
  // A copy starts while other threads may still read the old value.
  BOOST_TEST(fails([&](unsigned char* memory) {
    if (threadIdx.x == 0) copy(memory);
    __syncthreads();
    if (threadIdx.x == 1) read(memory);
    if (threadIdx.x == 0) copy(memory);
  }));
  // The threads that give the row addresses of ldmatrix read those rows.
  BOOST_TEST(fails([&](unsigned char* memory) {
    if (threadIdx.x == 32) write(memory);
    std::uint32_t matrices[4];
    if (threadIdx.x < 32) load_matrix_x4(matrices, memory);
  }));
}
#endif

/// Barriers order these accesses, so they are no race.
BOOST_AUTO_TEST_CASE(the_race_detector_takes_no_barrier_for_a_race) {
  std::vector<int> results(64);
  run_grid({2, 1, 1}, 64, 64 * 16, [&] {
    auto* values = reinterpret_cast<int*>(shared_memory());
    for (int round = 0; round < 3; ++round) {
      values[threadIdx.x] = static_cast<int>(threadIdx.x);
      __syncwarp();
      const int of_warp = values[threadIdx.x ^ 1U];
      __syncthreads();
      results[threadIdx.x] = of_warp + values[63 - threadIdx.x];
      __syncthreads();
    }
    atomicAdd(&values[0], 1);
  });
  for (int i = 0; i < 64; ++i) BOOST_TEST(results[static_cast<std::size_t>(i)] == (i ^ 1) + 63 - i);
}

BOOST_AUTO_TEST_CASE(shared_memory_begins_as_nan) {
  run_grid({2, 1, 1}, 32, 32 * sizeof(float), [] {
    auto* values = reinterpret_cast<float*>(shared_memory());
    if (!std::isnan(values[threadIdx.x])) throw EmulationError("not poisoned");
    values[threadIdx.x] = 0.0F;
  });
}

BOOST_AUTO_TEST_CASE(shuffles_and_ballots_exchange_between_lanes) {
  std::vector<int> sums(64);
  std::vector<std::uint32_t> votes(64);
  std::vector<int> halves(64);
  run_grid({1, 1, 1}, 64, 0, [&] {
    int sum = static_cast<int>(threadIdx.x);
    for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(kAllLanes, sum, bits);
    sums[threadIdx.x] = sum;
    votes[threadIdx.x] = __ballot_sync(kAllLanes, threadIdx.x % 2 == 0);
    // The halves of a warp diverge.
    if (threadIdx.x % 32 < 16) {
      halves[threadIdx.x] = __shfl_sync(0x0000ffffU, static_cast<int>(threadIdx.x), 3);
    } else {
      halves[threadIdx.x] = __shfl_down_sync(0xffff0000U, static_cast<int>(threadIdx.x), 1);
    }
  });
  for (int i = 0; i < 64; ++i) {
    const auto at = static_cast<std::size_t>(i);
    BOOST_TEST(sums[at] == (i < 32 ? 496 : 496 + 32 * 32));
    BOOST_TEST(votes[at] == 0x55555555U);
    BOOST_TEST(halves[at] == (i % 32 < 16 ? i / 32 * 32 + 3 : (i % 32 == 31 ? i : i + 1)));
  }
}

BOOST_AUTO_TEST_CASE(a_barrier_that_not_all_reach_fails) {
  const auto some = [] {
    if (threadIdx.x < 32) __syncthreads();
  };
  BOOST_TEST(fails_with([&] { run_grid({2, 1, 1}, 96, 0, some); }, "64 threads have ended"));
  const auto different = [] {
    if (threadIdx.x < 32) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  };
  BOOST_TEST(fails_with([&] { run_grid({1, 1, 1}, 64, 0, different); }, "different barriers"));
  const auto half_a_warp = [] {
    if (threadIdx.x < 16) __syncwarp();
  };
  BOOST_TEST(fails_with([&] { run_grid({1, 1, 1}, 32, 0, half_a_warp); }, "16 threads wait for lanes"));
  // The next launch works normally.
  int runs = 0;
  run_grid({1, 1, 1}, 64, 0, [&] {
    __syncthreads();
    atomicAdd(&runs, 1);
  });
  BOOST_TEST(runs == 64);
}

BOOST_AUTO_TEST_CASE(exceptions_of_threads_are_rethrown) {
  BOOST_CHECK_THROW(run_grid({1, 1, 1}, 32, 0,
                             [] {
                               __syncthreads();
                               if (threadIdx.x == 5) throw std::out_of_range("x");
                             }),
                    std::out_of_range);
}

BOOST_AUTO_TEST_CASE(writes_behind_the_shared_memory_fail) {
  BOOST_TEST(fails_with([] { run_grid({1, 1, 1}, 32, 64, [] { shared_memory()[64 + threadIdx.x] = 0; }); },
                        "wrote behind its 64 bytes"));
}

BOOST_AUTO_TEST_CASE(an_asynchronous_copy_is_there_after_the_wait_and_not_before) {
  std::vector<std::uint32_t> source(2 * 32 * 4 + 4);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::uint32_t>(i);
  const auto address = reinterpret_cast<std::uintptr_t>(source.data());
  const std::uint32_t* aligned = source.data() + (16 - address % 16) % 16 / 4;
  run_grid({1, 1, 1}, 32, 2 * 32 * 16, [&] {
    auto* words = reinterpret_cast<std::uint32_t*>(shared_memory()) + threadIdx.x * 4;
    copy_async_16(words, aligned + threadIdx.x * 4, true);
    commit_copies();
    copy_async_16(words + 32 * 4, aligned, false);
    commit_copies();
    if (words[0] != 0xffffffffU) throw EmulationError("there too early");
    wait_copies<1>();
    if (words[1] != aligned[threadIdx.x * 4 + 1]) throw EmulationError("not there");
    if (words[32 * 4] != 0xffffffffU) throw EmulationError("there too early");
    wait_copies<0>();
    if (words[32 * 4 + 3] != 0) throw EmulationError("not zeros");
  });
  BOOST_TEST(fails_with(
      [&] {
        run_grid({1, 1, 1}, 32, 512, [&] {
          copy_async_16(shared_memory(), reinterpret_cast<const unsigned char*>(aligned) + 2, true);
        });
      },
      "source of cp.async is not aligned"));
}

template <typename T>
void check_multiplication() {
  std::vector<float> product(16 * 8);
  const auto element = [](int seed) { return static_cast<float>(seed * 37 % 17 - 8); };
  run_grid({1, 1, 1}, 32, (16 * 16 + 16 * 8) * sizeof(T), [&] {
    auto* a = reinterpret_cast<T*>(shared_memory());
    T* b = a + 16 * 16;  // row-major [16, 8]
    const int lane = static_cast<int>(threadIdx.x);
    for (int i = lane; i < 16 * 16; i += 32) a[i] = from_float<T>(element(i));
    for (int i = lane; i < 16 * 8; i += 32) b[i] = from_float<T>(element(i + 1000));
    __syncwarp();
    std::uint32_t a_registers[4];
    load_matrix_x4(a_registers, a + (lane % 16) * 16 + lane / 16 * 8);
    std::uint32_t b_registers[4];
    load_matrix_x4_transposed(b_registers, b + (lane % 16) * 8);
    float d[4] = {1.0F, 1.0F, 1.0F, 1.0F};
    mma_16x8x16<T>(d, a_registers, {b_registers[0], b_registers[1]});
    for (int i = 0; i < 4; ++i) {
      product[static_cast<std::size_t>((lane / 4 + 8 * (i / 2)) * 8 + 2 * (lane % 4) + i % 2)] = d[i];
    }
  });
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      float expected = 1.0F;
      for (int k = 0; k < 16; ++k) expected += element(row * 16 + k) * element(k * 8 + column + 1000);
      BOOST_TEST(product[static_cast<std::size_t>(row * 8 + column)] == expected);
    }
  }
}

BOOST_AUTO_TEST_CASE(matrices_are_loaded_and_multiplied) {
  check_multiplication<Half>();
  check_multiplication<BFloat16>();
}

struct Doubling {
  struct Parameters {
    int* values;
  };
  static constexpr int kThreads = 32;
  [[maybe_unused]] static constexpr int kBlocksPerMultiprocessor = 1;
  static __device__ void run(const Parameters& parameters) {
    parameters.values[blockIdx.x * blockDim.x + threadIdx.x] *= 2;
  }
};

BOOST_AUTO_TEST_CASE(launch_runs_a_kernel) {
  std::vector<int> values(64, 3);
  launch<Doubling>({.x = 2}, {values.data()}, nullptr);
  launch<Doubling>({.x = 0}, {nullptr}, nullptr);
  for (const int value : values) BOOST_TEST(value == 6);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::cuda::emulation_test
