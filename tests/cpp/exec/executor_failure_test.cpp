// Failures and early ends: the request reports them, and the others go on.

#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cmath>
#include <fstream>
#include <future>
#include <limits>
#include <thread>

#include "adaptrt/core/error.h"
#include "adaptrt/exec/executor.h"
#include "fake_engine.h"
#include "support/allocations.h"

namespace adaptrt::test::executor_failure_test {
namespace {

using namespace std::chrono_literals;

const std::vector<TokenId> kPrompt = {5, 17, 3};

template <class Error>
auto says(std::string part) {
  return [part = std::move(part)](const Error& error) {
    BOOST_TEST_INFO(error.what());
    const bool found = std::string(error.what()).find(part) != std::string::npos;
    BOOST_TEST(found);
    return found;
  };
}

/// An executor whose first step waits at the gate.
std::unique_ptr<Executor> make_gated(Gate& gate, const ExecutorConfig& config = {},
                                     FakeEngine::Options options = {}) {
  return make_executor(config, options, [&gate](std::int64_t step) {
    if (step == 0) gate.wait();
  });
}

BOOST_AUTO_TEST_SUITE(executor_failures)

BOOST_AUTO_TEST_CASE(a_failing_step_fails_its_requests_and_no_others) {
  const auto executor = make_executor({}, {}, [](std::int64_t step) {
    if (step == 1) throw StepError("the third wheel came off");
  });
  const auto id = executor->enqueue_request(make_request(kPrompt, 5));
  const auto responses = collect(*executor, id);
  BOOST_TEST(responses.back().has_error());
  BOOST_TEST(responses.back().error_msg == "the third wheel came off");
  BOOST_TEST(executor->is_alive());
  const auto result = collect_result(*executor, executor->enqueue_request(make_request(kPrompt, 5)));
  BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(kPrompt, 5), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_request_that_waits_survives_a_failing_step) {
  Gate gate;
  FakeEngine::Options options;
  options.max_batch_size = 1;
  const auto executor = make_executor({}, options, [&](std::int64_t step) {
    if (step == 0) gate.wait();
    if (step == 0) throw std::runtime_error("out of luck");
  });
  const auto failing = executor->enqueue_request(make_request(kPrompt, 5));
  gate.await_visitor();
  const auto waiting = executor->enqueue_request(make_request(kPrompt, 5));
  gate.open();
  BOOST_TEST(collect(*executor, failing).back().error_msg == "out of luck");
  BOOST_TEST(collect_result(*executor, waiting).output_token_ids.at(0) == expected_tokens(kPrompt, 5),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(an_unusable_engine_is_the_executors_end) {
  const auto executor = make_executor({}, {}, [](std::int64_t step) {
    if (step == 1) throw EngineError("the file is gone");
  });
  const auto id = executor->enqueue_request(make_request(kPrompt, 5));
  BOOST_TEST(collect(*executor, id).back().error_msg == "executor died: the file is gone");
  while (executor->is_alive()) std::this_thread::yield();
  BOOST_CHECK_EXCEPTION(executor->enqueue_request(make_request(kPrompt, 5)), ExecutorClosedError,
                        says<ExecutorClosedError>("executor died: the file is gone"));
  BOOST_CHECK_THROW(static_cast<void>(executor->await_responses(std::nullopt)), ExecutorClosedError);
  executor->shutdown();
}

BOOST_AUTO_TEST_CASE(a_broken_invariant_is_the_executors_end) {
  const auto observer = [](const StepPlan* plan, const Scheduler&, const LoraCache*, const DraftEngine*) {
    if (plan == nullptr) throw std::logic_error("two and two make five");
  };
  Executor executor(std::make_shared<FakeEngine>(), {}, kAvailableMemory, observer);
  const auto id = executor.enqueue_request(make_request(kPrompt, 5));
  BOOST_TEST(collect(executor, id).back().error_msg == "executor died: two and two make five");
}

BOOST_AUTO_TEST_CASE(a_thread_without_memory_for_its_first_events_is_the_executors_end) {
  ExecutorConfig config;
  config.kv_cache_config.event_buffer_max_size = 100;
  const testing::FailingAllocations failing(1);
  const auto executor = make_executor(config);
  while (executor->is_alive()) std::this_thread::yield();
  BOOST_CHECK_EXCEPTION(executor->enqueue_request(make_request(kPrompt, 5)), ExecutorClosedError,
                        says<ExecutorClosedError>("executor died: std::bad_alloc"));
}

/// Counts the blocks that executors allocate.
class CountingEngine final : public FakeEngine {
 public:
  using FakeEngine::FakeEngine;
  void allocate_kv_blocks(std::int32_t num_blocks) override {
    ++num_allocations;
    FakeEngine::allocate_kv_blocks(num_blocks);
  }
  int num_allocations = 0;
};

BOOST_AUTO_TEST_CASE(an_executor_that_is_refused_leaves_its_engine_without_kv_blocks) {
  FakeEngine::Options options;
  options.kv_identity = "engine";
  const auto engine = std::make_shared<CountingEngine>(options);
  ExecutorConfig config;
  config.kv_cache_config.host_cache_size = std::size_t{1} << 20;
  config.kv_cache_config.host_cache_dir = "/no/such/directory";
  BOOST_CHECK_EXCEPTION(Executor(engine, config, kAvailableMemory, check_every_step), ConfigError,
                        says<ConfigError>("host_cache_dir /no/such/directory"));
  BOOST_TEST(engine->num_allocations == 0);
  Executor executor(engine, {}, kAvailableMemory, check_every_step);
  BOOST_TEST(engine->num_allocations == 1);
  const auto result = collect_result(executor, executor.enqueue_request(make_request(kPrompt, 5)));
  BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(kPrompt, 5), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(an_executor_that_is_refused_leaves_its_draft_engine_without_kv_blocks) {
  FakeEngine::Options options;
  options.kv_identity = "engine";
  const auto draft = std::make_shared<CountingEngine>();
  ExecutorConfig config;
  config.draft_target_decoding_config.emplace();
  ExecutorConfig refused = config;
  refused.kv_cache_config.host_cache_size = std::size_t{1} << 20;
  refused.kv_cache_config.host_cache_dir = "/no/such/directory";
  BOOST_CHECK_EXCEPTION(
      Executor(std::make_shared<FakeEngine>(options), refused, kAvailableMemory, check_every_step, draft),
      ConfigError, says<ConfigError>("host_cache_dir /no/such/directory"));
  BOOST_TEST(draft->num_allocations == 0);
  const auto executor = make_drafting_executor(config, options, draft);
  BOOST_TEST(draft->num_allocations == 1);
  const auto result = collect_result(*executor, executor->enqueue_request(make_request(kPrompt, 5)));
  BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(kPrompt, 5), boost::test_tools::per_element());
}

/// Resident memory of this process.
std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t all = 0;
  std::size_t resident = 0;
  file >> all >> resident;
  return resident * static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

BOOST_AUTO_TEST_CASE(context_logits_of_requests_that_wait_take_no_memory) {
  Gate gate;
  FakeEngine::Options options;
  options.max_batch_size = 1;
  options.vocab_size = 1 << 18;
  const auto executor = make_gated(gate, {}, options);
  const auto running = executor->enqueue_request(make_request(kPrompt, 1));
  gate.await_visitor();
  Request request = make_request(std::vector<TokenId>(64, 5), 1);
  request.output_config.return_context_logits = true;  // 64 MiB
  const std::size_t before = resident_bytes();
  std::vector<RequestId> waiting;
  for (int i = 0; i < 16; ++i) waiting.push_back(executor->enqueue_request(request));
  BOOST_TEST(resident_bytes() < before + (std::size_t{256} << 20));
  for (const RequestId id : waiting) executor->cancel_request(id);
  gate.open();
  static_cast<void>(collect_result(*executor, running));
  for (const RequestId id : waiting) {
    BOOST_TEST((collect_result(*executor, id).finish_reasons.at(0) == FinishReason::kCancelled));
  }
}

BOOST_AUTO_TEST_CASE(cancelling_a_running_and_a_waiting_request) {
  Gate gate;
  FakeEngine::Options options;
  options.max_batch_size = 1;
  const auto executor = make_gated(gate, {}, options);
  const auto running = executor->enqueue_request(make_request(kPrompt, 90));
  gate.await_visitor();
  const auto waiting = executor->enqueue_request(make_request(kPrompt, 5));
  executor->cancel_request(waiting);
  executor->cancel_request(running);
  executor->cancel_request(running);
  gate.open();
  const auto expected = expected_tokens(kPrompt, 90);
  const auto first = collect_result(*executor, running);
  BOOST_TEST((first.finish_reasons.at(0) == FinishReason::kCancelled));
  BOOST_REQUIRE_EQUAL(first.output_token_ids.at(0).size(), 1);
  BOOST_TEST(first.output_token_ids[0][0] == expected[0]);
  const auto second = collect_result(*executor, waiting);
  BOOST_TEST((second.finish_reasons.at(0) == FinishReason::kCancelled));
  BOOST_TEST(second.output_token_ids.at(0).empty());
}

BOOST_AUTO_TEST_CASE(allotted_time_ends_a_request) {
  const auto executor = make_executor({}, {}, [](std::int64_t) { std::this_thread::sleep_for(2ms); });
  auto request = make_request(kPrompt, 120);
  request.allotted_time_ms = 20ms;
  const auto result = collect_result(*executor, executor->enqueue_request(request));
  BOOST_TEST((result.finish_reasons.at(0) == FinishReason::kTimedOut));
  const auto& tokens = result.output_token_ids.at(0);
  const auto expected = expected_tokens(kPrompt, 120);
  BOOST_TEST(std::equal(tokens.begin(), tokens.end(), expected.begin()));
  BOOST_TEST(tokens.size() < 120);
}

BOOST_AUTO_TEST_CASE(the_allotted_time_of_a_request_that_has_ended_ends_nothing) {
  const auto executor = make_executor();
  auto request = make_request(kPrompt, 2);
  request.allotted_time_ms = 50ms;
  static_cast<void>(collect_result(*executor, executor->enqueue_request(request)));
  std::this_thread::sleep_for(60ms);
  // While it serves this request, the executor checks the time.
  const auto result = collect_result(*executor, executor->enqueue_request(make_request(kPrompt, 2)));
  BOOST_TEST((result.finish_reasons.at(0) == FinishReason::kLength));
  BOOST_TEST(executor->is_alive());
}

BOOST_AUTO_TEST_CASE(a_request_that_never_started_gives_its_place_in_the_queue_back) {
  Gate gate;
  ExecutorConfig config;
  config.max_queue_size = 1;
  FakeEngine::Options options;
  options.max_batch_size = 1;
  const auto executor = make_gated(gate, config, options);
  const auto running = executor->enqueue_request(make_request(kPrompt, 2));
  gate.await_visitor();
  const auto waiting = executor->enqueue_request(make_request(kPrompt, 2));
  BOOST_TEST(!executor->can_enqueue_requests());
  executor->cancel_request(waiting);
  gate.open();
  static_cast<void>(collect_result(*executor, waiting));
  static_cast<void>(collect_result(*executor, running));
  BOOST_TEST(executor->can_enqueue_requests());
}

BOOST_AUTO_TEST_CASE(a_full_queue_refuses) {
  Gate gate;
  ExecutorConfig config;
  config.max_queue_size = 2;
  FakeEngine::Options options;
  options.max_batch_size = 1;
  const auto executor = make_gated(gate, config, options);
  std::vector<RequestId> ids = {executor->enqueue_request(make_request(kPrompt, 2))};
  gate.await_visitor();
  BOOST_TEST(executor->can_enqueue_requests());
  BOOST_CHECK_THROW(executor->enqueue_requests(std::vector(3, make_request(kPrompt, 2))), QueueFullError);
  ids.push_back(executor->enqueue_request(make_request(kPrompt, 2)));
  ids.push_back(executor->enqueue_request(make_request(kPrompt, 2)));
  BOOST_TEST(!executor->can_enqueue_requests());
  BOOST_CHECK_EXCEPTION(executor->enqueue_request(make_request(kPrompt, 2)), QueueFullError,
                        says<QueueFullError>("max_queue_size is 2"));
  gate.open();
  for (const auto id : ids) static_cast<void>(collect_result(*executor, id));
  BOOST_TEST(executor->can_enqueue_requests());
}

BOOST_AUTO_TEST_CASE(shutdown_ends_running_and_waiting_requests_and_wakes_those_who_wait) {
  Gate gate;
  FakeEngine::Options options;
  options.max_batch_size = 1;
  // Long enough that it cannot end before the shutdown.
  const auto executor = make_executor({}, options, [&](std::int64_t step) {
    if (step == 0) gate.wait();
    std::this_thread::sleep_for(10ms);
  });
  const auto running = executor->enqueue_request(make_request(kPrompt, 50));
  gate.await_visitor();
  const auto waiting = executor->enqueue_request(make_request(kPrompt, 5));
  const auto wait_for = [&](RequestId id) {
    return std::async(std::launch::async, [&, id] { return executor->await_responses(id, std::nullopt); });
  };
  auto first = wait_for(running);
  auto second = wait_for(waiting);
  std::this_thread::sleep_for(20ms);  // give both time to wait
  auto closing = std::async(std::launch::async, [&] { executor->shutdown(); });
  std::this_thread::sleep_for(20ms);
  gate.open();
  closing.get();
  BOOST_TEST(first.get().back().error_msg == "executor was shut down");
  BOOST_TEST(second.get().back().error_msg == "executor was shut down");
  BOOST_TEST(!executor->is_alive());
  BOOST_CHECK_THROW(executor->enqueue_request(make_request(kPrompt, 1)), ExecutorClosedError);
  BOOST_CHECK_THROW(static_cast<void>(executor->await_responses(1ms)), ExecutorClosedError);
  BOOST_CHECK_THROW(executor->cancel_request(running), ExecutorClosedError);
  BOOST_CHECK_THROW(static_cast<void>(executor->list_adapters()), ExecutorClosedError);
  executor->shutdown();
}

/// Shuts down an executor this long after another thread was told to wait for its responses. Returns false if
/// that thread began to wait only afterwards.
bool shutdown_wakes_a_waiter(std::chrono::milliseconds delay) {
  const auto executor = make_executor();
  auto waiting = std::async(std::launch::async, [&] { return executor->await_responses(std::nullopt); });
  std::this_thread::sleep_for(delay);
  BOOST_TEST(!executor->is_shut_down());
  BOOST_TEST(executor->can_enqueue_requests());
  executor->shutdown();
  BOOST_TEST(executor->is_shut_down());
  BOOST_TEST(!executor->can_enqueue_requests());
  BOOST_CHECK_THROW(executor->throw_if_closed(), ExecutorClosedError);
  BOOST_CHECK_THROW(static_cast<void>(executor->await_responses(std::nullopt)), ExecutorClosedError);
  try {
    BOOST_TEST(waiting.get().empty());
    return true;
  } catch (const ExecutorClosedError&) {
    return false;
  }
}

BOOST_AUTO_TEST_CASE(shutdown_of_an_idle_executor_wakes_those_who_wait) {
  // On a busy machine, the other thread may start late.
  auto delay = 20ms;
  while (!shutdown_wakes_a_waiter(delay)) {
    delay *= 4;
    BOOST_TEST_REQUIRE(delay < 10s);
  }
}

BOOST_AUTO_TEST_CASE(executors_may_go_in_any_state) {
  for (int round = 0; round < 30; ++round) {
    const auto executor = make_executor();
    for (int i = 0; i < round; ++i) executor->enqueue_request(make_request({i, 1, 2}, 20));
    if (round % 3 == 0) static_cast<void>(executor->await_responses(1ms));
  }
}

BOOST_AUTO_TEST_CASE(a_pinned_cache_refuses_what_can_never_be_loaded) {
  ExecutorConfig config;
  config.peft_cache_config.emplace().num_device_module_layer = 8;
  const auto executor = make_executor(config);
  executor->put_adapter(fake_adapter(1, 8));
  executor->pin_adapter(1);
  auto request = make_request(kPrompt, 3);
  request.lora_config = fake_adapter(2, 8);
  BOOST_CHECK_THROW(executor->enqueue_request(request), LoraCacheFullError);
  executor->unpin_adapter(1);
  const auto result = collect_result(*executor, executor->enqueue_request(request));
  BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(kPrompt, 3, 2),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_SUITE_END()

BOOST_AUTO_TEST_SUITE(request_validation)

/// Checks that the request is refused with this text, and that the executor then serves others.
void check_refused(const Request& request, const std::string& part, const ExecutorConfig& config = {}) {
  const auto executor = make_executor(config);
  BOOST_CHECK_EXCEPTION(executor->enqueue_request(request), RequestError, says<RequestError>(part));
  BOOST_CHECK_THROW(executor->enqueue_requests({make_request(kPrompt, 1), request}), RequestError);
  BOOST_TEST(executor->get_num_responses_ready(std::nullopt) == 0);
  BOOST_TEST(collect_result(*executor, executor->enqueue_request(make_request(kPrompt, 1))).is_final);
}

BOOST_AUTO_TEST_CASE(bad_lengths) {
  check_refused(make_request({}, 1), "input_token_ids is empty");
  check_refused(make_request(std::vector<TokenId>(97, 1), 1), "97 tokens; the engine's max_input_len is 96");
  check_refused(make_request(std::vector<TokenId>(90, 1), 39), "129 tokens; the engine's max_seq_len is 128");
  check_refused(make_request(kPrompt, 0), "max_tokens is 0");
  check_refused(make_request(kPrompt, std::numeric_limits<std::int32_t>::max()), "max_seq_len is 128");
}

BOOST_AUTO_TEST_CASE(requests_that_never_fit_are_refused_with_numbers) {
  check_refused(make_request(std::vector<TokenId>(70, 1), 1), "max_num_tokens = 64");
  ExecutorConfig config;
  config.kv_cache_config.max_tokens = 40;
  check_refused(make_request(std::vector<TokenId>(30, 1), 12), "needs 11 KV blocks of 4 tokens; there are 10",
                config);
}

BOOST_AUTO_TEST_CASE(bad_tokens) {
  check_refused(make_request({1, 101, -2}, 1),
                "input_token_ids[1] is 101 (and 1 more); the vocabulary is 0 to 100");
  auto request = make_request(kPrompt, 1);
  request.end_id = 101;
  check_refused(request, "end_id is 101");
  request = make_request(kPrompt, 1);
  request.stop_words = std::vector<std::vector<TokenId>>{{1}, {}, {400}};
  check_refused(request, "stop_words[1] is empty");
  check_refused(request, "stop_words[2][0] is 400");
  request = make_request(kPrompt, 1);
  request.bad_words = std::vector<std::vector<TokenId>>{{-1}};
  check_refused(request, "bad_words");
  request = make_request(kPrompt, 1);
  request.embedding_bias = bias_of(std::vector<float>(101, std::numeric_limits<float>::quiet_NaN()));
  check_refused(request, "embedding_bias[0] is NaN");
  request.embedding_bias = bias_of(std::vector<float>(101, std::numeric_limits<float>::infinity()));
  check_refused(request, "embedding_bias[0] is NaN or +infinity");
}

BOOST_AUTO_TEST_CASE(a_bias_of_another_length_is_the_responses_error) {
  Gate gate;
  const auto executor = make_gated(gate);
  const auto running = executor->enqueue_request(make_request(kPrompt, 5));
  gate.await_visitor();
  auto request = make_request(kPrompt, 5);
  request.embedding_bias = bias_of(std::vector<float>(100, 0.0F));
  const auto id = executor->enqueue_request(request);
  gate.open();
  const auto responses = collect(*executor, id);
  BOOST_TEST_REQUIRE(responses.size() == 1U);
  BOOST_TEST(
      responses[0].error_msg ==
      "embedding bias shape is not as expected: embedding_bias is [100]; accepted: [101], one value for "
      "each token of the vocabulary");
  BOOST_TEST(collect_result(*executor, running).output_token_ids.at(0) == expected_tokens(kPrompt, 5),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(bad_numbers) {
  auto request = make_request(kPrompt, 1);
  request.priority = std::numeric_limits<float>::quiet_NaN();
  check_refused(request, "priority is");
  request = make_request(kPrompt, 1);
  request.allotted_time_ms = 0ms;
  check_refused(request, "allotted_time_ms is 0");
  request = make_request(kPrompt, 1);
  request.sampling_config.top_p = 2.0;
  check_refused(request, "sampling_config.top_p");
  for (const std::int32_t bad : {-1, 21, std::numeric_limits<std::int32_t>::max()}) {
    request = make_request(kPrompt, 1);
    request.output_config.top_log_probs = bad;
    check_refused(request, "output_config.top_log_probs is " + std::to_string(bad) + "; accepted: 0 to 20");
  }
}

BOOST_AUTO_TEST_CASE(a_wrong_retention_is_refused_by_name) {
  auto request = make_request(kPrompt, 1);
  request.kv_cache_retention_config.emplace().decode_retention_priority = 101;
  check_refused(request, "kv_cache_retention_config.decode_retention_priority is 101");
}

BOOST_AUTO_TEST_CASE(unsupported_fields_are_refused_by_name) {
  const auto check = [](auto set, const std::string& part) {
    auto request = make_request(kPrompt, 1);
    set(request);
    check_refused(request, part);
  };
  check([](Request& request) { request.position_ids = {{0, 1, 2}}; }, "position_ids is given");
  check([](Request& request) { request.prompt_tuning_config.emplace(); },
        "prompt_tuning_config is given; accepted: None, because encoder-decoders, engines with embeddings of "
        "each layer, of several ranks and of TensorRT take no embeddings");
  check([](Request& request) { request.logits_post_processor_name = "x"; },
        "logits_post_processor_name is 'x', which the executor's");
  check([](Request& request) { request.encoder_input_token_ids = {{1}}; },
        "encoder_input_token_ids is given");
  check([](Request& request) { request.guided_decoding_params.emplace(); },
        "guided_decoding_params is given");
  check([](Request& request) { request.eagle_config = given("X"); }, "eagle_config is given");
  check([](Request& request) { request.request_type = RequestType::kContextOnly; },
        "request_type is not REQUEST_TYPE_CONTEXT_AND_GENERATION");
  check([](Request& request) { request.multimodal_embedding = given("X"); }, "multimodal_embedding is given");
  check([](Request& request) { request.multimodal_input = given("X"); }, "multimodal_input is given");
  check([](Request& request) { request.mrope_config = given("X"); }, "mrope_config is given");
  check([](Request& request) { request.context_phase_params = given("X"); }, "context_phase_params is given");
  check([](Request& request) { request.output_config.additional_model_outputs = given("X"); },
        "output_config.additional_model_outputs is given");
  check([](Request& request) { request.output_config.return_encoder_output = true; },
        "return_encoder_output is True");
}

BOOST_AUTO_TEST_CASE(all_problems_are_told_at_once) {
  auto request = make_request({-1}, 0);
  request.num_return_sequences = 0;
  check_refused(request, "max_tokens is 0");
  check_refused(request, "input_token_ids[0] is -1");
  check_refused(request, "num_return_sequences is 0");
}

BOOST_AUTO_TEST_CASE(adapters_that_are_missing_or_not_wanted) {
  const auto executor = make_executor();
  auto request = make_request(kPrompt, 1);
  request.lora_config = task_alone(44);
  BOOST_CHECK_EXCEPTION(executor->enqueue_request(request), PeftTaskNotCachedError,
                        says<PeftTaskNotCachedError>("LoRA task 44 not found in cache"));
  request.lora_config = fake_adapter(1, 9);
  BOOST_CHECK_THROW(executor->enqueue_request(request), AdapterError);
  BOOST_TEST(executor->list_adapters().empty());

  FakeEngine::Options options;
  options.with_lora = false;
  const auto plain = make_executor({}, options);
  request.lora_config = fake_adapter(1);
  BOOST_CHECK_EXCEPTION(plain->enqueue_request(request), AdapterError,
                        says<AdapterError>("built without LoRA"));
  BOOST_CHECK_THROW(static_cast<void>(plain->lora_cache_stats()), AdapterError);
}

BOOST_AUTO_TEST_CASE(bad_configurations_tell_everything) {
  ExecutorConfig config;
  config.max_beam_width = 2;
  config.max_batch_size = 9;
  config.max_num_tokens = 0;
  config.parallel_config = given("ParallelConfig");
  config.debug_config = given("DebugConfig");
  config.additional_model_outputs = given("list");
  config.cache_transceiver_config = given("CacheTransceiverConfig");
  config.recv_poll_period_ms = -1;
  config.kv_cache_config.max_attention_window = {4096, 3};
  config.normalize_log_probs = false;
  config.batching_type = BatchingType::kStatic;
  config.gpu_weights_percent = 0.5;
  config.kv_cache_config.onboard_blocks = false;
  config.kernels = "portable";
  for (const char* part : {"max_beam_width is 2", "max_batch_size is 9; the engine was built for 8",
                           "max_num_tokens is 0", "parallel_config is given (ParallelConfig)",
                           "debug_config is given (DebugConfig)", "additional_model_outputs is given (list)",
                           "cache_transceiver_config is given", "recv_poll_period_ms is -1",
                           "kv_cache_config.max_attention_window has 3", "normalize_log_probs is False",
                           "batching_type is STATIC", "gpu_weights_percent", "kv_cache_config.onboard_blocks",
                           "kernels is 'portable'; the engine runs on a device and takes none"}) {
    BOOST_CHECK_EXCEPTION(make_executor(config), ConfigError, says<ConfigError>(part));
  }
}

BOOST_AUTO_TEST_CASE(hints_that_only_tune_change_nothing) {
  ExecutorConfig config;
  config.use_gpu_direct_storage = true;
  config.extended_runtime_perf_knob_config = {false, true, true, 7};
  config.recv_poll_period_ms = 50;
  config.max_seq_idle_microseconds = 1;
  config.kv_cache_config.max_attention_window = {4096};
  config.scheduler_config.dynamic_batch_config = DynamicBatchConfig{true, true, 7};
  config.peft_cache_config->num_put_workers = 4;
  config.peft_cache_config->num_copy_streams = 4;
  const auto executor = make_executor(config);
  const auto result = collect_result(*executor, executor->enqueue_request(make_request(kPrompt, 5)));
  BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(kPrompt, 5), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(values_that_are_kept_are_equal_in_their_own_sense) {
  BOOST_TEST((given("X") == given("X")));
  BOOST_TEST((given("X") != given("Y")));
  BOOST_TEST((given("X") != Unsupported{}));
  BOOST_TEST((Unsupported{} == Unsupported{}));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::executor_failure_test
