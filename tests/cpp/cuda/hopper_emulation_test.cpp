#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/kernels/hopper/ptx.h"
#include "cuda/kernels/hopper/wgmma.h"
#include "cuda/kernels/launch.h"
#include "fails_with.h"

// The stand-ins for instructions of compute capability 9.0 do what PTX says, and find what would be wrong on
// a GPU although the emulated threads happened to run in an order that hides it.
namespace adaptrt::cuda::hopper_emulation_test {
namespace {

using emulation::run_grid;
using emulation_test::fails_with;

constexpr int kThreads = 128;
constexpr int kRowBytes = 128;
constexpr std::size_t kSharedBytes = 24 * 1024;

/// A matrix of bfloat16 [rows, columns] at an address for the copy engine.
class Matrix {
 public:
  Matrix(int rows, int columns) : rows_(rows), columns_(columns), elements_(size() + 8) {
    for (std::size_t i = 0; i < size(); ++i) {
      data()[i] = from_float<BFloat16>(static_cast<float>(static_cast<int>(i * 37 % 17) - 8));
    }
  }
  [[nodiscard]] std::size_t size() const {
    return static_cast<std::size_t>(rows_) * static_cast<std::size_t>(columns_);
  }
  [[nodiscard]] BFloat16* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(elements_.data());
    return elements_.data() + (16 - address % 16) % 16 / sizeof(BFloat16);
  }
  [[nodiscard]] float at(int row, int column) {
    return to_float(data()[static_cast<std::size_t>(row) * static_cast<std::size_t>(columns_) +
                           static_cast<std::size_t>(column)]);
  }
  [[nodiscard]] CUtensorMap map(int box_rows) {
    return map_of(DType::kBFloat16, data(), rows_, columns_, box_rows);
  }

 private:
  int rows_;
  int columns_;
  std::vector<BFloat16> elements_;
};

/// Places of a test kernel: boxes from the first multiple of 1024 on, and a barrier before them.
struct Places {
  std::uint32_t boxes;
  std::uint32_t barrier;
  unsigned char* memory;
};

Places places() {
  const std::uint32_t begin = detail::shared_address(shared_memory());
  const std::uint32_t boxes = (begin + 8 + 1023) / 1024 * 1024;
  return {boxes, boxes - 8, shared_memory() + (boxes - begin)};
}

/// Makes the barrier, for the copies of thread 0.
void make_barrier(const Places& at) {
  if (threadIdx.x == 0) {
    init_barrier(at.barrier, 1);
    fence_barrier_init();
  }
  __syncthreads();
}

void run(const std::function<void(const Places&)>& kernel) {
  run_grid({1, 1, 1}, kThreads, kSharedBytes, [&] { kernel(places()); });
}

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

BOOST_AUTO_TEST_SUITE(hopper_emulation_suite)

BOOST_AUTO_TEST_CASE(a_box_is_there_after_the_wait_in_its_swizzle) {
  Matrix matrix(24, 72);
  const CUtensorMap map = matrix.map(16);
  run([&](const Places& at) {
    make_barrier(at);
    if (threadIdx.x == 0) {
      arrive_and_expect(at.barrier, 16 * kRowBytes);
      // Columns 8 to 71, and rows 12 to 27, of which 12 are in the matrix; then columns outside of it.
      copy_box(at.boxes, &map, at.barrier, 16, 12, CachePolicy::kNormal);
      require(at.memory[0] == 0xff && at.memory[1] == 0xff, "the box is there too early");
    }
    wait(at.barrier, 0);
    for (int i = static_cast<int>(threadIdx.x); i < 16 * 64; i += kThreads) {
      const int row = i / 64;
      const int column = i % 64;
      BFloat16 found{};
      std::memcpy(&found, at.memory + row * kRowBytes + (column / 8 ^ row % 8) * 16 + column % 8 * 2, 2);
      const bool inside = row + 12 < 24 && column + 16 < 72;
      require(to_float(found) == (inside ? matrix.at(row + 12, column + 16) : 0.0F), "a wrong element");
    }
  });
}

BOOST_AUTO_TEST_CASE(phases_alternate) {
  run([](const Places& at) {
    if (threadIdx.x == 0) init_barrier(at.barrier, 2);
    __syncthreads();
    wait(at.barrier, 1);  // of the phase before the first
    __syncthreads();
    for (std::uint32_t phase = 0; phase < 4; ++phase) {
      if (threadIdx.x % 64 == 0) arrive(at.barrier);
      wait(at.barrier, phase % 2);
      __syncthreads();
    }
  });
}

BOOST_AUTO_TEST_CASE(wrong_barriers_are_found) {
  Matrix matrix(16, 64);
  const CUtensorMap map = matrix.map(16);
  const auto fails = [](const std::function<void(const Places&)>& kernel, const std::string& part) {
    return fails_with([&] { run(kernel); }, part);
  };
  BOOST_TEST(fails(
      [](const Places& at) {
        make_barrier(at);
        wait(at.barrier, 0);
      },
      "would hang"));
  BOOST_TEST(fails([](const Places& at) { arrive(at.barrier); }, "not initialised"));
  BOOST_TEST(fails(
      [](const Places& at) {
        make_barrier(at);
        if (threadIdx.x == 0) std::memset(at.memory - 8, 0, 8);
        arrive(at.barrier);
      },
      "overwritten"));
  BOOST_TEST(fails(
      [&](const Places& at) {
        if (threadIdx.x != 0) return;
        init_barrier(at.barrier, 1);
        copy_box(at.boxes, &map, at.barrier, 0, 0, CachePolicy::kNormal);
      },
      "not fenced"));
  BOOST_TEST(fails(
      [&](const Places& at) {
        make_barrier(at);
        if (threadIdx.x == 0) copy_box(at.boxes, &map, at.barrier, 0, 0, CachePolicy::kNormal);
      },
      "still runs when its block ends"));
  BOOST_TEST(fails(
      [&](const Places& at) {
        make_barrier(at);
        if (threadIdx.x == 0) copy_box(at.boxes + 64, &map, at.barrier, 0, 0, CachePolicy::kNormal);
      },
      "not aligned to 128"));
  BOOST_TEST(fails(
      [&](const Places& at) {
        make_barrier(at);
        if (threadIdx.x != 0) return;
        copy_box(at.boxes, &map, at.barrier, 0, 0, CachePolicy::kNormal);
        copy_box(at.boxes + 1024, &map, at.barrier, 0, 0, CachePolicy::kNormal);
      },
      "over a running copy"));
  BOOST_TEST(fails([](const Places&) { named_barrier_arrive(3, 2 * kThreads); }, "at which none waits"));
  BOOST_TEST(fails([](const Places&) { named_barrier_sync(3, 2 * kThreads); }, "would hang"));
}

BOOST_AUTO_TEST_CASE(named_barriers_order_two_groups) {
  std::vector<int> order;
  run([&](const Places&) {
    const bool is_first = threadIdx.x < 64;
    for (int round = 0; round < 3; ++round) {
      if (!is_first || round > 0) named_barrier_sync(is_first ? 1 : 2, kThreads);
      if (threadIdx.x % 64 == 0) order.push_back(is_first ? 0 : 1);
      if (is_first || round < 2) named_barrier_arrive(is_first ? 2 : 1, kThreads);
    }
  });
  BOOST_TEST((order == std::vector<int>{0, 1, 0, 1, 0, 1}));
}

/// Copies `rows` rows of 64 columns to the boxes' place + offset, and waits for them.
void load(const Places& at, const CUtensorMap& map, int rows, std::uint32_t offset, std::uint32_t parity) {
  if (threadIdx.x == 0) {
    arrive_and_expect(at.barrier, rows * kRowBytes);
    for (int row = 0; row < rows; row += 16) {
      copy_box(at.boxes + offset + static_cast<std::uint32_t>(row * kRowBytes), &map, at.barrier, 0, row,
               CachePolicy::kNormal);
    }
  }
  wait(at.barrier, parity);
}

BOOST_AUTO_TEST_CASE(products_of_rows_in_shared_memory) {
  Matrix a(64, 64);
  Matrix b(48, 64);
  const CUtensorMap a_map = a.map(16);
  const CUtensorMap b_map = b.map(16);
  std::vector<float> product(64 * 48);
  constexpr std::uint32_t kBytesOfA = 64 * kRowBytes;
  run([&](const Places& at) {
    make_barrier(at);
    load(at, a_map, 64, 0, 0);
    load(at, b_map, 48, kBytesOfA, 1);
    float d[24] = {};
    wgmma_fence();
    for (std::uint32_t column = 0; column < 64; column += 16) {
      Wgmma<BFloat16, 48>::run(d, advanced(matrix_descriptor(at.boxes), column * 2),
                               matrix_descriptor(at.boxes + kBytesOfA + column * 2), column > 0);
    }
    wgmma_commit();
    require(std::isnan(d[0]), "a product is there too early");
    wgmma_wait<0>();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int i = 0; i < 24; ++i) {
      const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
      product[static_cast<std::size_t>(row * 48 + i / 4 * 8 + lane % 4 * 2 + i % 2)] = d[i];
    }
  });
  for (int row = 0; row < 64; ++row) {
    for (int column = 0; column < 48; ++column) {
      float expected = 0.0F;
      for (int k = 0; k < 64; ++k) expected += a.at(row, k) * b.at(column, k);
      BOOST_TEST(product[static_cast<std::size_t>(row * 48 + column)] == expected);
    }
  }
}

template <int kColumns>
void check_product_of_registers() {
  Matrix b(32, 64);
  const CUtensorMap b_map = b.map(16);
  const auto a = [](int row, int k) { return static_cast<float>((row * 5 + k * 3) % 13 - 6); };
  std::vector<float> product(64 * kColumns);
  run([&](const Places& at) {
    make_barrier(at);
    load(at, b_map, 32, 0, 0);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first_row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
    std::uint32_t registers[2][4];
    for (int step = 0; step < 2; ++step) {
      for (int i = 0; i < 4; ++i) {
        const int row = first_row + i % 2 * 8;
        const int k = step * 16 + lane % 4 * 2 + i / 2 * 8;
        registers[step][i] = pack_pair<BFloat16>(a(row, k), a(row, k + 1));
      }
    }
    float d[kColumns / 2];
    wgmma_fence();
    for (std::uint32_t step = 0; step < 2; ++step) {
      WgmmaOfRegisters<BFloat16, kColumns>::run(
          d, registers[step], advanced(matrix_descriptor(at.boxes), step * 16 * kRowBytes), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < kColumns / 2; ++i) {
      product[static_cast<std::size_t>((first_row + i / 2 % 2 * 8) * kColumns + i / 4 * 8 + lane % 4 * 2 +
                                       i % 2)] = d[i];
    }
  });
  for (int row = 0; row < 64; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      float expected = 0.0F;
      for (int k = 0; k < 32; ++k) expected += a(row, k) * b.at(k, column);
      BOOST_TEST(product[static_cast<std::size_t>(row * kColumns + column)] == expected);
    }
  }
}

BOOST_AUTO_TEST_CASE(products_of_registers_and_transposed_rows) {
  check_product_of_registers<64>();
  check_product_of_registers<32>();
}

BOOST_AUTO_TEST_CASE(products_without_a_wait_or_a_fence_are_found) {
  Matrix b(16, 64);
  const CUtensorMap b_map = b.map(16);
  const std::uint32_t a[4] = {};
  const auto multiply = [&](const Places& at, float (&d)[32]) {
    WgmmaOfRegisters<BFloat16, 64>::run(d, a, matrix_descriptor(at.boxes), false);
  };
  const auto fails = [&](const std::function<void(const Places&, float (&)[32])>& kernel,
                         const std::string& part) {
    return fails_with(
        [&] {
          run([&](const Places& at) {
            float d[32];
            make_barrier(at);
            kernel(at, d);
          });
        },
        part);
  };
  BOOST_TEST(fails(
      [&](const Places& at, float (&d)[32]) {
        load(at, b_map, 16, 0, 0);
        multiply(at, d);
      },
      "no wgmma.fence"));
  BOOST_TEST(fails(
      [&](const Places& at, float (&d)[32]) {
        load(at, b_map, 16, 0, 0);
        wgmma_fence();
        multiply(at, d);
        wgmma_commit();
      },
      "a product still runs"));
  BOOST_TEST(fails(
      [&](const Places& at, float (&d)[32]) {
        load(at, b_map, 16, 0, 0);
        wgmma_fence();
        multiply(at, d);
        __syncthreads();
        copy_async_16(at.memory + threadIdx.x * 16, b.data(), true);
      },
      "written that a running product may read"));
  // Only thread 0 waits for the copy.
  BOOST_TEST(fails(
      [&](const Places& at, float (&d)[32]) {
        if (threadIdx.x == 0) load(at, b_map, 16, 0, 0);
        __syncthreads();
        wgmma_fence();
        multiply(at, d);
      },
      "before a thread of it has waited for the copy"));
  BOOST_TEST(fails(
      [&](const Places& at, float (&d)[32]) {
        copy_async_16(at.memory + threadIdx.x * 16, b.data(), true);
        commit_copies();
        wait_copies<0>();
        __syncthreads();
        wgmma_fence();
        multiply(at, d);
      },
      "without fence.proxy.async"));
  BOOST_TEST(fails(
      [&](const Places& at, float (&)[32]) {
        copy_async_16(at.memory + threadIdx.x * 16, b.data(), true);
        __syncthreads();
        if (threadIdx.x == 0) copy_box(at.boxes, &b_map, at.barrier, 0, 0, CachePolicy::kNormal);
      },
      "without fence.proxy.async"));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::cuda::hopper_emulation_test
