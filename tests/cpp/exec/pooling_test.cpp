// Requests that return rows: their results, in any batch and with any chunking of their prompts, and the
// refused ones.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/exec/executor.h"
#include "crowd_setting.h"
#include "fake_engine.h"

namespace adaptrt::test::pooling_test {
namespace {

namespace data = boost::unit_test::data;

using Floats = std::vector<float>;

/// FakeEngine's hidden size.
constexpr std::int64_t kHiddenSize = 6;
constexpr PoolingType kTypes[] = {PoolingType::kLast, PoolingType::kCls, PoolingType::kMean,
                                  PoolingType::kAll};

FloatTensor matrix_of(const Floats& values, std::int64_t rows, std::int64_t columns) {
  return {std::make_shared<const Floats>(values), {rows, columns}};
}

Request pooled(std::vector<TokenId> prompt, PoolingParams params) {
  Request request;
  request.input_token_ids = std::move(prompt);
  request.pooling_params = std::move(params);
  return request;
}

/// Returns the hidden states of a prompt's tokens, in order.
Floats hidden_states(const std::vector<TokenId>& prompt, std::uint64_t task_id = 0) {
  Floats states;
  for (std::size_t end = 1; end <= prompt.size(); ++end) {
    const std::vector<TokenId> history(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(end));
    const Floats state = FakeEngine::hidden_after(history, task_id, kHiddenSize);
    states.insert(states.end(), state.begin(), state.end());
  }
  return states;
}

/// Expected output; the mean is summed in double precision, in the order of the tokens.
Floats expected_rows(const std::vector<TokenId>& prompt, PoolingType type, std::uint64_t task_id = 0) {
  const Floats states = hidden_states(prompt, task_id);
  if (type == PoolingType::kAll) return states;
  if (type == PoolingType::kCls) return {states.begin(), states.begin() + kHiddenSize};
  if (type == PoolingType::kLast) return {states.end() - kHiddenSize, states.end()};
  Floats mean;
  for (std::int64_t i = 0; i < kHiddenSize; ++i) {
    double sum = 0.0;
    for (std::size_t at = static_cast<std::size_t>(i); at < states.size(); at += kHiddenSize) {
      sum += states[at];
    }
    mean.push_back(static_cast<float>(sum / static_cast<double>(prompt.size())));
  }
  return mean;
}

void check_equal(const Floats& found, const Floats& expected) {
  BOOST_TEST(found == expected, boost::test_tools::per_element());
}

std::vector<TokenId> prompt_of(std::int32_t length, TokenId first = 3) {
  std::vector<TokenId> prompt;
  for (std::int32_t i = 0; i < length; ++i) prompt.push_back((first + 7 * i) % 101);
  return prompt;
}

/// Runs a request and ignores its result.
void run_alone(Executor& executor, const Request& request) {
  BOOST_TEST(collect_result(executor, executor.enqueue_request(request)).is_final);
}

std::string refusal(Executor& executor, const Request& request) {
  try {
    executor.enqueue_request(request);
  } catch (const RequestError& error) {
    return error.what();
  }
  return "";
}

BOOST_AUTO_TEST_SUITE(pooling)

BOOST_DATA_TEST_CASE(rows_are_those_of_the_type, data::xrange(4) * data::make({4, 64}), type_index,
                     max_num_tokens) {
  ExecutorConfig config;
  config.enable_chunked_context = true;
  config.max_num_tokens = max_num_tokens;
  const PoolingType type = kTypes[type_index];
  const auto executor = make_executor(config);
  const auto prompt = prompt_of(19);
  // In the second round, its blocks are cached.
  for (int i = 0; i < 2; ++i) {
    const auto result = collect_result(*executor, executor->enqueue_request(pooled(prompt, {type})));
    const std::vector<std::int64_t> shape = type == PoolingType::kAll
                                                ? std::vector<std::int64_t>{19, kHiddenSize}
                                                : std::vector<std::int64_t>{kHiddenSize};
    BOOST_TEST(result.pooled_output.value().shape == shape, boost::test_tools::per_element());
    check_equal(*result.pooled_output->values, expected_rows(prompt, type));
    BOOST_TEST((result.finish_reasons.at(0) == FinishReason::kLength));
    BOOST_TEST(result.is_final);
    BOOST_TEST(result.output_token_ids.at(0) == prompt, boost::test_tools::per_element());
  }
}

/// Steps are shorter than the intervals, so some steps have no row, and rows lie anywhere in a step.
BOOST_DATA_TEST_CASE(every_nth_row_is_returned, data::make({1, 2, 4, 7, 18, 19, 2147483647}), row_interval) {
  ExecutorConfig config;
  config.enable_chunked_context = true;
  config.max_num_tokens = 3;
  const auto executor = make_executor(config);
  const auto prompt = prompt_of(19);
  const Floats states = hidden_states(prompt);
  Floats expected;
  for (std::size_t row = 0; row < 19; row += static_cast<std::size_t>(row_interval)) {
    const auto first = states.begin() + static_cast<std::ptrdiff_t>(row) * kHiddenSize;
    expected.insert(expected.end(), first, first + kHiddenSize);
  }
  const PoolingParams params{.pooling_type = PoolingType::kAll, .row_interval = row_interval};
  const auto result = collect_result(*executor, executor->enqueue_request(pooled(prompt, params)));
  BOOST_TEST(result.pooled_output->shape.at(0) == static_cast<std::int64_t>(expected.size()) / kHiddenSize);
  check_equal(*result.pooled_output->values, expected);
}

BOOST_AUTO_TEST_CASE(intervals_are_refused_by_name) {
  const auto executor = make_executor();
  for (const auto& [type, row_interval, reason] :
       {std::tuple{PoolingType::kAll, 0, "row_interval is 0; accepted: 1 or more"},
        std::tuple{PoolingType::kMean, 2, "row_interval is 2; accepted without pooling_type ALL: 1"}}) {
    const Request request = pooled({1, 2}, {.pooling_type = type, .row_interval = row_interval});
    BOOST_TEST(refusal(*executor, request).find(reason) != std::string::npos, reason);
  }
}

BOOST_AUTO_TEST_CASE(the_last_tokens_state_needs_its_block_alone) {
  auto engine = std::make_shared<FakeEngine>();
  Executor executor(engine, {}, kAvailableMemory, check_every_step);
  const auto prompt = prompt_of(30);
  for (const auto type : {PoolingType::kLast, PoolingType::kLast, PoolingType::kMean}) {
    run_alone(executor, pooled(prompt, {type}));
  }
  // Seven of eight blocks are full, and shared.
  BOOST_TEST(engine->num_tokens() == 30 + 2 + 30);
}

BOOST_AUTO_TEST_CASE(rows_of_a_prompt_are_shared_with_generation) {
  const auto executor = make_executor();
  const auto prompt = prompt_of(18);
  run_alone(*executor, make_request(prompt, 3));
  const auto id = executor->enqueue_request(pooled(prompt, {PoolingType::kLast}));
  const auto result = collect_result(*executor, id);
  check_equal(*result.pooled_output->values, expected_rows(prompt, PoolingType::kLast));
  const auto generated = collect_result(*executor, executor->enqueue_request(make_request(prompt, 3)));
  BOOST_TEST(generated.output_token_ids.at(0) == expected_tokens(prompt, 3),
             boost::test_tools::per_element());
  BOOST_TEST(!generated.pooled_output.has_value());
}

BOOST_AUTO_TEST_CASE(layers_and_lengths_are_applied_in_turn) {
  const auto executor = make_executor();
  const auto prompt = prompt_of(5);
  PoolingLayer first{.weight = matrix_of({1, 0, 0, 0, 0, 2, 0, -1, 0, 0, 0, 0, 0.5F, 0, 1, 0, 1, 0}, 3, 6),
                     .bias = bias_of({0.25F, 0.0F, -1.0F}),
                     .activation = PoolingActivation::kTanh,
                     .norm_weight = bias_of({1.0F, 2.0F, 0.5F}),
                     .norm_bias = bias_of({0.0F, 0.125F, 0.0F}),
                     .norm_epsilon = 0.01F};
  PoolingLayer second{.weight = matrix_of({1, 1, 0, 0, -1, 3}, 2, 3), .activation = PoolingActivation::kRelu};
  const auto result = collect_result(
      *executor,
      executor->enqueue_request(pooled(prompt, {PoolingType::kLast, {first, second}, /*normalize=*/true})));

  const Floats x = expected_rows(prompt, PoolingType::kLast);
  std::vector<double> made = {std::tanh(x[0] + 2.0 * x[5] + 0.25), std::tanh(-x[1]),
                              std::tanh(0.5 * x[0] + x[2] + x[4] - 1.0)};
  const double mean = (made[0] + made[1] + made[2]) / 3;
  double variance = 0.0;
  for (const double value : made) variance += (value - mean) * (value - mean) / 3;
  const double scale = 1.0 / std::sqrt(variance + 0.01);
  made = {(made[0] - mean) * scale, (made[1] - mean) * scale * 2.0 + 0.125, (made[2] - mean) * scale * 0.5};
  std::vector<double> last = {std::max(0.0, made[0] + made[1]), std::max(0.0, 3.0 * made[2] - made[1])};
  const double length = std::hypot(last[0], last[1]);
  BOOST_REQUIRE(length > 0.0);
  BOOST_REQUIRE_EQUAL(result.pooled_output->values->size(), 2);
  for (std::size_t i = 0; i < 2; ++i) {
    BOOST_TEST((*result.pooled_output->values)[i] == static_cast<float>(last[i] / length),
               boost::test_tools::tolerance(1e-5F));
  }
}

/// Values that transformers computes for 0.75 and -1.5.
BOOST_AUTO_TEST_CASE(activations_are_those_of_their_names) {
  const std::vector<std::pair<PoolingActivation, Floats>> expected = {
      {PoolingActivation::kNone, {0.75F, -1.5F}},
      {PoolingActivation::kTanh, {0.635149F, -0.9051483F}},
      {PoolingActivation::kRelu, {0.75F, 0.0F}},
      {PoolingActivation::kSilu, {0.509384F, -0.2736383F}},
      {PoolingActivation::kGelu, {0.580029F, -0.1002108F}},
      {PoolingActivation::kGeluTanh, {0.579961F, -0.1004284F}},
  };
  const auto executor = make_executor();
  for (const auto& [activation, values] : expected) {
    const PoolingLayer layer{.weight = matrix_of(Floats(12, 0.0F), 2, 6),
                             .bias = bias_of({0.75F, -1.5F}),
                             .activation = activation};
    const auto result = collect_result(
        *executor, executor->enqueue_request(pooled(prompt_of(2), {PoolingType::kLast, {layer}})));
    for (std::size_t i = 0; i < 2; ++i) {
      BOOST_TEST(std::abs((*result.pooled_output->values)[i] - values[i]) < 2e-6F);
    }
  }
}

BOOST_AUTO_TEST_CASE(a_row_without_length_stays_zero) {
  const auto executor = make_executor();
  const PoolingLayer zeros{.weight = matrix_of(Floats(12, 0.0F), 2, 6)};
  const auto result = collect_result(
      *executor, executor->enqueue_request(pooled(prompt_of(2), {PoolingType::kLast, {zeros}, true})));
  check_equal(*result.pooled_output->values, {0.0F, 0.0F});
}

BOOST_AUTO_TEST_CASE(a_prompt_may_be_as_long_as_a_sequence) {
  const auto executor = make_executor({}, {.max_num_tokens = 128, .max_input_len = 128, .max_seq_len = 128});
  const auto prompt = prompt_of(128);
  const auto result = collect_result(*executor, executor->enqueue_request(pooled(prompt, {})));
  check_equal(*result.pooled_output->values, expected_rows(prompt, PoolingType::kLast));
  const auto longer = pooled(prompt_of(129), {});
  BOOST_TEST(refusal(*executor, longer).find("max_seq_len is 128") != std::string::npos);
}

const std::vector<CrowdSetting> kSettings = {
    {CapacitySchedulerPolicy::kGuaranteedNoEvict, 1024, 64, true},
    {CapacitySchedulerPolicy::kGuaranteedNoEvict, 160, 11, true},
    {CapacitySchedulerPolicy::kMaxUtilization, 132, 13, true, 6},
    {CapacitySchedulerPolicy::kMaxUtilization, 132, 64, false},
    {CapacitySchedulerPolicy::kStaticBatch, 256, 7, true},
};

BOOST_DATA_TEST_CASE(crowds_get_what_each_gets_alone, data::make(kSettings) * data::xrange(4), setting,
                     seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  const auto executor = make_executor(config_of(setting));
  struct Guest {
    RequestId id = 0;
    std::vector<TokenId> tokens;
    Floats rows;
  };
  std::vector<Guest> crowd;
  for (int i = 0; i < 40; ++i) {
    const auto prompt = prompt_of(draw(1, 90), draw(0, 3));
    const auto task_id = static_cast<std::uint64_t>(draw(0, 3));
    Guest guest;
    Request request;
    if (draw(0, 2) == 0) {
      const int max_tokens = draw(1, 20);
      request = make_request(prompt, max_tokens);
      guest.tokens = expected_tokens(prompt, max_tokens, task_id);
    } else {
      const PoolingType type = kTypes[draw(0, 3)];
      request = pooled(prompt, {type});
      guest.rows = expected_rows(prompt, type, task_id);
    }
    if (task_id > 0) request.lora_config = fake_adapter(task_id);
    request.priority = static_cast<float>(draw(0, 4)) / 4.0F;
    guest.id = executor->enqueue_request(request);
    crowd.push_back(std::move(guest));
  }
  for (const Guest& guest : crowd) {
    const auto result = collect_result(*executor, guest.id);
    if (guest.rows.empty()) {
      BOOST_TEST(result.output_token_ids.at(0) == guest.tokens, boost::test_tools::per_element());
    } else {
      check_equal(*result.pooled_output.value().values, guest.rows);
    }
  }
}

BOOST_AUTO_TEST_CASE(a_cancelled_one_has_no_rows) {
  Gate gate;
  const auto executor = make_executor({}, {}, [&](std::int64_t step) {
    if (step == 0) gate.wait();
  });
  const auto running = executor->enqueue_request(make_request({1}, 2));
  gate.await_visitor();
  const auto id = executor->enqueue_request(pooled(prompt_of(9), {}));
  executor->cancel_request(id);
  gate.open();
  const auto result = collect_result(*executor, id);
  BOOST_TEST((result.finish_reasons.at(0) == FinishReason::kCancelled));
  BOOST_TEST(!result.pooled_output.has_value());
  BOOST_TEST(collect_result(*executor, running).is_final);
}

/// The hidden states of one token have NaN.
class PoisonedEngine final : public FakeEngine {
 public:
  static constexpr TokenId kPoison = 66;
  using FakeEngine::step;
  void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) override {
    FakeEngine::step(input, sink, [&](std::int64_t first_row, std::int64_t num_rows, const float* hidden) {
      Floats rows(hidden, hidden + num_rows * kHiddenSize);
      for (std::int64_t row = 0; row < num_rows; ++row) {
        const auto token =
            static_cast<std::size_t>(input.hidden_rows[static_cast<std::size_t>(first_row + row)]);
        if (input.token_ids[token] != kPoison) continue;
        rows[static_cast<std::size_t>(row * kHiddenSize)] = std::numeric_limits<float>::quiet_NaN();
      }
      hidden_sink(first_row, num_rows, rows.data());
    });
  }
};

BOOST_DATA_TEST_CASE(states_that_are_no_numbers_fail_their_request_alone, data::make({3, 64}),
                     max_num_tokens) {
  ExecutorConfig config;
  config.enable_chunked_context = true;
  config.max_num_tokens = max_num_tokens;
  Executor executor(std::make_shared<PoisonedEngine>(), config, kAvailableMemory, check_every_step);
  const std::vector<TokenId> poisoned = {1, 2, PoisonedEngine::kPoison, 3, PoisonedEngine::kPoison, 4, 5};
  const auto ids = executor.enqueue_requests({pooled(poisoned, {PoolingType::kMean}),
                                              pooled(poisoned, {PoolingType::kLast}),
                                              pooled(prompt_of(9), {PoolingType::kAll})});
  const auto failed = collect(executor, ids[0]);
  BOOST_TEST(failed.back().error_msg == "the hidden state of token 2 has NaN or infinity");
  check_equal(*collect_result(executor, ids[1]).pooled_output->values,
              expected_rows(poisoned, PoolingType::kLast));
  check_equal(*collect_result(executor, ids[2]).pooled_output->values,
              expected_rows(prompt_of(9), PoolingType::kAll));
}

BOOST_AUTO_TEST_CASE(fields_of_generation_are_refused_by_name) {
  const auto executor = make_executor();
  const auto check = [&](const std::string& name, auto change) {
    Request request = pooled({1, 2, 3}, {});
    change(request);
    const std::string reason = refusal(*executor, request);
    BOOST_TEST(reason.find(name) != std::string::npos, name << " is not in: " << reason);
  };
  check("max_tokens 4 is given", [](Request& request) { request.max_tokens = 4; });
  check("streaming", [](Request& request) { request.streaming = true; });
  check("sampling_config", [](Request& request) { request.sampling_config.top_k = 3; });
  check("end_id", [](Request& request) { request.end_id = 2; });
  check("bad_words", [](Request& request) { request.bad_words.emplace(1, std::vector<TokenId>{1}); });
  check("stop_words", [](Request& request) { request.stop_words.emplace(1, std::vector<TokenId>{1}); });
  check("embedding_bias", [](Request& request) { request.embedding_bias = bias_of(Floats(101, 0.0F)); });
  check("external_draft_tokens_config",
        [](Request& request) { request.external_draft_tokens_config.emplace().tokens = {1}; });
  check("lookahead_config", [](Request& request) { request.lookahead_config.emplace(); });
  check("logits_post_processor_name", [](Request& request) { request.logits_post_processor_name = "x"; });
  check("return_all_generated_tokens", [](Request& request) { request.return_all_generated_tokens = true; });
  check("num_return_sequences", [](Request& request) { request.num_return_sequences = 2; });
  check("return_log_probs", [](Request& request) { request.output_config.return_log_probs = true; });
  check("return_context_logits",
        [](Request& request) { request.output_config.return_context_logits = true; });
  check("return_generation_logits",
        [](Request& request) { request.output_config.return_generation_logits = true; });
  check("top_log_probs", [](Request& request) { request.output_config.top_log_probs = 1; });
  check("return_prompt_log_probs",
        [](Request& request) { request.output_config.return_prompt_log_probs = true; });
  check("input_token_ids is empty", [](Request& request) { request.input_token_ids.clear(); });
  check("max_input_len is 96", [](Request& request) { request.input_token_ids = prompt_of(97); });
  run_alone(*executor, pooled({1, 2, 3}, {}));
}

BOOST_AUTO_TEST_CASE(layers_that_do_not_fit_are_refused_by_name) {
  const auto executor = make_executor();
  const auto check = [&](const std::string& text, const std::vector<PoolingLayer>& layers) {
    const std::string reason = refusal(*executor, pooled({1, 2}, {PoolingType::kLast, layers}));
    BOOST_TEST(reason.find(text) != std::string::npos, text << " is not in: " << reason);
  };
  const PoolingLayer sound{.weight = matrix_of(Floats(12), 2, 6)};
  check("layers[0].weight is [2, 5]; accepted: [outputs, 6]", {{.weight = matrix_of(Floats(10), 2, 5)}});
  check("layers[1].weight is [1, 6]; accepted: [outputs, 2]",
        {sound, {.weight = matrix_of(Floats(6), 1, 6)}});
  check("layers[0].weight is [6]", {{.weight = bias_of(Floats(6))}});
  PoolingLayer layer = sound;
  layer.bias = bias_of(Floats(3));
  check("layers[0].bias has another shape", {layer});
  layer = sound;
  layer.norm_bias = bias_of(Floats(2));
  check("norm_bias is given without norm_weight", {layer});
  layer.norm_weight = bias_of(Floats(1));
  check("layers[0].norm_weight has another shape", {layer});
  layer = sound;
  layer.norm_epsilon = -1.0F;
  check("layers[0].norm_epsilon is -1", {layer});
}

BOOST_AUTO_TEST_CASE(engines_without_hidden_states_or_logits_say_so) {
  const auto without_states = make_executor({}, {.hidden_size = 0});
  BOOST_TEST(refusal(*without_states, pooled({1}, {})).find("does not tell hidden states") !=
             std::string::npos);
  const auto without_logits = make_executor({}, {.has_logits = false});
  BOOST_TEST(refusal(*without_logits, make_request({1}, 1)).find("the model has no lm_head") !=
             std::string::npos);
  check_equal(*collect_result(*without_logits, without_logits->enqueue_request(pooled({1}, {})))
                   .pooled_output->values,
              expected_rows({1}, PoolingType::kLast));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::pooling_test
