// An engine that keeps states: results are those of an engine whose results depend on KV only.

#include <algorithm>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "crowd_setting.h"
#include "sequences.h"

namespace adaptrt::test::states_test {
namespace {

using Answers = std::vector<std::vector<TokenId>>;

constexpr LookaheadDecodingConfig kLookahead{
    .max_window_size = 6, .max_ngram_size = 4, .max_verification_set_size = 4};

FakeEngine::Options with_states() {
  FakeEngine::Options options;
  options.has_states = true;
  options.max_beam_width = 4;
  return options;
}

ExecutorConfig with_snapshots(std::optional<std::int32_t> num_snapshots) {
  ExecutorConfig config;
  config.kv_cache_config.max_state_snapshots = num_snapshots;
  config.max_beam_width = 4;
  config.enable_chunked_context = true;
  return config;
}

Answers answers_of(Executor& executor, RequestId id) {
  Answers answers;
  for (const auto& [index, results] : results_of(executor, id)) answers.push_back(tokens_of(results));
  return answers;
}

/// Returns the answers of an engine without states to a request that runs alone.
Answers expected_answers(const Request& request) {
  FakeEngine::Options options;
  options.max_beam_width = 4;
  const auto executor = make_executor(with_snapshots(std::nullopt), options);
  return answers_of(*executor, executor->enqueue_request(request));
}

StatePoolStats stats_of(Executor& executor) {
  const auto steps = executor.get_latest_iteration_stats();
  BOOST_TEST_REQUIRE(!steps.empty());
  return steps.back().state_stats.value();
}

/// Requests of all kinds, many with the same beginnings.
std::vector<Request> draw_crowd(std::mt19937& random, int count) {
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  std::vector<TokenId> common(60);
  for (auto& token : common) token = draw(0, 100);
  std::vector<Request> crowd;
  for (int i = 0; i < count; ++i) {
    std::vector<TokenId> prompt(common.begin(), common.begin() + draw(0, 50));
    for (int own = draw(1, 10); own > 0; --own) prompt.push_back(draw(0, 3));
    Request request = make_request(prompt, draw(1, 16));
    switch (draw(0, 4)) {
      case 0:
        request = several(sampled(prompt, request.max_tokens, static_cast<std::uint64_t>(i)), draw(2, 4));
        break;
      case 1:
        request.sampling_config.beam_width = draw(2, 4);
        break;
      default:
        break;
    }
    const auto task_id = static_cast<std::uint64_t>(draw(0, 3));
    if (task_id > 0) request.lora_config = fake_adapter(task_id);
    if (draw(0, 5) == 0) request.cache_salt_id = 1;
    crowd.push_back(std::move(request));
  }
  return crowd;
}

const std::vector<CrowdSetting> kSettings = {
    {CapacitySchedulerPolicy::kGuaranteedNoEvict, 1024, 64, true, 8},
    {CapacitySchedulerPolicy::kGuaranteedNoEvict, 512, 5, true, 5},
    {CapacitySchedulerPolicy::kMaxUtilization, 512, 64, true, 8},
    {CapacitySchedulerPolicy::kMaxUtilization, 512, 7, true, 8},
    {CapacitySchedulerPolicy::kMaxUtilization, 512, 64, false, 8},
};

BOOST_AUTO_TEST_SUITE(states)

BOOST_DATA_TEST_CASE(a_crowd_changes_no_token, boost::unit_test::data::make(kSettings), setting) {
  std::mt19937 random(static_cast<unsigned>(setting.max_num_tokens));
  std::int64_t num_reused = 0;
  for (const int num_snapshots : setting.reuse ? std::vector{-1, 0, 2, 9} : std::vector{-1, 0}) {
    const auto crowd = draw_crowd(random, 16);
    ExecutorConfig config = config_of(setting);
    config.max_beam_width = 4;
    if (num_snapshots >= 0) config.kv_cache_config.max_state_snapshots = num_snapshots;
    const auto executor = make_executor(config, with_states());
    std::vector<RequestId> ids;
    for (const Request& request : crowd) ids.push_back(executor->enqueue_request(request));
    for (std::size_t i = 0; i < crowd.size(); ++i) {
      BOOST_TEST((answers_of(*executor, ids[i]) == expected_answers(crowd[i])));
    }
    const StatePoolStats stats = stats_of(*executor);
    BOOST_TEST(stats.used_slots == 0);
    BOOST_TEST(stats.num_slots == setting.max_batch_size.value());
    if (!setting.reuse || num_snapshots == 0) BOOST_TEST(stats.reused_snapshots == 0);
    num_reused += stats.reused_snapshots;
  }
  BOOST_TEST((num_reused > 0) == setting.reuse);
}

BOOST_AUTO_TEST_CASE(a_preempted_sequence_continues_from_its_snapshot_or_from_nothing) {
  for (const int num_snapshots : {0, 8}) {
    ExecutorConfig config = with_snapshots(num_snapshots);
    config.scheduler_config.capacity_scheduler_policy = CapacitySchedulerPolicy::kMaxUtilization;
    config.kv_cache_config.max_tokens = 60;
    config.request_stats_max_iterations = 10;
    const auto executor = make_executor(config, with_states());
    std::vector<Request> requests;
    for (TokenId first = 0; first < 4; ++first) {
      std::vector<TokenId> prompt(10, 7);
      prompt[0] = first;
      requests.push_back(make_request(prompt, 30));
    }
    std::vector<RequestId> ids;
    for (const Request& request : requests) ids.push_back(executor->enqueue_request(request));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      BOOST_TEST(answers_of(*executor, ids[i]).at(0) == expected_answers(requests[i]).at(0),
                 boost::test_tools::per_element());
    }
    const auto steps = executor->get_latest_iteration_stats();
    BOOST_TEST(std::ranges::any_of(
        steps, [](const auto& step) { return step.inflight_batching_stats->num_paused_requests > 0; }));
  }
}

BOOST_AUTO_TEST_CASE(a_conversation_continues_from_the_end_of_the_last_answer) {
  const auto engine = std::make_shared<FakeEngine>(with_states());
  Executor executor(engine, with_snapshots(std::nullopt), kAvailableMemory, check_every_step);
  std::vector<TokenId> history(33, 4);
  for (int turn = 0; turn < 3; ++turn) {
    const Request request = make_request(history, 14);
    const std::int64_t computed_before = engine->num_tokens();
    const auto answer = answers_of(executor, executor.enqueue_request(request)).at(0);
    BOOST_TEST(answer == expected_answers(request).at(0), boost::test_tools::per_element());
    // All but the last block of the last turn, and the new tokens.
    const std::int64_t num_computed = engine->num_tokens() - computed_before;
    BOOST_TEST(num_computed <= (turn == 0 ? 33 + 13 : 5 + 3 + 13));
    history.insert(history.end(), answer.begin(), answer.end());
    history.insert(history.end(), 3, static_cast<TokenId>(turn));
  }
  const StatePoolStats stats = stats_of(executor);
  BOOST_TEST(stats.slot_bytes == 8);
  BOOST_TEST(stats.reused_snapshots == 2);
  BOOST_TEST(stats.max_snapshots == 2 * 8);
}

BOOST_AUTO_TEST_CASE(a_third_prompt_starts_where_two_were_equal) {
  const auto engine = std::make_shared<FakeEngine>(with_states());
  Executor executor(engine, with_snapshots(4), kAvailableMemory, check_every_step);
  std::vector<std::int64_t> computed;
  for (TokenId own = 0; own < 3; ++own) {
    std::vector<TokenId> prompt(22, 6);
    prompt.insert(prompt.end(), 9, own);
    const Request request = make_request(prompt, 1);
    const std::int64_t before = engine->num_tokens();
    BOOST_TEST(
        answers_of(executor, executor.enqueue_request(request)).at(0) == expected_answers(request).at(0),
        boost::test_tools::per_element());
    computed.push_back(engine->num_tokens() - before);
  }
  BOOST_TEST(computed == (std::vector<std::int64_t>{31, 31, 31 - 20}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(each_fork_costs_one_copy) {
  const auto engine = std::make_shared<FakeEngine>(with_states());
  Executor executor(engine, with_snapshots(0), kAvailableMemory, check_every_step);
  const Request request = several(sampled(kPrompt, 6, 3), 4);
  const auto answers = answers_of(executor, executor.enqueue_request(request));
  BOOST_TEST((answers == each_alone(request)));
  BOOST_TEST(engine->num_state_copies() == 3);
}

/// Returns the number of steps of a request with these drafts; checks its tokens.
std::int64_t num_steps_with(Executor& executor, const std::vector<TokenId>& drafts) {
  Request request = make_request(kPrompt, 6);
  request.external_draft_tokens_config.emplace().tokens = drafts;
  const Result result = collect_result(executor, executor.enqueue_request(request));
  BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(kPrompt, 6), boost::test_tools::per_element());
  return result.decoding_iter;
}

BOOST_AUTO_TEST_CASE(wrong_drafts_cost_two_copies_and_their_step) {
  FakeEngine::Options options = with_states();
  options.tokens_per_block = 32;  // so that there are no snapshots
  const auto engine = std::make_shared<FakeEngine>(options);
  Executor executor(engine, with_snapshots(4), kAvailableMemory, check_every_step);
  auto drafts = expected_tokens(kPrompt, 5);
  // The prompt's step gives one token, and the next one the others.
  BOOST_TEST(num_steps_with(executor, drafts) == 2);
  const std::int64_t copies_before = engine->num_state_copies();
  const std::int64_t tokens_before = engine->num_tokens();
  drafts[2] = (drafts[2] + 1) % 101;
  // Tokens 1; 2 and 3 with the right draft; 4, for which 1 to 3 are computed again; 5; 6.
  BOOST_TEST(num_steps_with(executor, drafts) == 5);
  BOOST_TEST(engine->num_tokens() - tokens_before == std::ssize(kPrompt) + 5 + 3 + 1 + 1);
  BOOST_TEST(engine->num_state_copies() - copies_before == 2);
}

BOOST_DATA_TEST_CASE(drafts_change_no_token, boost::unit_test::data::make(kSettings), setting) {
  if (!setting.reuse) return;  // there are no slots to save states in
  std::mt19937 random(static_cast<unsigned>(setting.max_num_tokens));
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  FakeEngine::Options options = with_states();
  options.vocab_size = 3;
  FakeEngine::Options without_states = options;
  without_states.has_states = false;
  const auto alone = make_executor({}, without_states);
  ExecutorConfig config = config_of(setting);
  config.iter_stats_max_iterations = 10000;
  config.decoding_config.emplace().lookahead_decoding_config = kLookahead;
  const auto executor = make_executor(config, options);
  std::vector<Request> requests;
  std::vector<RequestId> ids;
  for (int i = 0; i < 30; ++i) {
    std::vector<TokenId> prompt(static_cast<std::size_t>(draw(1, 30)));
    for (auto& token : prompt) token = draw(0, 1);
    Request request = make_request(prompt, draw(1, 40));
    if (draw(0, 3) == 0) request = several(sampled(prompt, request.max_tokens, 5), 2);
    if (draw(0, 2) == 0) request.lora_config = fake_adapter(1);
    requests.push_back(request);
    if (draw(0, 2) == 0) {
      request.external_draft_tokens_config.emplace().tokens.assign(static_cast<std::size_t>(draw(1, 6)), 1);
    }
    ids.push_back(executor->enqueue_request(request));
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    BOOST_TEST((answers_of(*executor, ids[i]) == answers_of(*alone, alone->enqueue_request(requests[i]))));
  }
  std::int64_t num_drafts = 0;
  std::int64_t num_accepted = 0;
  const auto steps = executor->get_latest_iteration_stats();
  for (const IterationStats& step : steps) {
    if (!step.spec_decoding_stats) continue;
    num_drafts += step.spec_decoding_stats->num_draft_tokens;
    num_accepted += step.spec_decoding_stats->num_accepted_tokens;
  }
  BOOST_TEST(num_accepted > 0);
  BOOST_TEST(num_accepted < num_drafts);
  BOOST_TEST(steps.back().state_stats->used_slots == 0);
}

BOOST_AUTO_TEST_CASE(a_draft_engine_drafts_for_an_engine_with_states) {
  ExecutorConfig config = with_snapshots(4);
  config.draft_target_decoding_config.emplace();
  const auto executor = make_drafting_executor(config, with_states(), std::make_shared<FakeEngine>());
  const Result result = collect_result(*executor, executor->enqueue_request(make_request(kPrompt, 12)));
  BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(kPrompt, 12), boost::test_tools::per_element());
  BOOST_TEST(result.decoding_iter < 12);
}

BOOST_AUTO_TEST_CASE(a_failed_step_leaves_no_wrong_snapshot) {
  const auto executor = make_executor(with_snapshots(4), with_states(), [](std::int64_t step) {
    if (step == 1) throw StepError("out of luck");  // the step that makes the copy
  });
  const Request request = make_request(std::vector<TokenId>(12, 3), 3);
  BOOST_TEST(collect(*executor, executor->enqueue_request(request)).back().error_msg == "out of luck");
  for (int i = 0; i < 2; ++i) {
    BOOST_TEST(
        answers_of(*executor, executor->enqueue_request(request)).at(0) == expected_answers(request).at(0),
        boost::test_tools::per_element());
  }
}

/// Checks that an executor is refused with these words.
void check_refused(const ExecutorConfig& config, const std::string& words) {
  BOOST_CHECK_EXCEPTION(static_cast<void>(make_executor(config, with_states())), ConfigError,
                        [&](const ConfigError& error) {
                          BOOST_TEST_INFO(error.what());
                          return std::string(error.what()).find(words) != std::string::npos;
                        });
}

BOOST_AUTO_TEST_CASE(drafts_need_a_slot_to_save_states_in) {
  ExecutorConfig drafts = with_snapshots(0);
  drafts.decoding_config.emplace().lookahead_decoding_config = kLookahead;
  check_refused(drafts,
                "max_state_snapshots is 0; accepted: None, and 1 or more, because drafts are configured");
  drafts.kv_cache_config.max_state_snapshots.reset();
  drafts.kv_cache_config.enable_block_reuse = false;
  check_refused(drafts, "enable_block_reuse is False; accepted: True, because drafts are configured");
  drafts.decoding_config->lookahead_decoding_config = LookaheadDecodingConfig{1, 1, 0};
  BOOST_CHECK_NO_THROW(static_cast<void>(make_executor(drafts, with_states())));
  ExecutorConfig many = with_snapshots(1 << 30);
  check_refused(many, "the states of max_batch_size 8 sequences and 1073741824 snapshots");

  FakeEngine::Options without_states;
  without_states.max_beam_width = 4;
  BOOST_CHECK_THROW(static_cast<void>(make_executor(with_snapshots(1), without_states)), ConfigError);
  BOOST_CHECK_NO_THROW(static_cast<void>(make_executor(with_snapshots(0), without_states)));

  ExecutorConfig drafting = with_snapshots(0);
  drafting.draft_target_decoding_config.emplace();
  BOOST_CHECK_THROW(
      static_cast<void>(make_drafting_executor(drafting, with_states(), std::make_shared<FakeEngine>())),
      ConfigError);
  drafting.kv_cache_config.max_state_snapshots.reset();
  BOOST_CHECK_THROW(
      static_cast<void>(make_drafting_executor(drafting, {}, std::make_shared<FakeEngine>(with_states()))),
      ConfigError);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::states_test
