// Requests to an encoder-only engine: whole sequences, no KV blocks, rows instead of tokens.

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/engine/check_step_input.h"
#include "adaptrt/exec/executor.h"
#include "fake_engine.h"

namespace adaptrt::test::encoder_only_test {
namespace {

namespace data = boost::unit_test::data;

using Floats = std::vector<float>;

/// FakeEngine's hidden size.
constexpr std::int64_t kHiddenSize = 6;
constexpr PoolingType kTypes[] = {PoolingType::kLast, PoolingType::kCls, PoolingType::kMean,
                                  PoolingType::kAll};

/// Hidden states that depend on the whole sequence and on the position.
Floats hidden_of(std::vector<TokenId> sequence, std::int32_t position, std::uint64_t task_id) {
  sequence.push_back(position);
  return FakeEngine::hidden_after(sequence, task_id, kHiddenSize);
}

class FakeEncoder final : public FakeEngine {
 public:
  explicit FakeEncoder(const Options& options = {}) : FakeEngine(options), info_(FakeEngine::info()) {
    info_.has_kv_cache = false;
    info_.has_logits = false;
    info_.has_adapter_start_positions = false;
    info_.kv_block_bytes = 0;
    info_.max_reusable_prompt_len = 0;
  }

  [[nodiscard]] const EngineInfo& info() const override { return info_; }
  void allocate_kv_blocks(std::int32_t /*num_blocks*/) override { throw EngineError("there are none"); }
  using Engine::step;
  void step(const StepInput& input, const LogitsSink& /*sink*/, const HiddenSink& hidden_sink) override {
    checker_.check(input, info_, 0);
    std::int64_t row = 0;
    for (const std::int32_t token : input.hidden_rows) {
      const auto& offsets = input.sequence_offsets;
      const auto sequence = std::ranges::upper_bound(offsets, token) - offsets.begin() - 1;
      const auto at = static_cast<std::size_t>(sequence);
      const DeviceAdapter* adapter = input.adapters[at];
      const Floats hidden =
          hidden_of({input.token_ids.begin() + offsets[at], input.token_ids.begin() + offsets[at + 1]},
                    token - offsets[at], adapter == nullptr ? 0 : adapter->task_id);
      hidden_sink(row++, 1, hidden.data());
    }
  }

 private:
  EngineInfo info_;
  StepInputChecker checker_;
};

std::unique_ptr<Executor> make_encoder(const ExecutorConfig& config = {}) {
  return std::make_unique<Executor>(std::make_shared<FakeEncoder>(), config, kAvailableMemory,
                                    check_every_step);
}

Floats expected_rows(const std::vector<TokenId>& prompt, PoolingType type, std::uint64_t task_id = 0) {
  Floats states;
  for (std::int32_t i = 0; std::cmp_less(i, prompt.size()); ++i) {
    const Floats state = hidden_of(prompt, i, task_id);
    states.insert(states.end(), state.begin(), state.end());
  }
  if (type == PoolingType::kAll) return states;
  if (type == PoolingType::kCls) return {states.begin(), states.begin() + kHiddenSize};
  if (type == PoolingType::kLast) return {states.end() - kHiddenSize, states.end()};
  Floats mean;
  for (std::int64_t i = 0; i < kHiddenSize; ++i) {
    double sum = 0.0;
    for (auto at = static_cast<std::size_t>(i); at < states.size(); at += kHiddenSize) sum += states[at];
    mean.push_back(static_cast<float>(sum / static_cast<double>(prompt.size())));
  }
  return mean;
}

Request pooled(std::vector<TokenId> prompt, PoolingType type = PoolingType::kMean) {
  Request request;
  request.input_token_ids = std::move(prompt);
  request.pooling_params = PoolingParams{.pooling_type = type};
  return request;
}

Request encoded(std::vector<TokenId> prompt, std::int32_t max_tokens = 0) {
  Request request;
  request.input_token_ids = std::move(prompt);
  request.max_tokens = max_tokens;
  request.output_config.return_encoder_output = true;
  return request;
}

std::vector<TokenId> prompt_of(std::int32_t length, TokenId first = 3) {
  std::vector<TokenId> prompt;
  for (std::int32_t i = 0; i < length; ++i) prompt.push_back((first + 7 * i) % 101);
  return prompt;
}

void check_equal(const Floats& found, const Floats& expected) {
  BOOST_TEST(found == expected, boost::test_tools::per_element());
}

bool says(const std::exception& error, const std::string& words) {
  const bool found = std::string(error.what()).find(words) != std::string::npos;
  BOOST_TEST(found, words << " is not in: " << error.what());
  return found;
}

void check_refused(Executor& executor, const Request& request, const std::string& words) {
  BOOST_CHECK_EXCEPTION(executor.enqueue_request(request), RequestError,
                        [&](const auto& error) { return says(error, words); });
}

BOOST_AUTO_TEST_SUITE(encoder_only)

BOOST_AUTO_TEST_CASE(rows_see_the_whole_sequence) {
  const auto executor = make_encoder();
  const auto prompt = prompt_of(19);
  for (const PoolingType type : kTypes) {
    const auto result = collect_result(*executor, executor->enqueue_request(pooled(prompt, type)));
    check_equal(*result.pooled_output.value().values, expected_rows(prompt, type));
    BOOST_TEST(!result.encoder_output.has_value());
  }
  BOOST_TEST(executor->num_kv_blocks() == 0);
}

BOOST_DATA_TEST_CASE(the_encoders_output_is_what_a_request_ends_in, data::make({0, 1}), max_tokens) {
  const auto executor = make_encoder();
  const auto prompt = prompt_of(5);
  const auto result = collect_result(*executor, executor->enqueue_request(encoded(prompt, max_tokens)));
  BOOST_TEST(!result.pooled_output.has_value());
  const std::vector<std::int64_t> shape = {5, kHiddenSize};
  BOOST_TEST(result.encoder_output.value().shape == shape, boost::test_tools::per_element());
  check_equal(*result.encoder_output->values, expected_rows(prompt, PoolingType::kAll));
  BOOST_TEST((result.finish_reasons.at(0) == FinishReason::kLength));
  BOOST_TEST(result.is_final);
}

BOOST_DATA_TEST_CASE(crowds_get_what_each_gets_alone,
                     data::xrange(3) * data::xrange(2) * data::make({16, 64}), policy, chunking,
                     max_num_tokens) {
  ExecutorConfig config;
  config.scheduler_config.capacity_scheduler_policy = static_cast<CapacitySchedulerPolicy>(policy);
  config.scheduler_config.context_chunking_policy = static_cast<ContextChunkingPolicy>(chunking);
  config.enable_chunked_context = true;
  config.max_num_tokens = max_num_tokens;
  config.iter_stats_max_iterations = 1000;
  const auto executor = make_encoder(config);
  std::mt19937 random(7);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  std::vector<std::pair<RequestId, Floats>> crowd;
  for (int i = 0; i < 60; ++i) {
    const auto prompt = prompt_of(draw(1, max_num_tokens), draw(0, 3));
    const auto task_id = static_cast<std::uint64_t>(draw(0, 3));
    const PoolingType type = kTypes[draw(0, 3)];
    Request request = draw(0, 3) == 0 ? encoded(prompt) : pooled(prompt, type);
    if (task_id > 0) request.lora_config = fake_adapter(task_id);
    request.priority = static_cast<float>(draw(0, 4)) / 4.0F;
    const PoolingType wanted = request.pooling_params ? type : PoolingType::kAll;
    crowd.emplace_back(executor->enqueue_request(request), expected_rows(prompt, wanted, task_id));
  }
  for (const auto& [id, rows] : crowd) {
    const auto result = collect_result(*executor, id);
    check_equal(*(result.pooled_output ? result.pooled_output : result.encoder_output).value().values, rows);
  }
  for (const IterationStats& stats : executor->get_latest_iteration_stats()) {
    BOOST_TEST(stats.kv_cache_stats.value().max_num_blocks == 0);
    BOOST_TEST(stats.kv_cache_stats->alloc_total_blocks == 0);
  }
}

BOOST_AUTO_TEST_CASE(inputs_longer_than_a_step_are_refused) {
  ExecutorConfig config;
  config.max_num_tokens = 16;
  config.enable_chunked_context = true;
  const auto executor = make_encoder(config);
  check_refused(
      *executor, pooled(prompt_of(17)),
      "the prompt has 17 tokens, a step takes max_num_tokens = 16 and the engine computes prompts whole");
  const auto id = executor->enqueue_request(pooled(prompt_of(16)));
  check_equal(*collect_result(*executor, id).pooled_output->values,
              expected_rows(prompt_of(16), PoolingType::kMean));
}

BOOST_AUTO_TEST_CASE(requests_that_make_no_sense_are_refused_by_name) {
  const auto executor = make_encoder();
  check_refused(*executor, make_request({1, 2}, 3), "the engine is an encoder and generates nothing");
  check_refused(*executor, encoded({1, 2}, 2),
                "max_tokens 2 is given with output_config.return_encoder_output");
  Request request = encoded({1, 2});
  request.pooling_params.emplace();
  check_refused(*executor, request, "output_config.return_encoder_output is True with pooling_params");
  request = encoded({1, 2});
  request.encoder_input_token_ids.emplace(3, 5);
  check_refused(*executor, request, "an encoder-only engine reads input_token_ids");
  request = encoded({1, 2});
  request.num_return_sequences = 2;
  check_refused(*executor, request, "num_return_sequences is given with output_config.return_encoder_output");
  request = pooled({1, 2});
  request.lora_config = fake_adapter(1);
  request.lora_config->active_from = 1;
  check_refused(*executor, request, "lora_config.active_from is 1");
  check_refused(*executor, pooled({}), "input_token_ids is empty");
  const auto id = executor->enqueue_request(pooled({1, 2}));
  BOOST_TEST(collect_result(*executor, id).is_final);
}

BOOST_AUTO_TEST_CASE(configurations_of_a_kv_cache_are_refused_by_name) {
  const auto check = [](const std::string& words, auto change) {
    ExecutorConfig config;
    change(config);
    BOOST_CHECK_EXCEPTION(make_encoder(config), ConfigError,
                          [&](const auto& error) { return says(error, words); });
  };
  check("kv_cache_config.max_tokens is given; accepted: None, because the engine keeps no keys and values",
        [](ExecutorConfig& config) { config.kv_cache_config.max_tokens = 100; });
  check("kv_cache_config.free_gpu_memory_fraction is given",
        [](ExecutorConfig& config) { config.kv_cache_config.free_gpu_memory_fraction = 0.5; });
  check("kv_cache_config.max_attention_window is given", [](ExecutorConfig& config) {
    config.kv_cache_config.max_attention_window = std::vector<std::int64_t>{1000};
  });
  check("kv_cache_config.event_buffer_max_size is given",
        [](ExecutorConfig& config) { config.kv_cache_config.event_buffer_max_size = 8; });
  check("kv_cache_config.host_cache_size is given", [](ExecutorConfig& config) {
    config.kv_cache_config.host_cache_size = 1 << 20;
    config.kv_cache_config.host_cache_dir = "/tmp";
  });
  check("draft_target_decoding_config is given",
        [](ExecutorConfig& config) { config.draft_target_decoding_config.emplace(); });
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::encoder_only_test
