#include "adaptrt/exec/prompt_tuning.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace adaptrt::prompt_tuning_test {
namespace {

constexpr std::int64_t kFirstId = 10;

EmbeddingTable table_of(std::vector<float> values, std::vector<std::int64_t> shape,
                        DType dtype = DType::kFloat32) {
  return {{std::make_shared<const std::vector<float>>(std::move(values)), std::move(shape)}, dtype};
}

PromptTuningConfig config_of(std::vector<float> values,
                             std::optional<std::vector<std::uint64_t>> extra_ids = std::nullopt) {
  const auto rows = static_cast<std::int64_t>(values.size()) / 2;
  return {table_of(std::move(values), {rows, 2}), std::move(extra_ids)};
}

using Prompt = std::vector<std::int32_t>;

/// Returns the digest at the last token.
Sha256Digest last_of(const PromptTuningConfig& config, const Prompt& prompt) {
  return config.digests_of(prompt, kFirstId).back().digest;
}

EngineInfo engine_of(DType dtype = DType::kFloat32) {
  EngineInfo engine;
  engine.dtype = dtype;
  engine.prompt_embedding_size = 2;
  return engine;
}

std::string problem_of(const EmbeddingTable& table, const EngineInfo& engine = engine_of()) {
  const auto problems = table.validate(engine).list();
  return problems.empty() ? "" : problems.front();
}

BOOST_AUTO_TEST_SUITE(prompt_tuning)

BOOST_AUTO_TEST_CASE(digests_are_of_virtual_tokens_and_extra_ids_alone) {
  const auto config = config_of({1, 2, 3, 4});
  BOOST_TEST(config.digests_of(Prompt{1, 2, 3}, kFirstId).empty());
  const auto digests = config.digests_of(Prompt{1, 11, 3, 10}, kFirstId);
  BOOST_TEST_REQUIRE(digests.size() == 2U);
  BOOST_TEST(digests[0].position == 1);
  BOOST_TEST(digests[1].position == 3);
  const auto named = config_of({1, 2, 3, 4}, {{0, 0, 7}}).digests_of(Prompt{1, 2, 3}, kFirstId);
  BOOST_TEST_REQUIRE(named.size() == 1U);
  BOOST_TEST(named[0].position == 2);
}

BOOST_AUTO_TEST_CASE(the_same_rows_of_another_table_are_the_same) {
  const auto digest = last_of(config_of({1, 2, 3, 4}), {1, 10, 11});
  BOOST_TEST((digest == last_of(config_of({1, 2, 3, 4, 5, 6}), {1, 10, 11})));
  BOOST_TEST((digest == last_of(config_of({3, 4, 1, 2}), {1, 11, 10})));
  BOOST_TEST((digest == last_of(config_of({1, 2, 3, 4}), {9, 10, 11})));  // tokens themselves are compared
                                                                          // separately
  BOOST_TEST((digest == last_of(config_of({1, 2, 3, 4}, {{0, 0, 0}}), {1, 10, 11})));
}

BOOST_AUTO_TEST_CASE(anything_else_is_something_else) {
  std::vector<Sha256Digest> digests = {
      last_of(config_of({1, 2, 3, 4}), {1, 10, 11}),
      last_of(config_of({1, 2, 3, 4}), {1, 11, 10}),
      last_of(config_of({1, 2, 3, 5}), {1, 10, 11}),
      last_of(config_of({1, 0, 3, 4}), {1, 10, 11}),
      last_of(config_of({1, 2, 3, 4}), {1, 1, 10, 11}),
      last_of(config_of({1, 2, 3, 4}), {1, 10, 1, 11}),
      last_of(config_of({1, 2, 3, 4}), {1, 1, 11}),
      last_of(config_of({1, 2, 3, 4}, {{0, 1, 0}}), {1, 10, 11}),
      last_of(config_of({1, 2, 3, 4}, {{0, 0, 1}}), {1, 10, 11}),
      last_of(config_of({1, 2, 3, 4}, {{1, 0, 0}}), {1, 10, 11}),
      last_of(config_of({1, 2, 3, 4}, {{1, 0}}), {1, 2}),
      last_of(config_of({1, 2, 3, 4}, {{0, 1}}), {1, 2}),
  };
  std::ranges::sort(digests);
  BOOST_TEST((std::ranges::adjacent_find(digests) == digests.end()));
}

BOOST_AUTO_TEST_CASE(threads_may_ask_for_digests_at_once) {
  const auto table = table_of(std::vector<float>(2000, 3.0F), {1000, 2});
  std::vector<const Sha256Digest*> found(4);
  std::vector<std::thread> threads;
  for (auto& digest : found) {
    threads.emplace_back([&digest, copy = table] { digest = copy.digests().data(); });
  }
  for (auto& thread : threads) thread.join();
  BOOST_TEST(table.digests().size() == 1000U);
  for (const auto* digest : found) BOOST_TEST(digest == table.digests().data());
}

BOOST_AUTO_TEST_CASE(tables_that_engines_do_not_take_are_told_by_name) {
  BOOST_TEST(problem_of(table_of({1, 2}, {1, 2})).empty());
  BOOST_TEST(problem_of(table_of({1, 2}, {2, 1})).starts_with("embedding_table is [2, 1]; accepted: "));
  BOOST_TEST(problem_of(table_of({1, 2}, {2})).starts_with("embedding_table is [2]; accepted: "));
  BOOST_TEST(problem_of({}).starts_with("embedding_table is [0, 0]; accepted: "));
  EngineInfo with_coordinates = engine_of();
  with_coordinates.num_coordinates = 1;
  BOOST_TEST(problem_of(table_of({0.5F, -1, 0.5F, 1 << 23}, {2, 2}), with_coordinates).empty());
  for (const float coordinate : {-2.0F, 0.5F, 8388610.0F}) {
    BOOST_TEST(problem_of(table_of({0.5F, 1, 0.5F, coordinate}, {2, 2}), with_coordinates) ==
               "embedding_table[1, 1] is " + std::to_string(coordinate) +
                   "; accepted: a coordinate, a whole number from -1 to 8388608");
  }
  BOOST_TEST(problem_of(table_of({1, 2}, {1, 2}, DType::kBFloat16), engine_of(DType::kBFloat16)).empty());
  BOOST_TEST(problem_of(table_of({1, 2}, {1, 2}), engine_of(DType::kBFloat16)).empty());
  BOOST_TEST(problem_of(table_of({1, 2}, {1, 2}, DType::kFloat16), engine_of(DType::kBFloat16)) ==
             "embedding_table is of float16; accepted: float32 and bfloat16, the engine's type");
  BOOST_TEST(problem_of(table_of({1, 2}, {1, 2}, DType::kFloat16)) ==
             "embedding_table is of float16; accepted: float32, the engine's type");
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  BOOST_TEST(problem_of(table_of({1, 2, 3, kInfinity}, {2, 2})) ==
             "embedding_table[1, 1] is inf; accepted: finite values");
}

BOOST_AUTO_TEST_CASE(extra_ids_are_the_prompts) {
  const auto config = config_of({1, 2}, {{1, 2}});
  BOOST_TEST(config.validate(engine_of(), 2).empty());
  BOOST_TEST(config.validate(engine_of(), 3).list().front() ==
             "input_token_extra_ids has 2 ids; accepted: one for each of the 3 tokens of input_token_ids, or "
             "None");
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::prompt_tuning_test
