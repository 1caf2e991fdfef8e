// Engines that find best tokens and highest logits: responses are the same as with the rows of logits.

#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/exec/executor.h"
#include "crowd_setting.h"
#include "exec/active_sequence.h"
#include "fake_engine.h"
#include "fake_grammar.h"
#include "sequences.h"

namespace adaptrt::test::best_tokens_test {
namespace {

/// Adds 1 to the logit of token 7.
class FakeProcessor final : public LogitsPostProcessor {
 public:
  std::shared_ptr<void> enter() override { return nullptr; }
  void process(PostProcessedRow& row) override { row.logits->at(7) += 1.0F; }
  void process_batch(std::span<PostProcessedRow> rows) override {
    for (PostProcessedRow& row : rows) process(row);
  }
  [[nodiscard]] bool equals(const LogitsPostProcessor& other) const override { return this == &other; }
};

/// A kind of request, and what its tokens need of their rows.
struct Kind {
  const char* name;
  RowNeed need;
  std::function<void(Request&)> set;
};

std::ostream& operator<<(std::ostream& out, const Kind& kind) {
  return out << kind.name;
}

constexpr RowNeed kLogits{};
constexpr RowNeed kBest{.kind = RowNeed::Kind::kBestToken};
constexpr RowNeed highest(std::int32_t count) {
  return {.kind = RowNeed::Kind::kHighest, .num_highest = count};
}

const std::vector<Kind> kKinds = {
    {"greedy", kBest, [](Request&) {}},
    {"top_k 1", kBest, [](Request& request) { request.sampling_config.top_k = 1; }},
    {"temperature 0", kBest,
     [](Request& request) {
       request.sampling_config.top_p = 0.9;
       request.sampling_config.temperature = 0.0;
     }},
    {"streaming", kBest, [](Request& request) { request.streaming = true; }},
    {"end id", kBest, [](Request& request) { request.end_id = 7; }},
    {"stop words", kBest, [](Request& request) { request.stop_words = {{{8}, {1, 2}}}; }},
    {"min_tokens without end id", kBest, [](Request& request) { request.sampling_config.min_tokens = 5; }},
    {"several sequences", kBest, [](Request& request) { request.num_return_sequences = 3; }},
    {"an adapter", kBest, [](Request& request) { request.lora_config = fake_adapter(3); }},
    {"lookahead", kBest,
     [](Request& request) {
       request.lookahead_config = {.max_window_size = 6, .max_ngram_size = 4, .max_verification_set_size = 4};
     }},
    {"drafts", kBest,
     [](Request& request) {
       auto drafts = expected_tokens(request.input_token_ids, 4);
       drafts.push_back(1);
       request.external_draft_tokens_config.emplace().tokens = std::move(drafts);
     }},
    {"top_k", highest(20),
     [](Request& request) {
       request.sampling_config.top_k = 20;
       request.sampling_config.temperature = 1.5;
     }},
    {"top_k and top_p", highest(50),
     [](Request& request) {
       request.sampling_config.top_k = 50;
       request.sampling_config.top_p = 0.7;
       request.sampling_config.top_p_decay = 0.9;
     }},
    {"top_k and log probs", highest(3),
     [](Request& request) {
       request.sampling_config.top_k = 3;
       request.output_config.return_log_probs = true;
     }},
    {"top_k and more log probs", highest(12),
     [](Request& request) {
       request.sampling_config.top_k = 3;
       request.output_config.top_log_probs = 12;
     }},
    {"top_k of all tokens", highest(101), [](Request& request) { request.sampling_config.top_k = 120; }},
    {"top_k of sequences", highest(9),
     [](Request& request) {
       request.sampling_config.top_k = 9;
       request.num_return_sequences = 3;
     }},
    {"top_k with drafts", highest(4),
     [](Request& request) {
       request.sampling_config.top_k = 4;
       request.sampling_config.temperature = 0.01;
       request.output_config.return_log_probs = true;
       request.external_draft_tokens_config.emplace().tokens = expected_tokens(request.input_token_ids, 6);
     }},
    {"top_p", kLogits, [](Request& request) { request.sampling_config.top_p = 0.7; }},
    {"min_p", kLogits, [](Request& request) { request.sampling_config.min_p = 0.1; }},
    {"top_k and a penalty", kLogits,
     [](Request& request) {
       request.sampling_config.top_k = 9;
       request.sampling_config.presence_penalty = 0.5;
     }},
    {"repetition penalty", kLogits,
     [](Request& request) { request.sampling_config.repetition_penalty = 1.5; }},
    {"presence penalty", kLogits, [](Request& request) { request.sampling_config.presence_penalty = 0.5; }},
    {"frequency penalty", kLogits, [](Request& request) { request.sampling_config.frequency_penalty = 0.5; }},
    {"no repeated n-grams", kLogits,
     [](Request& request) { request.sampling_config.no_repeat_ngram_size = 1; }},
    {"bad words", kLogits, [](Request& request) { request.bad_words = {{{3}}}; }},
    {"bias", kLogits,
     [](Request& request) {
       std::vector<float> bias(101);
       bias[3] = 9.0F;
       request.embedding_bias = bias_of(bias);
     }},
    {"log probs", highest(1), [](Request& request) { request.output_config.return_log_probs = true; }},
    {"top log probs", highest(2), [](Request& request) { request.output_config.top_log_probs = 2; }},
    {"generation logits", kLogits,
     [](Request& request) { request.output_config.return_generation_logits = true; }},
    {"a guide", kLogits, [](Request& request) { request = guided(std::move(request), "9"); }},
    {"a post-processor", kLogits,
     [](Request& request) {
       request.logits_post_processor = PostProcessorFunction{std::make_shared<FakeProcessor>()};
     }},
    {"beams", kLogits, [](Request& request) {
       request.sampling_config.beam_width = 2;
       request.sampling_config.beam_search_diversity_rate = 0.0;
     }}};

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

void check_same_rows(const std::optional<FloatTensor>& found, const std::optional<FloatTensor>& expected) {
  BOOST_TEST_REQUIRE(found.has_value() == expected.has_value());
  if (!found) return;
  BOOST_TEST((found->shape == expected->shape));
  BOOST_TEST((*found->values == *expected->values));
}

/// Checks that both lists have the same responses for each sequence, in the same order. With
/// `may_have_other_steps`, a sequence may get its tokens in fewer or more steps.
void check_same(const std::vector<Response>& found, const std::vector<Response>& expected,
                bool may_have_other_steps = false) {
  std::map<std::int32_t, std::vector<const Result*>> expected_results;
  std::map<std::int32_t, std::vector<const Result*>> found_results;
  for (const Response& response : expected) {
    expected_results[response.result.sequence_index].push_back(&response.result);
  }
  for (const Response& response : found) {
    BOOST_TEST(response.error_msg == expected.front().error_msg);
    found_results[response.result.sequence_index].push_back(&response.result);
  }
  BOOST_TEST_REQUIRE(found.size() == expected.size());
  for (const auto& [index, results] : expected_results) {
    BOOST_TEST_REQUIRE(found_results[index].size() == results.size());
    for (std::size_t i = 0; i < results.size(); ++i) {
      const Result& one = *found_results[index][i];
      const Result& other = *results[i];
      BOOST_TEST((one.output_token_ids == other.output_token_ids));
      BOOST_TEST((one.finish_reasons == other.finish_reasons));
      BOOST_TEST((one.log_probs == other.log_probs));
      BOOST_TEST((one.cum_log_probs == other.cum_log_probs));
      BOOST_TEST((one.top_log_probs == other.top_log_probs));
      BOOST_TEST((one.prompt_log_probs == other.prompt_log_probs));
      BOOST_TEST((one.prompt_top_log_probs == other.prompt_top_log_probs));
      BOOST_TEST(one.is_sequence_final == other.is_sequence_final);
      if (!may_have_other_steps) BOOST_TEST(one.decoding_iter == other.decoding_iter);
      check_same_rows(one.generation_logits, other.generation_logits);
      check_same_rows(one.context_logits, other.context_logits);
    }
  }
}

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

bool has_drafts(const Request& request) {
  return request.lookahead_config || request.external_draft_tokens_config;
}

const std::vector<CrowdSetting> kSettings = {{CapacitySchedulerPolicy::kGuaranteedNoEvict, 512, 64, true},
                                             {CapacitySchedulerPolicy::kMaxUtilization, 128, 11, true},
                                             {CapacitySchedulerPolicy::kMaxUtilization, 128, 64, false}};

BOOST_DATA_TEST_CASE(a_mixed_crowd_gets_the_same_responses, boost::unit_test::data::make(kSettings),
                     setting) {
  std::mt19937 random(5);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  std::vector<Request> crowd;
  for (int i = 0; i < 60; ++i) {
    std::vector<TokenId> prompt;
    for (int left = draw(1, 30); left > 0; --left) prompt.push_back(draw(0, 3));
    Request request = make_request(std::move(prompt), draw(1, 20));
    request.sampling_config.seed = static_cast<std::uint64_t>(i);
    // Half of them are plain greedy requests.
    const auto kind = static_cast<std::size_t>(draw(0, 2 * static_cast<int>(kKinds.size()) - 1));
    if (kind < kKinds.size()) kKinds[kind].set(request);
    if (!request.has_beams() && !has_drafts(request) && draw(0, 3) == 0) request.streaming = true;
    if (draw(0, 7) == 0) request.output_config.return_prompt_log_probs = true;
    if (!request.lora_config && draw(0, 4) == 0) request.lora_config = fake_adapter(4);
    crowd.push_back(std::move(request));
  }
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
