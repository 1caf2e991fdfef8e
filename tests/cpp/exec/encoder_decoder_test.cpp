// Requests with shared encoder inputs: caching, sharing and evicting an input changes no result.

#include <algorithm>
#include <atomic>
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
#include "crowd_setting.h"
#include "fake_engine.h"

namespace adaptrt::test::encoder_decoder_test {
namespace {

constexpr std::int64_t kVocabSize = 101;

/// Result of the encoder for an input: the number of places by which the decoder's logits are rotated.
std::int64_t turn_of(const std::vector<TokenId>& encoder_tokens, std::uint64_t task_id) {
  const auto hidden = FakeEngine::hidden_after(encoder_tokens, task_id + 100, 1);
  return static_cast<std::int64_t>(1e6F * (hidden[0] + 1.0F)) % kVocabSize;
}

/// FakeEngine's logits, rotated by the value in the blocks of a sequence's encoder input.
class FakeEncoderDecoder final : public FakeEngine {
 public:
  explicit FakeEncoderDecoder(Hook hook = {}, const Options& options = {})
      : FakeEngine(options, std::move(hook)), info_(FakeEngine::info()) {
    info_.max_encoder_input_len = 40;
    info_.encoder_hidden_size = 1;
    info_.cross_kv_block_bytes = sizeof(std::int64_t);
    info_.max_reusable_prompt_len = 0;
    info_.has_adapter_start_positions = false;
  }

  [[nodiscard]] const EngineInfo& info() const override { return info_; }
  void allocate_cross_kv_blocks(std::int32_t num_blocks) override {
    cross_.assign(static_cast<std::size_t>(num_blocks), -1);
  }
  using Engine::step;
  void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) override {
    check_encoder_inputs(input, info_, static_cast<std::int32_t>(cross_.size()));
    encode(input);
    std::vector<float> turned(static_cast<std::size_t>(kVocabSize));
    const auto turn = [&](std::int64_t first_row, std::int64_t num_rows, const float* logits) {
      for (std::int64_t row = 0; row < num_rows; ++row) {
        const std::int32_t token = input.logit_rows[static_cast<std::size_t>(first_row + row)];
        const auto after = std::ranges::upper_bound(input.sequence_offsets, token);
        const std::int64_t by =
            read(input, static_cast<std::size_t>(after - input.sequence_offsets.begin() - 1));
        std::rotate_copy(logits + row * kVocabSize, logits + (row + 1) * kVocabSize - by,
                         logits + (row + 1) * kVocabSize, turned.begin());
        sink(first_row + row, 1, turned.data());
      }
    };
    FakeEngine::step(input, turn, hidden_sink);
  }

  [[nodiscard]] std::size_t num_cross_blocks() const { return cross_.size(); }
  [[nodiscard]] std::int64_t num_encoder_tokens() const { return num_encoder_tokens_; }

 private:
  void encode(const StepInput& input) {
    const EncoderInputs& encoder = input.encoder;
    for (std::size_t i = 0; i + 1 < encoder.offsets.size(); ++i) {
      const std::vector<TokenId> tokens(encoder.token_ids.begin() + encoder.offsets[i],
                                        encoder.token_ids.begin() + encoder.offsets[i + 1]);
      const DeviceAdapter* adapter = encoder.adapters[i];
      const std::int64_t turn = turn_of(tokens, adapter == nullptr ? 0 : adapter->task_id);
      const auto width = static_cast<std::size_t>(input.max_cross_blocks);
      for (const std::int32_t block : encoder.block_tables.subspan(i * width, width)) {
        if (block >= 0) cross_.at(static_cast<std::size_t>(block)) = turn;
      }
      if (float* const output = encoder.outputs[i])
        std::fill_n(output, tokens.size(), static_cast<float>(turn));
      num_encoder_tokens_ += static_cast<std::int64_t>(tokens.size());
    }
  }
  [[nodiscard]] std::int64_t read(const StepInput& input, std::size_t sequence) const {
    const auto width = static_cast<std::size_t>(input.max_cross_blocks);
    std::int64_t turn = -1;
    for (const std::int32_t block : input.cross_block_tables.subspan(sequence * width, width)) {
      if (block < 0) continue;
      const std::int64_t found = cross_.at(static_cast<std::size_t>(block));
      if (found < 0 || (turn >= 0 && found != turn)) throw EngineError("blocks of an encoder input differ");
      turn = found;
    }
    return turn;
  }

  EngineInfo info_;
  std::vector<std::int64_t> cross_;  // by block
  std::atomic<std::int64_t> num_encoder_tokens_ = 0;
};

struct Guest {
  std::vector<TokenId> encoder_tokens;
  std::vector<TokenId> prompt;
  std::uint64_t task_id = 0;
  bool wants_output = false;
  std::int32_t num_sequences = 1;
};

Request request_of(const Guest& guest, std::int32_t max_tokens) {
  Request request = make_request(guest.prompt, max_tokens);
  request.encoder_input_token_ids = guest.encoder_tokens;
  request.output_config.return_encoder_output = guest.wants_output;
  if (guest.task_id > 0)
    request.lora_config = fake_adapter(guest.task_id, 1 + static_cast<int>(guest.task_id));
  if (guest.num_sequences > 1) request.num_return_sequences = guest.num_sequences;
  return request;
}

std::vector<TokenId> expected_of(const Guest& guest, std::int32_t max_tokens) {
  const std::int64_t turn = turn_of(guest.encoder_tokens, guest.task_id);
  std::vector<TokenId> history = guest.prompt;
  std::vector<TokenId> generated;
  for (std::int32_t i = 0; i < max_tokens; ++i) {
    auto logits = FakeEngine::logits_after(history, guest.task_id, kVocabSize);
    std::ranges::rotate(logits, logits.end() - turn);
    generated.push_back(static_cast<TokenId>(std::ranges::max_element(logits) - logits.begin()));
    history.push_back(generated.back());
  }
  return generated;
}

void check_answers(Executor& executor, RequestId id, const Guest& guest, std::int32_t max_tokens) {
  for (const Response& response : collect(executor, id)) {
    BOOST_REQUIRE_EQUAL(response.error_msg, "");
    BOOST_TEST(response.result.output_token_ids.at(0) == expected_of(guest, max_tokens),
               boost::test_tools::per_element());
    BOOST_TEST_REQUIRE(response.result.encoder_output.has_value() == guest.wants_output);
    if (!guest.wants_output) continue;
    const std::vector<float> expected(guest.encoder_tokens.size(),
                                      static_cast<float>(turn_of(guest.encoder_tokens, guest.task_id)));
    BOOST_TEST(*response.result.encoder_output->values == expected, boost::test_tools::per_element());
  }
}

std::unique_ptr<Executor> make_encoder_decoder(const std::shared_ptr<FakeEncoderDecoder>& engine,
                                               const ExecutorConfig& config = {}) {
  return std::make_unique<Executor>(engine, config, kAvailableMemory, check_every_step);
}

const std::vector<CrowdSetting> kSettings = {
    {CapacitySchedulerPolicy::kGuaranteedNoEvict, 1024, 64, true},
    {CapacitySchedulerPolicy::kGuaranteedNoEvict, 80, 40, true},
    {CapacitySchedulerPolicy::kGuaranteedNoEvict, 80, 40, false},
    {CapacitySchedulerPolicy::kMaxUtilization, 80, 45, true},
    {CapacitySchedulerPolicy::kMaxUtilization, 80, 45, false},
    {CapacitySchedulerPolicy::kStaticBatch, 120, 64, true},
};

BOOST_AUTO_TEST_SUITE(encoder_decoder)

BOOST_DATA_TEST_CASE(a_crowd_of_inputs_that_meet_changes_no_result, boost::unit_test::data::make(kSettings),
                     setting) {
  for (unsigned seed = 0; seed < 4; ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
    std::vector<std::vector<TokenId>> inputs;
    for (const int length : {1, 4, 7, 20, 40}) {
      inputs.emplace_back(static_cast<std::size_t>(length), draw(0, 100));
      inputs.push_back(inputs.back());
      inputs.back().back() = draw(0, 100);
    }
    const auto engine = std::make_shared<FakeEncoderDecoder>();
    const auto executor = make_encoder_decoder(engine, config_of(setting));
    std::vector<std::pair<RequestId, Guest>> crowd;
    std::int64_t num_tokens = 0;
    for (int i = 0; i < 60; ++i) {
      Guest guest{.encoder_tokens = inputs[static_cast<std::size_t>(draw(0, 9))],
                  .prompt = std::vector<TokenId>(static_cast<std::size_t>(draw(1, 12)), draw(0, 100)),
                  .task_id = static_cast<std::uint64_t>(draw(0, 2)),
                  .wants_output = draw(0, 4) == 0,
                  .num_sequences = draw(0, 4) == 0 ? 3 : 1};
      num_tokens += static_cast<std::int64_t>(guest.encoder_tokens.size());
      crowd.emplace_back(executor->enqueue_request(request_of(guest, 9)), std::move(guest));
    }
    for (const auto& [id, guest] : crowd) check_answers(*executor, id, guest, 9);
    // Preempted sequences may need to be computed again.
    const bool may_preempt = setting.policy == CapacitySchedulerPolicy::kMaxUtilization;
    if (setting.reuse && !may_preempt) BOOST_TEST(engine->num_encoder_tokens() < num_tokens);
    if (!setting.reuse) BOOST_TEST(engine->num_encoder_tokens() >= num_tokens);
  }
}

BOOST_AUTO_TEST_CASE(an_input_of_a_step_that_fails_is_not_kept) {
  const auto engine = std::make_shared<FakeEncoderDecoder>([](std::int64_t step) {
    if (step == 0) throw std::runtime_error("the first step fails");
  });
  const auto executor = make_encoder_decoder(engine);
  const Guest guest{.encoder_tokens = {3, 4, 5}, .prompt = {6}};
  const auto refused = collect(*executor, executor->enqueue_request(request_of(guest, 4)));
  BOOST_TEST(refused.at(0).error_msg.find("the first step fails") != std::string::npos);
  const std::int64_t before = engine->num_encoder_tokens();
  check_answers(*executor, executor->enqueue_request(request_of(guest, 4)), guest, 4);
  BOOST_TEST(engine->num_encoder_tokens() == before + 3);
  check_answers(*executor, executor->enqueue_request(request_of(guest, 4)), guest, 4);
  BOOST_TEST(engine->num_encoder_tokens() == before + 3);
}

BOOST_AUTO_TEST_CASE(blocks_of_encoder_inputs_take_their_share_of_a_devices_memory) {
  FakeEngine::Options options;
  options.with_lora = false;
  options.free_device_memory = 3200;
  const auto engine = std::make_shared<FakeEncoderDecoder>(FakeEngine::Hook{}, options);
  ExecutorConfig config;
  config.kv_cache_config.free_gpu_memory_fraction = 0.5;
  config.kv_cache_config.cross_kv_cache_fraction = 0.25;
  const Executor executor(engine, config, kAvailableMemory, check_every_step);
  BOOST_TEST(engine->num_cross_blocks() == 3200 / 4 / 2 / sizeof(std::int64_t));
}

BOOST_AUTO_TEST_CASE(a_reset_of_the_prefix_cache_forgets_encoder_inputs) {
  const auto engine = std::make_shared<FakeEncoderDecoder>();
  const auto executor = make_encoder_decoder(engine, {});
  const Guest guest{.encoder_tokens = std::vector<TokenId>(9, 5), .prompt = {6}};
  for (const std::int64_t num_encoded : {9, 18}) {
    for (int i = 0; i < 2; ++i) {
      check_answers(*executor, executor->enqueue_request(request_of(guest, 2)), guest, 2);
      BOOST_TEST(engine->num_encoder_tokens() == num_encoded);
    }
    executor->reset_prefix_cache();
  }
}

BOOST_AUTO_TEST_CASE(statistics_count_blocks_of_encoder_inputs) {
  const auto engine = std::make_shared<FakeEncoderDecoder>();
  ExecutorConfig config;
  config.request_stats_max_iterations = 100;
  const auto executor = make_encoder_decoder(engine, config);
  const Guest guest{.encoder_tokens = std::vector<TokenId>(9, 5), .prompt = {6}};
  for (const std::int64_t reused : {0, 3}) {
    check_answers(*executor, executor->enqueue_request(request_of(guest, 2)), guest, 2);
    const RequestStats of_request = executor->get_latest_request_stats().back().request_stats.at(0);
    BOOST_TEST(of_request.reused_blocks_per_request == reused);
    BOOST_TEST(of_request.missed_blocks_per_request == 3 - reused);
    BOOST_TEST(of_request.alloc_total_blocks_per_request == 3 + 1);  // and one of the decoder's own
  }
  const KvCacheStats stats = executor->get_latest_iteration_stats().back().cross_kv_cache_stats.value();
  BOOST_TEST(stats.reused_blocks == 3);
  BOOST_TEST(stats.reused_tokens == 9);
  BOOST_TEST(stats.missed_blocks == 3);
  BOOST_TEST(stats.alloc_new_blocks == 3);
  BOOST_TEST(stats.used_num_blocks == 0);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::encoder_decoder_test
