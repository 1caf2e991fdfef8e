// The KV cache: its precision, its size, and the isolation of sequences.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/cpu/kernel_table.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"
#include "emulated_tiles/kernel_tables.h"

namespace adaptrt::testing::kv_cache_test {
namespace {

namespace data = boost::unit_test::data;

constexpr std::int32_t kNumBlocks = 24;
constexpr std::size_t kVocab = 61;

std::unique_ptr<Engine> engine_of(const Program& program, const std::string& kernels = "") {
  auto engine = make_cpu_engine(program, std::make_shared<ThreadPool>(2), kernel_table(kernels));
  engine->allocate_kv_blocks(kNumBlocks);
  return engine;
}

/// Tokens [first, end) of a sequence.
Piece piece_of(const std::vector<std::int32_t>& tokens, std::size_t first, std::size_t end,
               std::vector<std::int32_t> blocks) {
  return {.tokens = {tokens.begin() + static_cast<std::ptrdiff_t>(first),
                     tokens.begin() + static_cast<std::ptrdiff_t>(end)},
          .first_position = static_cast<std::int32_t>(first),
          .prompt_length = static_cast<std::int32_t>(tokens.size()),
          .blocks = std::move(blocks)};
}

std::vector<float> run(Engine* engine, const std::vector<Piece>& pieces) {
  return logits_of(engine, StepArrays(pieces).input());
}

std::vector<std::int32_t> random_tokens(std::size_t count, std::uint64_t seed) {
  Random random(seed);
  std::vector<std::int32_t> tokens(count);
  for (auto& token : tokens) token = static_cast<std::int32_t>(random.below(kVocab - 1));
  return tokens;
}

/// Returns rows [first, end) of logits.
std::vector<float> rows(const std::vector<float>& logits, std::size_t first, std::size_t end) {
  return {logits.begin() + static_cast<std::ptrdiff_t>(first * kVocab),
          logits.begin() + static_cast<std::ptrdiff_t>(end * kVocab)};
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

BOOST_AUTO_TEST_SUITE(kv_cache)

BOOST_AUTO_TEST_CASE(a_block_has_the_bytes_of_its_slots) {
  // Two layers, keys and values, two heads of 12; values have 16 columns.
  const auto bytes = [](ModelOptions options) {
    return make_cpu_engine(RandomModel(options).program, std::make_shared<ThreadPool>(1))
        ->info()
        .kv_block_bytes;
  };
  BOOST_TEST(bytes({.dtype = DType::kBFloat16}) == 2U * 2 * 16 * (12 + 16) * 2);
  BOOST_TEST(bytes({.dtype = DType::kFloat32, .tokens_per_block = 23}) == 2U * 2 * 32 * (12 + 16) * 4);
  BOOST_TEST(bytes({.dtype = DType::kBFloat16, .int8_kv_cache = true}) == 2U * 2 * 16 * (12 + 4 + 16 + 4));
}

BOOST_DATA_TEST_CASE(blocks_that_were_kept_elsewhere_are_read_as_the_same,
                     data::make({0, 1, 2}) * data::make({false, true}), dtype_index, int8_kv_cache) {
  RandomModel model({.dtype = static_cast<DType>(dtype_index), .int8_kv_cache = int8_kv_cache});
  model.program.identity = "this one";
  const auto tokens = random_tokens(70, 5);
  const auto first = engine_of(model.program);
  const auto alone = run(first.get(), {piece_of(tokens, 0, 70, {0, 1, 2, 3, 4})});
  BOOST_TEST(first->info().kv_identity == "this one");
  const auto second = engine_of(model.program);
  std::vector<std::byte> kept(first->info().kv_block_bytes);
  for (const auto& [from, to] : {std::pair{0, 20}, std::pair{1, 3}, std::pair{2, 0}}) {
    first->read_kv_block(from, kept);
    second->write_kv_block(to, kept);
  }
  const auto reused = run(second.get(), {piece_of(tokens, 48, 70, {20, 3, 0, 10, 11})});
  BOOST_TEST(same_bits(reused, rows(alone, 48, 70)));
}

BOOST_AUTO_TEST_CASE(blocks_that_are_not_there_are_neither_read_nor_written) {
  const auto engine = engine_of(RandomModel({}).program);
  std::vector<std::byte> bytes(engine->info().kv_block_bytes);
  for (const std::int32_t block : {-1, kNumBlocks}) {
    BOOST_CHECK_THROW(engine->read_kv_block(block, bytes), EngineError);
    BOOST_CHECK_THROW(engine->write_kv_block(block, bytes), EngineError);
  }
  bytes.pop_back();
  BOOST_CHECK_THROW(engine->read_kv_block(0, bytes), EngineError);
  BOOST_CHECK_THROW(engine->write_kv_block(0, bytes), EngineError);
}

BOOST_DATA_TEST_CASE(int8_is_near_the_unquantised_cache, kernel_tables() * data::make({0, 1, 2}), kernels,
                     dtype_index) {
  ModelOptions options{.dtype = static_cast<DType>(dtype_index)};
  const auto tokens = random_tokens(150, 4);
  const auto piece = piece_of(tokens, 0, tokens.size(), {3, 1, 4, 0, 5, 9, 2, 6, 8, 7});
  const auto expected = run(engine_of(RandomModel(options).program, kernels).get(), {piece});
  options.int8_kv_cache = true;
  const auto actual = run(engine_of(RandomModel(options).program, kernels).get(), {piece});
  // An element's error is at most half of 1 / 127 of its row's maximum, and typically a quarter of that.
  // Errors of the twelve elements of a key and of the tokens' values average out, and two layers add up.
  constexpr float kTolerance = 0.02F;
  float greatest = 0.0F;
  float difference = 0.0F;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    greatest = std::max(greatest, std::abs(expected[i]));
    difference = std::max(difference, std::abs(actual[i] - expected[i]));
  }
  BOOST_TEST(difference <= kTolerance * greatest, difference / greatest);
  BOOST_TEST(difference > 0.0F);
}

BOOST_DATA_TEST_CASE(blocks_of_another_request_are_read_as_one_s_own,
                     data::make({0, 1, 2}) * data::make({false, true}), dtype_index, int8_kv_cache) {
  const RandomModel model({.dtype = static_cast<DType>(dtype_index), .int8_kv_cache = int8_kv_cache});
  const auto tokens = random_tokens(70, 5);
  const auto alone = run(engine_of(model.program).get(), {piece_of(tokens, 0, 70, {0, 1, 2, 3, 4})});
  const auto engine = engine_of(model.program);
  auto other = tokens;
  std::reverse(other.begin() + 48, other.end());
  (void)run(engine.get(), {piece_of(other, 0, 70, {7, 6, 5, 9, 8})});
  const auto reused = run(engine.get(), {piece_of(tokens, 48, 70, {7, 6, 5, 10, 11})});
  BOOST_TEST(same_bits(reused, rows(alone, 48, 70)));
}

BOOST_DATA_TEST_CASE(a_copied_block_is_read_as_one_s_own, data::make({0, 1, 2}) * data::make({false, true}),
                     dtype_index, int8_kv_cache) {
  const RandomModel model({.dtype = static_cast<DType>(dtype_index), .int8_kv_cache = int8_kv_cache});
  const auto tokens = random_tokens(60, 5);
  auto other = tokens;
  std::reverse(other.begin() + 41, other.end());
  const auto alone = run(engine_of(model.program).get(), {piece_of(tokens, 0, 60, {0, 1, 2, 3})});
  const auto other_alone = run(engine_of(model.program).get(), {piece_of(other, 0, 60, {0, 1, 2, 3})});
  const auto engine = engine_of(model.program);
  (void)run(engine.get(), {piece_of(tokens, 0, 41, {7, 6, 5})});
  // Both sequences continue in the step that makes the copy, one of them in the copied block.
  StepArrays arrays({piece_of(tokens, 41, 60, {7, 6, 5, 10}), piece_of(other, 41, 60, {7, 6, 11, 12})});
  arrays.copies_from = {5};
  arrays.copies_to = {11};
  const auto forked = logits_of(engine.get(), arrays.input());
  BOOST_TEST(same_bits(rows(forked, 0, 19), rows(alone, 41, 60)));
  BOOST_TEST(same_bits(rows(forked, 19, 38), rows(other_alone, 41, 60)));
}

BOOST_AUTO_TEST_CASE(copies_are_made_in_their_order) {
  // A block has several of the slices that threads share.
  const RandomModel model({.num_layers = 20, .tokens_per_block = 128});
  const auto engine = engine_of(model.program);
  BOOST_TEST_REQUIRE(engine->info().kv_block_bytes > 2U << 18);
  const auto tokens = random_tokens(100, 5);
  const auto others = random_tokens(90, 6);
  const auto alone = run(engine.get(), {piece_of(tokens, 0, 100, {0})});
  (void)run(engine.get(), {piece_of(tokens, 0, 99, {1}), piece_of(others, 0, 89, {2})});
  StepArrays arrays({piece_of(tokens, 99, 100, {3}), piece_of(others, 89, 90, {1})});
  arrays.copies_from = {1, 2};
  arrays.copies_to = {3, 1};
  const auto forked = logits_of(engine.get(), arrays.input());
  BOOST_TEST(same_bits(rows(forked, 0, 1), rows(alone, 99, 100)));
  const auto others_alone = run(engine.get(), {piece_of(others, 0, 90, {0})});
  BOOST_TEST(same_bits(rows(forked, 1, 2), rows(others_alone, 89, 90)));
}

BOOST_DATA_TEST_CASE(tokens_that_are_not_finite_spoil_those_behind_them_alone,
                     kernel_tables() * data::make({0, 1, 2}) * data::make({false, true}), kernels,
                     dtype_index, int8_kv_cache) {
  constexpr std::size_t kBad = 21;  // in the middle of a tile and of a block
  const auto dtype = static_cast<DType>(dtype_index);
  RandomModel model({.dtype = dtype, .int8_kv_cache = int8_kv_cache});
  auto& embedding = std::get<EmbeddingOp>(model.program.body.front()).table;
  auto values = unpack(embedding);
  values[(kVocab - 1) * 48 + 7] = std::numeric_limits<float>::infinity();
  embedding = model.storage().matrix(dtype, kVocab, 48, values);

  const auto good = random_tokens(40, 6);
  auto bad = good;
  bad[kBad] = kVocab - 1;
  const auto expected = run(engine_of(model.program, kernels).get(), {piece_of(good, 0, 40, {0, 1, 2})});
  const auto engine = engine_of(model.program, kernels);
  const auto crowd = run(engine.get(), {piece_of(bad, 0, 40, {0, 1, 2}), piece_of(good, 0, 40, {3, 4, 5})});
  BOOST_TEST(same_bits(rows(crowd, 0, kBad), rows(expected, 0, kBad)));
  for (const float logit : rows(crowd, kBad, 40)) BOOST_TEST_REQUIRE(std::isnan(logit));
  BOOST_TEST(same_bits(rows(crowd, 40, 80), expected));
  // Another sequence then uses the bad request's blocks, completely or up to before the bad token.
  const auto after = run(engine.get(), {piece_of(good, 0, 18, {2, 1})});
  BOOST_TEST(same_bits(after, rows(expected, 0, 18)));
  const auto reused = run(engine.get(), {piece_of(good, 16, 40, {0, 6, 7})});
  BOOST_TEST(same_bits(reused, rows(expected, 16, 40)));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::kv_cache_test
