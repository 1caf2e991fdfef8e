// A row of logits has the same bits whichever other rows are asked for, and whether or not the body goes on
// with rows of logits alone after its last attention.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <memory>
#include <vector>

#include "engine/random_model.h"

namespace adaptrt::testing {
namespace {

namespace data = boost::unit_test::data;

constexpr std::int32_t kBlocks = 32;
constexpr Quantization kQuantizations[] = {
    {},
    {.algo = QuantAlgo::kW8A8},
    {.algo = QuantAlgo::kW4A16, .group_size = 16, .zero_points = true},
};

ModelOptions options_of(const Quantization& quantization, bool keep_logit_rows) {
  return {.dtype = DType::kBFloat16,
          .biases = true,
          .max_batch_size = 4,
          .max_rank = 9,
          .quantization = quantization,
          .keep_logit_rows = keep_logit_rows};
}

/// A model's engine with the adapters that its sequences have.
struct Served {
  explicit Served(const ModelOptions& options) : model(options) {
    adapters = {model.adapter(31, false), model.adapter(32, true)};
    engine = make_cpu_engine(model.program, std::make_shared<ThreadPool>(2));
    engine->allocate_kv_blocks(kBlocks);
  }

  /// Prompts of two adapters and of the base between them, two of them with one adapter.
  [[nodiscard]] std::vector<Piece> prompts() const {
    const std::vector<const DeviceAdapter*> of{adapters.data(), adapters.data(), nullptr, &adapters[1]};
    std::vector<Piece> pieces;
    Random random(std::uint64_t{5});
    for (std::size_t i = 0; i < of.size(); ++i) {
      const auto length = static_cast<std::int32_t>(1 + random.below(40));
      Piece piece{.prompt_length = length, .adapter = of[i]};
      for (std::int32_t t = 0; t < length; ++t) {
        piece.tokens.push_back(static_cast<std::int32_t>(random.below(61)));
      }
      for (std::int32_t block = 0; block < 3; ++block) {
        piece.blocks.push_back(static_cast<std::int32_t>(3 * i) + block);
      }
      pieces.push_back(std::move(piece));
    }
    return pieces;
  }

  /// The next token of each of the prompts.
  [[nodiscard]] std::vector<Piece> next() const {
    std::vector<Piece> pieces = prompts();
    for (Piece& piece : pieces) {
      piece.first_position = piece.prompt_length;
      piece.tokens = {7};
    }
    return pieces;
  }

  RandomModel model;
  std::vector<DeviceAdapter> adapters;
  std::unique_ptr<Engine> engine;
};

/// Each of `count` rows with a chance of one in `one_in`.
std::vector<std::int32_t> some_rows(std::size_t count, std::int64_t one_in, Random* random) {
  std::vector<std::int32_t> rows;
  for (std::size_t row = 0; row < count; ++row) {
    if (random->below(one_in) == 0) rows.push_back(static_cast<std::int32_t>(row));
  }
  return rows;
}

BOOST_AUTO_TEST_SUITE(logit_rows)

BOOST_DATA_TEST_CASE(rows_have_the_bits_that_they_have_among_all, data::xrange(std::size(kQuantizations)),
                     quantization) {
  Served all(options_of(kQuantizations[quantization], false));
  Served kept(options_of(kQuantizations[quantization], true));
  constexpr std::size_t kVocab = 61;
  const auto same = [&](const std::vector<float>& found, std::size_t at, const std::vector<float>& expected,
                        std::size_t row) {
    return std::memcmp(found.data() + at * kVocab, expected.data() + row * kVocab, kVocab * sizeof(float)) ==
           0;
  };
  const auto prompts = logits_of(all.engine.get(), StepArrays(all.prompts()).input());
  const auto next = logits_of(all.engine.get(), StepArrays(all.next()).input());
  Random random(std::uint64_t{9});
  // From all rows to hardly any.
  for (const std::int64_t one_in : {1, 2, 2, 5, 30, 30, 1000000}) {
    StepArrays arrays(kept.prompts());
    arrays.logit_rows = some_rows(arrays.tokens.size(), one_in, &random);
    const auto found = logits_of(kept.engine.get(), arrays.input());
    BOOST_TEST_REQUIRE(found.size() == arrays.logit_rows.size() * kVocab);
    for (std::size_t i = 0; i < arrays.logit_rows.size(); ++i) {
      BOOST_TEST(same(found, i, prompts, static_cast<std::size_t>(arrays.logit_rows[i])));
    }
    // The keys and values of all tokens are there, whatever was asked for.
    const auto after = logits_of(kept.engine.get(), StepArrays(kept.next()).input());
    for (std::size_t row = 0; row < 4; ++row) BOOST_TEST(same(after, row, next, row));
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing
