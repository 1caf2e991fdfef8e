#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <vector>

#include "adaptrt/cuda/row_kernels.h"
#include "rows_case.h"

BOOST_TEST_DONT_PRINT_LOG_VALUE(adaptrt::RopeKind)

namespace adaptrt::cuda::rows_rope_test {
namespace {

namespace data = boost::unit_test::data;

/// Tokens of one sequence in a step.
struct Chunk {
  std::int32_t prompt_length;
  std::int32_t first_position;
  std::int32_t tokens;
};

/// Tables of a step's tokens, [tokens, half].
struct Tables {
  Tensor<float> cosine;
  Tensor<float> sine;
};

class RopeCase {
 public:
  static constexpr std::int64_t kHalf = 20;
  static constexpr std::int32_t kOriginal = 64;
  static constexpr float kBase = 10000.0F;
  static constexpr float kFactor = 4.0F;
  static constexpr float kScaling = 1.25F;

  explicit RopeCase(RopeKind kind) : kind_(kind), frequencies_(kHalf), long_frequencies_(kHalf) {
    for (std::int64_t i = 0; i < kHalf; ++i) {
      frequencies_[i] = static_cast<float>(std::pow(kBase, -static_cast<double>(i) / kHalf));
      long_frequencies_[i] = frequencies_[i] / static_cast<float>(i + 2);
    }
  }

  /// Tokens after the last sequence pad the step.
  [[nodiscard]] Tables run(const std::vector<Chunk>& chunks, std::int64_t padding = 0) const {
    Tensor<std::int32_t> offsets(static_cast<std::int64_t>(chunks.size()) + 1);
    Tensor<std::int32_t> lengths(static_cast<std::int64_t>(chunks.size()));
    offsets[0] = 0;
    std::vector<std::int32_t> places;
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      offsets[at + 1] = offsets[at] + chunks[i].tokens;
      lengths[at] = chunks[i].prompt_length;
      for (int token = 0; token < chunks[i].tokens; ++token)
        places.push_back(chunks[i].first_position + token);
    }
    places.resize(places.size() + static_cast<std::size_t>(padding), 0);
    const auto tokens = static_cast<std::int64_t>(places.size());
    Tensor<std::int32_t> positions(tokens);
    std::ranges::copy(places, positions.data());
    Tables tables{Tensor<float>(tokens * kHalf), Tensor<float>(tokens * kHalf)};
    const bool needs_lengths = kind_ != RopeKind::kStatic;
    enqueue(
        RopeTable{.tokens = tokens,
                  .half = kHalf,
                  .kind = kind_,
                  .attention_scaling = kScaling,
                  .base = kBase,
                  .factor = kFactor,
                  .original_max_position = kOriginal,
                  .inverse_frequencies = frequencies_.data(),
                  .long_inverse_frequencies = kind_ == RopeKind::kLong ? long_frequencies_.data() : nullptr,
                  .positions = positions.data(),
                  .sequences = static_cast<std::int64_t>(chunks.size()),
                  .sequence_offsets = needs_lengths ? offsets.data() : nullptr,
                  .prompt_lengths = needs_lengths ? lengths.data() : nullptr,
                  .cosine = tables.cosine.data(),
                  .sine = tables.sine.data()},
        nullptr);
    BOOST_TEST(tables.cosine.rest_is_unchanged());
    BOOST_TEST(tables.sine.rest_is_unchanged());
    return tables;
  }

  [[nodiscard]] float frequency(std::int32_t length, std::int64_t i) const {
    if (kind_ == RopeKind::kStatic || length <= kOriginal) return frequencies_[i];
    if (kind_ == RopeKind::kLong) return long_frequencies_[i];
    const double dim = 2.0 * kHalf;
    const double grown = static_cast<double>(kFactor) * length / kOriginal - (kFactor - 1.0);
    const double base = kBase * std::pow(grown, dim / (dim - 2));
    return static_cast<float>(1 / std::pow(base, 2.0 * static_cast<double>(i) / dim));
  }

  /// Number of wrong angles of row `row` for a position of a sequence.
  [[nodiscard]] std::int64_t wrong_angles(const Tables& tables, std::int64_t row, std::int32_t prompt_length,
                                          std::int32_t position) const {
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < kHalf; ++i) {
      // The product is rounded to float32, so float64 frequencies may differ in the last bit.
      const float inverse = frequency(std::max(prompt_length, position + 1), i);
      const double angle = static_cast<float>(position) * inverse;
      const double doubt = kind_ == RopeKind::kDynamic ? angle * 0x1p-22 : 0;
      const double bound = kScaling * (0x1p-23 + doubt);
      wrong += static_cast<std::int64_t>(
          !(std::abs(tables.cosine[row * kHalf + i] - std::cos(angle) * kScaling) <= bound));
      wrong += static_cast<std::int64_t>(
          !(std::abs(tables.sine[row * kHalf + i] - std::sin(angle) * kScaling) <= bound));
    }
    return wrong;
  }

 private:
  RopeKind kind_;
  Tensor<float> frequencies_;
  Tensor<float> long_frequencies_;
};

BOOST_AUTO_TEST_SUITE(row_kernels)

BOOST_DATA_TEST_CASE(rotary_angles_match_float64,
                     data::make({RopeKind::kStatic, RopeKind::kDynamic, RopeKind::kLong}), kind) {
  const RopeCase rope(kind);
  // Prompts below and above the original maximum, generated tokens that pass it, and a sequence without
  // tokens.
  const std::vector<Chunk> chunks = {{.prompt_length = 40, .first_position = 0, .tokens = 40},
                                     {.prompt_length = 100, .first_position = 10, .tokens = 30},
                                     {.prompt_length = 7, .first_position = 3, .tokens = 0},
                                     {.prompt_length = 50, .first_position = 60, .tokens = 10},
                                     {.prompt_length = 3, .first_position = 131071, .tokens = 1}};
  const Tables tables = rope.run(chunks, 2);
  std::int64_t row = 0;
  for (const Chunk& chunk : chunks) {
    for (std::int32_t i = 0; i < chunk.tokens; ++i, ++row) {
      BOOST_TEST_CONTEXT("row " << row) {
        BOOST_TEST(rope.wrong_angles(tables, row, chunk.prompt_length, chunk.first_position + i) == 0);
      }
    }
  }
  // Tokens after the last sequence are at position 0.
  for (; row < tables.cosine.size() / RopeCase::kHalf; ++row)
    BOOST_TEST(rope.wrong_angles(tables, row, 0, 0) == 0);
}

BOOST_DATA_TEST_CASE(rotary_angles_of_chunks_equal_those_of_the_prompt,
                     data::make({RopeKind::kStatic, RopeKind::kDynamic, RopeKind::kLong}), kind) {
  const RopeCase rope(kind);
  const Tables whole = rope.run({{.prompt_length = 100, .first_position = 0, .tokens = 100}});
  for (const std::int32_t begin : {0, 33, 66}) {
    const std::int32_t tokens = std::min(33, 100 - begin);
    const Tables chunk = rope.run({{.prompt_length = 5, .first_position = 90, .tokens = 3},
                                   {.prompt_length = 100, .first_position = begin, .tokens = tokens}});
    const std::int64_t count = tokens * RopeCase::kHalf;
    const std::int64_t from = begin * RopeCase::kHalf;
    BOOST_TEST(chunk.cosine.values(3 * RopeCase::kHalf, count) == whole.cosine.values(from, count));
    BOOST_TEST(chunk.sine.values(3 * RopeCase::kHalf, count) == whole.sine.values(from, count));
  }
}

/// Angles of every size, to the last bit but one.
BOOST_AUTO_TEST_CASE(rotary_angles_are_accurate_in_every_quarter) {
  constexpr std::int64_t kTokens = 4000;
  FreshRandom random;
  Tensor<float> frequency(1);
  frequency[0] = random.real(0.2F, 1.0F);
  Tensor<std::int32_t> positions(kTokens);
  for (std::int64_t i = 0; i < kTokens; ++i) {
    positions[i] = static_cast<std::int32_t>(i < 100 ? i : random.integer(0, 1 << 24));
  }
  Tensor<float> cosine(kTokens);
  Tensor<float> sine(kTokens);
  enqueue(RopeTable{.tokens = kTokens,
                    .half = 1,
                    .inverse_frequencies = frequency.data(),
                    .positions = positions.data(),
                    .cosine = cosine.data(),
                    .sine = sine.data()},
          nullptr);
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < kTokens; ++i) {
    const double angle = static_cast<float>(positions[i]) * frequency[0];
    for (const auto& [value, expected] :
         {std::pair{cosine[i], std::cos(angle)}, {sine[i], std::sin(angle)}}) {
      wrong += static_cast<std::int64_t>(!(std::abs(value - expected) <= std::abs(expected) * 0x1.01p-24));
    }
  }
  BOOST_TEST(wrong == 0, "seed " << random.seed());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::cuda::rows_rope_test
