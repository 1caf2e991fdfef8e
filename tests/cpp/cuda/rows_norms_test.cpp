#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cuda/row_kernels.h"
#include "print_dtype.h"
#include "rows_case.h"

namespace adaptrt::cuda::rows_norms_test {
namespace {

namespace data = boost::unit_test::data;

constexpr float kEpsilon = 0.01F;
/// Layer norms have blocks of 128, 512 or 1024 threads, and read wider rows again.
constexpr std::int64_t kWidths[] = {8, 96, 1032, 4104, 17000};

auto says(const std::string& text) {
  return
      [text](const ConfigError& error) { return std::string(error.what()).find(text) != std::string::npos; };
}

/// Returns x / sqrt(mean(x^2) + epsilon) in float64.
std::vector<double> rms_normalised(const std::vector<double>& x) {
  double squares = 0;
  for (const double value : x) squares += value * value;
  const double factor = 1 / std::sqrt(squares / static_cast<double>(x.size()) + kEpsilon);
  std::vector<double> result;
  for (const double value : x) result.push_back(value * factor);
  return result;
}

std::vector<double> elements_of(DType dtype, const Tensor<std::uint16_t>& tensor, std::int64_t begin,
                                std::int64_t count) {
  std::vector<double> values;
  for (std::int64_t i = begin; i < begin + count; ++i) values.push_back(element(dtype, tensor[i]));
  return values;
}

/// Columns [q | k | v] of a test: q and k of `heads` groups, v of 16 columns.
struct Heads {
  std::int64_t queries;
  std::int64_t query_size;
  std::int64_t keys;
  std::int64_t key_size;

  [[nodiscard]] std::int64_t first_key() const { return queries * query_size; }
  [[nodiscard]] std::int64_t stride() const { return first_key() + keys * key_size + 16; }
};
std::ostream& operator<<(std::ostream& out, const Heads& heads) {
  return out << heads.queries << " of " << heads.query_size << ", " << heads.keys << " of " << heads.key_size;
}

/// Heads for warps, of the largest size for warps too, and groups for blocks.
const Heads kHeads[] = {{4, 16, 2, 16}, {3, 128, 1, 128}, {2, 256, 2, 256},
                        {5, 72, 5, 72}, {1, 512, 1, 256}, {1, 6144, 1, 1024}};

struct HeadsCase {
  Heads heads;
  DType dtype;
  Tensor<float> query_weight;
  Tensor<float> key_weight;

  HeadsCase(const Heads& each, DType type, FreshRandom* random)
      : heads(each),
        dtype(type),
        query_weight(random_floats(each.query_size, random)),
        key_weight(random_floats(each.key_size, random)) {}

  /// The tables of a rotation before the norms; empty: there is none.
  Tensor<float> cosine{0};
  Tensor<float> sine{0};
  std::int64_t half = 0;
  bool interleaved = false;

  void add_rotation(std::int64_t rotary_half, std::int64_t tokens, FreshRandom* random) {
    half = rotary_half;
    cosine = random_floats(tokens * half, random, 1);
    sine = random_floats(tokens * half, random, 1);
  }

  /// Group [begin, begin + size) of a token, rotated.
  [[nodiscard]] std::vector<double> rotated(std::vector<double> group, std::int64_t token) const {
    for (std::int64_t i = 0; i < half; ++i) {
      const std::int64_t low = interleaved ? 2 * i : i;
      double& first = group[static_cast<std::size_t>(low)];
      double& second = group[static_cast<std::size_t>(interleaved ? low + 1 : low + half)];
      const double c = cosine[token * half + i];
      const double s = sine[token * half + i];
      const double turned = first * c - second * s;
      second = second * c + first * s;
      first = turned;
    }
    return group;
  }

  void run(Tensor<std::uint16_t>* qkv) const {
    enqueue(HeadNorms{.dtype = dtype,
                      .tokens = qkv->size() / heads.stride(),
                      .stride = heads.stride(),
                      .queries = {.first = 0,
                                  .count = heads.queries,
                                  .size = heads.query_size,
                                  .weight = query_weight.data()},
                      .keys = {.first = heads.first_key(),
                               .count = heads.keys,
                               .size = heads.key_size,
                               .weight = key_weight.data()},
                      .epsilon = kEpsilon,
                      .qkv = qkv->data(),
                      .rotary_half = half,
                      .interleaved = interleaved,
                      .cosine = cosine.data(),
                      .sine = sine.data()},
            nullptr);
  }
};

BOOST_AUTO_TEST_SUITE(row_norms)

BOOST_DATA_TEST_CASE(head_norms_match_float64,
                     data::make(kRowTypes) * data::make(kHeads) * data::make({false, true}), dtype, heads,
                     interleaved) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    HeadsCase norms(heads, dtype, &random);
    norms.interleaved = interleaved;
    for (const std::int64_t tokens : {1, 5}) {
      const bool rotates = std::max(heads.query_size, heads.key_size) <= 256;
      norms.add_rotation(rotates ? std::min(heads.query_size, heads.key_size) / 16 * 8 / tokens / 8 * 8 : 0,
                         tokens, &random);
      const auto before = random_elements(dtype, tokens * heads.stride(), &random);
      Tensor<std::uint16_t> qkv = before;
      norms.run(&qkv);
      std::int64_t wrong = 0;
      const auto check = [&](std::int64_t begin, std::int64_t size, const Tensor<float>& weight) {
        const auto expected =
            rms_normalised(norms.rotated(elements_of(dtype, before, begin, size), begin / heads.stride()));
        for (std::int64_t i = 0; i < size; ++i) {
          const double value = expected[static_cast<std::size_t>(i)] * weight[i];
          // Both terms of a rotation are rounded.
          const double extra = std::abs(value) * 0x1p-19 + (norms.half > 0 ? 0x1p-19 : 0.0);
          const bool right = is_rounded(value, dtype, qkv[begin + i], extra);
          wrong += static_cast<std::int64_t>(!right);
        }
      };
      for (std::int64_t token = 0; token < tokens; ++token) {
        const std::int64_t row = token * heads.stride();
        for (std::int64_t i = 0; i < heads.queries; ++i) {
          check(row + i * heads.query_size, heads.query_size, norms.query_weight);
        }
        for (std::int64_t i = 0; i < heads.keys; ++i) {
          check(row + heads.first_key() + i * heads.key_size, heads.key_size, norms.key_weight);
        }
        const std::int64_t values = row + heads.stride() - 16;
        BOOST_TEST(qkv.values(values, 16) == before.values(values, 16));
      }
      BOOST_TEST(wrong == 0);
      BOOST_TEST(qkv.rest_is_unchanged());
    }
  }
}

BOOST_DATA_TEST_CASE(head_norms_do_not_depend_on_the_other_tokens,
                     data::make(kRowTypes) * data::make({kHeads[1], kHeads[5]}), dtype, heads) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const HeadsCase norms(heads, dtype, &random);
    const auto row = random_elements(dtype, heads.stride(), &random);
    Tensor<std::uint16_t> alone = row;
    norms.run(&alone);
    // All other tokens are NaN.
    Tensor<std::uint16_t> many(7 * heads.stride());
    const std::int64_t begin = random.integer(0, 6) * heads.stride();
    std::copy_n(row.data(), heads.stride(), many.data() + begin);
    norms.run(&many);
    BOOST_TEST(many.values(begin, heads.stride()) == alone.values(0, heads.stride()));
  }
}

BOOST_AUTO_TEST_CASE(queries_may_have_a_norm_without_keys) {
  FreshRandom random;
  const Heads heads{2, 32, 1, 32};
  HeadsCase norms(heads, DType::kBFloat16, &random);
  const auto before = random_elements(norms.dtype, heads.stride(), &random);
  Tensor<std::uint16_t> both = before;
  norms.run(&both);
  Tensor<std::uint16_t> queries = before;
  enqueue(HeadNorms{.tokens = 1,
                    .stride = heads.stride(),
                    .queries = {.count = 2, .size = 32, .weight = norms.query_weight.data()},
                    .keys = {},
                    .epsilon = kEpsilon,
                    .qkv = queries.data()},
          nullptr);
  BOOST_TEST(queries.values(0, 64) == both.values(0, 64));
  BOOST_TEST(queries.values(64, 48) == before.values(64, 48));
}

/// v has two heads of 64, or the second and third head, k, are v too.
BOOST_DATA_TEST_CASE(values_have_norms_of_their_own, data::make(kRowTypes) * data::make({64, 512}), dtype,
                     size) {
  constexpr std::int64_t kTokens = 3;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const Tensor<float> query_weight = random_floats(size, &random);
    const Tensor<float> key_weight = random_floats(size, &random);
    const Tensor<float> value_weight = random_floats(size, &random);
    for (const bool from_keys : {false, true}) {
      const std::int64_t stride = (from_keys ? 3 : 5) * size + 8;
      const auto before = random_elements(dtype, kTokens * stride, &random);
      Tensor<std::uint16_t> qkv = before;
      Tensor<std::uint16_t> values(kTokens * stride);
      enqueue(HeadNorms{.dtype = dtype,
                        .tokens = kTokens,
                        .stride = stride,
                        .queries = {.count = 1, .size = size, .weight = query_weight.data()},
                        .keys = {.first = size, .count = 2, .size = size, .weight = key_weight.data()},
                        .values = {.first = 3 * size,
                                   .count = from_keys ? 0 : 2,
                                   .size = size,
                                   .weight = value_weight.data()},
                        .epsilon = kEpsilon,
                        .qkv = qkv.data(),
                        .values_from_keys = from_keys ? values.data() : nullptr},
              nullptr);
      std::int64_t wrong = 0;
      const auto check = [&](std::int64_t from, const std::uint16_t* found, const Tensor<float>& weight) {
        const auto expected = rms_normalised(elements_of(dtype, before, from, size));
        for (std::int64_t i = 0; i < size; ++i) {
          const double value = expected[static_cast<std::size_t>(i)] * weight[i];
          wrong += static_cast<std::int64_t>(!is_rounded(value, dtype, found[i], std::abs(value) * 0x1p-19));
        }
      };
      for (std::int64_t token = 0; token < kTokens; ++token) {
        const std::int64_t row = token * stride;
        check(row, qkv.data() + row, query_weight);
        for (std::int64_t head = 0; head < 2; ++head) {
          const std::int64_t key = row + (1 + head) * size;
          check(key, qkv.data() + key, key_weight);
          if (from_keys) {
            check(key, values.data() + row + head * size, value_weight);
          } else {
            check(key + 2 * size, qkv.data() + key + 2 * size, value_weight);
          }
        }
        // Elements after the heads stay.
        BOOST_TEST(qkv.values(row + stride - 8, 8) == before.values(row + stride - 8, 8));
        for (std::int64_t i = from_keys ? 2 * size : 0; i < stride; ++i) {
          wrong += static_cast<std::int64_t>(values[row + i] != 0xffff);
        }
      }
      BOOST_TEST(wrong == 0);
    }
  }
}

BOOST_DATA_TEST_CASE(rotated_heads_may_have_values_that_are_not, data::make(kRowTypes), dtype) {
  FreshRandom random;
  const Tensor<float> weight = random_floats(16, &random);
  const Tensor<float> cosine = random_floats(8, &random, 1);
  const Tensor<float> sine = random_floats(8, &random, 1);
  const auto before = random_elements(dtype, 48, &random);
  Tensor<std::uint16_t> rotated = before;
  Tensor<std::uint16_t> plain = before;
  const auto groups = [&](std::int64_t first) {
    return NormGroups{.first = first, .count = 1, .size = 16, .weight = weight.data()};
  };
  HeadNorms work{.dtype = dtype,
                 .tokens = 1,
                 .stride = 48,
                 .queries = groups(0),
                 .keys = groups(16),
                 .values = groups(32),
                 .epsilon = kEpsilon,
                 .qkv = plain.data()};
  enqueue(work, nullptr);
  work.qkv = rotated.data();
  work.rotary_half = 8;
  work.cosine = cosine.data();
  work.sine = sine.data();
  enqueue(work, nullptr);
  BOOST_TEST(rotated.values(32, 16) == plain.values(32, 16));
  BOOST_TEST(rotated.values(0, 16) != plain.values(0, 16));
  BOOST_TEST(rotated.values(16, 16) != plain.values(16, 16));
  Tensor<std::uint16_t> values(48);
  work.values_from_keys = values.data();
  BOOST_CHECK_EXCEPTION(enqueue(work, nullptr), ConfigError,
                        says("values_from_keys is given, and values have columns or heads are rotated"));
}

BOOST_DATA_TEST_CASE(columns_have_gates, data::make(kRowTypes), dtype) {
  constexpr std::int64_t kTokens = 5;
  constexpr std::int64_t kWidth = 24;
  constexpr std::int64_t kStride = 72;
  constexpr std::int64_t kFirst = 40;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const auto gate = random_elements(dtype, kTokens * kWidth, &random);
    const auto values = random_floats(kTokens * kStride, &random);
    for (const auto activation :
         {LinearEpilogue::kSiluMul, LinearEpilogue::kGeluMul, LinearEpilogue::kGeluTanhMul}) {
      Tensor<std::uint16_t> output(kTokens * kWidth);
      enqueue(GatedColumns{.dtype = dtype,
                           .tokens = kTokens,
                           .width = kWidth,
                           .stride = kStride,
                           .first_column = kFirst,
                           .activation = activation,
                           .gate = gate.data(),
                           .values = values.data(),
                           .output = output.data()},
              nullptr);
      for (std::int64_t i = 0; i < kTokens * kWidth; ++i) {
        const double x = element(dtype, gate[i]);
        const double activated = activation == LinearEpilogue::kSiluMul ? x / (1 + std::exp(-x))
                                 : activation == LinearEpilogue::kGeluMul
                                     ? 0.5 * x * std::erfc(-x / std::sqrt(2.0))
                                     : x / (1 + std::exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)));
        const double factor = values[i / kWidth * kStride + kFirst + i % kWidth];
        BOOST_TEST(is_rounded(activated * factor, dtype, output[i], 1e-5));
      }
      BOOST_TEST(output.rest_is_unchanged());
    }
  }
}

BOOST_DATA_TEST_CASE(added_norms_may_read_floats_and_scale_their_sums,
                     data::make({8, 1032, 17000}) * data::make({false, true}), width, is_scaled) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const auto rounded = random_elements(DType::kFloat16, 2 * width, &random);
    Tensor<float> input(2 * width);
    for (std::int64_t i = 0; i < 2 * width; ++i) input[i] = element(DType::kFloat16, rounded[i]);
    const auto weight = random_floats(width, &random);
    const auto before = random_floats(2 * width, &random);
    const float scale = 0.25F;  // which multiplies exactly
    Tensor<float> plain = before;
    AddedNorm work{.dtype = DType::kFloat16,
                   .rows = 2,
                   .width = width,
                   .input = rounded.data(),
                   .weight = weight.data(),
                   .epsilon = kEpsilon,
                   .stream = plain.data()};
    enqueue(work, nullptr);
    Tensor<float> stream = before;
    work.input = input.data();
    work.float32_input = true;
    work.sum_scale = is_scaled ? &scale : nullptr;
    work.stream = stream.data();
    enqueue(work, nullptr);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < 2 * width; ++i) {
      wrong += static_cast<std::int64_t>(stream[i] != plain[i] * (is_scaled ? scale : 1.0F));
    }
    BOOST_TEST(wrong == 0);
  }
}

BOOST_DATA_TEST_CASE(rms_norms_may_be_float32, data::make(kRowTypes) * data::make({8, 2056, 17000}), dtype,
                     width) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    auto stream = random_floats(2 * width, &random);
    const auto weight = random_floats(width, &random);
    Tensor<std::uint16_t> rounded(2 * width);
    Tensor<float> exact(2 * width);
    RmsNorm work{.dtype = dtype,
                 .rows = 2,
                 .width = width,
                 .stream = stream.data(),
                 .weight = weight.data(),
                 .epsilon = kEpsilon,
                 .output = rounded.data()};
    enqueue(work, nullptr);
    work.output = exact.data();
    work.float32_output = true;
    enqueue(work, nullptr);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < 2 * width; ++i) {
      const auto bits = dtype == DType::kFloat16 ? float_to_float16(exact[i]) : float_to_bfloat16(exact[i]);
      wrong += static_cast<std::int64_t>(rounded[i] != bits);
    }
    BOOST_TEST(wrong == 0);
    BOOST_TEST(exact.rest_is_unchanged());
  }
}

BOOST_DATA_TEST_CASE(added_norms_match_float64, data::make(kRowTypes) * data::make(kWidths), dtype, width) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t rows : {1, 5}) {
      const auto input = random_elements(dtype, rows * width, &random);
      const auto weight = random_floats(width, &random);
      const auto before = random_floats(rows * width, &random);
      Tensor<float> stream = before;
      enqueue(AddedNorm{.dtype = dtype,
                        .rows = rows,
                        .width = width,
                        .input = input.data(),
                        .weight = weight.data(),
                        .epsilon = kEpsilon,
                        .stream = stream.data()},
              nullptr);
      std::int64_t wrong = 0;
      for (std::int64_t row = 0; row < rows; ++row) {
        const auto expected = rms_normalised(elements_of(dtype, input, row * width, width));
        for (std::int64_t i = 0; i < width; ++i) {
          const double added = expected[static_cast<std::size_t>(i)] * weight[i];
          const double value = before[row * width + i] + added;
          const double bound = std::abs(added) * 0x1p-19 + std::abs(value) * 0x1p-23;
          wrong += static_cast<std::int64_t>(!(std::abs(stream[row * width + i] - value) <= bound));
        }
      }
      BOOST_TEST(wrong == 0);
      BOOST_TEST(stream.rest_is_unchanged());
    }
  }
}

struct LayerNormCase {
  DType dtype;
  std::int64_t width;
  Tensor<float> stream;
  Tensor<std::uint16_t> addend;
  Tensor<float> weight;
  Tensor<float> bias;

  LayerNormCase(DType type, std::int64_t tokens, std::int64_t row_width, FreshRandom* random)
      : dtype(type),
        width(row_width),
        stream(random_floats(tokens * row_width, random)),
        addend(random_elements(type, tokens * row_width, random)),
        weight(random_floats(row_width, random)),
        bias(random_floats(row_width, random)) {
    // A mean much larger than the deviation, which a difference of large sums would lose.
    const float shift = random->real(-100, 100);
    for (std::int64_t i = 0; i < stream.size(); ++i) stream[i] += shift;
  }

  [[nodiscard]] LayerNorm norm(Tensor<float>* target, std::int64_t rows, bool has_addend) const {
    return {.dtype = dtype,
            .rows = rows,
            .width = width,
            .stream = target->data(),
            .addend = has_addend ? addend.data() : nullptr,
            .weight = weight.data(),
            .bias = has_addend ? nullptr : bias.data(),
            .epsilon = kEpsilon};
  }

  [[nodiscard]] float sum(std::int64_t index, bool has_addend) const {
    return stream[index] + (has_addend ? element(dtype, addend[index]) : 0.0F);
  }

  struct Expected {
    double value;
    double error;
  };

  /// Returns the output of row `from`. Cases with an addend have no bias.
  [[nodiscard]] std::vector<Expected> expected(std::int64_t from, bool has_addend) const {
    double mean = 0;
    for (std::int64_t i = 0; i < width; ++i) mean += sum(from * width + i, has_addend);
    mean /= static_cast<double>(width);
    double squares = 0;
    for (std::int64_t i = 0; i < width; ++i) {
      squares += std::pow(sum(from * width + i, has_addend) - mean, 2);
    }
    const double factor = 1 / std::sqrt(squares / static_cast<double>(width) + kEpsilon);
    std::vector<Expected> row;
    for (std::int64_t i = 0; i < width; ++i) {
      const double scale = factor * weight[i];
      const double scaled = (sum(from * width + i, has_addend) - mean) * scale;
      const double added = has_addend ? 0.0 : bias[i];
      // The mean, of up to some 100, is rounded to float32.
      const double error =
          std::abs(scaled) * 0x1p-18 + std::abs(mean * scale) * 0x1p-21 + std::abs(added) * 0x1p-23;
      row.push_back({scaled + added, error});
    }
    return row;
  }
};

BOOST_DATA_TEST_CASE(layer_norms_match_float64, data::make(kRowTypes) * data::make(kWidths), dtype, width) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const std::int64_t tokens = 3;
    const LayerNormCase one(dtype, tokens, width, &random);
    for (const bool has_addend : {false, true}) {
      Tensor<float> stream = one.stream;
      Tensor<std::uint16_t> output(tokens * width);
      LayerNorm norm = one.norm(&stream, tokens, has_addend);
      norm.output = output.data();
      enqueue(norm, nullptr);
      // The same norm as a residual stream in float32.
      Tensor<float> same = one.stream;
      Tensor<float> exact(tokens * width);
      norm = one.norm(&same, tokens, has_addend);
      norm.output = exact.data();
      norm.float32_output = true;
      enqueue(norm, nullptr);
      std::int64_t wrong = 0;
      for (std::int64_t row = 0; row < tokens; ++row) {
        const auto expected = one.expected(row, has_addend);
        for (std::int64_t i = 0; i < width; ++i) {
          const auto [value, error] = expected[static_cast<std::size_t>(i)];
          const std::int64_t at = row * width + i;
          wrong += static_cast<std::int64_t>(!is_rounded(value, dtype, output[at], error));
          wrong += static_cast<std::int64_t>(!(std::abs(exact[at] - value) <= error));
          wrong += static_cast<std::int64_t>(stream[at] != one.sum(at, has_addend));
        }
      }
      BOOST_TEST(wrong == 0);
      BOOST_TEST(stream.rest_is_unchanged());
      BOOST_TEST(output.rest_is_unchanged());
      BOOST_TEST(exact.rest_is_unchanged());
      // In place.
      same = Tensor<float>(one.stream);
      norm.stream = same.data();
      norm.output = same.data();
      enqueue(norm, nullptr);
      BOOST_TEST(same.values(0, same.size()) == exact.values(0, exact.size()));
    }
  }
}

BOOST_DATA_TEST_CASE(layer_norms_of_gathered_rows_leave_the_stream,
                     data::make(kRowTypes) * data::make({96, 17000}), dtype, width) {
  constexpr std::int64_t kTokens = 6;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const LayerNormCase one(dtype, kTokens, width, &random);
    Tensor<std::int32_t> rows(3);
    for (const auto& [at, row] : {std::pair{0, 5}, {1, 2}, {2, 5}}) rows[at] = row;
    for (const bool has_addend : {false, true}) {
      Tensor<float> stream = one.stream;
      Tensor<std::uint16_t> output(rows.size() * width);
      LayerNorm norm = one.norm(&stream, rows.size(), has_addend);
      norm.row_ids = rows.data();
      norm.output = output.data();
      enqueue(norm, nullptr);
      BOOST_TEST(stream.values(0, stream.size()) == one.stream.values(0, stream.size()));
      BOOST_TEST(output.rest_is_unchanged());
      // A row has the same bits as in a norm of all rows.
      Tensor<std::uint16_t> all(kTokens * width);
      norm = one.norm(&stream, kTokens, has_addend);
      norm.output = all.data();
      enqueue(norm, nullptr);
      for (std::int64_t row = 0; row < rows.size(); ++row) {
        BOOST_TEST(output.values(row * width, width) == all.values(rows[row] * width, width));
      }
    }
  }
}

/// Adapters 0 and 2 have a shift, of which the second norm's are wanted; adapter 1 has none.
BOOST_DATA_TEST_CASE(shifts_of_adapters_are_added_to_the_bias,
                     data::make(kRowTypes) * data::make({96, 17000}), dtype, width) {
  constexpr std::int64_t kRows = 5;
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const LayerNormCase one(dtype, kRows, width, &random);
    const std::vector<Tensor<float>> made{random_floats(width, &random), random_floats(width, &random)};
    const auto address = [&](std::size_t i) { return reinterpret_cast<std::int64_t>(made[i].data()); };
    const std::vector<std::int64_t> shifts{address(1), address(0), 0, 0, address(0), address(1)};
    const std::vector<std::int32_t> slots{-1, 2, 0, 1, 2};
    Tensor<float> stream = one.stream;
    Tensor<std::uint16_t> output(kRows * width);
    LayerNorm norm = one.norm(&stream, kRows, false);
    norm.adapter_slots = slots.data();
    norm.shifts = shifts.data();
    norm.slot_entries = 2;
    norm.entry = 1;
    norm.output = output.data();
    enqueue(norm, nullptr);
    for (std::int64_t row = 0; row < kRows; ++row) {
      // The same row with a bias that includes the shift.
      LayerNormCase own = one;
      const std::int32_t slot = slots[static_cast<std::size_t>(row)];
      for (std::int64_t i = 0; slot == 0 || slot == 2; ++i) {
        if (i == width) break;
        own.bias[i] += made[slot == 0 ? 0 : 1][i];
      }
      Tensor<std::uint16_t> expected(kRows * width);
      LayerNorm plain = own.norm(&stream, kRows, false);
      plain.output = expected.data();
      enqueue(plain, nullptr);
      BOOST_TEST(output.values(row * width, width) == expected.values(row * width, width));
    }
    BOOST_TEST(output.rest_is_unchanged());
    norm.bias = nullptr;
    BOOST_CHECK_EXCEPTION(enqueue(norm, nullptr), ConfigError, says("shifts are for norms with a bias"));
  }
}

BOOST_DATA_TEST_CASE(casts_round_once, data::make(kRowTypes) * data::make({8, 24, 4096, 30000}), dtype,
                     elements) {
  FreshRandom random;
  const auto input = random_floats(elements, &random);
  Tensor<std::uint16_t> output(elements);
  enqueue(Cast{.dtype = dtype, .elements = elements, .input = input.data(), .output = output.data()},
          nullptr);
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < elements; ++i) {
    const auto bits = dtype == DType::kFloat16 ? float_to_float16(input[i]) : float_to_bfloat16(input[i]);
    wrong += static_cast<std::int64_t>(output[i] != bits);
  }
  BOOST_TEST(wrong == 0);
  BOOST_TEST(output.rest_is_unchanged());
}

BOOST_AUTO_TEST_CASE(logits_have_a_bias) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t width : {8, 136}) {
      for (const std::int64_t rows : {1, 19}) {
        const auto before = random_floats(rows * width, &random);
        const auto bias = random_floats(width, &random);
        Tensor<float> logits = before;
        enqueue(FinishLogits{.elements = rows * width,
                             .logits = logits.data(),
                             .scale = 0.5F,
                             .softcap = 0.0F,
                             .bias = bias.data(),
                             .width = width},
                nullptr);
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < rows * width; ++i) {
          wrong += static_cast<std::int64_t>(logits[i] != (before[i] + bias[i % width]) * 0.5F);
        }
        BOOST_TEST(wrong == 0);
        BOOST_TEST(logits.rest_is_unchanged());
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(the_padding_of_logits_is_left_out) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (const std::int64_t width : {1, 61, 1027}) {
      for (const std::int64_t rows : {1, 19}) {
        for (const bool has_bias : {false, true}) {
          const std::int64_t stride = (width + 7) / 8 * 8;
          const std::int64_t logits_stride = width + (has_bias ? 5 : 0);
          const auto input = random_floats(rows * stride, &random);
          const auto bias = random_floats(width, &random);
          Tensor<float> logits(rows * logits_stride);
          enqueue(FinishPaddedLogits{.rows = rows,
                                     .width = width,
                                     .stride = stride,
                                     .logits_stride = logits_stride,
                                     .input = input.data(),
                                     .logits = logits.data(),
                                     .scale = 0.5F,
                                     .bias = has_bias ? bias.data() : nullptr},
                  nullptr);
          std::int64_t wrong = 0;
          for (std::int64_t i = 0; i < rows * logits_stride; ++i) {
            const std::int64_t column = i % logits_stride;
            if (column >= width) {  // not written
              wrong += static_cast<std::int64_t>(!std::isnan(logits[i]));
              continue;
            }
            const float sum = input[i / logits_stride * stride + column] + (has_bias ? bias[column] : 0.0F);
            wrong += static_cast<std::int64_t>(logits[i] != sum * 0.5F);
          }
          BOOST_TEST(wrong == 0);
          BOOST_TEST(logits.rest_is_unchanged());
        }
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(no_rows_need_no_memory) {
  enqueue(LayerNorm{.width = 8}, nullptr);
  enqueue(AddedNorm{.width = 8}, nullptr);
  enqueue(Cast{}, nullptr);
  enqueue(FinishPaddedLogits{.width = 9, .stride = 16, .logits_stride = 9}, nullptr);
  enqueue(HeadNorms{.stride = 8, .queries = {.count = 1, .size = 8}, .keys = {}}, nullptr);
  enqueue(HeadNorms{.tokens = 4, .stride = 8, .queries = {}, .keys = {}}, nullptr);
}

BOOST_AUTO_TEST_CASE(invalid_sizes_are_refused_by_name) {
  BOOST_CHECK_EXCEPTION(
      enqueue(LayerNorm{.dtype = DType::kFloat32, .rows = 1, .width = 4}, nullptr), ConfigError,
      says("LayerNorm: dtype is float32; expected float16 or bfloat16; width is 4; expected "));
  BOOST_CHECK_EXCEPTION(enqueue(AddedNorm{.rows = -1, .width = 8}, nullptr), ConfigError,
                        says("AddedNorm: rows is -1; expected 0 to "));
  BOOST_CHECK_EXCEPTION(enqueue(Cast{.elements = 9}, nullptr), ConfigError,
                        says("Cast: elements is 9; expected a multiple of 8 from 0 to "));
  BOOST_CHECK_EXCEPTION(
      enqueue(HeadNorms{.tokens = 1,
                        .stride = 24,
                        .queries = {.count = 2, .size = 12},
                        .keys = {.first = 16, .count = 1, .size = 16}},
              nullptr),
      ConfigError,
      says(
          "HeadNorms: queries.size is 12; expected a multiple of 8 from 8 to 2147483647; keys ends after the "
          "row"));
  BOOST_CHECK_EXCEPTION(enqueue(HeadNorms{.tokens = 1,
                                          .stride = 1024,
                                          .queries = {.count = 1, .size = 512},
                                          .keys = {.first = 512, .count = 1, .size = 8},
                                          .rotary_half = 8},
                                nullptr),
                        ConfigError,
                        says("queries.size is too large for a rotation; expected at most 256; rotary_half is "
                             "more than half of a group"));
  BOOST_CHECK_EXCEPTION(enqueue(HeadNorms{.stride = 8, .queries = {}, .keys = {}, .rotary_half = 4}, nullptr),
                        ConfigError, says("HeadNorms: rotary_half is 4; expected a multiple of 8"));
  BOOST_CHECK_EXCEPTION(
      enqueue(GatedColumns{.tokens = 1, .width = 8, .stride = 16, .first_column = 16}, nullptr), ConfigError,
      says("GatedColumns: the columns end after the row"));
  BOOST_CHECK_EXCEPTION(
      enqueue(GatedColumns{.width = 8, .stride = 8, .activation = LinearEpilogue::kReluMul}, nullptr),
      ConfigError, says("activation is not kSiluMul, kGeluMul or kGeluTanhMul"));
  BOOST_CHECK_EXCEPTION(enqueue(Xielu{.elements = 9, .coefficients = {}}, nullptr), ConfigError,
                        says("Xielu: elements is 9; expected a multiple of 8 from 0 to "));
  const float bias = 0;
  BOOST_CHECK_EXCEPTION(enqueue(FinishLogits{.elements = 8, .bias = &bias, .width = 4}, nullptr), ConfigError,
                        says("FinishLogits: width is 4; expected a multiple of 8 from 8 to "));
  BOOST_CHECK_EXCEPTION(
      enqueue(FinishPaddedLogits{.rows = 1, .width = 9, .stride = 8, .logits_stride = 9}, nullptr),
      ConfigError, says("FinishPaddedLogits: stride is below width"));
  BOOST_CHECK_EXCEPTION(
      enqueue(FinishPaddedLogits{.rows = 1, .width = 9, .stride = 9, .logits_stride = 8}, nullptr),
      ConfigError, says("FinishPaddedLogits: logits_stride is below width"));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::cuda::rows_norms_test
