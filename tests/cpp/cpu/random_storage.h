#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <utility>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/huge_array.h"
#include "adaptrt/core/neuron_table.h"
#include "adaptrt/core/panels.h"
#include "adaptrt/core/quantized_panels.h"
#include "adaptrt/program/ops.h"
#include "random_weights.h"

namespace adaptrt::testing {

/// Uniform numbers that are the same on every machine (splitmix64).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15U);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(limit));
  }
  float between(float low, float high) {
    return low + (high - low) * static_cast<float>(bits() >> 40) * 0x1p-24F;
  }

 private:
  std::uint64_t state_;
};

/// Weights and vectors whose addresses do not change.
class Storage {
 public:
  PanelMatrix matrix(DType dtype, std::int64_t n, std::int64_t k, float bound, Random* random) {
    const auto& memory = memories_.emplace_back(panel_bytes(dtype, n, k));
    std::vector<float> row(static_cast<std::size_t>(k));
    for (std::int64_t i = 0; i < n; ++i) {
      for (auto& value : row) value = random->between(-bound, bound);
      pack_panels(memory.data(), dtype, n, k, i, 1, reinterpret_cast<const std::byte*>(row.data()),
                  DType::kFloat32, k);
    }
    return {memory.data(), dtype, n, k};
  }
  /// Makes W[n, k] of these values.
  PanelMatrix matrix(DType dtype, std::int64_t n, std::int64_t k, const std::vector<float>& values) {
    const auto& memory = memories_.emplace_back(panel_bytes(dtype, n, k));
    pack_panels(memory.data(), dtype, n, k, 0, n, reinterpret_cast<const std::byte*>(values.data()),
                DType::kFloat32, k);
    return {memory.data(), dtype, n, k};
  }
  /// Makes random integers and scales, whose values are like those of matrix() with this bound.
  PanelMatrix quantized(const Quantization& how, DType dtype, std::int64_t n, std::int64_t k, float bound,
                        Random* random) {
    const bool is_int4 = has_few_bits(how.algo);
    const std::int64_t groups = group_count(how, k);
    std::vector<std::byte> weights(static_cast<std::size_t>(n * (is_int4 ? (k + 1) / 2 : k)));
    for (auto& byte : weights) byte = weight_byte(how, static_cast<std::byte>(random->below(256)));
    std::vector<float> scales(static_cast<std::size_t>(n * groups));
    const float greatest = how.code == WeightCode::kE4M3                                   ? 448.0F
                           : how.algo == QuantAlgo::kW8A16 || how.algo == QuantAlgo::kW8A8 ? 128.0F
                           : how.is_codebook()                                             ? 1.0F
                                                                                           : 8.0F;
    for (auto& scale : scales) scale = bound / greatest * random->between(0.5F, 1.0F);
    std::vector<std::uint8_t> zeros(scales.size());
    for (auto& zero : zeros) zero = static_cast<std::uint8_t>((is_int4 ? 5 : 125) + random->below(6));
    std::vector<float> minimums = scales;
    for (auto& minimum : minimums) minimum *= random->between(5.0F, 11.0F);
    const auto& memory = memories_.emplace_back(panel_bytes(how, dtype, n, k));
    pack_quantized_panels(memory.data(), how, n, k, 0, n,
                          {weights.data(), scales.data(), how.zero_points ? zeros.data() : nullptr,
                           how.minimums ? minimums.data() : nullptr});
    const PanelMatrix made{memory.data(), dtype, n, k, nullptr, how};
    if (how.act_order) {
      pack_permutation(memory.data() + made.bytes_of_panels(), how, n, k, order(k, random).data());
    }
    return made;
  }
  /// Returns the same matrix with rows after its panels.
  PanelMatrix with_rows(const PanelMatrix& matrix) {
    PanelMatrix made = matrix;
    made.has_rows = true;
    const auto& memory = memories_.emplace_back(made.bytes());
    std::memcpy(memory.data(), matrix.data, matrix.bytes());
    std::vector<float> row(static_cast<std::size_t>(matrix.k));
    for (std::int64_t i = 0; i < matrix.n; ++i) {
      unpack_panel_row(matrix, i, row.data());
      for (std::int64_t k = 0; k < matrix.k; ++k) {
        store_from_float(memory.data() + matrix.bytes(), matrix.dtype,
                         static_cast<std::size_t>(i * matrix.k + k), row[static_cast<std::size_t>(k)]);
      }
    }
    made.data = memory.data();
    return made;
  }
  /// Returns the same matrix with columns after its panels.
  PanelMatrix with_columns(const PanelMatrix& matrix) {
    PanelMatrix made = matrix;
    made.has_columns = true;
    const auto& memory = memories_.emplace_back(made.bytes());
    std::memcpy(memory.data(), matrix.data, matrix.bytes());
    std::vector<float> column(static_cast<std::size_t>(matrix.n));
    for (std::int64_t k = 0; k < matrix.k; ++k) {
      unpack_panel_column(matrix, k, column.data());
      for (std::int64_t i = 0; i < matrix.n; ++i) {
        store_from_float(memory.data() + matrix.bytes(), matrix.dtype,
                         static_cast<std::size_t>(k * matrix.n + i), column[static_cast<std::size_t>(i)]);
      }
    }
    made.data = memory.data();
    return made;
  }
  /// Returns the rows of up and columns of down, neuron by neuron.
  NeuronTable neurons(const PanelMatrix& up, const PanelMatrix& down) {
    NeuronTable made{.dtype = up.dtype, .count = up.n, .size = up.k};
    const auto& memory = memories_.emplace_back(made.bytes());
    made.data = memory.data();
    std::vector<float> row(static_cast<std::size_t>(up.k));
    const auto store = [&](std::int64_t neuron, std::int64_t first) {
      std::byte* record = memory.data() + static_cast<std::size_t>(neuron) * made.record_bytes();
      for (std::int64_t i = 0; i < made.size; ++i) {
        store_from_float(record, made.dtype, static_cast<std::size_t>(first + i),
                         row[static_cast<std::size_t>(i)]);
      }
    };
    for (std::int64_t neuron = 0; neuron < up.n; ++neuron) {
      unpack_panel_row(up, neuron, row.data());
      store(neuron, 0);
      unpack_panel_column(down, neuron, row.data());
      store(neuron, made.size);
    }
    return made;
  }
  VectorView vector(std::int64_t size, float low, float high, Random* random) {
    auto& values = vectors_.emplace_back(static_cast<std::size_t>(size));
    for (auto& value : values) value = random->between(low, high);
    return {values.data(), size};
  }
  VectorView vector(std::vector<float> values) {
    const auto& kept = vectors_.emplace_back(std::move(values));
    return {kept.data(), static_cast<std::int64_t>(kept.size())};
  }

 private:
  /// Returns one of two permutations of the inputs, so that some parts of a layer share one.
  static std::vector<std::int32_t> order(std::int64_t k, Random* random) {
    Random own(static_cast<std::uint64_t>(k * 2 + random->below(2)));
    std::vector<std::int32_t> order(static_cast<std::size_t>(k));
    for (std::int64_t i = 0; i < k; ++i) {
      const auto at = static_cast<std::size_t>(own.below(i + 1));
      order[static_cast<std::size_t>(i)] = order[at];
      order[at] = static_cast<std::int32_t>(i);
    }
    return order;
  }

  std::deque<HugeArray> memories_;
  std::deque<std::vector<float>> vectors_;
};

/// Returns the rows of W[n, k] as float32.
inline std::vector<float> unpack(const PanelMatrix& matrix) {
  std::vector<float> values(static_cast<std::size_t>(matrix.n * matrix.k));
  for (std::int64_t row = 0; row < matrix.n; ++row)
    unpack_panel_row(matrix, row, values.data() + row * matrix.k);
  return values;
}

}  // namespace adaptrt::testing
