// Measures the products of rows with consecutive panels of bfloat16 weights, each read from memory once per
// pass, plain and compressed: a linear layer without the work around its products.
//   panel_bench [inputs] [rounds] [kernels] [rows...]

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "adaptrt/core/compressed_panels.h"
#include "adaptrt/core/huge_array.h"
#include "adaptrt/core/panels.h"
#include "adaptrt/cpu/kernel_table.h"

namespace adaptrt {
namespace {

constexpr std::int64_t kThreads = 2;
/// Larger than any cache that a thread has to itself.
constexpr std::size_t kWeightBytes = std::size_t{512} << 20U;
/// Consecutive panels that a thread processes.
constexpr std::int64_t kChunk = 4;
constexpr std::int64_t kOutliers = 64;

/// Panels of k inputs. Only some differ; the others are copies of them.
struct Weights {
  Weights(std::int64_t k, bool compressed) : is_compressed(compressed) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0.0F, 0.02F);
    constexpr std::int64_t kDifferent = 8;
    std::vector<std::vector<std::byte>> panels;
    for (std::int64_t i = 0; i < kDifferent; ++i) {
      std::vector<std::uint16_t> plain(static_cast<std::size_t>(k * kPanelColumns));
      for (auto& element : plain) element = float_to_bfloat16(normal(random));
      const auto* bytes = reinterpret_cast<const std::byte*>(plain.data());
      std::vector<std::byte> panel(bytes, bytes + 2 * plain.size());
      if (compressed) {
        panel.resize(compressed_panel_bytes(k, kOutliers));
        if (count_outliers(bytes, k) > kOutliers) std::abort();
        compress_panel(bytes, k, kOutliers, panel.data());
      }
      panels.push_back(std::move(panel));
    }
    panel_bytes = panels[0].size();
    count = static_cast<std::int64_t>(kWeightBytes / panel_bytes);
    data = HugeArray(static_cast<std::size_t>(count) * panel_bytes);
    for (std::int64_t i = 0; i < count; ++i) {
      std::memcpy(at(i), panels[static_cast<std::size_t>(i % kDifferent)].data(), panel_bytes);
    }
  }

  [[nodiscard]] std::byte* at(std::int64_t panel) const {
    return data.data() + static_cast<std::size_t>(panel) * panel_bytes;
  }

  bool is_compressed;
  std::size_t panel_bytes = 0;
  std::int64_t count = 0;
  HugeArray data;
};

/// Multiplies every kThreads-th chunk of panels by `rows` rows.
void multiply(const KernelTable& table, const Weights& weights, std::int64_t k, std::int64_t rows,
              std::int64_t thread) {
  const std::vector<std::uint16_t> a(static_cast<std::size_t>(rows * k), float_to_bfloat16(0.37F));
  // The stride is an odd number of tiles, as in the engine.
  const std::int64_t step_bytes =
      ((rows / PackedSteps::kBlockRows + 2) | 1) * PackedSteps::kBlockRows * PackedSteps::kRowBytes;
  const HugeArray steps(static_cast<std::size_t>((k * 2 / PackedSteps::kRowBytes + 1) * step_bytes));
  if (table.pack_rows != nullptr) {
    table.pack_rows({reinterpret_cast<const std::byte*>(a.data()), k * 2, k * 2}, rows, steps.data(),
                    step_bytes);
  }
  std::vector<float> out(static_cast<std::size_t>(rows * kPanelColumns));
  for (std::int64_t chunk = thread * kChunk; chunk < weights.count; chunk += kThreads * kChunk) {
    for (std::int64_t i = chunk; i < std::min(chunk + kChunk, weights.count); ++i) {
      const std::int64_t next = i + 1 < chunk + kChunk ? i + 1 : chunk + kThreads * kChunk;
      const PanelGemm gemm{.call = {.a = a.data(),
                                    .a_stride = k,
                                    .panel = weights.at(i),
                                    .k = k,
                                    .width = kPanelColumns,
                                    .out = out.data(),
                                    .out_stride = kPanelColumns,
                                    .rows = rows,
                                    .next_panel = next < weights.count ? weights.at(next) : nullptr},
                           .a_steps = table.pack_rows == nullptr ? nullptr : steps.data(),
                           .a_step_bytes = step_bytes};
      if (weights.is_compressed) {
        table.compressed_gemm(gemm, kOutliers);
      } else {
        table.gemm[static_cast<std::size_t>(DType::kBFloat16)](gemm);
      }
    }
  }
  if (table.release_tiles != nullptr) table.release_tiles();
}

double seconds_of_pass(const KernelTable& table, const Weights& weights, std::int64_t k, std::int64_t rows) {
  const auto begin = std::chrono::steady_clock::now();
  {
    std::vector<std::jthread> threads;
    for (std::int64_t i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] { multiply(table, weights, k, rows, i); });
    }
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

int run(int argc, char** argv) {
  const std::int64_t k = argc > 1 ? std::atoll(argv[1]) : 1024;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 5;
  const KernelTable& table = find_kernels(argc > 3 ? argv[3] : "");
  std::vector<std::int64_t> rows;
  for (int i = 4; i < argc; ++i) rows.push_back(std::atoll(argv[i]));
  if (rows.empty()) rows = {1, 2, 3, 4, 6, 8, 16, 24, 32, 64, 128, 256, 512};
  std::vector<Weights> kinds;
  kinds.emplace_back(k, false);
  if (table.compressed_gemm != nullptr) kinds.emplace_back(k, true);
  std::printf("%s kernels, %lld inputs, %lld threads, medians of %d rounds in turn\n",
              std::string(table.name).c_str(), static_cast<long long>(k), static_cast<long long>(kThreads),
              rounds);
  std::printf("%6s %28s %28s\n", "rows", "plain: GB/s, GFLOP/s", "compressed: GB/s, GFLOP/s");
  for (const std::int64_t count : rows) {
    std::vector<std::vector<double>> times(kinds.size());
    for (int round = 0; round < rounds; ++round) {
      for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
        times[kind].push_back(seconds_of_pass(table, kinds[kind], k, count));
      }
    }
    std::printf("%6lld", static_cast<long long>(count));
    for (std::size_t kind = 0; kind < kinds.size(); ++kind) {
      std::sort(times[kind].begin(), times[kind].end());
      const double median = times[kind][times[kind].size() / 2];
      const double bytes = static_cast<double>(kinds[kind].data.bytes());
      const double flops = 2.0 * static_cast<double>(kinds[kind].count * kPanelColumns * k * count);
      std::printf(" %17.1f %10.0f", bytes / median / 1e9, flops / median / 1e9);
    }
    std::printf("\n");
  }
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace adaptrt

int main(int argc, char** argv) {
  return adaptrt::run(argc, argv);
}
