// Kernels of latent attention, compared with their definitions in float64, and in steps and crowds.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cuda/latent_kernels.h"
#include "print_dtype.h"
#include "rows_case.h"

namespace adaptrt::cuda::latent_test {
namespace {

namespace data = boost::unit_test::data;

std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

std::uint16_t rounded(DType dtype, double value) {
  const auto number = static_cast<float>(value);
  return dtype == DType::kFloat16 ? float_to_float16(number) : float_to_bfloat16(number);
}

auto says(const std::string& text) {
  return
      [text](const ConfigError& error) { return std::string(error.what()).find(text) != std::string::npos; };
}

/// A sequence of a step: `tokens` new tokens after `past` positions. Padding has no blocks.
struct Sequence {
  std::int32_t past = 0;
  std::int32_t tokens = 1;
  bool is_padding = false;
};

struct Sizes {
  std::int32_t heads = 1;
  std::int32_t key_dim = 16;
  std::int32_t rotary_dim = 16;
  bool interleaved = true;
  std::int32_t window = 0;
};

constexpr std::int32_t kTokensPerBlock = 24;  // tiles of keys and blocks begin at different positions
constexpr std::int32_t kMostBlocks = 6;

/// Sequences with random keys at all positions. A step of them has its own pool, in which only the slots of
/// earlier positions are not NaN.
class Case {
 public:
  Case(DType type, const Sizes& sizes, std::vector<Sequence> sequences, FreshRandom* random)
      : dtype_(type),
        sizes_(sizes),
        sequences_(std::move(sequences)),
        scale_(1 / std::sqrt(static_cast<float>(sizes.key_dim))) {
    for (const Sequence& sequence : sequences_) {
      Rows rows{random_elements(dtype_, count_of(sequence) * row_size(), random, 2),
                random_floats(count_of(sequence) * half(), random, 3),
                random_floats(count_of(sequence) * half(), random, 3)};
      for (std::int64_t i = 0; i < rows.cosine.size(); ++i) {
        rows.sine[i] = std::sin(rows.cosine[i]);
        rows.cosine[i] = std::cos(rows.cosine[i]);
      }
      rows_.push_back(std::move(rows));
    }
  }

  /// A part of the tokens of a step's sequences.
  struct Chunk {
    std::int32_t skipped = 0;
    std::int32_t most = 1000;
    /// The pool that the chunk before has left, if tokens are skipped. Gets the pool that this one leaves.
    std::vector<std::uint16_t>* pool = nullptr;
  };

  /// Results of a step with some sequences, in their order.
  [[nodiscard]] std::vector<std::vector<std::uint16_t>> run(const std::vector<std::size_t>& order) const {
    return run(order, Chunk());
  }
  [[nodiscard]] std::vector<std::vector<std::uint16_t>> run(const std::vector<std::size_t>& order,
                                                            const Chunk& chunk) const {
    std::vector<std::int32_t> offsets{0};
    std::vector<std::int32_t> positions;
    std::vector<std::int32_t> tables;
    std::int32_t next_block = 1;
    for (const std::size_t s : order) {
      const Sequence& sequence = sequences_[s];
      const std::int32_t first = sequence.past + chunk.skipped;
      const std::int32_t tokens = std::min(sequence.tokens - chunk.skipped, chunk.most);
      for (std::int32_t i = 0; i < tokens; ++i) positions.push_back(first + i);
      offsets.push_back(static_cast<std::int32_t>(positions.size()));
      for (std::int32_t block = 0; block < kMostBlocks; ++block) {
        const bool is_used = !sequence.is_padding && block * kTokensPerBlock < first + tokens;
        tables.push_back(is_used ? next_block++ : -1);
      }
    }
    const auto tokens = static_cast<std::int32_t>(positions.size());
    Tensor<std::uint16_t> pool(std::int64_t{next_block} * kTokensPerBlock * sizes_.key_dim);
    Tensor<std::uint16_t> qk(std::int64_t{tokens} * row_size());
    Tensor<float> cosine(std::int64_t{tokens} * half());
    Tensor<float> sine(std::int64_t{tokens} * half());
    for (std::size_t i = 0; i < order.size(); ++i) {
      const std::int32_t* blocks = tables.data() + i * kMostBlocks;
      for (std::int32_t key = 0; key < sequences_[order[i]].past && blocks[0] >= 0; ++key) {
        store(key_of(order[i], key), &pool[slot_of(blocks, key)]);
      }
      for (std::int32_t token = offsets[i]; token < offsets[i + 1]; ++token) {
        const Rows& rows = rows_[order[i]];
        const std::int64_t position = positions[at(token)];
        std::copy_n(&rows.qk[position * row_size()], row_size(), &qk[token * row_size()]);
        std::copy_n(&rows.cosine[position * half()], half(), &cosine[token * half()]);
        std::copy_n(&rows.sine[position * half()], half(), &sine[token * half()]);
      }
    }
    // A kernel's float32 may round a key the other way than key_of().
    if (chunk.skipped > 0) std::ranges::copy(*chunk.pool, pool.data());
    const Tensor<std::uint16_t> before = pool;
    Tensor<std::uint16_t> attended(std::int64_t{tokens} * sizes_.heads * sizes_.key_dim);
    enqueue(LatentAttention{.dtype = dtype_,
                            .tokens = tokens,
                            .sequences = static_cast<std::int32_t>(order.size()),
                            .max_blocks = kMostBlocks,
                            .tokens_per_block = kTokensPerBlock,
                            .num_heads = sizes_.heads,
                            .key_dim = sizes_.key_dim,
                            .rotary_dim = sizes_.rotary_dim,
                            .interleaved = sizes_.interleaved,
                            .sliding_window = sizes_.window,
                            .scale = scale_,
                            .qk = qk.data(),
                            .kv_pool = pool.data(),
                            .block_tables = tables.data(),
                            .sequence_offsets = offsets.data(),
                            .positions = positions.data(),
                            .cosine = cosine.data(),
                            .sine = sine.data(),
                            .attended = attended.data()},
            nullptr);
    BOOST_TEST(attended.rest_is_unchanged());
    check_pool(order, offsets, positions, tables, before, pool);
    if (chunk.pool != nullptr) *chunk.pool = pool.values(0, pool.size());
    std::vector<std::vector<std::uint16_t>> results;
    const std::int64_t width = std::int64_t{sizes_.heads} * sizes_.key_dim;
    for (std::size_t i = 0; i < order.size(); ++i) {
      results.push_back(attended.values(offsets[i] * width, (offsets[i + 1] - offsets[i]) * width));
    }
    return results;
  }

  /// Compares the results of all tokens of a sequence with float64.
  void check(std::size_t s, const std::vector<std::uint16_t>& results) const {
    const Sequence& sequence = sequences_[s];
    for (std::int32_t token = 0; token < sequence.tokens; ++token) {
      for (std::int32_t head = 0; head < sizes_.heads; ++head) {
        const std::uint16_t* result =
            results.data() + (std::int64_t{token} * sizes_.heads + head) * sizes_.key_dim;
        if (sequence.is_padding) {
          BOOST_TEST_REQUIRE(
              std::all_of(result, result + sizes_.key_dim, [](auto bits) { return bits == 0; }));
        } else {
          compare(s, sequence.past + token, head, result);
        }
      }
    }
  }

 private:
  struct Rows {
    Tensor<std::uint16_t> qk;  // of every position
    Tensor<float> cosine;
    Tensor<float> sine;
  };

  [[nodiscard]] static std::int64_t count_of(const Sequence& sequence) {
    return std::int64_t{sequence.past} + sequence.tokens;
  }
  [[nodiscard]] std::int64_t row_size() const { return std::int64_t{sizes_.heads + 1} * sizes_.key_dim; }
  [[nodiscard]] std::int64_t half() const { return sizes_.rotary_dim / 2; }
  [[nodiscard]] std::int64_t slot_of(const std::int32_t* blocks, std::int32_t key) const {
    const std::int64_t row =
        std::int64_t{blocks[key / kTokensPerBlock]} * kTokensPerBlock + key % kTokensPerBlock;
    return row * sizes_.key_dim;
  }

  /// A rotated head of a position, rounded; head sizes_.heads is the key.
  [[nodiscard]] std::vector<double> rotated(std::size_t s, std::int32_t position, std::int32_t head) const {
    const Rows& rows = rows_[s];
    const std::uint16_t* from = &rows.qk[position * row_size() + std::int64_t{head} * sizes_.key_dim];
    std::vector<double> values(at(sizes_.key_dim));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = element(dtype_, from[i]);
    for (std::int64_t i = 0; i < half(); ++i) {
      const double cosine = rows.cosine[position * half() + i];
      const double sine = rows.sine[position * half() + i];
      double& a = values[at(sizes_.interleaved ? 2 * i : i)];
      double& b = values[at(sizes_.interleaved ? 2 * i + 1 : i + half())];
      const double turned = a * cosine - b * sine;
      b = element(dtype_, rounded(dtype_, b * cosine + a * sine));
      a = element(dtype_, rounded(dtype_, turned));
    }
    return values;
  }
  [[nodiscard]] std::vector<double> key_of(std::size_t s, std::int32_t position) const {
    return rotated(s, position, sizes_.heads);
  }
  void store(const std::vector<double>& values, std::uint16_t* to) const {
    for (std::size_t i = 0; i < values.size(); ++i) to[i] = rounded(dtype_, values[i]);
  }

  /// The step's keys are in the pool, and nothing else has changed.
  void check_pool(const std::vector<std::size_t>& order, const std::vector<std::int32_t>& offsets,
                  const std::vector<std::int32_t>& positions, const std::vector<std::int32_t>& tables,
                  const Tensor<std::uint16_t>& before, const Tensor<std::uint16_t>& pool) const {
    Tensor<std::uint16_t> expected = before;
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (sequences_[order[i]].is_padding) continue;
      for (std::int32_t token = offsets[i]; token < offsets[i + 1]; ++token) {
        const std::int32_t position = positions[at(token)];
        const std::int64_t slot = slot_of(tables.data() + i * kMostBlocks, position);
        const std::vector<double> key = key_of(order[i], position);
        for (std::int32_t d = 0; d < sizes_.key_dim; ++d) {
          // A rotation in float32 may round the other way.
          const double extra = d < sizes_.rotary_dim ? std::abs(key[at(d)]) * 0x1p-7 + 0x1p-20 : 0.0;
          BOOST_TEST_REQUIRE(is_rounded(key[at(d)], dtype_, pool[slot + d], extra));
          expected[slot + d] = pool[slot + d];
        }
      }
    }
    BOOST_TEST((expected.values(0, expected.size()) == pool.values(0, pool.size())));
    BOOST_TEST(pool.rest_is_unchanged());
  }

  void compare(std::size_t s, std::int32_t position, std::int32_t head, const std::uint16_t* result) const {
    const std::vector<double> query = rotated(s, position, head);
    const std::int32_t first = sizes_.window == 0 ? 0 : std::max(0, position + 1 - sizes_.window);
    std::vector<std::vector<double>> keys;
    std::vector<double> weights;
    for (std::int32_t key = first; key <= position; ++key) {
      keys.push_back(key_of(s, key));
      double score = 0;
      for (std::size_t d = 0; d < query.size(); ++d) score += query[d] * keys.back()[d];
      weights.push_back(score * scale_);
    }
    const double largest = *std::max_element(weights.begin(), weights.end());
    double total = 0;
    for (double& weight : weights) total += weight = std::exp(weight - largest);
    const double rounding = dtype_ == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
    for (std::int32_t d = 0; d < sizes_.key_dim; ++d) {
      double expected = 0;
      double magnitude = 0;
      for (std::size_t i = 0; i < keys.size(); ++i) {
        expected += weights[i] / total * keys[i][at(d)];
        magnitude += weights[i] / total * std::abs(keys[i][at(d)]);
      }
      // Weights and the result are rounded, and rotated queries and keys may be rounded the other way.
      BOOST_TEST_REQUIRE(std::abs(element(dtype_, result[d]) - expected) <= 6 * rounding * magnitude + 1e-6,
                         "head " << head << " position " << position << " element " << d << ": "
                                 << element(dtype_, result[d]) << ", expected " << expected);
    }
  }

  DType dtype_;
  Sizes sizes_;
  std::vector<Sequence> sequences_;
  float scale_;
  std::vector<Rows> rows_;
};

const Sizes kCases[] = {
    {.heads = 3, .key_dim = 56, .rotary_dim = 16, .interleaved = true},
    {.heads = 20, .key_dim = 64, .rotary_dim = 32, .interleaved = false},
    {.heads = 1, .key_dim = 40, .rotary_dim = 16, .interleaved = true, .window = 37},
    {.heads = 2, .key_dim = 576, .rotary_dim = 64, .interleaved = true},
};

std::ostream& operator<<(std::ostream& stream, const Sizes& sizes) {
  return stream << sizes.heads << " heads of " << sizes.key_dim;
}

}  // namespace

BOOST_AUTO_TEST_SUITE(latent_kernels)

BOOST_DATA_TEST_CASE(attention_equals_float64_in_any_step, data::make(kRowTypes) * data::make(kCases), dtype,
                     sizes) {
  FreshRandom random;
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    const Case all(dtype, sizes, {{0, 3}, {95, 1}, {30, 6}, {.tokens = 2, .is_padding = true}, {31, 1}},
                   &random);
    const auto together = all.run({0, 1, 2, 3, 4});
    for (std::size_t s = 0; s < together.size(); ++s) all.check(s, together[s]);
    const auto elsewhere = all.run({4, 2, 3, 0, 1});
    BOOST_TEST((elsewhere[1] == together[2]));
    BOOST_TEST((elsewhere[3] == together[0]));
    BOOST_TEST((elsewhere[4] == together[1]));
    BOOST_TEST((all.run({4})[0] == together[4]));
    // A prompt in two chunks: the second has the first one's keys from the pool.
    std::vector<std::uint16_t> pool;
    const auto begin = all.run({2}, {.most = 2, .pool = &pool})[0];
    const auto end = all.run({2}, {.skipped = 2, .pool = &pool})[0];
    BOOST_TEST((std::equal(begin.begin(), begin.end(), together[2].begin())));
    BOOST_TEST((std::equal(end.rbegin(), end.rend(), together[2].rbegin())));
  }
}

BOOST_DATA_TEST_CASE(queries_and_keys_are_joined, data::make(kRowTypes), dtype) {
  FreshRandom random;
  constexpr std::int64_t kTokens = 3;
  constexpr std::int32_t kHeads = 5;
  constexpr std::int64_t kLatent = 40;
  constexpr std::int64_t kRotary = 16;
  constexpr std::int64_t kPlain = 24;
  constexpr std::int64_t kKey = kLatent + kRotary;
  const auto queries = random_elements(dtype, kTokens * kHeads * (kPlain + kRotary), &random);
  const auto products = random_elements(dtype, kHeads * kTokens * kLatent, &random);
  const auto rows = random_elements(dtype, kTokens * kKey, &random);
  const auto norm = random_floats(kLatent, &random);
  Tensor<std::uint16_t> qk(kTokens * (kHeads + 1) * kKey);
  enqueue(JoinQueries{.dtype = dtype,
                      .tokens = kTokens,
                      .heads = kHeads,
                      .latent_dim = kLatent,
                      .rotary_dim = kRotary,
                      .plain_dim = kPlain,
                      .queries = queries.data(),
                      .products = products.data(),
                      .rows = rows.data(),
                      .norm = norm.data(),
                      .epsilon = 0.5F,
                      .qk = qk.data()},
          nullptr);
  BOOST_TEST_CONTEXT("seed " << random.seed()) {
    for (std::int64_t token = 0; token < kTokens; ++token) {
      for (std::int64_t head = 0; head < kHeads; ++head) {
        const std::int64_t to = (token * (kHeads + 1) + head) * kKey;
        const std::int64_t of_query = (token * kHeads + head) * (kPlain + kRotary);
        BOOST_TEST((qk.values(to, kRotary) == queries.values(of_query + kPlain, kRotary)));
        BOOST_TEST((qk.values(to + kRotary, kLatent) ==
                    products.values((head * kTokens + token) * kLatent, kLatent)));
      }
      const std::int64_t to = (token * (kHeads + 1) + kHeads) * kKey;
      BOOST_TEST((qk.values(to, kRotary) == rows.values(token * kKey + kLatent, kRotary)));
      double squares = 0;
      for (std::int64_t i = 0; i < kLatent; ++i) {
        const double value = element(dtype, rows[token * kKey + i]);
        squares += value * value;
      }
      for (std::int64_t i = 0; i < kLatent; ++i) {
        const double expected =
            element(dtype, rows[token * kKey + i]) / std::sqrt(squares / kLatent + 0.5) * norm[i];
        BOOST_TEST(is_rounded(expected, dtype, qk[to + kRotary + i], std::abs(expected) * 1e-5));
      }
    }
    BOOST_TEST(qk.rest_is_unchanged());
  }
}

BOOST_AUTO_TEST_CASE(heads_are_copied_by_their_strides) {
  constexpr std::int64_t kTokens = 7;
  constexpr std::int32_t kHeads = 3;
  constexpr std::int64_t kWidth = 24;
  FreshRandom random;
  const auto x = random_elements(DType::kBFloat16, kTokens * kHeads * 40, &random);
  Tensor<std::uint16_t> y(kHeads * kTokens * kWidth);
  enqueue(CopyHeads{.tokens = kTokens,
                    .heads = kHeads,
                    .width = kWidth,
                    .x_of_token = kHeads * 40,
                    .x_of_head = 40,
                    .x = x.data() + 16,
                    .y_of_token = kWidth,
                    .y_of_head = kTokens * kWidth,
                    .y = y.data()},
          nullptr);
  for (std::int64_t token = 0; token < kTokens; ++token) {
    for (std::int64_t head = 0; head < kHeads; ++head) {
      BOOST_TEST((y.values((head * kTokens + token) * kWidth, kWidth) ==
                  x.values((token * kHeads + head) * 40 + 16, kWidth)));
    }
  }
  BOOST_TEST(y.rest_is_unchanged());
}

BOOST_AUTO_TEST_CASE(tiles_have_one_head_and_one_adapter) {
  constexpr std::int32_t kHeads = 3;
  // More tokens than a block has threads; the adapter changes within tiles and at their ends.
  std::vector<std::int32_t> adapters(300, -1);
  std::fill(adapters.begin() + 5, adapters.begin() + 20, 2);
  std::fill(adapters.begin() + 20, adapters.begin() + 32, 0);
  std::fill(adapters.begin() + 270, adapters.end(), 1);
  const auto tokens = static_cast<std::int32_t>(adapters.size());
  constexpr std::int32_t kTile = 16;
  const std::int64_t most = most_head_tiles(tokens, 5, kTile);
  Tensor<std::int32_t> offsets(kHeads + 1);
  Tensor<SlotTile> tiles(kHeads * most + 1);
  NumberHeads work{.tokens = tokens,
                   .heads = kHeads,
                   .offsets = offsets.data(),
                   .tile_tokens = kTile,
                   .tiles_of_head = most,
                   .token_slots = adapters.data(),
                   .tiles = tiles.data()};
  enqueue(work, nullptr);
  BOOST_TEST((offsets.values(0, kHeads + 1) == std::vector<std::int32_t>{0, tokens, 2 * tokens, 3 * tokens}));
  std::int32_t next = 0;
  for (std::int64_t i = 0; i < kHeads * most; ++i) {
    const std::int32_t end = tiles[i + 1].first;
    BOOST_TEST_REQUIRE(tiles[i].first == next);
    BOOST_TEST_REQUIRE(end - next <= kTile);
    for (std::int32_t slot = next; slot < end; ++slot) {
      BOOST_TEST_REQUIRE(tiles[i].expert == slot / tokens);
      BOOST_TEST_REQUIRE(tiles[i].adapter_slot == adapters[at(slot % tokens)]);
    }
    next = end;
  }
  BOOST_TEST(next == kHeads * tokens);
  BOOST_TEST(tiles.rest_is_unchanged());
  // Without adapters there are only the offsets.
  work.tokens = 4;
  work.token_slots = nullptr;
  work.tiles = nullptr;
  enqueue(work, nullptr);
  BOOST_TEST((offsets.values(0, kHeads + 1) == std::vector<std::int32_t>{0, 4, 8, 12}));
}

BOOST_AUTO_TEST_CASE(invalid_sizes_are_refused) {
  LatentAttention attention{.tokens = 1, .sequences = 1, .tokens_per_block = 16, .num_heads = 1};
  attention.key_dim = 584;
  BOOST_CHECK_EXCEPTION(enqueue(attention, nullptr), ConfigError,
                        says("key_dim is 584; expected a multiple of 8 from 16 to 576"));
  attention.key_dim = 48;
  attention.rotary_dim = 24;
  BOOST_CHECK_EXCEPTION(enqueue(attention, nullptr), ConfigError,
                        says("rotary_dim is not a multiple of 16 up to key_dim"));
  attention.rotary_dim = 16;
  attention.scale = 0.0F;
  BOOST_CHECK_EXCEPTION(enqueue(attention, nullptr), ConfigError, says("scale is not above 0"));
  BOOST_CHECK_EXCEPTION(enqueue(CopyHeads{.tokens = 1, .heads = 1, .width = 12}, nullptr), ConfigError,
                        says("width is 12; expected a multiple of 8"));
  BOOST_CHECK_EXCEPTION(
      enqueue(JoinQueries{.heads = 1, .latent_dim = 8, .rotary_dim = 8, .plain_dim = 4}, nullptr),
      ConfigError, says("plain_dim is 4"));
  SlotTile tile;
  BOOST_CHECK_EXCEPTION(enqueue(NumberHeads{.tokens = 1, .heads = 1, .tiles = &tile}, nullptr), ConfigError,
                        says("one of tiles and token_slots is given; expected both or none"));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace adaptrt::cuda::latent_test
