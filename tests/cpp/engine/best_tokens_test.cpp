// The checks of the rows whose best tokens an engine finds.

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/engine/check_step_input.h"

namespace adaptrt::testing::best_tokens_test {
namespace {

/// An engine that finds best tokens, and a valid step of one sequence.
struct Fixture {
  Fixture() {
    info.vocab_size = 10;
    info.max_batch_size = 3;
    info.max_num_tokens = 8;
    info.max_seq_len = 8;
    info.tokens_per_block = 4;
    info.finds_best_tokens = true;
    info.finds_highest_logits = true;
  }

  void check() {
    checker.check(
        {.token_ids = tokens,
         .positions = tokens,
         .sequence_offsets = offsets,
         .prompt_lengths = prompts,
         .block_tables = tables,
         .max_blocks_per_sequence = 1,
         .adapters = adapters,
         .logit_rows = logit_rows,
         .best_token_rows = rows,
         .best_tokens = best,
         .highest = {.rows = highest_rows, .count = count, .summaries = summaries, .logits = highest}},
        info, 1);
  }

  /// Checks that the step is refused with these words.
  void refuses(const std::string& words) {
    BOOST_CHECK_EXCEPTION(check(), StepError, [&](const StepError& error) {
      BOOST_TEST_INFO(error.what());
      return std::string(error.what()).find(words) != std::string::npos;
    });
  }

  EngineInfo info;
  StepInputChecker checker;
  std::vector<std::int32_t> tokens = {0, 1, 2, 3};
  std::vector<std::int32_t> offsets = {0, 4};
  std::vector<std::int32_t> prompts = {4};
  std::vector<std::int32_t> tables = {0};
  std::vector<const DeviceAdapter*> adapters = {nullptr};
  std::vector<std::int32_t> logit_rows = {0, 2};
  std::vector<std::int32_t> rows = {1, 3};
  std::vector<std::int32_t> best = {0, 0};
  std::vector<std::int32_t> highest_rows;
  std::int32_t count = 0;
  std::vector<RowSummary> summaries;
  std::vector<TokenLogit> highest;
};

/// A step whose last row is one of highest logits.
struct HighestFixture : Fixture {
  HighestFixture() {
    rows = {1};
    best = {0};
    highest_rows = {3};
    count = 10;
    summaries.resize(1);
    highest.resize(10);
  }
};

BOOST_FIXTURE_TEST_SUITE(best_tokens, Fixture)

BOOST_AUTO_TEST_CASE(rows_of_both_kinds_may_alternate) {
  BOOST_CHECK_NO_THROW(check());
  logit_rows.clear();
  BOOST_CHECK_NO_THROW(check());
  rows.clear();
  best.clear();
  BOOST_CHECK_NO_THROW(check());
}

BOOST_AUTO_TEST_CASE(only_engines_that_find_best_tokens_take_them) {
  info.finds_best_tokens = false;
  refuses("best_token_rows are given; the engine does not find best tokens");
  rows.clear();
  best.clear();
  BOOST_CHECK_NO_THROW(check());
}

BOOST_AUTO_TEST_CASE(models_without_logits_have_no_best_tokens) {
  info.has_logits = false;
  logit_rows.clear();
  refuses("best_token_rows are given; the model has no lm_head");
}

BOOST_AUTO_TEST_CASE(each_row_has_a_place_for_its_token) {
  best.pop_back();
  refuses("best_tokens has 1 elements, not 2");
}

BOOST_AUTO_TEST_CASE(rows_ascend_within_the_tokens) {
  rows = {3, 1};
  refuses("best_token_rows do not ascend within the tokens");
  rows = {1, 4};
  refuses("best_token_rows do not ascend within the tokens");
  rows = {-1, 1};
  refuses("best_token_rows do not ascend within the tokens");
}

BOOST_AUTO_TEST_CASE(a_row_has_one_kind) {
  rows = {1, 2};
  refuses("row 2 is in logit_rows and in best_token_rows");
  rows = {0, 1};
  refuses("row 0 is in logit_rows and in best_token_rows");
}

BOOST_AUTO_TEST_SUITE_END()

BOOST_FIXTURE_TEST_SUITE(highest_rows, HighestFixture)

BOOST_AUTO_TEST_CASE(all_kinds_of_rows_may_be_in_one_step) {
  BOOST_CHECK_NO_THROW(check());
}

BOOST_AUTO_TEST_CASE(only_engines_that_find_highest_logits_take_them) {
  info.finds_highest_logits = false;
  refuses("highest.rows are given; the engine does not find highest logits");
  info.finds_highest_logits = true;
  info.has_logits = false;
  refuses("highest.rows are given; the model has no lm_head");
}

BOOST_AUTO_TEST_CASE(each_row_has_a_place_for_its_results) {
  summaries.clear();
  refuses("highest.summaries has 0 elements, not 1");
  summaries.resize(1);
  highest.pop_back();
  refuses("highest.logits has 9 elements, not 10");
}

BOOST_AUTO_TEST_CASE(there_are_limits_of_the_number_of_logits) {
  const auto set = [&](std::int32_t of_row) {
    count = of_row;
    highest.resize(static_cast<std::size_t>(of_row));
  };
  set(0);
  refuses("highest.count is 0; expected 1 to 10");
  set(11);
  refuses("highest.count is 11; expected 1 to 10");
  info.vocab_size = 1000;
  set(128);
  BOOST_CHECK_NO_THROW(check());
  set(129);
  refuses("highest.count is 129; expected 1 to 128");
}

BOOST_AUTO_TEST_CASE(rows_ascend_and_are_in_no_other_list) {
  highest_rows = {4};
  refuses("highest.rows do not ascend within the tokens");
  highest_rows = {2};
  refuses("row 2 is in logit_rows and in highest.rows");
  highest_rows = {1};
  refuses("row 1 is in best_token_rows and in highest.rows");
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::best_tokens_test
