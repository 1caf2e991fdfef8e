#include <boost/test/unit_test.hpp>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"

namespace adaptrt::testing::step_input_test {
namespace {

/// An engine with content in its KV pool, and a valid step.
struct Fixture {
  Fixture() : model({.max_batch_size = 3, .max_num_tokens = 32, .max_seq_len = 40, .max_rank = 4}) {
    engine = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1));
    engine->allocate_kv_blocks(8);
    (void)logits_of(engine.get(), StepArrays({first_chunk()}).input());
  }

  static Piece first_chunk() {
    return {.tokens = {1, 2, 3, 4, 5}, .first_position = 0, .prompt_length = 9, .blocks = {2, 5}};
  }
  static std::vector<Piece> sound() {
    return {{.tokens = {6, 7, 8, 9}, .first_position = 5, .prompt_length = 9, .blocks = {2, 5}},
            {.tokens = {10, 11}, .first_position = 0, .prompt_length = 2, .blocks = {3}}};
  }

  /// Checks that the changed step is refused with these words, and that the pool is unchanged.
  void refuses(const std::string& words, const std::function<void(StepArrays*)>& change) {
    StepArrays arrays(sound());
    change(&arrays);
    bool called = false;
    BOOST_CHECK_EXCEPTION(
        engine->step(arrays.input(), [&](std::int64_t, std::int64_t, const float*) { called = true; }),
        StepError, [&](const StepError& error) {
          BOOST_TEST_INFO(error.what());
          return std::string(error.what()).find(words) != std::string::npos;
        });
    BOOST_TEST(!called);
    const auto again = logits_of(engine.get(), StepArrays(sound()).input());
    if (expected.empty()) expected = again;
    BOOST_TEST(std::memcmp(again.data(), expected.data(), again.size() * sizeof(float)) == 0);
  }

  RandomModel model;
  std::unique_ptr<Engine> engine;
  std::vector<float> expected;
};

BOOST_FIXTURE_TEST_SUITE(step_input, Fixture)

BOOST_AUTO_TEST_CASE(bad_sizes_are_refused) {
  refuses("0 tokens", [](StepArrays* a) { a->tokens.clear(); });
  refuses("max_num_tokens 32", [](StepArrays* a) { a->tokens.resize(33); });
  refuses("max_batch_size 3", [](StepArrays* a) { a->prompt_lengths.resize(4, 1); });
  refuses("0 sequences", [](StepArrays* a) { a->prompt_lengths.clear(); });
  refuses("positions has", [](StepArrays* a) { a->positions.pop_back(); });
  refuses("sequence_offsets has", [](StepArrays* a) { a->offsets.pop_back(); });
  refuses("block_tables has", [](StepArrays* a) { a->tables.pop_back(); });
  refuses("max_blocks_per_sequence", [](StepArrays* a) { a->max_blocks = -2; });
  refuses("adapters has", [](StepArrays* a) { a->adapters.pop_back(); });
}

BOOST_AUTO_TEST_CASE(states_are_refused_by_a_model_without_them) {
  refuses("state slots are given; the engine keeps no states",
          [](StepArrays* a) { a->state_slots = {0, 1}; });
  refuses("state slots are given; the engine keeps no states", [](StepArrays* a) {
    a->state_copies_from = {0};
    a->state_copies_to = {1};
  });
  BOOST_CHECK_THROW(engine->allocate_states(4), EngineError);
}

BOOST_AUTO_TEST_CASE(bad_embeddings_are_refused) {
  const std::vector<float> embedding(static_cast<std::size_t>(engine->info().prompt_embedding_size));
  const auto give = [&](std::vector<std::int32_t> rows, std::size_t count) {
    return [&embedding, rows, count](StepArrays* a) {
      a->prompt_embedding_rows = rows;
      a->prompt_embeddings.assign(count, embedding.data());
    };
  };
  refuses("prompt_embeddings has 1 elements, not 2", give({0, 1}, 1));
  refuses("prompt_embedding_rows do not ascend", give({1, 1}, 2));
  refuses("token_types has 2 elements", [](StepArrays* a) { a->token_types = {0, 0}; });
  refuses("token 1 has type 1; the model has 1", [](StepArrays* a) { a->token_types = {0, 1, 0, 0, 0, 0}; });
  refuses("rotary_positions has 1 elements, not 6", [](StepArrays* a) { a->rotary_positions = {0}; });
  refuses("token 2 has rotary position -1; accepted: 0 to 16777216",
          [](StepArrays* a) { a->rotary_positions = {0, 1, -1, 2, 0, 0}; });
  refuses("token 5 has rotary position 16777217",
          [](StepArrays* a) { a->rotary_positions = {0, 1, 1, 2, 0, 16777217}; });
  refuses("prompt_embedding_rows do not ascend", give({-1}, 1));
  refuses("prompt_embedding_rows do not ascend", give({6}, 1));
}

BOOST_AUTO_TEST_CASE(given_embeddings_take_the_place_of_tokens) {
  const auto width = static_cast<std::size_t>(engine->info().prompt_embedding_size);
  BOOST_TEST_REQUIRE(width > 0U);
  std::vector<std::vector<float>> rows(2, std::vector<float>(width));
  const StepArrays plain(sound());
  const auto* op = std::get_if<EmbeddingOp>(&model.program.body.front());
  BOOST_TEST_REQUIRE(op != nullptr);
  unpack_panel_row(op->table, plain.tokens[1], rows[0].data());
  unpack_panel_row(op->table, plain.tokens[4], rows[1].data());
  StepArrays given(sound());
  given.tokens[1] = 0;
  given.tokens[4] = 0;
  given.prompt_embedding_rows = {1, 4};
  given.prompt_embeddings = {rows[0].data(), rows[1].data()};
  const auto expected_logits = logits_of(engine.get(), plain.input());
  const auto logits = logits_of(engine.get(), given.input());
  BOOST_TEST(std::memcmp(logits.data(), expected_logits.data(), logits.size() * sizeof(float)) == 0);
  rows[0][0] += 1.0F;
  const auto changed = logits_of(engine.get(), given.input());
  BOOST_TEST(std::memcmp(changed.data(), expected_logits.data(), logits.size() * sizeof(float)) != 0);
}

BOOST_AUTO_TEST_CASE(bad_offsets_are_refused) {
  refuses("sequence_offsets do not run", [](StepArrays* a) { a->offsets.front() = 1; });
  refuses("sequence_offsets do not run", [](StepArrays* a) { a->offsets.back() = 5; });
  refuses("has no tokens", [](StepArrays* a) { a->offsets[1] = 0; });
  refuses("has no tokens", [](StepArrays* a) { a->offsets[1] = 100; });
}

BOOST_AUTO_TEST_CASE(bad_tokens_positions_and_rows_are_refused) {
  refuses("token 0 is -1", [](StepArrays* a) { a->tokens[0] = -1; });
  refuses("token 5 is 61", [](StepArrays* a) { a->tokens[5] = 61; });
  refuses("positions lie outside", [](StepArrays* a) { a->positions[0] = -1; });
  refuses("positions lie outside", [](StepArrays* a) { a->positions[0] = 37; });
  refuses("not consecutive", [](StepArrays* a) { a->positions[2] = 6; });
  refuses("prompt length 0", [](StepArrays* a) { a->prompt_lengths[1] = 0; });
  refuses("prompt length 41", [](StepArrays* a) { a->prompt_lengths[1] = 41; });
  refuses("logit_rows", [](StepArrays* a) { a->logit_rows = {0, 6}; });
  refuses("logit_rows", [](StepArrays* a) { a->logit_rows = {-1}; });
  refuses("logit_rows", [](StepArrays* a) { a->logit_rows = {2, 2}; });
}

BOOST_AUTO_TEST_CASE(bad_blocks_are_refused) {
  refuses("block table is -1", [](StepArrays* a) { a->tables[0] = -1; });
  refuses("block table is 8", [](StepArrays* a) { a->tables[2] = 8; });
  refuses("needs 2 blocks", [](StepArrays* a) {
    a->positions = {13, 14, 15, 16, 0, 1};
    a->max_blocks = 1;
    a->tables = {2, 3};
  });
  refuses("written at two places", [](StepArrays* a) { a->tables[2] = 2; });
  refuses("written and read at two places", [](StepArrays* a) {
    a->positions = {16, 17, 18, 19, 0, 1};
    a->tables = {3, 5, 3, -1};
  });
}

BOOST_AUTO_TEST_CASE(bad_copies_are_refused) {
  const auto copies = [](std::vector<std::int32_t> from, std::vector<std::int32_t> to) {
    return [=](StepArrays* a) {
      a->copies_from = from;
      a->copies_to = to;
    };
  };
  refuses("copies_to has 1 elements, not 2", copies({1, 2}, {3}));
  refuses("copy 0 is of block -1 to block 4; the pool has 8 blocks", copies({-1}, {4}));
  refuses("copy 1 is of block 2 to block 8; the pool has 8 blocks", copies({2, 2}, {4, 8}));
  // Each copy is reported once.
  refuses("engine step: copy 0 is of block -1 to block 9; the pool has 8 blocks; copy 1 is",
          copies({-1, 2}, {9, 8}));
  refuses("copy 0 is of block 4 to itself", copies({4}, {4}));
  refuses("copy 1 is to block 4, as one before it", copies({2, 5}, {4, 4}));
}

BOOST_AUTO_TEST_CASE(bad_adapters_are_refused) {
  DeviceAdapter adapter = model.adapter(5, false, 2);
  const auto with = [&](StepArrays* a) { a->adapters[1] = &adapter; };
  adapter.sites.pop_back();
  refuses("has 7 sites, the engine 8", with);
  adapter = model.adapter(5, false, 2);
  adapter.sites[3].total_rank = 1000;
  refuses("site 3 is inconsistent", with);
  adapter = model.adapter(5, false, 2);
  adapter.sites[0].parts[1].rank_offset = 5;
  refuses("site 0 is inconsistent", with);
  adapter = model.adapter(5, false, 2);
  adapter.sites[1].parts[0].b = nullptr;
  refuses("site 1 is inconsistent", with);
}

BOOST_AUTO_TEST_CASE(all_problems_come_at_once) {
  refuses("token 1 is -5; the vocabulary has 61; token 2 is 99", [](StepArrays* a) {
    a->tokens[1] = -5;
    a->tokens[2] = 99;
  });
}

BOOST_AUTO_TEST_CASE(logits_come_in_slices_of_max_batch_size) {
  const StepArrays arrays(sound());
  const auto all = logits_of(engine.get(), arrays.input());
  std::vector<std::pair<std::int64_t, std::int64_t>> slices;
  engine->step(arrays.input(), [&](std::int64_t first, std::int64_t rows, const float* logits) {
    slices.emplace_back(first, rows);
    BOOST_TEST(std::memcmp(logits, all.data() + first * 61,
                           static_cast<std::size_t>(rows) * 61 * sizeof(float)) == 0);
  });
  BOOST_TEST((slices == std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 3}, {3, 3}}));
  StepArrays none(sound());
  none.logit_rows.clear();
  engine->step(none.input(),
               [](std::int64_t, std::int64_t, const float*) { BOOST_FAIL("there are no rows"); });
}

BOOST_AUTO_TEST_CASE(a_pool_is_allocated_once_and_before_the_first_step) {
  BOOST_CHECK_THROW(engine->allocate_kv_blocks(4), ConfigError);
  const auto fresh = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1));
  const StepArrays arrays(sound());
  BOOST_CHECK_THROW(fresh->step(arrays.input(), [](std::int64_t, std::int64_t, const float*) {}), StepError);
  BOOST_CHECK_THROW(fresh->allocate_kv_blocks(0), ConfigError);
  BOOST_CHECK_THROW(fresh->allocate_kv_blocks(-3), ConfigError);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::step_input_test
