// Engines that find best tokens and highest logits: responses are the same as with the rows of logits.

#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "adaptrt/exec/executor.h"
#include "crowd_setting.h"
#include "fake_engine.h"
#include "fake_grammar.h"
#include "request_kinds.h"
#include "sequences.h"

namespace adaptrt::test::best_tokens_test {
namespace {

using namespace request_kinds;

/// An engine that finds best tokens and highest logits, or not, and its executor.
struct Run {
  explicit Run(bool finds, const ExecutorConfig& config = {}) {
    FakeEngine::Options options;
    options.max_beam_width = 2;
    options.finds_best_tokens = finds;
    options.finds_highest_logits = finds;
    ExecutorConfig with_beams = config;
    with_beams.max_beam_width = 2;
    engine = std::make_shared<FakeEngine>(options);
    executor = std::make_unique<Executor>(engine, with_beams, kAvailableMemory, check_every_step);
    executor->set_grammar_compiler(std::make_shared<FakeCompiler>());
  }

  std::shared_ptr<FakeEngine> engine;
  std::unique_ptr<Executor> executor;
};

BOOST_AUTO_TEST_SUITE(best_tokens)

BOOST_DATA_TEST_CASE(a_request_needs_logits_or_less, boost::unit_test::data::make(kKinds), kind) {
  Request request = make_request(kPrompt, 9);
  kind.set(request);
  const Run with(true);
  const Run without(false);
  check_same(collect(*with.executor, with.executor->enqueue_request(request)),
             collect(*without.executor, without.executor->enqueue_request(request)));
  using Need = RowNeed::Kind;
  BOOST_TEST((with.engine->num_logit_rows() > 0) == (kind.need.kind == Need::kLogits));
  BOOST_TEST((with.engine->num_best_tokens() > 0) == (kind.need.kind == Need::kBestToken));
  BOOST_TEST((with.engine->num_highest_rows() > 0) == (kind.need.kind == Need::kHighest));
  BOOST_TEST(with.engine->max_highest() == kind.need.num_highest);
  BOOST_TEST(with.engine->num_logit_rows() + with.engine->num_best_tokens() +
                 with.engine->num_highest_rows() ==
             without.engine->num_logit_rows());
  BOOST_TEST(without.engine->num_best_tokens() + without.engine->num_highest_rows() == 0);
}

BOOST_AUTO_TEST_CASE(more_than_the_most_highest_logits_are_a_row) {
  for (const std::int32_t top_k : {kMaxHighestLogits, kMaxHighestLogits + 1}) {
    FakeEngine::Options options;
    options.vocab_size = 300;
    options.finds_highest_logits = true;
    const auto engine = std::make_shared<FakeEngine>(options);
    Executor executor(engine, {}, kAvailableMemory, check_every_step);
    Request request = make_request(kPrompt, 5);
    request.sampling_config.top_k = top_k;
    static_cast<void>(collect_result(executor, executor.enqueue_request(request)));
    const bool is_most = top_k == kMaxHighestLogits;
    BOOST_TEST(engine->num_highest_rows() == (is_most ? 5 : 0));
    BOOST_TEST(engine->num_logit_rows() == (is_most ? 0 : 5));
  }
}

BOOST_AUTO_TEST_CASE(logits_are_needed_until_the_end_id_is_allowed) {
  Request request = make_request(kPrompt, 9);
  request.sampling_config.min_tokens = 4;
  request.end_id = expected_tokens(kPrompt, 3).back();
  const Run with(true);
  const Run without(false);
  check_same(collect(*with.executor, with.executor->enqueue_request(request)),
             collect(*without.executor, without.executor->enqueue_request(request)));
  BOOST_TEST(with.engine->num_logit_rows() == 4);
  BOOST_TEST(with.engine->num_best_tokens() > 0);
}

BOOST_DATA_TEST_CASE(rows_of_the_prompt_need_logits, boost::unit_test::data::make({false, true}), log_probs) {
  Request request = make_request(kPrompt, 9);
  request.output_config.return_context_logits = !log_probs;
  request.output_config.return_prompt_log_probs = log_probs;
  ExecutorConfig config;
  config.enable_chunked_context = true;
  config.max_num_tokens = 3;
  const Run with(true, config);
  const Run without(false, config);
  check_same(collect(*with.executor, with.executor->enqueue_request(request)),
             collect(*without.executor, without.executor->enqueue_request(request)));
  // Log probs end one row earlier, and the last token of the prompt has a step of its own.
  BOOST_TEST(with.engine->num_logit_rows() == std::ssize(kPrompt) - (log_probs ? 1 : 0));
  BOOST_TEST(with.engine->num_best_tokens() == (log_probs ? 9 : 8));
}

const std::vector<CrowdSetting> kSettings = {{CapacitySchedulerPolicy::kGuaranteedNoEvict, 512, 64, true},
                                             {CapacitySchedulerPolicy::kMaxUtilization, 128, 11, true},
                                             {CapacitySchedulerPolicy::kMaxUtilization, 128, 64, false}};

BOOST_DATA_TEST_CASE(a_mixed_crowd_gets_the_same_responses, boost::unit_test::data::make(kSettings),
                     setting) {
  std::mt19937 random(5);
  const std::vector<Request> crowd = draw_mixed_crowd(random, 60);
  const Run with(true, config_of(setting));
  const Run without(false, config_of(setting));
  const std::vector<RequestId> found = with.executor->enqueue_requests(crowd);
  const std::vector<RequestId> expected = without.executor->enqueue_requests(crowd);
  for (std::size_t i = 0; i < crowd.size(); ++i) {
    BOOST_TEST_CONTEXT("request " << i) {
      // The number of drafts in a step depends on the rest of the crowd.
      check_same(collect(*with.executor, found[i]), collect(*without.executor, expected[i]),
                 has_drafts(crowd[i]));
    }
  }
  BOOST_TEST(with.engine->num_best_tokens() > 100);
  BOOST_TEST(with.engine->num_logit_rows() > 100);
  BOOST_TEST(with.engine->num_highest_rows() > 50);
}

/// No token can be chosen after one particular token.
class PoisonedEngine final : public FakeEngine {
 public:
  static constexpr TokenId kPoison = 66;
  PoisonedEngine(bool finds_best_tokens, float poison)
      : FakeEngine([&] {
          Options options;
          options.finds_best_tokens = finds_best_tokens;
          return options;
        }()),
        poison_(poison) {}

  using Engine::step;
  void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) override {
    const auto is_poisoned = [&](std::int32_t row) {
      return input.token_ids[static_cast<std::size_t>(row)] == kPoison;
    };
    const auto poison = [&](std::int64_t first_row, std::int64_t num_rows, const float* logits) {
      const auto width = static_cast<std::size_t>(info().vocab_size);
      std::vector<float> rows(logits, logits + static_cast<std::size_t>(num_rows) * width);
      for (std::int64_t row = 0; row < num_rows; ++row) {
        if (!is_poisoned(input.logit_rows[static_cast<std::size_t>(first_row + row)])) continue;
        std::fill_n(rows.begin() + row * info().vocab_size, width, poison_);
      }
      sink(first_row, num_rows, rows.data());
    };
    FakeEngine::step(input, poison, hidden_sink);
    for (std::size_t i = 0; i < input.best_tokens.size(); ++i) {
      if (!is_poisoned(input.best_token_rows[i])) continue;
      input.best_tokens[i] = std::isnan(poison_) ? kUnusableLogits : kEveryTokenForbidden;
    }
  }

 private:
  float poison_;
};

BOOST_DATA_TEST_CASE(rows_without_a_best_token_fail_their_request,
                     boost::unit_test::data::make({false, true}) *
                         boost::unit_test::data::make({false, true}),
                     is_nan, finds_best_tokens) {
  const float poison =
      is_nan ? std::numeric_limits<float>::quiet_NaN() : -std::numeric_limits<float>::infinity();
  Executor executor(std::make_shared<PoisonedEngine>(finds_best_tokens, poison), {}, kAvailableMemory,
                    check_every_step);
  auto poisoned = make_request({1, 2, PoisonedEngine::kPoison}, 3);
  const auto ids = executor.enqueue_requests({make_request(kPrompt, 3), poisoned, several(poisoned, 2)});
  for (const std::size_t i : {1U, 2U}) {
    const auto responses = collect(executor, ids[i]);
    BOOST_TEST_REQUIRE(responses.size() == 1U);
    BOOST_TEST(responses[0].error_msg ==
               (is_nan ? "the engine's logits have NaN or infinity" : "every token is forbidden"));
  }
  BOOST_TEST(collect_result(executor, ids[0]).output_token_ids.at(0) == expected_tokens(kPrompt, 3),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(draft_engines_find_best_tokens_too) {
  for (const bool finds_best_tokens : {false, true}) {
    FakeEngine::Options options;
    options.finds_best_tokens = finds_best_tokens;
    const auto draft_engine = std::make_shared<FakeEngine>(options);
    ExecutorConfig config;
    config.draft_target_decoding_config.emplace();
    const auto executor = make_drafting_executor(config, options, draft_engine);
    const auto result = collect_result(*executor, executor->enqueue_request(make_request(kPrompt, 20)));
    BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(kPrompt, 20),
               boost::test_tools::per_element());
    BOOST_TEST(result.decoding_iter < 10);  // drafts of the same model are right
    BOOST_TEST((draft_engine->num_best_tokens() > 0) == finds_best_tokens);
    BOOST_TEST((draft_engine->num_logit_rows() > 0) == !finds_best_tokens);
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::best_tokens_test
