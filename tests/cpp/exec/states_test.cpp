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

BOOST_AUTO_TEST_CASE(what_needs_earlier_states_is_refused) {
  ExecutorConfig file;
  file.kv_cache_config.host_cache_size = std::size_t{1} << 20;
  file.kv_cache_config.host_cache_dir = "/tmp";
  check_refused(file,
                "kv_cache_config.host_cache_size is given; accepted: None and 0, because the engine keeps");
  ExecutorConfig lookahead;
  const LookaheadDecodingConfig drafts_of_text{
      .max_window_size = 1, .max_ngram_size = 3, .max_verification_set_size = 4};
  lookahead.decoding_config.emplace().lookahead_decoding_config = drafts_of_text;
  check_refused(lookahead, "decoding_config.lookahead_decoding_config is given");
  ExecutorConfig many = with_snapshots(1 << 30);
  check_refused(many, "the states of max_batch_size 8 sequences and 1073741824 snapshots");

  FakeEngine::Options without_states;
  without_states.max_beam_width = 4;
  BOOST_CHECK_THROW(static_cast<void>(make_executor(with_snapshots(1), without_states)), ConfigError);
  BOOST_CHECK_NO_THROW(static_cast<void>(make_executor(with_snapshots(0), without_states)));

  const auto executor = make_executor(with_snapshots(1), with_states());
  Request drafts = make_request(kPrompt, 3);
  drafts.external_draft_tokens_config.emplace().tokens = {1};
  BOOST_CHECK_EXCEPTION(executor->enqueue_request(drafts), RequestError, [](const RequestError& error) {
    return std::string(error.what()).find("external_draft_tokens_config is given; accepted: None") !=
           std::string::npos;
  });
  Request own_text = make_request(kPrompt, 3);
  own_text.lookahead_config = drafts_of_text;
  BOOST_CHECK_THROW(executor->enqueue_request(own_text), RequestError);

  ExecutorConfig drafting;
  drafting.draft_target_decoding_config.emplace();
  BOOST_CHECK_THROW(
      static_cast<void>(make_drafting_executor(drafting, {}, std::make_shared<FakeEngine>(with_states()))),
      ConfigError);
  BOOST_CHECK_THROW(
      static_cast<void>(make_drafting_executor(drafting, with_states(), std::make_shared<FakeEngine>())),
      ConfigError);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::states_test
