// Executors with a draft engine: the same results in fewer steps.

#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <random>
#include <string>

#include "adaptrt/exec/executor.h"
#include "crowd_setting.h"
#include "fake_engine.h"
#include "sequences.h"

namespace adaptrt::test::draft_target_test {
namespace {

const std::vector<TokenId> kText = {3, 1, 4, 1, 5};

FakeEngine::Options few_tokens() {
  FakeEngine::Options options;
  options.vocab_size = 3;
  return options;
}

ExecutorConfig drafting(ExecutorConfig config = {}) {
  config.draft_target_decoding_config.emplace();
  config.iter_stats_max_iterations = 10000;
  return config;
}

SpeculationStats newest_of(Executor& executor) {
  const auto steps = executor.get_latest_iteration_stats();
  BOOST_TEST_REQUIRE(!steps.empty());
  return steps.back().speculation_stats;
}

BOOST_AUTO_TEST_SUITE(draft_target)

BOOST_AUTO_TEST_CASE(right_drafts_come_in_one_step) {
  const auto draft = std::make_shared<FakeEngine>();
  const auto executor = make_drafting_executor(drafting(), {}, draft);
  const Result result = collect_result(*executor, executor->enqueue_request(make_request(kText, 20)));
  BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(kText, 20), boost::test_tools::per_element());
  // The prompt's step has no drafts; the next one has 2, and later ones have 4.
  BOOST_TEST(result.decoding_iter == 1 + 1 + 4);
  const auto steps = executor->get_latest_iteration_stats();
  BOOST_TEST_REQUIRE(steps.size() == 6U);
  BOOST_TEST(!steps[0].spec_decoding_stats.has_value());
  BOOST_TEST(steps[1].spec_decoding_stats->num_draft_tokens == 2);
  BOOST_TEST(steps[2].spec_decoding_stats->num_draft_tokens == 4);
  BOOST_TEST((steps[2].spec_decoding_stats->draft_overhead > 0.0 &&
              steps[2].spec_decoding_stats->draft_overhead <= 1.0));
  const SpeculationStats& total = steps.back().speculation_stats;
  BOOST_TEST(total.draft_tokens == 2 + 3 * 4);  // the last step uses all but one of 4 tokens
  BOOST_TEST(total.accepted_tokens == total.draft_tokens);
  BOOST_TEST_REQUIRE(total.draft_engine.has_value());
  BOOST_TEST(total.draft_engine->num_tokens == draft->num_tokens());
  BOOST_TEST(total.draft_engine->num_sequences == 0);
  BOOST_TEST(total.draft_engine->error == "");
  BOOST_TEST(to_json_str(steps.back()).find(R"("speculationStats":{"draftTokens":14,"acceptedTokens":14,)") !=
             std::string::npos);
}

BOOST_AUTO_TEST_CASE(memory_is_bounded_and_told) {
  ExecutorConfig config = drafting();
  const auto memory_of = [&](std::optional<std::size_t> kv_cache_size) {
    config.draft_target_decoding_config->kv_cache_size = kv_cache_size;
    const auto executor = make_drafting_executor(config, {}, std::make_shared<FakeEngine>());
    static_cast<void>(collect_result(*executor, executor->enqueue_request(make_request(kText, 4))));
    const auto steps = executor->get_latest_iteration_stats();
    return std::pair(steps.back().cpu_mem_usage, *steps.back().speculation_stats.draft_engine);
  };
  const auto [small, small_stats] = memory_of(64 * 10 + 63);
  BOOST_TEST(small_stats.max_num_blocks == 10);
  const auto [large, large_stats] = memory_of(64 * 100);
  BOOST_TEST(large_stats.max_num_blocks == 100);
  BOOST_TEST(large_stats.mem_usage - small_stats.mem_usage == 64U * 90);
  BOOST_TEST(large - small == 64U * 90);
  // Enough for a full batch of sequences of maximal length.
  BOOST_TEST(memory_of(std::nullopt).second.max_num_blocks == 8 * 32);
}

BOOST_AUTO_TEST_CASE(blocks_of_the_draft_engine_are_reserved_on_a_device) {
  FakeEngine::Options options;
  options.with_lora = false;
  options.free_device_memory = 64 * 30;
  ExecutorConfig config = drafting();
  config.kv_cache_config.free_gpu_memory_fraction = 0.5;
  config.draft_target_decoding_config->kv_cache_size = 64 * 10;
  const auto num_blocks = [&](const FakeEngine::Options& of_draft) {
    const auto executor = make_drafting_executor(config, options, std::make_shared<FakeEngine>(of_draft));
    static_cast<void>(collect_result(*executor, executor->enqueue_request(make_request(kText, 4))));
    return executor->get_latest_iteration_stats().back().kv_cache_stats->max_num_blocks;
  };
  BOOST_TEST(num_blocks(options) == (30 - 10) / 2);
  FakeEngine::Options on_host;
  on_host.with_lora = false;
  BOOST_TEST(num_blocks(on_host) == 30 / 2);
}

BOOST_AUTO_TEST_CASE(adapters_of_the_draft_engine_are_its_own) {
  const auto executor = make_drafting_executor(drafting(), {}, std::make_shared<FakeEngine>());
  auto request = make_request(kText, 20);
  request.lora_config = fake_adapter(7);
  const auto expected = expected_tokens(kText, 20, 7);
  const auto steps_of = [&] {
    const Result result = collect_result(*executor, executor->enqueue_request(request));
    BOOST_TEST(result.output_token_ids.at(0) == expected, boost::test_tools::per_element());
    return result.decoding_iter;
  };
  BOOST_TEST(steps_of() > 15);
  // FakeEngine's logits depend on the task_id.
  request.draft_lora_config = task_alone(7);
  BOOST_CHECK_THROW(executor->enqueue_request(request), PeftTaskNotCachedError);
  request.draft_lora_config = fake_adapter(7, 2, 5.0F);
  BOOST_TEST(steps_of() == 6);
  request.draft_lora_config = task_alone(7);
  request.lora_config = task_alone(7);
  BOOST_TEST(steps_of() == 6);
  BOOST_TEST(executor->list_adapters().size() == 1U);
  executor->unload_draft_adapter(7);
  BOOST_CHECK_THROW(executor->unload_draft_adapter(7), PeftTaskNotCachedError);
  BOOST_CHECK_THROW(executor->enqueue_request(request), PeftTaskNotCachedError);
  executor->put_draft_adapter(fake_adapter(7, 2, 5.0F));
  BOOST_TEST(steps_of() == 6);
  BOOST_TEST(executor->list_adapters().size() == 1U);
}

BOOST_AUTO_TEST_CASE(adapters_need_a_draft_engine_with_lora) {
  const auto says = [](const std::string& reason) {
    return [reason](const AdapterError& error) { return std::string(error.what()) == reason; };
  };
  FakeEngine::Options options;
  options.with_lora = false;
  const auto without = make_drafting_executor(drafting(), {}, std::make_shared<FakeEngine>(options));
  BOOST_CHECK_EXCEPTION(without->put_draft_adapter(fake_adapter(7)), AdapterError,
                        says("the draft engine was built without LoRA"));
  const auto alone = make_executor();
  BOOST_CHECK_EXCEPTION(alone->unload_draft_adapter(7), AdapterError,
                        says("the executor has no draft engine"));
}

BOOST_AUTO_TEST_CASE(a_draft_adapter_serves_the_rest_of_its_list_and_a_refused_list_leaves_none) {
  const auto executor = make_drafting_executor(drafting(), {}, std::make_shared<FakeEngine>());
  std::vector<Request> requests(2, make_request(kText, 20));
  for (auto& request : requests) request.lora_config = fake_adapter(7);
  requests[0].draft_lora_config = fake_adapter(7, 2, 5.0F);
  requests[1].draft_lora_config = task_alone(7);
  auto refused = requests;
  refused[1].draft_lora_config = task_alone(8);
  BOOST_CHECK_THROW(executor->enqueue_requests(refused), PeftTaskNotCachedError);
  BOOST_TEST(executor->list_adapters().empty());
  BOOST_CHECK_THROW(executor->enqueue_request(requests[1]), PeftTaskNotCachedError);
  for (const RequestId id : executor->enqueue_requests(requests)) {
    const Result result = collect_result(*executor, id);
    BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(kText, 20, 7),
               boost::test_tools::per_element());
    BOOST_TEST(result.decoding_iter == 6);  // 20 tokens in 6 steps: drafts of the right adapter
  }
}

BOOST_AUTO_TEST_CASE(an_adapter_that_finds_no_room_costs_drafts_alone) {
  ExecutorConfig config = drafting();
  config.draft_target_decoding_config->peft_cache_config.host_cache_size = 1024;
  config.draft_target_decoding_config->peft_cache_config.max_adapter_size = 1;
  const auto executor = make_drafting_executor(config, {}, std::make_shared<FakeEngine>());
  auto request = make_request(kText, 6);
  for (std::uint64_t task_id = 1; task_id <= 4; ++task_id) {
    request.draft_lora_config = fake_adapter(task_id, 8);
    BOOST_TEST(collect_result(*executor, executor->enqueue_request(request)).output_token_ids.at(0) ==
                   expected_tokens(kText, 6),
               boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(a_load_that_fails_costs_drafts_alone) {
  FakeEngine::Options options;
  options.in_load = [] { throw StepError("no load"); };
  const auto executor = make_drafting_executor(drafting(), {}, std::make_shared<FakeEngine>(options));
  auto request = make_request(kText, 6);
  request.draft_lora_config = fake_adapter(1);
  BOOST_TEST(collect_result(*executor, executor->enqueue_request(request)).output_token_ids.at(0) ==
                 expected_tokens(kText, 6),
             boost::test_tools::per_element());
  BOOST_TEST(newest_of(*executor).draft_tokens == 0);
}

BOOST_AUTO_TEST_CASE(a_draft_engine_that_fails_costs_drafts_alone) {
  const auto draft = std::make_shared<FakeEngine>(FakeEngine::Options{}, [](std::int64_t step) {
    if (step == 3) throw StepError("out of order");
  });
  const auto executor = make_drafting_executor(drafting(), {}, draft);
  for (int i = 0; i < 2; ++i) {
    const Result result = collect_result(*executor, executor->enqueue_request(make_request(kText, 20)));
    BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(kText, 20), boost::test_tools::per_element());
  }
  const SpeculationStats total = newest_of(*executor);
  BOOST_TEST(total.draft_engine->error == "out of order");
  BOOST_TEST(total.draft_tokens == 2);
}

BOOST_AUTO_TEST_CASE(the_text_comes_first_and_the_engine_where_it_says_nothing) {
  ExecutorConfig config = drafting();
  config.decoding_config.emplace().lookahead_decoding_config = LookaheadDecodingConfig{4, 3, 4};
  const auto executor =
      make_drafting_executor(config, few_tokens(), std::make_shared<FakeEngine>(few_tokens()));
  const std::vector<TokenId> prompt = {0, 1, 2, 0, 1};
  const Result result = collect_result(*executor, executor->enqueue_request(make_request(prompt, 100)));
  BOOST_TEST(result.output_token_ids.at(0) == expected_tokens(prompt, 100, 0, 3),
             boost::test_tools::per_element());
  const SpeculationStats total = newest_of(*executor);
  BOOST_TEST(total.accepted_tokens < total.draft_tokens);          // drafts from the text are wrong as well
  BOOST_TEST(total.draft_engine->num_steps < total.draft_tokens);  // and not all drafts are the engine's
  BOOST_TEST(total.draft_engine->num_steps > 0);
}

BOOST_AUTO_TEST_CASE(wrong_drafts_are_given_up) {
  // The draft engine never sees the adapter.
  const auto draft = std::make_shared<FakeEngine>();
  const auto executor = make_drafting_executor(drafting(), {}, draft);
  auto request = make_request(kText, 120);
  request.lora_config = fake_adapter(7);
  BOOST_TEST(collect_result(*executor, executor->enqueue_request(request)).decoding_iter > 115);
  BOOST_TEST(newest_of(*executor).draft_tokens < 12);
  BOOST_TEST(draft->num_tokens() < 2 * (5 + 120));
}

struct Setting {
  CrowdSetting crowd;
  std::size_t draft_blocks;
  std::int32_t draft_batch;
};

std::ostream& operator<<(std::ostream& out, const Setting& setting) {
  return out << setting.crowd << ", draft blocks " << setting.draft_blocks << ", draft batch "
             << setting.draft_batch;
}

const std::vector<Setting> kSettings = {
    {{CapacitySchedulerPolicy::kGuaranteedNoEvict, 1024, 64, true}, 512, 8},
    {{CapacitySchedulerPolicy::kGuaranteedNoEvict, 160, 6, true}, 20, 3},
    {{CapacitySchedulerPolicy::kMaxUtilization, 128, 64, true}, 256, 8},
    {{CapacitySchedulerPolicy::kMaxUtilization, 128, 9, true}, 24, 2},
    {{CapacitySchedulerPolicy::kStaticBatch, 512, 32, true}, 40, 8},
};

/// The draft engine's adapters are those of the requests, different ones, or none, so that some drafts are
/// right and some wrong. Each request is compared with its result alone and without drafts.
BOOST_DATA_TEST_CASE(drafts_change_nothing_in_a_crowd, boost::unit_test::data::make(kSettings), setting) {
  ExecutorConfig config = drafting(config_of(setting.crowd));
  config.draft_target_decoding_config->kv_cache_size = setting.draft_blocks * 64;
  FakeEngine::Options draft_options = few_tokens();
  draft_options.max_batch_size = setting.draft_batch;
  draft_options.max_num_tokens = 12;
  draft_options.max_seq_len = 70;
  const auto draft = std::make_shared<FakeEngine>(draft_options);
  const auto executor = make_drafting_executor(config, few_tokens(), draft);
  const auto alone = make_executor({}, few_tokens());
  std::mt19937 random(7);
  const auto number = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  std::vector<Request> requests;
  std::vector<RequestId> ids;
  for (int i = 0; i < 40; ++i) {
    std::vector<TokenId> prompt(static_cast<std::size_t>(number(1, 40)));
    for (auto& token : prompt) token = number(0, 2);
    auto request = make_request(prompt, number(1, 40));
    request.output_config.return_log_probs = true;
    request.num_return_sequences = number(0, 3) == 0 ? 2 : 1;
    if (const int task_id = number(0, 3); task_id > 0)
      request.lora_config = fake_adapter(static_cast<std::uint64_t>(task_id));
    if (number(0, 1) == 0) {
      request.sampling_config.top_p = 0.9;
      request.sampling_config.temperature = 0.5;
      request.sampling_config.seed = static_cast<std::uint64_t>(i);
    }
    if (number(0, 3) == 0) request.stop_words = {{0, 1, 1, 2}};
    if (number(0, 3) == 0) request.lookahead_config = LookaheadDecodingConfig{4, 3, 4};
    if (number(0, 4) == 0) request.cache_salt_id = number(0, 1);
    requests.push_back(request);
    if (request.lora_config && number(0, 2) > 0) request.draft_lora_config = request.lora_config;
    if (!request.lora_config && number(0, 4) == 0) request.draft_lora_config = fake_adapter(9);
    ids.push_back(executor->enqueue_request(request));
    if (number(0, 9) == 0) {
      executor->cancel_request(executor->enqueue_request(request));
    }
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto found = results_of(*executor, ids[i]);
    const auto expected = results_of(*alone, alone->enqueue_request(requests[i]));
    for (const auto& [index, results] : expected) {
      BOOST_TEST(tokens_of(found.at(index)) == tokens_of(results), boost::test_tools::per_element());
      BOOST_TEST((found.at(index).back().log_probs == results.back().log_probs));
      BOOST_TEST((found.at(index).back().finish_reasons == results.back().finish_reasons));
    }
  }
  const SpeculationStats total = newest_of(*executor);
  BOOST_TEST(total.accepted_tokens > 20);
  BOOST_TEST(total.accepted_tokens < total.draft_tokens);
  BOOST_TEST(total.draft_engine->error == "");
}

BOOST_AUTO_TEST_CASE(invalid_drafts_are_refused_by_name) {
  const auto check = [&](auto set, const FakeEngine::Options& draft, const std::string& part) {
    ExecutorConfig config = drafting();
    set(*config.draft_target_decoding_config);
    BOOST_CHECK_EXCEPTION(
        static_cast<void>(make_drafting_executor(config, {}, std::make_shared<FakeEngine>(draft))),
        ConfigError,
        [&](const ConfigError& error) { return std::string(error.what()).find(part) != std::string::npos; });
  };
  using Config = DraftTargetDecodingConfig;
  check([](Config& config) { config.max_draft_len = 0; }, {},
        "draft_target_decoding_config.max_draft_len is 0; accepted: 1 to 31");
  check([](Config& config) { config.max_draft_len = 32; }, {}, "max_draft_len is 32; accepted: 1 to 31");
  check([](Config& config) { config.kv_cache_size = 0; }, {},
        "kv_cache_size is 0; accepted: None, 1 or more");
  check([](Config& config) { config.kv_cache_size = 63; }, {},
        "kv_cache_size is 63, less than one KV block of the draft engine, which takes 64");
  check([](Config& config) { config.peft_cache_config.lora_prefetch_dir = "here"; }, {},
        "draft_target_decoding_config.peft_cache_config.lora_prefetch_dir is 'here'; accepted: None");
  check([](Config& config) { config.peft_cache_config.optimal_adapter_size = 0; }, {},
        "draft_target_decoding_config.peft_cache_config.optimal_adapter_size is 0");
  check([](Config& /*config*/) {}, few_tokens(),
        "draft_target_decoding_config: the draft engine's vocab_size is 3; accepted: the engine's, 101");

  BOOST_CHECK_THROW(static_cast<void>(make_executor(drafting())), ConfigError);
  BOOST_CHECK_THROW(static_cast<void>(make_drafting_executor({}, {}, std::make_shared<FakeEngine>())),
                    ConfigError);
  auto request = make_request(kText, 4);
  request.draft_lora_config = fake_adapter(1);
  BOOST_CHECK_EXCEPTION(
      make_executor()->enqueue_request(request), RequestError, [](const RequestError& error) {
        return std::string(error.what()).find("draft_lora_config is given; accepted: None") !=
               std::string::npos;
      });
  FakeEngine::Options without_lora;
  without_lora.with_lora = false;
  const auto executor = make_drafting_executor(drafting(), {}, std::make_shared<FakeEngine>(without_lora));
  BOOST_CHECK_THROW(executor->enqueue_request(request), AdapterError);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::draft_target_test
