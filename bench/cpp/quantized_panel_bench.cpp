// Measures the products of rows with consecutive panels of quantised weights, each read from memory once per
// pass: a linear layer without the work around its products. With panels in the caches, it measures the
// decoding of weights.
//   quantized_panel_bench [inputs] [rounds] [kernels] [rows...]

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/cpu/int16_spans.h"
#include "adaptrt/cpu/kernel_table.h"

namespace adaptrt {
namespace {

constexpr std::int64_t kThreads = 2;
/// Bytes per thread; larger than any cache that it has.
constexpr std::int64_t kWeightBytes = std::int64_t{64} << 20U;
/// Panels that stay in the second-level cache.
constexpr std::int64_t kCachedPanels = 4;
/// Tiles may read this many int8 rows after the last one.
constexpr std::int64_t kReadRows = 16;
constexpr auto kBFloat16 = static_cast<std::size_t>(DType::kBFloat16);

struct Form {
  const char* name;
  Quantization how;
};

Quantization of_bits(QuantAlgo algo, std::int32_t bits, std::int64_t group_size) {
  return {.algo = algo, .group_size = group_size, .scale_type = DType::kBFloat16, .bits = bits};
}

Quantization of_code(QuantAlgo algo, WeightCode code, std::int64_t group_size, DType scales) {
  return {.algo = algo,
          .group_size = group_size,
          .scale_type = scales,
          .code = code,
          .value_type = DType::kBFloat16};
}

const std::vector<Form>& forms() {
  using enum QuantAlgo;
  static const std::vector<Form> all = {
      {"W8A16", {.algo = kW8A16}},
      {"W8A8", {.algo = kW8A8}},
      {"W4A16 g128", of_bits(kW4A16, 4, 128)},
      {"3 bits g128", of_bits(kW4A16, 3, 128)},
      {"2 bits g64", of_bits(kW4A16, 2, 64)},
      {"W4A8 g128", of_bits(kW4A8, 4, 128)},
      {"3 bits A8", of_bits(kW4A8, 3, 128)},
      {"2 bits A8", of_bits(kW4A8, 2, 64)},
      {"NF4 b64", of_code(kW4A16, WeightCode::kNF4, 64, DType::kFloat32)},
      {"MXFP4", of_code(kW4A16, WeightCode::kE2M1, 32, DType::kBFloat16)},
      {"FP8 g128", of_code(kW8A16, WeightCode::kE4M3, 128, DType::kFloat32)},
      {"LLM.int8()", of_code(kW8A16, WeightCode::kLLMInt8, 0, DType::kFloat32)},
  };
  return all;
}

/// Panels of random words whose scales are all the same power of two.
struct Weights {
  Weights(const Quantization& quantization, std::int64_t inputs) : how(quantization), k(inputs) {
    bytes_of_panel = panel_bytes(how, DType::kBFloat16, kPanelColumns, k);
    count = kThreads * (kWeightBytes / static_cast<std::int64_t>(bytes_of_panel));
    data = HugeArray(static_cast<std::size_t>(count) * bytes_of_panel);
    std::mt19937_64 random(7);
    for (std::size_t i = 0; i + sizeof(std::uint64_t) <= data.bytes(); i += sizeof(std::uint64_t)) {
      // Avoids NaN as FP8.
      const std::uint64_t words = random() & 0xbfbfbfbfbfbfbfbfULL;
      std::memcpy(data.data() + i, &words, sizeof(words));
    }
    const DType type = has_typed_scales(how) ? how.scale_type : DType::kFloat32;
    for (std::int64_t i = 0; i < count; ++i) {
      const QuantizedPanel parts = parts_of_panel(how, at(i), k, kPanelColumns);
      std::byte* scales = at(i) + (parts.scales - parts.weights);
      const std::int64_t of_panel = group_count(how, k) * kPanelColumns;
      for (std::int64_t s = 0; s < of_panel; ++s) {
        store_from_float(scales, type, static_cast<std::size_t>(s), 0.0078125F);
      }
    }
  }

  [[nodiscard]] std::byte* at(std::int64_t panel) const {
    return data.data() + static_cast<std::size_t>(panel) * bytes_of_panel;
  }

  Quantization how;
  std::int64_t k;
  std::size_t bytes_of_panel = 0;
  std::int64_t count = 0;
  HugeArray data;
};

/// Rows in all forms of activations.
struct Activations {
  Activations(std::int64_t number, std::int64_t inputs)
      : rows(number),
        k(inputs),
        bfloat16(static_cast<std::size_t>(rows * k), float_to_bfloat16(0.37F)),
        int16(static_cast<std::size_t>(rows * padded_int16_inputs(k)), 300),
        int8(static_cast<std::size_t>((rows + kReadRows) * k), 150),
        scales(static_cast<std::size_t>(rows * k), 0.01F),
        sums(static_cast<std::size_t>(rows * k), 3),
        out(static_cast<std::size_t>(rows * kPanelColumns)) {}

  std::int64_t rows;
  std::int64_t k;
  std::vector<std::uint16_t> bfloat16;
  std::vector<std::int16_t> int16;
  std::vector<std::uint8_t> int8;
  // They have room for the largest number of groups or spans.
  std::vector<float> scales;
  std::vector<std::int32_t> sums;
  std::vector<float> out;
};

void multiply_panel(const KernelTable& table, const Quantization& how, const std::byte* panel,
                    const std::byte* next, Activations* x) {
  const auto filled = [&](auto gemm) {
    gemm.call.a_stride = x->k;
    gemm.call.panel = panel;
    gemm.call.k = x->k;
    gemm.call.width = kPanelColumns;
    gemm.call.out = x->out.data();
    gemm.call.out_stride = kPanelColumns;
    gemm.call.rows = x->rows;
    gemm.call.next_panel = next;
    return gemm;
  };
  if (how.algo == QuantAlgo::kW8A8) {
    table.int8_gemm(filled(Int8Gemm{.call = {.a = x->int8.data()}, .a_scales = x->scales.data()}));
  } else if (how.algo == QuantAlgo::kW4A8) {
    table.w4a8_gemm(filled(W4A8Gemm{.call = {.a = reinterpret_cast<const std::int8_t*>(x->int8.data())},
                                    .a_scales = x->scales.data(),
                                    .a_sums = x->sums.data(),
                                    .quantization = how}));
  } else if (how.is_codebook()) {
    table.codebook_gemm[kBFloat16](filled(PanelGemm{.call = {.a = x->bfloat16.data()}}), how);
  } else if (table.int16_gemm != nullptr) {
    Int16Gemm gemm = filled(Int16Gemm{.call = {.a = x->int16.data()},
                                      .a_scales = x->scales.data(),
                                      .a_sums = x->sums.data(),
                                      .spans = span_count(how, x->k),
                                      .quantization = how});
    gemm.call.a_stride = padded_int16_inputs(x->k);
    table.int16_gemm(gemm);
  } else {
    table.quantized_gemm[kBFloat16](filled(QuantizedGemm{
        .call = {.a = x->bfloat16.data()}, .activation = DType::kBFloat16, .quantization = how}));
  }
}

/// Seconds of one pass over all panels, or over the first ones repeatedly if `cached`.
double seconds_of_pass(const KernelTable& table, const Weights& weights, std::int64_t rows, bool cached) {
  const std::int64_t share = weights.count / kThreads;
  const auto begin = std::chrono::steady_clock::now();
  {
    std::vector<std::jthread> threads;
    for (std::int64_t thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        Activations x(rows, weights.k);
        const auto place = [&](std::int64_t i) {
          return weights.at(thread * share + (cached ? i % kCachedPanels : i));
        };
        for (std::int64_t i = 0; i < share; ++i) {
          multiply_panel(table, weights.how, place(i), i + 1 < share ? place(i + 1) : nullptr, &x);
        }
        if (table.release_tiles != nullptr) table.release_tiles();
      });
    }
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

int run(int argc, char** argv) {
  const std::int64_t k = argc > 1 ? std::atoll(argv[1]) : 1024;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 9;
  const KernelTable& table = find_kernels(argc > 3 ? argv[3] : "");
  std::vector<std::int64_t> rows;
  for (int i = 4; i < argc; ++i) rows.push_back(std::atoll(argv[i]));
  if (rows.empty()) rows = {1, 2, 3, 4, 6};
  std::printf(
      "%s kernels, %lld inputs, %lld threads, medians of %d rounds; GB/s from memory, from the caches "
      "alone\n",
      std::string(table.name).c_str(), static_cast<long long>(k), static_cast<long long>(kThreads), rounds);
  std::printf("%-12s", "rows");
  for (const std::int64_t number : rows) std::printf(" %13lld", static_cast<long long>(number));
  std::printf("\n");
  for (const Form& form : forms()) {
    const Weights weights(form.how, k);
    std::printf("%-12s", form.name);
    for (const std::int64_t number : rows) {
      for (const bool cached : {false, true}) {
        std::vector<double> times;
        for (int round = 0; round < rounds; ++round) {
          times.push_back(seconds_of_pass(table, weights, number, cached));
        }
        std::sort(times.begin(), times.end());
        std::printf(" %6.1f", static_cast<double>(weights.data.bytes()) / times[times.size() / 2] / 1e9);
      }
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace adaptrt

int main(int argc, char** argv) {
  return adaptrt::run(argc, argv);
}
