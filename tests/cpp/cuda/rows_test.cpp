#include <algorithm>
#include <bit>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cuda/row_kernels.h"
#include "print_dtype.h"
#include "rows_case.h"
#include "support/found_highest.h"

namespace adaptrt::cuda::rows_test {
namespace {

namespace data = boost::unit_test::data;

constexpr std::int64_t kRowCounts[] = {1, 3, 17};
/// The norm has blocks of 128 to 1024 threads, and reads wider rows twice.
constexpr std::int64_t kWidths[] = {8, 96, 1032, 2056, 4096, 8200, 17000};

auto says(const std::string& text) {
  return
      [text](const ConfigError& error) { return std::string(error.what()).find(text) != std::string::npos; };
}

BOOST_AUTO_TEST_SUITE(row_kernels)

BOOST_DATA_TEST_CASE(embeddings_match_float64, data::make(kRowTypes) * data::make({8, 96, 4096}), dtype,
                     width) {
  constexpr std::int64_t kVocabulary = 37;
  constexpr std::int64_t kPositions = 11;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const auto table = random_elements(dtype, kVocabulary * width, &random);
    const auto positions = random_elements(dtype, kPositions * width, &random);
    for (const std::int64_t tokens : kRowCounts) {
      auto ids = random_indices(tokens, kVocabulary, &random);
      const auto places = random_indices(tokens, kPositions, &random);
      for (const bool has_positions : {false, true}) {
        Tensor<float> output(tokens * width);
        const float scale = random.real(0.5, 60);
        enqueue(Embedding{.dtype = dtype,
                          .tokens = tokens,
                          .width = width,
                          .vocabulary = kVocabulary,
                          .table = table.data(),
                          .token_ids = ids.data(),
                          .scale = scale,
                          .positions = has_positions ? positions.data() : nullptr,
                          .position_ids = has_positions ? places.data() : nullptr,
                          .output = output.data()},
                nullptr);
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < tokens * width; ++i) {
          const std::int64_t token = i / width;
          const double scaled =
              static_cast<double>(element(dtype, table[ids[token] * width + i % width])) * scale;
          const double added =
              has_positions ? element(dtype, positions[places[token] * width + i % width]) : 0.0;
          const double bound = (std::abs(scaled) + std::abs(added)) * 0x1p-22;
          wrong += static_cast<std::int64_t>(!(std::abs(output[i] - (scaled + added)) <= bound));
        }
        BOOST_TEST(wrong == 0);
        BOOST_TEST(output.rest_is_unchanged());
      }
    }
  }
}

struct NormCase {
  DType dtype;
  std::int64_t width;
  Tensor<float> stream;
  Tensor<std::uint16_t> addend;
  Tensor<float> weight;

  NormCase(DType type, std::int64_t tokens, std::int64_t row_width, FreshRandom* random)
      : dtype(type),
        width(row_width),
        stream(random_floats(tokens * row_width, random)),
        addend(random_elements(type, tokens * row_width, random)),
        weight(random_floats(row_width, random)) {}

  /// Runs the norm on `target`, a copy of the stream.
  Tensor<std::uint16_t> run(Tensor<float>* target, std::int64_t rows, const std::int32_t* row_ids,
                            bool has_addend) const {
    Tensor<std::uint16_t> output(rows * width);
    enqueue(RmsNorm{.dtype = dtype,
                    .rows = rows,
                    .width = width,
                    .stream = target->data(),
                    .addend = has_addend ? addend.data() : nullptr,
                    .row_ids = row_ids,
                    .weight = weight.data(),
                    .epsilon = kEpsilon,
                    .output = output.data()},
            nullptr);
    return output;
  }

  [[nodiscard]] float sum(std::int64_t index, bool has_addend) const {
    return stream[index] + (has_addend ? element(dtype, addend[index]) : 0.0F);
  }

  /// Number of wrong elements of an output row, made from row `from`.
  [[nodiscard]] std::int64_t wrong_elements(const Tensor<std::uint16_t>& output, std::int64_t row,
                                            std::int64_t from, bool has_addend) const {
    double squares = 0;
    for (std::int64_t i = 0; i < width; ++i) {
      const double value = sum(from * width + i, has_addend);
      squares += value * value;
    }
    const double factor = 1 / std::sqrt(squares / static_cast<double>(width) + kEpsilon);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < width; ++i) {
      const double expected = sum(from * width + i, has_addend) * factor * weight[i];
      const bool right = is_rounded(expected, dtype, output[row * width + i], std::abs(expected) * 0x1p-19);
      wrong += static_cast<std::int64_t>(!right);
    }
    return wrong;
  }

  static constexpr float kEpsilon = 0.01F;
};

BOOST_DATA_TEST_CASE(norms_match_float64, data::make(kRowTypes) * data::make(kWidths), dtype, width) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t tokens : {1, 5}) {
      const NormCase norm(dtype, tokens, width, &random);
      for (const bool has_addend : {false, true}) {
        Tensor<float> stream = norm.stream;
        const auto output = norm.run(&stream, tokens, nullptr, has_addend);
        std::int64_t wrong = 0;
        for (std::int64_t row = 0; row < tokens; ++row)
          wrong += norm.wrong_elements(output, row, row, has_addend);
        BOOST_TEST(wrong == 0);
        for (std::int64_t i = 0; i < stream.size(); ++i) {
          wrong += static_cast<std::int64_t>(stream[i] != norm.sum(i, has_addend));
        }
        BOOST_TEST(wrong == 0);
        BOOST_TEST(stream.rest_is_unchanged());
        BOOST_TEST(output.rest_is_unchanged());
      }
    }
  }
}

BOOST_DATA_TEST_CASE(norms_of_gathered_rows_leave_the_stream, data::make(kRowTypes) * data::make({96, 17000}),
                     dtype, width) {
  constexpr std::int64_t kTokens = 6;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const NormCase norm(dtype, kTokens, width, &random);
    Tensor<std::int32_t> rows(4);
    for (const auto& [at, row] : {std::pair{0, 5}, {1, 2}, {2, 5}, {3, 0}}) rows[at] = row;
    for (const bool has_addend : {false, true}) {
      Tensor<float> stream = norm.stream;
      const auto output = norm.run(&stream, rows.size(), rows.data(), has_addend);
      std::int64_t wrong = 0;
      for (std::int64_t row = 0; row < rows.size(); ++row) {
        wrong += norm.wrong_elements(output, row, rows[row], has_addend);
      }
      BOOST_TEST(wrong == 0);
      BOOST_TEST(output.rest_is_unchanged());
      BOOST_TEST(stream.values(0, stream.size()) == norm.stream.values(0, stream.size()));
      // A row has the same bits as in a norm of all rows.
      const auto all = norm.run(&stream, kTokens, nullptr, has_addend);
      for (std::int64_t row = 0; row < rows.size(); ++row) {
        BOOST_TEST(output.values(row * width, width) == all.values(rows[row] * width, width));
      }
    }
  }
}

BOOST_DATA_TEST_CASE(a_norm_does_not_depend_on_the_other_rows,
                     data::make(kRowTypes) * data::make({1032, 8200}), dtype, width) {
  constexpr std::int64_t kTokens = 9;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    NormCase norm(dtype, 1, width, &random);
    Tensor<float> stream = norm.stream;
    const auto alone = norm.run(&stream, 1, nullptr, true);
    const int place = random.integer(0, kTokens - 1);
    // All other rows are NaN.
    NormCase many = norm;
    many.stream = Tensor<float>(kTokens * width);
    many.addend = Tensor<std::uint16_t>(kTokens * width);
    std::copy_n(norm.stream.data(), width, many.stream.data() + place * width);
    std::copy_n(norm.addend.data(), width, many.addend.data() + place * width);
    const auto together = many.run(&many.stream, kTokens, nullptr, true);
    BOOST_TEST(together.values(place * width, width) == alone.values(0, width));
    BOOST_TEST(many.stream.values(place * width, width) == stream.values(0, width));
  }
}

BOOST_DATA_TEST_CASE(additions_are_exact_sums, data::make(kRowTypes) * data::make({8, 24, 4096, 30000}),
                     dtype, elements) {
  FreshRandom random;
  const auto before = random_floats(elements, &random);
  const auto addend = random_elements(dtype, elements, &random);
  Tensor<float> stream = before;
  enqueue(Addition{.dtype = dtype, .elements = elements, .stream = stream.data(), .addend = addend.data()},
          nullptr);
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < elements; ++i) {
    wrong += static_cast<std::int64_t>(stream[i] != before[i] + element(dtype, addend[i]));
  }
  BOOST_TEST(wrong == 0);
  BOOST_TEST(stream.rest_is_unchanged());
}

BOOST_AUTO_TEST_CASE(logits_are_scaled_and_bounded) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t elements : {1, 8, 2047, 5003}) {
      for (const float softcap : {0.0F, 30.0F}) {
        const auto before = random_floats(elements, &random, 200);
        Tensor<float> logits = before;
        const float scale = 0.37F;
        enqueue(
            FinishLogits{.elements = elements, .logits = logits.data(), .scale = scale, .softcap = softcap},
            nullptr);
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < elements; ++i) {
          const double scaled = static_cast<double>(before[i]) * scale;
          const double expected = softcap == 0.0F ? scaled : softcap * std::tanh(scaled / softcap);
          wrong +=
              static_cast<std::int64_t>(!(std::abs(logits[i] - expected) <= std::abs(expected) * 0x1p-20));
        }
        BOOST_TEST(wrong == 0);
        BOOST_TEST(logits.rest_is_unchanged());
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(best_tokens_are_the_first_of_the_largest) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kLargest = std::numeric_limits<float>::max();
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t width : {1, 3, 8, 1021, 4096, 20004, 20005}) {
      for (const std::int64_t rows : {1, 5}) {
        // Values between the rows do not count.
        const std::int64_t stride = width + (rows == 1 ? 0 : random.integer(0, 5));
        auto logits = random_floats(rows * stride, &random);
        for (std::int64_t row = 0; row < rows; ++row) {
          float* of_row = logits.data() + row * stride;
          std::fill(of_row + width, of_row + stride, std::numeric_limits<float>::quiet_NaN());
          if (row == 1) std::fill_n(of_row, width, -kInfinity);
          if (row == 2) std::fill_n(of_row, width, 2.5F);
          // Several equal maxima at any places.
          for (int repeat = 0; row >= 3 && repeat < 4; ++repeat) {
            of_row[random.integer(0, static_cast<int>(width) - 1)] = row == 3 ? 5.0F : kLargest;
          }
          if (row == 4 && width > 1) of_row[random.integer(0, static_cast<int>(width) - 1)] = -kInfinity;
        }
        Tensor<std::int32_t> tokens(rows);
        enqueue(BestTokens{.rows = rows,
                           .width = width,
                           .stride = stride,
                           .logits = logits.data(),
                           .tokens = tokens.data()},
                nullptr);
        for (std::int64_t row = 0; row < rows; ++row) {
          const float* of_row = logits.data() + row * stride;
          const auto best = std::max_element(of_row, of_row + width);
          BOOST_TEST(tokens[row] == (*best == -kInfinity ? kEveryTokenForbidden : best - of_row));
        }
        BOOST_TEST(tokens.rest_is_unchanged());
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(rows_with_nan_or_infinity_have_no_best_token) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::infinity()}) {
      for (const std::int64_t width : {1, 3, 1021, 20004}) {
        constexpr std::int64_t kRows = 3;
        auto logits = random_floats(kRows * width, &random);
        const auto place = [&] { return random.integer(0, static_cast<int>(width) - 1); };
        logits[width + place()] = std::numeric_limits<float>::max();
        logits[width + place()] = bad;
        Tensor<std::int32_t> tokens(kRows);
        enqueue(BestTokens{.rows = kRows,
                           .width = width,
                           .stride = width,
                           .logits = logits.data(),
                           .tokens = tokens.data()},
                nullptr);
        BOOST_TEST(tokens[0] >= 0);
        BOOST_TEST(tokens[1] == kUnusableLogits);
        BOOST_TEST(tokens[2] >= 0);
      }
    }
  }
}

/// Runs the kernel on `rows` rows, and compares it with the host bit by bit.
void check_highest(const Tensor<float>& logits, std::int64_t rows, std::int64_t width, std::int64_t stride,
                   std::int64_t count) {
  Tensor<TokenLogit> highest(rows * count);
  Tensor<RowSummary> summaries(rows + 1);
  enqueue(FindHighest{.rows = rows,
                      .width = width,
                      .stride = stride,
                      .count = count,
                      .logits = logits.data(),
                      .summaries = summaries.data(),
                      .highest = highest.data()},
          nullptr);
  for (std::int64_t row = 0; row < rows; ++row) {
    const adaptrt::testing::FoundHighest expected(
        std::span(logits.data() + row * stride, static_cast<std::size_t>(width)),
        static_cast<std::size_t>(count));
    const RowSummary& found = summaries[row];
    BOOST_TEST_INFO_SCOPE("row " << row << " of " << width << ", highest " << count);
    BOOST_TEST(found.best_token == expected.summary.best_token);
    if (expected.summary.best_token < 0) continue;
    BOOST_TEST(found.max == expected.summary.max);
    BOOST_TEST(std::signbit(found.max) == std::signbit(expected.summary.max));
    BOOST_TEST(found.min == expected.summary.min);
    BOOST_TEST(found.sum_of_exponentials == expected.summary.sum_of_exponentials);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const TokenLogit& one = highest[row * count + i];
      const TokenLogit& other = expected.highest[static_cast<std::size_t>(i)];
      const bool is_same = one.token == other.token && std::bit_cast<std::uint32_t>(one.logit) ==
                                                           std::bit_cast<std::uint32_t>(other.logit);
      wrong += static_cast<std::int64_t>(!is_same);
    }
    BOOST_TEST(wrong == 0);
  }
  BOOST_TEST(highest.rest_is_unchanged());
  BOOST_TEST(std::isnan(summaries[rows].max));
}

BOOST_AUTO_TEST_CASE(highest_logits_and_summaries_have_the_bits_of_the_host) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t width : {1, 3, 8, 250, 1021, 5001, 20004}) {
      constexpr std::int64_t kRows = 8;
      const std::int64_t stride = width + (width % 2 == 0 ? 4 : 1);
      Tensor<float> logits(kRows * stride);  // NaN between the rows
      for (std::int64_t row = 0; row < kRows; ++row) {
        for (std::int64_t i = 0; i < width; ++i) {
          float& logit = logits[row * stride + i];
          logit = random.real(-20, 20);
          // Few values, all equal, both zeros, mostly forbidden, descending, a wide range.
          if (row == 1) logit = static_cast<float>(random.integer(-3, 3));
          if (row == 2) logit = -2.5F;
          if (row == 3) logit = random.integer(0, 1) == 0 ? -0.0F : 0.0F;
          if (row == 4 && i % 400 != 7 % width) logit = -kInfinity;
          if (row == 5) logit = -static_cast<float>(i) / 16.0F;
          if (row == 6) logit *= 0x1p100F;
        }
        if (row == 7) std::fill_n(logits.data() + row * stride, width, -kInfinity);
      }
      for (const std::int64_t count : {1, 2, 20, 127, 128}) {
        const bool is_slow = width > 10000 && count != 20;
        if (count <= width && !is_slow) check_highest(logits, kRows, width, stride, count);
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(the_highest_logits_may_all_be_of_one_thread) {
  constexpr std::int64_t kWidth = 4096 * 130;
  Tensor<float> logits(kWidth);
  for (std::int64_t i = 0; i < kWidth; ++i) logits[i] = static_cast<float>(i % 4096 == 40 ? i : -(i % 77));
  check_highest(logits, 1, kWidth, kWidth, 128);
}

BOOST_AUTO_TEST_CASE(rows_with_nan_or_infinity_have_no_highest_logits) {
  FreshRandom random;
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity()}) {
    for (const std::int64_t width : {1, 1021, 20004}) {
      auto logits = random_floats(3 * width, &random);
      logits[width + random.integer(0, static_cast<int>(width) - 1)] = bad;
      check_highest(logits, 3, width, width, 1);
    }
  }
}

BOOST_AUTO_TEST_CASE(wrong_sizes_of_searches_are_refused) {
  const auto refuses = [](const FindHighest& work, const std::string& text) {
    BOOST_CHECK_EXCEPTION(enqueue(work, nullptr), ConfigError, says(text));
  };
  refuses({.rows = 1, .width = 8, .stride = 8, .count = 9}, "count is 9; expected 1 to 8");
  refuses({.rows = 1, .width = 800, .stride = 800, .count = 129}, "count is 129; expected 1 to 128");
  refuses({.rows = 1, .width = 8, .stride = 8, .count = 0}, "count is 0; expected 1 to 8");
  refuses({.rows = 1, .width = 8, .stride = 7, .count = 1}, "stride is below width");
  refuses({.rows = -1, .width = 8, .stride = 8, .count = 1}, "rows is -1");
}

BOOST_AUTO_TEST_CASE(a_zero_equals_a_negative_zero) {
  const std::vector<float> logits = {-1.0F, -0.0F, 0.0F, -1.0F, 0.0F, -0.0F};
  Tensor<std::int32_t> tokens(2);
  enqueue(BestTokens{.rows = 2, .width = 3, .stride = 3, .logits = logits.data(), .tokens = tokens.data()},
          nullptr);
  BOOST_TEST(tokens[0] == 1);
  BOOST_TEST(tokens[1] == 1);
}

BOOST_AUTO_TEST_CASE(tokens_are_taken_from_earlier_rows) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t tokens : {1, 3, 255, 256, 257, 700}) {
      constexpr std::int64_t kRows = 300;
      Tensor<std::int32_t> best(kRows);
      for (std::int64_t row = 0; row < kRows; ++row) best[row] = random.integer(-2, 9);
      Tensor<std::int32_t> ids(tokens);
      std::vector<std::int32_t> expected;
      for (std::int64_t i = 0; i < tokens; ++i) {
        const int row = random.integer(0, kRows - 1);
        const bool is_known = random.integer(0, 3) == 0;
        ids[i] = is_known ? 100 + row : -1 - row;
        expected.push_back(is_known ? 100 + row : std::max(best[row], 0));
      }
      enqueue(TakeTokens{.tokens = tokens, .best_tokens = best.data(), .token_ids = ids.data()}, nullptr);
      for (std::int64_t i = 0; i < tokens; ++i) {
        BOOST_TEST(ids[i] == expected[static_cast<std::size_t>(i)]);
      }
      BOOST_TEST(ids.rest_is_unchanged());
    }
  }
}

BOOST_AUTO_TEST_CASE(tokens_that_a_table_does_not_have_keep_their_rows) {
  FreshRandom random;
  const auto table = random_elements(DType::kFloat16, 3 * 8, &random);
  const std::vector<std::int32_t> ids{3, 2, 7};
  Tensor<float> output(3 * 8);
  enqueue(Embedding{.dtype = DType::kFloat16,
                    .tokens = 3,
                    .width = 8,
                    .vocabulary = 3,
                    .table = table.data(),
                    .token_ids = ids.data(),
                    .output = output.data()},
          nullptr);
  for (std::int64_t i = 0; i < 8; ++i) {
    BOOST_TEST(std::isnan(output[i]));
    BOOST_TEST(output[8 + i] == element(DType::kFloat16, table[16 + i]));
    BOOST_TEST(std::isnan(output[16 + i]));
  }
}

BOOST_AUTO_TEST_CASE(no_rows_need_no_memory) {
  enqueue(Embedding{.width = 8, .vocabulary = 1}, nullptr);
  enqueue(RmsNorm{.width = 8}, nullptr);
  enqueue(Addition{}, nullptr);
  enqueue(RopeTable{.half = 4}, nullptr);
  enqueue(Finish{.width = 8}, nullptr);
  enqueue(FinishLogits{}, nullptr);
  enqueue(BestTokens{.width = 8, .stride = 8}, nullptr);
  enqueue(TakeTokens{}, nullptr);
}

BOOST_AUTO_TEST_CASE(invalid_sizes_are_refused_by_name) {
  BOOST_CHECK_EXCEPTION(
      enqueue(Embedding{.dtype = DType::kFloat32, .tokens = -1, .width = 12}, nullptr), ConfigError,
      says("Embedding: dtype is float32; expected float16 or bfloat16; tokens is -1; expected 0 to "
           "2147483647; width is 12; expected a multiple of 8 from 8 to "));
  BOOST_CHECK_EXCEPTION(enqueue(RmsNorm{.rows = 1, .width = 0}, nullptr), ConfigError,
                        says("RmsNorm: width is 0; expected a multiple of 8 from 8 to "));
  BOOST_CHECK_EXCEPTION(enqueue(Addition{.elements = 4}, nullptr), ConfigError,
                        says("Addition: elements is 4; expected a multiple of 8 from 0 to "));
  BOOST_CHECK_EXCEPTION(enqueue(RopeTable{.half = 0}, nullptr), ConfigError,
                        says("half is 0; expected 1 to "));
  BOOST_CHECK_EXCEPTION(
      enqueue(RopeTable{.half = 1, .kind = RopeKind::kDynamic}, nullptr), ConfigError,
      says("half is 1; expected at least 2 for a dynamic base; original_max_position is not positive"));
  BOOST_CHECK_EXCEPTION(enqueue(RopeTable{.half = 1, .kind = RopeKind::kLong}, nullptr), ConfigError,
                        says("long_inverse_frequencies is missing"));
  BOOST_CHECK_EXCEPTION(enqueue(Finish{.width = 8, .epilogue = LinearEpilogue::kAdd}, nullptr), ConfigError,
                        says("epilogue is kAdd"));
  BOOST_CHECK_EXCEPTION(enqueue(FinishLogits{.elements = -1}, nullptr), ConfigError, says("elements is -1"));
  BOOST_CHECK_EXCEPTION(enqueue(BestTokens{.width = 0}, nullptr), ConfigError,
                        says("width is 0; expected 1 to "));
  BOOST_CHECK_EXCEPTION(enqueue(BestTokens{.width = 8, .stride = 7}, nullptr), ConfigError,
                        says("stride is below width"));
  BOOST_CHECK_EXCEPTION(enqueue(TakeTokens{.tokens = -1}, nullptr), ConfigError,
                        says("TakeTokens: tokens is -1; expected 0 to "));
  BOOST_CHECK_EXCEPTION(enqueue(Embedding{.width = 8}, nullptr), ConfigError, says("vocabulary is 0"));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::cuda::rows_test
