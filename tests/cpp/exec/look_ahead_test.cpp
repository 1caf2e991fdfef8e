// Engines that begin a step before the host has the tokens of the step before: responses are the same.

#include <algorithm>
#include <array>
#include <atomic>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/exec/executor.h"
#include "crowd_setting.h"
#include "fake_engine.h"
#include "request_kinds.h"
#include "sequences.h"
#include "support/sanitized.h"
#include "support/temporary_directory.h"

namespace adaptrt::test::look_ahead_test {
namespace {

using namespace request_kinds;

namespace data = boost::unit_test::data;
using namespace std::chrono_literals;
using Ahead = FakeEngine::Options::Ahead;

constexpr std::array kTimes = {Ahead::kEarly, Ahead::kLate};

FakeEngine::Options looking(Ahead ahead) {
  FakeEngine::Options options;
  options.max_beam_width = 2;
  options.finds_best_tokens = true;
  options.finds_highest_logits = true;
  options.ahead = ahead;
  return options;
}

/// An engine and its executor.
struct Run {
  explicit Run(const FakeEngine::Options& options, const ExecutorConfig& config = {},
               FakeEngine::Hook hook = {}, std::shared_ptr<FakeEngine> draft_engine = nullptr)
      : Run(std::make_shared<FakeEngine>(options, std::move(hook)), config, std::move(draft_engine)) {}
  explicit Run(std::shared_ptr<FakeEngine> made, ExecutorConfig config = {},
               std::shared_ptr<FakeEngine> draft_engine = nullptr)
      : engine(std::move(made)) {
    config.max_beam_width = 2;
    config.iter_stats_max_iterations = 100000;
    executor = std::make_unique<Executor>(engine, config, kAvailableMemory, check_every_step,
                                          std::move(draft_engine));
    executor->set_grammar_compiler(std::make_shared<FakeCompiler>());
  }
  ~Run() {
    executor.reset();
    BOOST_TEST(engine->num_in_flight() == 0);
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  std::vector<Response> responses_to(const Request& request) const {
    return collect(*executor, executor->enqueue_request(request));
  }
  void check_tokens(const Request& request) const {
    const std::uint64_t task_id = request.lora_config ? request.lora_config->task_id : 0;
    BOOST_TEST(collect_result(*executor, executor->enqueue_request(request)).output_token_ids.at(0) ==
                   expected_tokens(request.input_token_ids, request.max_tokens, task_id),
               boost::test_tools::per_element());
  }

  std::shared_ptr<FakeEngine> engine;
  std::unique_ptr<Executor> executor;
};

/// Number of the first generated token that has this value, from 1 on.
std::int32_t first_place(const std::vector<TokenId>& tokens, TokenId token) {
  return static_cast<std::int32_t>(std::ranges::find(tokens, token) - tokens.begin()) + 1;
}

BOOST_AUTO_TEST_SUITE(look_ahead)

const std::set<std::string> kKindsThatGoOn = {"greedy",
                                              "top_k 1",
                                              "temperature 0",
                                              "streaming",
                                              "end id",
                                              "stop words",
                                              "min_tokens without end id",
                                              "several sequences",
                                              "an adapter",
                                              "log probs",
                                              "top log probs"};

BOOST_DATA_TEST_CASE(a_kind_of_request_goes_on_or_waits, data::make(kKinds) * data::make({0, 1}), kind,
                     time) {
  Request request = make_request(kPrompt, 9);
  kind.set(request);
  const Run with(looking(kTimes.at(static_cast<std::size_t>(time))));
  const Run without(looking(Ahead::kNever));
  check_same(with.responses_to(request), without.responses_to(request));
  BOOST_TEST((with.engine->num_ahead() > 0) == kKindsThatGoOn.contains(kind.name));
  BOOST_TEST(without.engine->num_ahead() == 0);
}

BOOST_DATA_TEST_CASE(one_sequence_that_waits_holds_up_the_step, data::make(kKinds), kind) {
  if (kKindsThatGoOn.contains(kind.name)) return;
  Request request = make_request(kPrompt, 9);
  kind.set(request);
  const Run run(looking(Ahead::kEarly));
  const auto ids = run.executor->enqueue_requests({make_request(kPrompt, 9), request});
  for (const RequestId id : ids) static_cast<void>(collect(*run.executor, id));
  // Drafts may end their request earlier.
  BOOST_TEST(run.engine->num_ahead() <= (has_drafts(request) ? 5 : 0));
}

BOOST_AUTO_TEST_CASE(all_decodes_but_the_first_are_begun_ahead) {
  const Run run(looking(Ahead::kLate));
  run.check_tokens(make_request(kPrompt, 9));
  // The prompt's step gives a token, and the first decode follows a prompt.
  BOOST_TEST(run.engine->num_ahead() == 7);
  // No row is computed in vain: the end is known.
  BOOST_TEST(run.engine->num_tokens() == std::ssize(kPrompt) + 8);
  const auto steps = run.executor->get_latest_iteration_stats();
  BOOST_TEST_REQUIRE(steps.size() == 9U);
  for (std::size_t i = 0; i < steps.size(); ++i) BOOST_TEST(steps[i].begun_ahead == (i > 1));
}

BOOST_AUTO_TEST_CASE(a_sequence_whose_end_is_known_computes_nothing_in_vain) {
  const Run run(looking(Ahead::kLate));
  const auto ids = run.executor->enqueue_requests({make_request(kPrompt, 4), make_request(kPrompt, 9)});
  for (const RequestId id : ids) static_cast<void>(collect(*run.executor, id));
  BOOST_TEST(run.engine->num_tokens() == 2 * std::ssize(kPrompt) + 3 + 8);
}

BOOST_DATA_TEST_CASE(a_row_too_many_is_not_seen, data::make({0, 1}) * data::make({1, 2, 3, 4}), time, place) {
  // One request ends by an end token or stop words, the other goes on.
  const auto all = expected_tokens(kPrompt, 12);
  Request ending = make_request(kPrompt, 12);
  const auto end = static_cast<std::size_t>(2 * place);
  if (place % 2 == 0) {
    ending.end_id = all[end];
  } else {
    ending.stop_words = {{{all[end - 1], all[end]}}};
  }
  const Run with(looking(kTimes.at(static_cast<std::size_t>(time))));
  const Run without(looking(Ahead::kNever));
  std::vector<std::int64_t> computed;
  for (const Run* run : {&with, &without}) {
    const auto ids = run->executor->enqueue_requests({ending, make_request({3, 1, 4}, 15)});
    const Result ended = collect_result(*run->executor, ids[0]);
    const std::int32_t length = first_place(all, all[end]);
    BOOST_TEST(std::ssize(ended.output_token_ids.at(0)) == length - (place % 2 == 0 ? 1 : 0));
    BOOST_TEST(
        collect_result(*run->executor, ids[1]).output_token_ids.at(0) == expected_tokens({3, 1, 4}, 15),
        boost::test_tools::per_element());
    computed.push_back(run->engine->num_tokens());
    const auto steps = run->executor->get_latest_iteration_stats();
    BOOST_TEST(steps.size() == 15U);
    BOOST_TEST(steps.back().kv_cache_stats->used_num_blocks == 0);
    std::int32_t num_completed = 0;
    for (const auto& step : steps) num_completed += step.num_completed_requests;
    BOOST_TEST(num_completed == 2);
    // The next request reuses what the first one computed, and no more.
    std::vector<TokenId> longer = kPrompt;
    longer.insert(longer.end(), all.begin(), all.begin() + length);
    longer.insert(longer.end(), {9, 9, 9, 9, 9});
    const Result next =
        collect_result(*run->executor, run->executor->enqueue_request(make_request(longer, 4)));
    BOOST_TEST(next.output_token_ids.at(0) == expected_tokens(longer, 4), boost::test_tools::per_element());
    BOOST_TEST(next.num_cached_tokens == (std::ssize(kPrompt) + length - 1) / 4 * 4);
  }
  BOOST_TEST(computed[0] == computed[1] + 1);
}

BOOST_DATA_TEST_CASE(an_idle_executor_has_nothing_in_flight, data::make({0, 1}), time) {
  const Run run(looking(kTimes.at(static_cast<std::size_t>(time))));
  Request request = make_request(kPrompt, 12);
  request.lora_config = fake_adapter(3);
  request.end_id = expected_tokens(kPrompt, 4, 3).back();
  static_cast<void>(collect_result(*run.executor, run.executor->enqueue_request(request)));
  const auto deadline = std::chrono::steady_clock::now() + 1min;
  while (run.engine->num_in_flight() > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  BOOST_TEST(run.engine->num_in_flight() == 0);
  run.check_tokens(make_request(kPrompt, 9));
}

/// Engines and executors that never begin a step ahead.
BOOST_AUTO_TEST_CASE(drafts_states_and_second_levels_wait) {
  ExecutorConfig config;
  config.draft_target_decoding_config.emplace();
  {
    const Run drafting(looking(Ahead::kEarly), config, {}, std::make_shared<FakeEngine>());
    Request request = make_request(kPrompt, 12);
    drafting.check_tokens(request);
    BOOST_TEST(drafting.engine->num_ahead() == 0);
  }
  FakeEngine::Options options = looking(Ahead::kEarly);
  options.has_states = true;
  const Run with_states(options);
  with_states.check_tokens(make_request(kPrompt, 12));
  BOOST_TEST(with_states.engine->num_ahead() == 0);

  const testing::TemporaryDirectory directory;
  ExecutorConfig two_levels;
  two_levels.kv_cache_config.host_cache_size = std::size_t{1} << 20;
  two_levels.kv_cache_config.host_cache_dir = directory.path().string();
  options = looking(Ahead::kEarly);
  options.kv_identity = "engine";
  const Run with_file(options, two_levels);
  with_file.check_tokens(make_request(kPrompt, 12));
  BOOST_TEST(with_file.engine->num_ahead() == 0);
}

BOOST_AUTO_TEST_CASE(rows_that_the_engine_does_not_search_wait) {
  FakeEngine::Options options = looking(Ahead::kEarly);
  options.finds_highest_logits = false;
  const Run run(options);
  Request request = make_request(kPrompt, 12);
  request.output_config.return_log_probs = true;
  run.check_tokens(request);
  BOOST_TEST(run.engine->num_ahead() == 0);
  run.check_tokens(make_request(kPrompt, 12));
  BOOST_TEST(run.engine->num_ahead() > 0);
}

BOOST_DATA_TEST_CASE(an_arrival_starts_after_the_step_in_flight, data::make({0, 1}), time) {
  std::atomic<Run*> running = nullptr;
  std::atomic<RequestId> late = 0;
  Gate is_made;
  Run run(looking(kTimes.at(static_cast<std::size_t>(time))), {}, [&](std::int64_t step) {
    if (step == 0) is_made.wait();
    if (step == 6) late = running.load()->executor->enqueue_request(make_request({1, 2, 3}, 3));
  });
  running = &run;
  is_made.open();
  run.check_tokens(make_request(kPrompt, 30));
  BOOST_TEST(collect_result(*run.executor, late).output_token_ids.at(0) == expected_tokens({1, 2, 3}, 3),
             boost::test_tools::per_element());
  const auto steps = run.executor->get_latest_iteration_stats();
  BOOST_TEST_REQUIRE(steps.size() == 30U);
  const auto started = std::ranges::find_if(
      steps.begin() + 1, steps.end(), [](const auto& step) { return step.num_new_active_requests == 1; });
  // The hook of an early step runs one step earlier.
  BOOST_TEST(std::distance(steps.begin(), started) == (time == 0 ? 7 : 8));
}

BOOST_AUTO_TEST_CASE(a_full_batch_looks_ahead_although_others_wait) {
  std::vector<std::size_t> num_steps;
  for (const Ahead ahead : {Ahead::kLate, Ahead::kNever}) {
    ExecutorConfig config;
    config.max_batch_size = 2;
    const Run run(looking(ahead), config);
    std::vector<Request> requests;
    for (TokenId i = 0; i < 6; ++i) requests.push_back(make_request({i, 2, 3}, 10 + i));
    const auto ids = run.executor->enqueue_requests(requests);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      BOOST_TEST(collect_result(*run.executor, ids[i]).output_token_ids.at(0) ==
                     expected_tokens(requests[i].input_token_ids, requests[i].max_tokens),
                 boost::test_tools::per_element());
    }
    const auto steps = run.executor->get_latest_iteration_stats();
    num_steps.push_back(steps.size());
    if (ahead == Ahead::kNever) continue;
    BOOST_TEST(run.engine->num_ahead() > 20);
    BOOST_TEST(std::ranges::any_of(
        steps, [](const auto& step) { return step.begun_ahead && step.num_queued_requests > 0; }));
  }
  // A sequence whose end is known makes room at once.
  BOOST_TEST(num_steps[0] == num_steps[1]);
}

/// An engine whose calls fail.
class FailingEngine final : public FakeEngine {
 public:
  using FakeEngine::FakeEngine;

  void begin_ahead(const StepInput& input, std::span<const std::int32_t> previous_rows) override {
    if (in_begin_ahead) in_begin_ahead();
    FakeEngine::begin_ahead(input, previous_rows);
  }

  std::function<void()> in_begin_ahead;
};

BOOST_AUTO_TEST_CASE(a_step_that_cannot_be_begun_ahead_is_begun_later) {
  const auto engine = std::make_shared<FailingEngine>(looking(Ahead::kLate));
  int calls = 0;
  engine->in_begin_ahead = [&] {
    if (++calls % 2 == 1) throw StepError("not now");
  };
  const Run run(engine);
  run.check_tokens(make_request(kPrompt, 12));
  BOOST_TEST(engine->num_ahead() > 0);
  BOOST_TEST(calls > engine->num_ahead());
}

BOOST_AUTO_TEST_CASE(a_lost_device_ends_the_executor) {
  const auto engine = std::make_shared<FailingEngine>(looking(Ahead::kLate));
  engine->in_begin_ahead = [] { throw EngineError("the device is lost"); };
  Executor executor(engine, {}, kAvailableMemory, check_every_step);
  const auto responses = collect(executor, executor.enqueue_request(make_request(kPrompt, 12)));
  BOOST_TEST(responses.at(0).error_msg == "executor died: the device is lost");
}

BOOST_DATA_TEST_CASE(a_step_that_fails_takes_its_requests_along, data::make({0, 1}) * data::xrange(9), time,
                     failing) {
  ExecutorConfig config;
  config.peft_cache_config.emplace().num_ensure_workers = 0;  // both requests start in the first step
  const Run run(looking(kTimes.at(static_cast<std::size_t>(time))), config, [&](std::int64_t step) {
    if (step == failing) throw StepError("a bad step");
  });
  Request ending = make_request(kPrompt, 12);
  ending.lora_config = fake_adapter(3);
  ending.end_id = expected_tokens(kPrompt, 5, 3).back();
  const auto ids = run.executor->enqueue_requests({ending, make_request({1, 2}, 12)});
  const auto ended = collect(*run.executor, ids[0]);
  const auto other = collect(*run.executor, ids[1]);
  BOOST_TEST(other.at(0).error_msg == "a bad step");
  // Its row too many may be in the step that fails.
  const std::int32_t length = first_place(expected_tokens(kPrompt, 12, 3), *ending.end_id);
  BOOST_TEST(ended.at(0).error_msg == (failing < length ? "a bad step" : ""));
  run.check_tokens(make_request(kPrompt, 12));
  BOOST_TEST(run.executor->get_latest_iteration_stats().back().kv_cache_stats->used_num_blocks == 0);
}

BOOST_AUTO_TEST_CASE(a_failed_step_in_flight_of_ended_sequences_fails_nobody) {
  Request ending = make_request(kPrompt, 12);
  ending.end_id = expected_tokens(kPrompt, 5).back();
  const std::int32_t length = first_place(expected_tokens(kPrompt, 12), *ending.end_id);
  const Run run(looking(Ahead::kLate), {}, [&](std::int64_t step) {
    if (step == length) throw StepError("a bad step");
  });
  BOOST_TEST(run.responses_to(ending).at(0).error_msg == "");
  run.check_tokens(make_request({1, 2}, 9));
}

BOOST_AUTO_TEST_CASE(a_step_in_flight_is_awaited_before_the_end) {
  for (const Ahead ahead : kTimes) {
    Gate in_step;
    auto run = std::make_unique<Run>(looking(ahead), ExecutorConfig{}, [&](std::int64_t step) {
      if (step == 5) in_step.wait();
    });
    static_cast<void>(run->executor->enqueue_request(make_request(kPrompt, 100)));
    in_step.await_visitor();
    std::jthread shutdown([&] { run->executor->shutdown(); });
    std::this_thread::sleep_for(5ms);
    in_step.open();
    shutdown.join();
    run.reset();  // checks it
  }
}

/// No token can be chosen after one particular token.
class PoisonedEngine final : public FakeEngine {
 public:
  static constexpr TokenId kPoison = 66;
  using Engine::step;
  using FakeEngine::FakeEngine;
  void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) override {
    FakeEngine::step(input, sink, hidden_sink);
    for (std::size_t i = 0; i < input.best_tokens.size(); ++i) {
      if (input.token_ids[static_cast<std::size_t>(input.best_token_rows[i])] == poison) {
        input.best_tokens[i] = kUnusableLogits;
      }
    }
  }
  TokenId poison = -1;
};

BOOST_DATA_TEST_CASE(a_row_without_a_best_token_fails_its_request, data::make({0, 1}), time) {
  const auto engine = std::make_shared<PoisonedEngine>(looking(kTimes.at(static_cast<std::size_t>(time))));
  engine->poison = expected_tokens(kPrompt, 4).back();
  const Run run(engine);
  const auto ids = run.executor->enqueue_requests({make_request(kPrompt, 12), make_request({1, 2}, 12)});
  BOOST_TEST(collect(*run.executor, ids[0]).at(0).error_msg == "the engine's logits have NaN or infinity");
  const auto tokens = collect_result(*run.executor, ids[1]).output_token_ids.at(0);
  const auto expected = expected_tokens({1, 2}, 12);
  BOOST_TEST(std::ranges::count(expected, engine->poison) == 0);
  BOOST_TEST(tokens == expected, boost::test_tools::per_element());
}

/// Random traffic: requests that come while others run, cancels, time limits, cleared caches.
struct Crowd {
  struct Guest {
    Request request;
    std::int32_t wait = 0;  ///< responses of earlier guests that the arrival waits for
    bool is_cancelled = false;
  };
  std::vector<Guest> guests;
};

Crowd draw_crowd(std::mt19937& random, int count) {
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  std::vector<Request> kinds = draw_mixed_crowd(random, count);
  std::vector<TokenId> common(40);
  for (auto& token : common) token = draw(0, 100);
  Crowd crowd;
  for (int i = 0; i < count; ++i) {
    std::vector<TokenId> prompt(common.begin(), common.begin() + draw(0, 30));
    for (int own = draw(1, 10); own > 0; --own) prompt.push_back(draw(0, 3));
    Request request = make_request(prompt, draw(1, 30));
    // Some wait for the host.
    if (draw(0, 9) == 0) request = kinds[static_cast<std::size_t>(i)];
    const auto task_id = static_cast<std::uint64_t>(draw(0, 6));
    if (task_id > 3 && !request.has_beams()) request.lora_config = fake_adapter(task_id);
    if (draw(0, 3) == 0) request.output_config.return_log_probs = true;
    if (draw(0, 3) == 0) request.streaming = !request.has_beams() && !has_drafts(request);
    if (draw(0, 2) == 0 && !request.guided_decoding_params) {
      const auto coming =
          expected_tokens(request.input_token_ids, request.max_tokens, request.lora_config ? task_id : 0);
      const auto place = static_cast<std::size_t>(draw(0, request.max_tokens - 1));
      if (draw(0, 1) == 0) {
        request.end_id = coming[place];
      } else {
        request.stop_words = {{{coming[place]}, {coming[place / 2], coming[std::min(place / 2 + 1, place)]}}};
      }
    }
    if (draw(0, 5) == 0 && !request.has_beams() && !has_drafts(request)) request.num_return_sequences = 3;
    if (draw(0, 15) == 0) request.allotted_time_ms = std::chrono::milliseconds(draw(1, 3));
    crowd.guests.push_back(
        {.request = std::move(request), .wait = draw(0, 2), .is_cancelled = draw(0, 9) == 0});
  }
  return crowd;
}

/// Returns the responses of each guest; those of cancelled guests and of guests with a time limit may be cut.
std::vector<std::vector<Response>> serve(const Run& run, const Crowd& crowd) {
  std::vector<RequestId> ids;
  std::vector<std::vector<Response>> responses(crowd.guests.size());
  for (std::size_t i = 0; i < crowd.guests.size(); ++i) {
    ids.push_back(run.executor->enqueue_request(crowd.guests[i].request));
    if (crowd.guests[i].wait == 0 && i > 4) {
      // Waits until an earlier guest has left.
      responses[i - 4] = responses[i - 4].empty() ? collect(*run.executor, ids[i - 4]) : responses[i - 4];
    }
    if (crowd.guests[i].is_cancelled) run.executor->cancel_request(ids[i]);
    if (i % 17 == 16) run.executor->reset_prefix_cache();
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (responses[i].empty()) responses[i] = collect(*run.executor, ids[i]);
  }
  return responses;
}

void check_prefix(const std::vector<Response>& cut, const std::vector<Response>& whole) {
  std::map<std::int32_t, std::vector<TokenId>> expected;
  for (const Response& response : whole) {
    auto& tokens = expected[response.result.sequence_index];
    const auto& part = response.result.output_token_ids.at(0);
    tokens.insert(tokens.end(), part.begin(), part.end());
  }
  std::map<std::int32_t, std::vector<TokenId>> found;
  for (const Response& response : cut) {
    auto& tokens = found[response.result.sequence_index];
    const auto& part = response.result.output_token_ids.at(0);
    tokens.insert(tokens.end(), part.begin(), part.end());
  }
  for (const auto& [index, tokens] : found) {
    BOOST_TEST_REQUIRE(tokens.size() <= expected[index].size());
    BOOST_TEST(std::ranges::equal(tokens, std::span(expected[index]).first(tokens.size())));
  }
}

const std::vector<CrowdSetting> kSettings = {
    {CapacitySchedulerPolicy::kGuaranteedNoEvict, 1024, 64, true, 8},
    {CapacitySchedulerPolicy::kGuaranteedNoEvict, 160, 9, true, 8},
    {CapacitySchedulerPolicy::kMaxUtilization, 128, 64, true, 8},
    {CapacitySchedulerPolicy::kMaxUtilization, 128, 5, false, 4},
    {CapacitySchedulerPolicy::kMaxUtilization, 112, 32, true, 3},
    {CapacitySchedulerPolicy::kStaticBatch, 256, 32, true, 4},
};

BOOST_DATA_TEST_CASE(a_crowd_gets_the_same_responses, data::make(kSettings) * data::make({0, 1}), setting,
                     time) {
  for (unsigned seed = 0; seed < sanitized(2U, 6U); ++seed) {
    std::mt19937 random(seed);
    const Crowd crowd = draw_crowd(random, 50);
    ExecutorConfig config = config_of(setting);
    config.kv_cache_config.enable_partial_reuse = seed % 2 == 0;
    config.kv_cache_config.copy_on_partial_reuse = seed % 4 == 0;
    if (seed % 3 == 0) {
      config.peft_cache_config.emplace().num_device_module_layer = 8;
      config.peft_cache_config->num_ensure_workers = static_cast<std::int32_t>(seed % 2);
    }
    const Run with(looking(kTimes.at(static_cast<std::size_t>(time))), config);
    const auto found = serve(with, crowd);
    Crowd patient = crowd;
    for (auto& guest : patient.guests) {
      guest.is_cancelled = false;
      guest.request.allotted_time_ms.reset();
    }
    const Run without(looking(Ahead::kNever), config_of(kSettings[0]));
    const auto expected = serve(without, patient);
    BOOST_TEST_CONTEXT("seed " << seed) {
      for (std::size_t i = 0; i < crowd.guests.size(); ++i) {
        BOOST_TEST_CONTEXT("request " << i) {
          const auto& guest = crowd.guests[i];
          const auto& reasons = found[i].back().result.finish_reasons;
          if (reasons.empty()) BOOST_TEST(found[i].back().error_msg == "");
          const bool is_cut = std::ranges::any_of(reasons, [](FinishReason reason) {
            return reason == FinishReason::kCancelled || reason == FinishReason::kTimedOut;
          });
          BOOST_TEST((!is_cut || guest.is_cancelled || guest.request.allotted_time_ms));
          if (guest.is_cancelled || guest.request.allotted_time_ms) {
            if (!guest.request.has_beams()) check_prefix(found[i], expected[i]);
          } else {
            check_same(found[i], expected[i], has_drafts(guest.request));
          }
        }
      }
      // How many depends on the times of arrivals.
      BOOST_TEST(with.engine->num_ahead() > 0);
      const auto steps = with.executor->get_latest_iteration_stats();
      BOOST_TEST(std::ranges::count_if(steps, &IterationStats::begun_ahead) > 0);
      for (std::size_t i = 1; i < steps.size(); ++i) {
        if (!steps[i].begun_ahead) continue;
        BOOST_TEST(steps[i].inflight_batching_stats->num_context_requests == 0);
        BOOST_TEST(steps[i - 1].inflight_batching_stats->num_context_requests == 0);
        BOOST_TEST(steps[i].num_new_active_requests == 0);
      }
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::look_ahead_test
