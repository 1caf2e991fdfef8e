// A row of logits, or a hidden state, has the same bits for any set of wanted rows, and also if the body
// continues with only these rows after its last attention.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/cpu/kernel_table.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"

namespace adaptrt::testing::logit_rows_test {
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

/// A model's engine with the adapters of its sequences.
struct Served {
  explicit Served(const ModelOptions& options) : model(options) {
    adapters = {model.adapter(31, false), model.adapter(32, true)};
    engine = make_cpu_engine(model.program, std::make_shared<ThreadPool>(2));
    engine->allocate_kv_blocks(kBlocks);
  }

  /// Prompts of two adapters with base model prompts between them; two prompts share an adapter.
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

  /// Returns the next token of each prompt.
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

/// Selects each of `count` rows with probability 1 / `one_in`.
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
  // The share of rows falls from all to nearly none.
  for (const std::int64_t one_in : {1, 2, 2, 5, 30, 30, 1000000}) {
    StepArrays arrays(kept.prompts());
    arrays.logit_rows = some_rows(arrays.tokens.size(), one_in, &random);
    const auto found = logits_of(kept.engine.get(), arrays.input());
    BOOST_TEST_REQUIRE(found.size() == arrays.logit_rows.size() * kVocab);
    for (std::size_t i = 0; i < arrays.logit_rows.size(); ++i) {
      BOOST_TEST(same(found, i, prompts, static_cast<std::size_t>(arrays.logit_rows[i])));
    }
    // The keys and values of all tokens must exist, whichever rows were wanted.
    const auto after = logits_of(kept.engine.get(), StepArrays(kept.next()).input());
    for (std::size_t row = 0; row < 4; ++row) BOOST_TEST(same(after, row, next, row));
  }
}

BOOST_DATA_TEST_CASE(hidden_states_have_the_bits_that_they_have_among_all,
                     data::xrange(std::size(kQuantizations)), quantization) {
  Served all(options_of(kQuantizations[quantization], false));
  Served kept(options_of(kQuantizations[quantization], true));
  const auto width = static_cast<std::size_t>(all.engine->info().hidden_size);
  BOOST_TEST_REQUIRE(width == 48);
  constexpr std::size_t kVocab = 61;
  StepArrays arrays_of_all(all.prompts());
  arrays_of_all.hidden_rows = arrays_of_all.logit_rows;
  const StepResults expected = results_of(all.engine.get(), arrays_of_all.input());
  Random random(std::uint64_t{10});
  for (const std::int64_t one_in : {1, 2, 5, 30, 1000000}) {
    for (const std::int64_t one_logit_in : {1, 3, 1000000}) {
      StepArrays arrays(kept.prompts());
      arrays.hidden_rows = some_rows(arrays.tokens.size(), one_in, &random);
      arrays.logit_rows = some_rows(arrays.tokens.size(), one_logit_in, &random);
      const StepResults found = results_of(kept.engine.get(), arrays.input());
      const auto same = [](const std::vector<float>& some, const std::vector<float>& every,
                           std::span<const std::int32_t> rows, std::size_t size) {
        for (std::size_t i = 0; i < rows.size(); ++i) {
          const auto* from = every.data() + static_cast<std::size_t>(rows[i]) * size;
          if (std::memcmp(some.data() + i * size, from, size * sizeof(float)) != 0) return false;
        }
        return some.size() == rows.size() * size;
      };
      BOOST_TEST(same(found.hidden, expected.hidden, arrays.hidden_rows, width));
      BOOST_TEST(same(found.logits, expected.logits, arrays.logit_rows, kVocab));
    }
  }
}

BOOST_AUTO_TEST_CASE(logits_are_products_of_hidden_states) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const RandomModel model({.dtype = dtype, .max_batch_size = 3});
    const auto engine = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1));
    engine->allocate_kv_blocks(kBlocks);
    StepArrays arrays({{.tokens = {5, 8, 13, 21, 34}, .prompt_length = 5, .blocks = {0}}});
    arrays.hidden_rows = arrays.logit_rows;
    const StepResults results = results_of(engine.get(), arrays.input());
    const auto table = unpack(std::get<EmbeddingOp>(model.program.body.front()).table);
    for (std::size_t row = 0; row < 5; ++row) {
      for (std::size_t token = 0; token < 61; ++token) {
        double sum = 0.0;
        for (std::size_t i = 0; i < 48; ++i) {
          sum += double{results.hidden[row * 48 + i]} * table[token * 48 + i];
        }
        BOOST_TEST(std::abs(results.logits[row * 61 + token] - sum) < 1e-4);
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(models_without_lm_head_have_hidden_states_alone) {
  RandomModel model({});
  const auto whole = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1));
  Program program = model.program;
  program.head.pop_back();
  program.logits = kNoBuffer;
  const auto headless = make_cpu_engine(program, std::make_shared<ThreadPool>(1));
  BOOST_TEST(whole->info().has_logits);
  BOOST_TEST(!headless->info().has_logits);
  StepArrays arrays({{.tokens = {5, 8, 13}, .prompt_length = 3, .blocks = {0}}});
  for (Engine* engine : {whole.get(), headless.get()}) engine->allocate_kv_blocks(kBlocks);
  BOOST_CHECK_THROW(logits_of(headless.get(), arrays.input()), StepError);
  arrays.logit_rows.clear();
  arrays.hidden_rows = {0, 2};
  const auto expected = results_of(whole.get(), arrays.input()).hidden;
  BOOST_TEST(results_of(headless.get(), arrays.input()).hidden == expected, boost::test_tools::per_element());

  program.hidden = kNoBuffer;
  BOOST_CHECK_THROW(make_cpu_engine(program, std::make_shared<ThreadPool>(1)), EngineError);
  program.hidden = 0;  // a buffer of the body
  BOOST_CHECK_THROW(make_cpu_engine(program, std::make_shared<ThreadPool>(1)), EngineError);
}

BOOST_AUTO_TEST_CASE(engines_that_do_not_tell_hidden_states_refuse_them) {
  RandomModel model({});
  model.program.hidden = kNoBuffer;
  const auto engine = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1));
  engine->allocate_kv_blocks(kBlocks);
  BOOST_TEST(engine->info().hidden_size == 0);
  StepArrays arrays({{.tokens = {5, 8, 13}, .prompt_length = 3, .blocks = {0}}});
  arrays.hidden_rows = {1};
  BOOST_CHECK_THROW(results_of(engine.get(), arrays.input()), StepError);
}

int num_times_left = 0;

BOOST_AUTO_TEST_CASE(kernels_leave_the_thread_however_a_step_ends) {
  KernelTable kernels = *available_kernels().front();
  kernels.release_tiles = [] { ++num_times_left; };
  const RandomModel model({});
  const auto engine = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1), kernels);
  engine->allocate_kv_blocks(kBlocks);
  const StepArrays step({{.tokens = {3}, .first_position = 0, .prompt_length = 1, .blocks = {0}}});
  num_times_left = 0;
  static_cast<void>(logits_of(engine.get(), step.input()));
  BOOST_TEST(num_times_left == 1);
  const auto refuse = [](std::int64_t, std::int64_t, const float*) { throw StepError("no rows, please"); };
  BOOST_CHECK_THROW(engine->step(step.input(), refuse), StepError);
  BOOST_TEST(num_times_left == 2);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::logit_rows_test
