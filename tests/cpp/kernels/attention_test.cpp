#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <span>
#include <vector>

#include "adaptrt/core/panels.h"
#include "adaptrt/cpu/attention_tile.h"
#include "adaptrt/cpu/kernel_table.h"
#include "kernel_tables.h"
#include "support/sanitized.h"

namespace adaptrt::attention_test {
namespace {

namespace data = boost::unit_test::data;

/// Sizes of a head and of the blocks with its keys and values.
struct Shape {
  std::int64_t head_dim = 64;
  std::int64_t rows_per_position = 4;
  std::int64_t tokens_per_block = 32;
  std::int64_t sliding_window = 0;
  std::int64_t length = 150;
  /// Ratio of the last tokens' keys to the first token's.
  float key_growth = 1.0F;
  float softcap = 0.0F;
  std::int64_t look_ahead = 0;
  bool biased = false;
  /// Sinks are between -sinks and sinks; 0 for none.
  float sinks = 0.0F;
};

constexpr Shape kShapes[] = {
    {},
    {.head_dim = 12, .rows_per_position = 1, .tokens_per_block = 16},
    {.head_dim = 80, .rows_per_position = 7, .tokens_per_block = 23, .sliding_window = 37},
    {.head_dim = 128, .rows_per_position = 2, .tokens_per_block = 64, .sliding_window = 70, .length = 200},
    {.head_dim = 32, .rows_per_position = 3, .length = 300, .key_growth = 12.0F},
    {.head_dim = 20, .rows_per_position = 3, .tokens_per_block = 40, .sliding_window = 33, .softcap = 2.5F},
    {.rows_per_position = 2, .tokens_per_block = 64, .look_ahead = 150, .biased = true},
    {.head_dim = 48, .rows_per_position = 1, .sliding_window = 20, .softcap = 2.5F, .look_ahead = 19},
    {.head_dim = 20, .rows_per_position = 3, .tokens_per_block = 23, .biased = true},
    {.rows_per_position = 8, .sinks = 4.0F},
    {.head_dim = 20, .rows_per_position = 3, .tokens_per_block = 40, .sliding_window = 33, .sinks = 40.0F},
    {.head_dim = 96, .rows_per_position = 5, .length = 200, .key_growth = 12.0F, .softcap = 30.0F},
};

/// The keys and values of one head, and queries of every position.
class Head {
 public:
  Head(const Shape& shape, DType dtype, bool is_int8, FreshRandom* random)
      : shape_(shape),
        dtype_(dtype),
        is_int8_(is_int8),
        interleave_(is_int8 ? 2 : k_interleave(dtype)),
        slots_(whole_groups(shape.tokens_per_block)),
        columns_(whole_groups(shape.head_dim)),
        groups_per_block_(slots_ / kKeyGroup) {
    const std::int64_t blocks = (shape.length + shape.tokens_per_block - 1) / shape.tokens_per_block;
    const auto size = static_cast<std::int64_t>(is_int8 ? 1 : size_of(dtype));
    // Slots without tokens: keys are NaN, and values are only finite.
    keys_.assign(static_cast<std::size_t>(blocks * slots_ * shape.head_dim * size), std::byte{0xff});
    values_.assign(static_cast<std::size_t>(blocks * slots_ * columns_ * size), std::byte{0x33});
    key_scales_.assign(static_cast<std::size_t>(blocks * slots_), std::nanf(""));
    value_scales_.assign(key_scales_.size(), 3.0F);
    for (std::int64_t token = 0; token < shape.length; ++token) write(token, random);
    if (shape.biased) bias_ = random->vector(shape.rows_per_position * bias_stride(), -2.0F, 2.0F);
    if (shape.sinks > 0.0F) sinks_ = random->vector(shape.rows_per_position, -shape.sinks, shape.sinks);
    const auto q = random->vector(shape.length * shape.rows_per_position * shape.head_dim, -1.5F, 1.5F);
    const DType type = dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
    queries_.resize(q.size() * size_of(type));
    for (std::size_t i = 0; i < q.size(); ++i) store_from_float(queries_.data(), type, i, q[i]);
    for (std::size_t i = 0; i < q.size(); ++i)
      wide_queries_.push_back(load_as_float(queries_.data(), type, i));
  }

  /// Returns the output [count * rows_per_position, head_dim] of positions [first, first + count), computed
  /// together, with this many key tiles at a time.
  [[nodiscard]] std::vector<float> attend(const KernelTable& table, std::int64_t first, std::int64_t count,
                                          std::int64_t tiles_at_once = 8) const {
    const std::int64_t rows = count * shape_.rows_per_position;
    std::vector<float> accumulator(static_cast<std::size_t>(rows * columns_), 0.0F);
    std::vector<float> row_sum(static_cast<std::size_t>(rows * kKeyGroup));
    std::vector<float> row_max(static_cast<std::size_t>(rows));
    for (std::int64_t row = 0; row < rows; ++row) {
      begin_row(sink_of(row), row_max.data() + row, row_sum.data() + row * kKeyGroup);
    }
    std::vector<float> scratch(static_cast<std::size_t>(tile_scratch_floats(shape_.head_dim)));
    const std::size_t query_bytes = queries_.size() / static_cast<std::size_t>(shape_.length);
    const AttentionRows attending{.queries = queries_.data() + static_cast<std::size_t>(first) * query_bytes,
                                  .rows = rows,
                                  .rows_per_position = shape_.rows_per_position,
                                  .first_position = first,
                                  .sliding_window = shape_.sliding_window,
                                  .look_ahead = shape_.look_ahead,
                                  .softcap = shape_.softcap,
                                  .bias = shape_.biased ? bias_.data() + shape_.length : nullptr,
                                  .bias_stride = bias_stride(),
                                  .head_dim = shape_.head_dim,
                                  .slots = slots_,
                                  .is_int8 = is_int8_,
                                  .scratch = scratch.data(),
                                  .row_max = row_max.data(),
                                  .row_sum = row_sum.data(),
                                  .accumulator = accumulator.data()};
    const std::int64_t begin = group_of(first_visible(first)) / kTileGroups * kTileGroups;
    std::vector<KeyGroup> groups;
    for (std::int64_t group = begin; group <= group_of(last_visible(first + count - 1)); ++group) {
      groups.push_back(group_at(group));
    }
    const std::span<const KeyGroup> all(groups);
    const auto most = static_cast<std::size_t>(tiles_at_once * kTileGroups);
    for (std::size_t taken = 0; taken < groups.size(); taken += most) {
      const std::size_t attended = std::min(most, groups.size() - taken);
      table.attend[static_cast<std::size_t>(dtype_)](
          attending, {.groups = all.subspan(taken), .attended = static_cast<std::int64_t>(attended)});
    }
    std::vector<float> out(static_cast<std::size_t>(rows * shape_.head_dim));
    for (std::int64_t row = 0; row < rows; ++row) {
      table.finish_attention(
          accumulator.data() + row * columns_, row_sum.data() + row * kKeyGroup, shape_.head_dim,
          reinterpret_cast<std::byte*>(out.data() + row * shape_.head_dim), DType::kFloat32);
    }
    return out;
  }

  /// Float64 reference for one row, with a bound for each element: the weighted sum of the values'
  /// magnitudes.
  void expect(std::int64_t row, std::vector<double>* out, std::vector<double>* magnitude) const {
    const std::int64_t position = row / shape_.rows_per_position;
    std::vector<double> weights;
    for (std::int64_t token = first_visible(position); token <= last_visible(position); ++token) {
      double score = 0.0;
      for (std::int64_t d = 0; d < shape_.head_dim; ++d) {
        score += static_cast<double>(wide_queries_[static_cast<std::size_t>(row * shape_.head_dim + d)]) *
                 wide_keys_[static_cast<std::size_t>(token * shape_.head_dim + d)];
      }
      if (shape_.softcap > 0.0F) score = shape_.softcap * std::tanh(score / shape_.softcap);
      const std::int64_t head = row % shape_.rows_per_position;
      const std::int64_t distance = token - position;
      if (shape_.biased) {
        score += bias_[static_cast<std::size_t>(head * bias_stride() + shape_.length + distance)];
      }
      weights.push_back(std::exp2(score));
    }
    double total = shape_.sinks > 0.0F ? std::exp2(sink_of(row)) : 0.0;
    for (const double weight : weights) total += weight;
    out->assign(static_cast<std::size_t>(shape_.head_dim), 0.0);
    magnitude->assign(out->size(), 0.0);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const auto token = static_cast<std::size_t>(first_visible(position)) + i;
      for (std::size_t d = 0; d < out->size(); ++d) {
        const double value = wide_values_[token * out->size() + d];
        (*out)[d] += weights[i] / total * value;
        (*magnitude)[d] += weights[i] / total * std::abs(value);
      }
    }
  }

  [[nodiscard]] const Shape& shape() const { return shape_; }

 private:
  [[nodiscard]] float sink_of(std::int64_t row) const {
    return sinks_.empty() ? kNoScore : sinks_[static_cast<std::size_t>(row % shape_.rows_per_position)];
  }
  [[nodiscard]] std::int64_t first_visible(std::int64_t position) const {
    return shape_.sliding_window == 0 ? 0 : std::max<std::int64_t>(0, position + 1 - shape_.sliding_window);
  }
  [[nodiscard]] std::int64_t last_visible(std::int64_t position) const {
    return std::min(position + shape_.look_ahead, shape_.length - 1);
  }
  [[nodiscard]] std::int64_t bias_stride() const { return 2 * shape_.length + kKeyGroup; }
  [[nodiscard]] std::int64_t group_of(std::int64_t position) const {
    return position / shape_.tokens_per_block * groups_per_block_ +
           position % shape_.tokens_per_block / kKeyGroup;
  }
  [[nodiscard]] KeyGroup group_at(std::int64_t index) const {
    const std::int64_t block = index / groups_per_block_;
    const std::int64_t slot = index % groups_per_block_ * kKeyGroup;
    const auto size = static_cast<std::int64_t>(is_int8_ ? 1 : size_of(dtype_));
    const auto scale = static_cast<std::size_t>(block * slots_ + slot);
    return {.keys = keys_.data() + (block * slots_ * shape_.head_dim + slot * interleave_) * size,
            .values = values_.data() + (block * slots_ + slot) * columns_ * size,
            .key_scales = key_scales_.data() + scale,
            .value_scales = value_scales_.data() + scale,
            .first_position = block * shape_.tokens_per_block + slot,
            .count = std::min({kKeyGroup, shape_.tokens_per_block - slot,
                               shape_.length - block * shape_.tokens_per_block - slot})};
  }

  void write(std::int64_t token, FreshRandom* random) {
    const std::int64_t block = token / shape_.tokens_per_block;
    const std::int64_t slot = token % shape_.tokens_per_block;
    const auto scale = static_cast<std::size_t>(block * slots_ + slot);
    const float growth =
        1.0F + (shape_.key_growth - 1.0F) * static_cast<float>(token) / static_cast<float>(shape_.length);
    key_scales_[scale] = growth * random->between(0.001F, 0.01F);
    value_scales_[scale] = random->between(0.001F, 0.02F);
    for (std::int64_t d = 0; d < shape_.head_dim; ++d) {
      const std::int64_t key = block * slots_ * shape_.head_dim +
                               (d / interleave_ * slots_ + slot) * interleave_ + d % interleave_;
      const std::int64_t value =
          block * slots_ * columns_ + (slot / interleave_ * columns_ + d) * interleave_ + slot % interleave_;
      wide_keys_.push_back(store(&keys_, key, key_scales_[scale], 1.5F * growth, random));
      wide_values_.push_back(store(&values_, value, value_scales_[scale], 1.5F, random));
    }
  }

  /// Stores a random element (int8 with this scale, others up to `bound`) and returns the value that it
  /// represents.
  float store(std::vector<std::byte>* to, std::int64_t index, float scale, float bound,
              FreshRandom* random) const {
    const auto at = static_cast<std::size_t>(index);
    if (is_int8_) {
      const float rounded = std::nearbyint(random->between(-127.0F, 127.0F));
      (*to)[at] = static_cast<std::byte>(static_cast<std::int8_t>(rounded));
      return rounded * scale;
    }
    store_from_float(to->data(), dtype_, at, random->between(-bound, bound));
    return load_as_float(to->data(), dtype_, at);
  }

  Shape shape_;
  DType dtype_;
  bool is_int8_;
  std::int64_t interleave_;
  std::int64_t slots_;
  std::int64_t columns_;
  std::int64_t groups_per_block_;
  std::vector<std::byte> keys_;
  std::vector<std::byte> values_;
  std::vector<float> key_scales_;
  std::vector<float> value_scales_;
  std::vector<float> bias_;   // [rows_per_position, bias_stride]
  std::vector<float> sinks_;  // [rows_per_position]
  std::vector<std::byte> queries_;
  std::vector<float> wide_queries_;  // [length, rows_per_position, head_dim]
  std::vector<float> wide_keys_;     // [length, head_dim]
  std::vector<float> wide_values_;   // [length, head_dim]
};

auto all_kinds() {
  return kernel_tables() * data::make({0, 1, 2}) * data::make({false, true}) *
         data::make({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
}

/// Stride of the rows that are compared with float64, which takes most of the time.
constexpr std::int64_t kStride = sanitized(35, 5);

BOOST_AUTO_TEST_SUITE(attention)

BOOST_DATA_TEST_CASE(a_chunk_matches_float64, all_kinds(), name, dtype_index, is_int8, shape_index) {
  const auto& table = kernel_table(name);
  const auto dtype = static_cast<DType>(dtype_index);
  FreshRandom random;
  const Head head(kShapes[shape_index], dtype, is_int8, &random);
  const Shape& shape = head.shape();
  // Probabilities are rounded to bfloat16 if that is the engine's type. A score has the rounding errors of at
  // most 128 products of up to 2.3, times ln 2 and the growth of the keys.
  const double probability = dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-21;
  const double score = 128.0 * 128.0 * 2.3 * 0x1p-24 * shape.key_growth;
  const auto out = head.attend(table, 0, shape.length);
  std::vector<double> expected;
  std::vector<double> magnitude;
  for (std::int64_t row = 0; row < shape.length * shape.rows_per_position; row += kStride) {
    head.expect(row, &expected, &magnitude);
    for (std::size_t d = 0; d < expected.size(); ++d) {
      const float found = out[static_cast<std::size_t>(row) * expected.size() + d];
      BOOST_TEST_REQUIRE(
          std::abs(found - expected[d]) <= (probability + score) * magnitude[d] + 1e-6,
          "row " << row << " of seed " << random.seed() << ": " << found << " is not " << expected[d]);
    }
  }
}

BOOST_DATA_TEST_CASE(a_row_has_the_same_bits_in_every_chunk, all_kinds(), name, dtype_index, is_int8,
                     shape_index) {
  const auto& table = kernel_table(name);
  FreshRandom random;
  const Head head(kShapes[shape_index], static_cast<DType>(dtype_index), is_int8, &random);
  const Shape& shape = head.shape();
  const auto together = head.attend(table, 0, shape.length);
  const auto row = static_cast<std::size_t>(shape.rows_per_position * shape.head_dim);
  // A few positions, and so many that their rows fill several blocks.
  constexpr std::int64_t kCounts[] = {1, 2, 3, 4, 5, 21, 35};
  std::int64_t count = 0;
  for (std::int64_t first = 0, i = 0; first < shape.length; first += count, ++i) {
    count = std::min(kCounts[i % std::ssize(kCounts)], shape.length - first);
    const auto part = head.attend(table, first, count, count % 3 + 1);
    BOOST_TEST_REQUIRE(std::memcmp(part.data(), together.data() + static_cast<std::size_t>(first) * row,
                                   part.size() * sizeof(float)) == 0,
                       "positions from " << first << ", seed " << random.seed());
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::attention_test
