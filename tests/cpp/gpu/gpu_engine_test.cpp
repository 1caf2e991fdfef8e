#include "adaptrt/gpu/gpu_engine.h"

#include <algorithm>
#include <array>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "cpu/step_arrays.h"
#include "support/host_device.h"

namespace adaptrt::testing::gpu_engine_test {
namespace {

constexpr std::int64_t kVocabSize = 8;
constexpr std::int32_t kTokensPerBlock = 4;

/// A model without names or contexts: its KV pool holds token ids, and its logits tell the sum of a
/// sequence's tokens up to a row's. A row's best token is its sum. With states, which are int32, a state is
/// the sum instead.
class SummingModel final : public GpuModel {
 public:
  /// Calls of the engine, in order; it outlives the model.
  struct Log {
    std::vector<GpuStepKind> runs;
    std::vector<RunShape> shapes;  ///< of runs that are not captured, and of captures
    int graph_works = 0;
    int takes = 0;     ///< calls of take_tokens()
    int computed = 0;  ///< runs that the device has done
    bool fails_to_load = false;
  };

  explicit SummingModel(Log& log) : log_(log) {}

  void load(const adaptrt::StepArrays& step_arrays, const GpuModelArrays& arrays, Device& /*device*/,
            Stream& /*stream*/) override {
    if (log_.fails_to_load) throw ConfigError("no memory for weights");
    step_arrays_ = &step_arrays;
    arrays_ = arrays;
  }
  void set_kv_pools(std::span<const DeviceArray> pools) override { pool_ = pools[0]; }
  void set_states(std::byte* slots) override { states_ = reinterpret_cast<std::int32_t*>(slots); }
  void run(GpuStepKind kind, const RunShape& shape, Stream& stream) override {
    log_.runs.push_back(kind);
    log_.shapes.push_back(shape);
    enqueue(shape, stream);
  }
  /// The largest logit of row i is its sum, and logit k of the highest is the sum minus k.
  void find_highest(std::int32_t first_row, std::int32_t rows, std::int32_t count, Stream& stream) override {
    submit(host_stream(stream.handle()), [this, first_row, rows, count] {
      for (std::int32_t row = 0; row < rows; ++row) {
        const float sum = reinterpret_cast<const float*>(arrays_.logits)[(first_row + row) * kVocabSize];
        arrays_.summaries[row] = {.max = sum, .best_token = static_cast<std::int32_t>(sum)};
        for (std::int32_t k = 0; k < count; ++k) {
          arrays_.highest[row * count + k] = {.logit = sum - static_cast<float>(k), .token = k};
        }
      }
    });
  }
  void take_tokens(const RunShape& shape, Stream& stream) override {
    ++log_.takes;
    submit(host_stream(stream.handle()), [this, shape] {
      auto* ids =
          reinterpret_cast<std::int32_t*>(arrays_.step_memory + step_arrays_->places(shape).token_ids.offset);
      for (std::int32_t* id = ids; id != ids + shape.tokens; ++id) {
        if (*id < 0) *id = std::max(arrays_.best_tokens[-1 - *id], 0);
      }
    });
  }
  [[nodiscard]] std::function<void(Stream&)> make_graph_work(const RunShape& shape) override {
    ++log_.graph_works;
    log_.shapes.push_back(shape);
    return [this, shape](Stream& stream) { enqueue(shape, stream); };
  }

 private:
  void enqueue(const RunShape& shape, Stream& stream) {
    submit(host_stream(stream.handle()), [this, shape] { compute(shape); });
  }

  [[nodiscard]] const std::int32_t* at(const StepArray& array) const {
    return reinterpret_cast<const std::int32_t*>(arrays_.step_memory + array.offset);
  }

  void compute(const RunShape& shape) const {
    ++log_.computed;
    const StepPlaces places = step_arrays_->places(shape);
    auto* pool = reinterpret_cast<std::uint16_t*>(pool_.address);
    const std::int32_t* offsets = at(places.sequence_offsets);
    std::vector<float> sums;
    for (std::int32_t sequence = 0; sequence < shape.sequences; ++sequence) {
      if (places.state_slots) {
        sum_states(shape, at(*places.state_slots)[sequence],
                   {at(places.token_ids) + offsets[sequence], at(places.token_ids) + offsets[sequence + 1]},
                   &sums);
        continue;
      }
      const std::int32_t* blocks = at(places.block_tables) + sequence * shape.blocks_per_sequence;
      for (std::int32_t token = offsets[sequence]; token < offsets[sequence + 1]; ++token) {
        sums.push_back(sum_to(at(places.positions)[token], at(places.token_ids)[token], blocks, pool));
      }
    }
    auto* logits = reinterpret_cast<float*>(arrays_.logits);
    for (std::int32_t row = 0; row < shape.logit_rows; ++row) {
      const float sum = sums[static_cast<std::size_t>(at(places.logit_rows)[row])];
      logits[row * kVocabSize] = sum;
      if (arrays_.best_tokens != nullptr) arrays_.best_tokens[row] = static_cast<std::int32_t>(sum);
    }
  }

  /// Adds tokens to a state; padding has none.
  void sum_states(const RunShape& shape, std::int32_t slot, std::span<const std::int32_t> tokens,
                  std::vector<float>* sums) const {
    std::int32_t state = slot == kNoSlot ? 0 : states_[slot];
    for (const std::int32_t token : tokens) sums->push_back(static_cast<float>(state += token));
    if (slot != kNoSlot && shape.advances_states) states_[slot] = state;
  }

  /// Writes a token to the pool; padding has no block.
  static float sum_to(std::int32_t position, std::int32_t token, const std::int32_t* blocks,
                      std::uint16_t* pool) {
    const auto place = [&](std::int32_t i) {
      return pool + 2 * blocks[i / kTokensPerBlock] * kTokensPerBlock + i % kTokensPerBlock;
    };
    if (blocks[position / kTokensPerBlock] < 0) return 0.0F;
    *place(position) = static_cast<std::uint16_t>(token);
    float sum = 0.0F;
    for (std::int32_t i = 0; i <= position; ++i) sum += static_cast<float>(*place(i));
    return sum;
  }

  Log& log_;
  const adaptrt::StepArrays* step_arrays_ = nullptr;
  GpuModelArrays arrays_;
  DeviceArray pool_;
  std::int32_t* states_ = nullptr;
};

GpuModelDescription small_model() {
  return {.dtype = DType::kFloat16,
          .vocab_size = kVocabSize,
          .num_layers = 1,
          .attention = {{.num_attention_heads = 1, .num_key_value_heads = 1, .head_dim = 1}},
          .max_batch_size = 4,
          .max_num_tokens = 16,
          .max_input_len = 14,
          .max_seq_len = 16,
          .tokens_per_block = kTokensPerBlock,
          .max_reusable_prompt_len = 14,
          .max_kv_blocks = 8,
          .prefill = {.max_tokens = 16, .max_sequences = 4, .max_logit_rows = 4},
          .decode = {.max_tokens = 4, .max_sequences = 4, .max_logit_rows = 4},
          .lora = {}};
}

GpuModelDescription model_with_best_tokens() {
  GpuModelDescription model = small_model();
  model.finds_best_tokens = true;
  model.finds_highest_logits = true;
  return model;
}

GpuModelDescription model_with_adapters(bool skips_unused_adapters) {
  GpuModelDescription model = small_model();
  model.num_adapter_slots = 4;
  model.lora.dtype = DType::kFloat16;
  model.lora.num_layers = 1;
  model.lora.max_rank = 8;
  model.lora.target_modules = {LoraModule::kAttnDense};
  model.lora.sites = {{0, 8, {{LoraModule::kAttnDense, 8}}}};
  model.skips_unused_adapters = skips_unused_adapters;
  return model;
}

/// A step and its results. `wanted` says of each token whether its logits (l), its highest logits (h), its
/// best token (b) or nothing (any other letter) is wanted; `count` is the number of highest logits.
struct WantedStep : FoundRows {
  WantedStep(const std::vector<Piece>& pieces, const std::string& wanted, std::int32_t count)
      : arrays(pieces) {
    BOOST_TEST_REQUIRE(arrays.tokens.size() == wanted.size());
    arrays.logit_rows.clear();
    for (std::size_t token = 0; token < wanted.size(); ++token) {
      const auto row = static_cast<std::int32_t>(token);
      if (wanted[token] == 'l') arrays.logit_rows.push_back(row);
      if (wanted[token] == 'b') best_rows.push_back(row);
      if (wanted[token] == 'h') highest_rows.push_back(row);
    }
    input = arrays.input();
    add_to(input, count);
  }
  WantedStep(const WantedStep&) = delete;
  WantedStep& operator=(const WantedStep&) = delete;

  StepArrays arrays;
  StepInput input;
};

struct Fixture {
  explicit Fixture(bool cuda_graphs = true, const GpuModelDescription& model = small_model(),
                   StreamTime time = StreamTime::kLate)
      : device(std::make_shared<HostDevice>(std::size_t{1} << 20, time)) {
    engine =
        make_gpu_engine(model, std::make_unique<SummingModel>(log), device, {.cuda_graphs = cuda_graphs});
    engine->allocate_kv_blocks(8);
  }

  /// The sum of each row.
  std::vector<float> sums_of(const std::vector<Piece>& pieces) const {
    const std::vector<float> logits = logits_of(engine.get(), StepArrays(pieces).input());
    std::vector<float> sums;
    for (std::size_t row = 0; row < logits.size(); row += kVocabSize) sums.push_back(logits[row]);
    return sums;
  }

  /// Runs a step. `wanted`: see WantedStep. Returns the sums of all kinds of rows, each in the order of the
  /// tokens.
  struct Sums {
    std::vector<float> logits;
    std::vector<std::int32_t> best_tokens;
    std::vector<float> highest;
  };
  [[nodiscard]] Sums sums_of(const std::vector<Piece>& pieces, const std::string& wanted) const {
    constexpr std::size_t kCount = 3;
    WantedStep step(pieces, wanted, kCount);
    Sums sums{
        .logits = std::vector<float>(step.arrays.logit_rows.size(), -1.0F), .best_tokens = {}, .highest = {}};
    engine->step(step.input, [&](std::int64_t first, std::int64_t rows, const float* logits) {
      for (std::int64_t row = 0; row < rows; ++row) {
        sums.logits.at(static_cast<std::size_t>(first + row)) = logits[row * kVocabSize];
      }
    });
    sums.best_tokens = step.best_tokens;
    for (std::size_t row = 0; row < step.summaries.size(); ++row) {
      const float max = step.summaries[row].max;
      sums.highest.push_back(max);
      for (std::size_t k = 0; k < kCount; ++k) {
        BOOST_TEST(step.highest[row * kCount + k].logit == max - static_cast<float>(k));
        BOOST_TEST(step.highest[row * kCount + k].token == static_cast<std::int32_t>(k));
      }
    }
    return sums;
  }

  std::shared_ptr<HostDevice> device;
  SummingModel::Log log;
  std::unique_ptr<Engine> engine;
};

Piece next_token(std::int32_t token, std::int32_t position, std::vector<std::int32_t> blocks) {
  return {.tokens = {token}, .first_position = position, .prompt_length = 2, .blocks = std::move(blocks)};
}

BOOST_AUTO_TEST_SUITE(gpu_engine)

BOOST_AUTO_TEST_CASE(a_model_that_is_no_plan_runs_prefills_and_captured_decodes) {
  const Fixture f;
  const std::vector<float> prefill = f.sums_of({{.tokens = {1, 2}, .prompt_length = 2, .blocks = {5}},
                                                {.tokens = {3, 4, 5}, .prompt_length = 3, .blocks = {2}}});
  BOOST_TEST(prefill == (std::vector<float>{1, 3, 3, 7, 12}), boost::test_tools::per_element());
  // Five rows, four at a time.
  BOOST_TEST((f.log.runs == std::vector{GpuStepKind::kPrefill, GpuStepKind::kPrefill}));
  // Three sequences are padded to four.
  const std::vector<Piece> decode{next_token(6, 2, {5}), next_token(7, 3, {2}), next_token(1, 0, {0})};
  for (int time = 0; time < 3; ++time) {
    BOOST_TEST(f.sums_of(decode) == (std::vector<float>{9, 19, 1}), boost::test_tools::per_element());
  }
  BOOST_TEST(f.log.graph_works == 1);
  BOOST_TEST(f.device->calls("launch") == 2);
  BOOST_TEST(f.log.runs.size() == 2U);
}

BOOST_AUTO_TEST_CASE(without_graphs_a_model_is_told_the_kind_of_each_step) {
  const Fixture f(false);
  BOOST_TEST(f.sums_of({next_token(7, 0, {1})}) == (std::vector<float>{7}), boost::test_tools::per_element());
  BOOST_TEST(f.sums_of({{.tokens = {1, 2}, .prompt_length = 2, .blocks = {5}}}) == (std::vector<float>{1, 3}),
             boost::test_tools::per_element());
  BOOST_TEST((f.log.runs == std::vector{GpuStepKind::kDecode, GpuStepKind::kPrefill}));
  BOOST_TEST(f.log.graph_works == 0);
}

BOOST_AUTO_TEST_CASE(best_tokens_come_with_logits_of_other_rows) {
  for (const bool cuda_graphs : {false, true}) {
    const Fixture f(cuda_graphs, model_with_best_tokens());
    BOOST_TEST(f.engine->info().finds_best_tokens);
    const std::vector<Piece> prefill{{.tokens = {1, 2}, .prompt_length = 2, .blocks = {5}},
                                     {.tokens = {3, 4, 5}, .prompt_length = 3, .blocks = {2}}};
    const auto check = [&](const std::vector<Piece>& pieces, const std::string& wanted,
                           const std::vector<float>& logits, const std::vector<std::int32_t>& best) {
      const Fixture::Sums sums = f.sums_of(pieces, wanted);
      BOOST_TEST(sums.logits == logits, boost::test_tools::per_element());
      BOOST_TEST(sums.best_tokens == best, boost::test_tools::per_element());
    };
    check(prefill, "-b--b", {}, {3, 12});
    check(prefill, "-b--l", {12}, {3});
    check(prefill, "blblb", {3, 7}, {1, 3, 12});  // two slices: four rows and one
    check(prefill, "lllll", {1, 3, 3, 7, 12}, {});
    check(prefill, "bbbbb", {}, {1, 3, 3, 7, 12});
    check(prefill, "-----", {}, {});
    const std::vector<Piece> decode{next_token(6, 2, {5}), next_token(7, 3, {2}), next_token(1, 0, {0})};
    for (int time = 0; time < 3; ++time) {
      check(decode, "blb", {19}, {9, 1});
      check(decode, "bbb", {}, {9, 19, 1});
      check(decode, "lll", {9, 19, 1}, {});
      check(decode, "l-b", {9}, {1});
    }
  }
}

BOOST_AUTO_TEST_CASE(rows_of_all_kinds_come_together) {
  for (const bool cuda_graphs : {false, true}) {
    const Fixture f(cuda_graphs, model_with_best_tokens());
    BOOST_TEST(f.engine->info().finds_highest_logits);
    const std::vector<Piece> prefill{{.tokens = {1, 2}, .prompt_length = 2, .blocks = {5}},
                                     {.tokens = {3, 4, 5}, .prompt_length = 3, .blocks = {2}}};
    const auto check = [&](const std::vector<Piece>& pieces, const std::string& wanted,
                           const std::vector<float>& logits, const std::vector<float>& highest,
                           const std::vector<std::int32_t>& best) {
      BOOST_TEST_INFO_SCOPE(wanted);
      const Fixture::Sums sums = f.sums_of(pieces, wanted);
      BOOST_TEST(sums.logits == logits, boost::test_tools::per_element());
      BOOST_TEST(sums.highest == highest, boost::test_tools::per_element());
      BOOST_TEST(sums.best_tokens == best, boost::test_tools::per_element());
    };
    check(prefill, "-h--b", {}, {3}, {12});
    check(prefill, "bhlhb", {3}, {3, 7}, {1, 12});  // two slices: four rows and one
    check(prefill, "hlhlh", {3, 7}, {1, 3, 12}, {});
    check(prefill, "hhhhh", {}, {1, 3, 3, 7, 12}, {});
    check(prefill, "lllhl", {1, 3, 3, 12}, {7}, {});
    check(prefill, "lllbh", {1, 3, 3}, {12}, {7});
    const std::vector<Piece> decode{next_token(6, 2, {5}), next_token(7, 3, {2}), next_token(1, 0, {0})};
    for (int time = 0; time < 3; ++time) {
      check(decode, "bhl", {1}, {19}, {9});
      check(decode, "hhh", {}, {9, 19, 1}, {});
      check(decode, "-h-", {}, {19}, {});
    }
  }
}

BOOST_AUTO_TEST_CASE(only_wanted_results_are_copied_to_the_host) {
  const Fixture f(true, model_with_best_tokens());
  const std::vector<Piece> decode{next_token(6, 0, {5}), next_token(7, 0, {2})};
  const auto copies_of = [&](const std::string& wanted) {
    const std::int64_t before = f.device->calls("copy_to_host");
    (void)f.sums_of(decode, wanted);
    return f.device->calls("copy_to_host") - before;
  };
  BOOST_TEST(copies_of("--") == 0);
  BOOST_TEST(copies_of("bb") == 1);
  BOOST_TEST(copies_of("ll") == 1);
  BOOST_TEST(copies_of("bl") == 2);
  BOOST_TEST(copies_of("hh") == 2);
  BOOST_TEST(copies_of("hb") == 3);
}

BOOST_AUTO_TEST_CASE(a_model_without_best_tokens_refuses_them) {
  const Fixture f;
  BOOST_CHECK_EXCEPTION((void)f.sums_of({next_token(6, 0, {5})}, "b"), StepError, [](const StepError& error) {
    return std::string(error.what()).find("best_token_rows are given") != std::string::npos;
  });
  BOOST_CHECK_EXCEPTION((void)f.sums_of({next_token(6, 0, {5})}, "h"), StepError, [](const StepError& error) {
    return std::string(error.what()).find("highest.rows are given") != std::string::npos;
  });
}

BOOST_AUTO_TEST_CASE(a_step_begins_without_waiting_for_the_device) {
  for (const bool cuda_graphs : {false, true}) {
    const Fixture f(cuda_graphs);
    // Five rows: the last one is in the second slice, whose run begins when the first is done.
    const StepArrays arrays({{.tokens = {1, 2, 3, 4, 5}, .prompt_length = 5, .blocks = {5, 1}}});
    const StepInput input = arrays.input();
    for (int time = 0; time < 2; ++time) {
      const std::int64_t waits = f.device->calls("synchronize");
      const std::size_t runs = f.log.runs.size();
      f.engine->begin_step(input);
      BOOST_TEST(f.device->calls("synchronize") == waits);
      BOOST_TEST(f.log.runs.size() == runs + 1);
      std::vector<float> sums;
      f.engine->await_step(
          [&](std::int64_t first, std::int64_t rows, const float* logits) {
            BOOST_TEST(first == static_cast<std::int64_t>(sums.size()));
            for (std::int64_t row = 0; row < rows; ++row) sums.push_back(logits[row * kVocabSize]);
          },
          {});
      BOOST_TEST(f.log.runs.size() == runs + 2);
      BOOST_TEST(sums == (std::vector<float>{1, 3, 6, 10, 15}), boost::test_tools::per_element());
    }
  }
}

BOOST_AUTO_TEST_CASE(a_step_that_fails_at_any_call_does_not_break_the_next) {
  const std::vector<Piece> prefill{{.tokens = {1, 2, 3, 4, 5}, .prompt_length = 5, .blocks = {5, 1}}};
  for (const std::string call : {"copy_to_device", "copy_to_host", "synchronize"}) {
    for (int successes = 0; successes < 2; ++successes) {
      const Fixture f(true, model_with_best_tokens());
      f.device->fail(call, Failure::kOnce, successes);
      BOOST_CHECK_THROW((void)f.sums_of(prefill, "bbbbl"), StepError);
      const Fixture::Sums sums = f.sums_of(prefill, "bbbbl");
      BOOST_TEST(sums.logits == (std::vector<float>{15}), boost::test_tools::per_element());
      BOOST_TEST(sums.best_tokens == (std::vector<std::int32_t>{1, 3, 6, 10}),
                 boost::test_tools::per_element());
    }
  }
}

/// A step of one token per sequence that may be in flight with another, and its results.
struct Flight : WantedStep {
  Flight(const std::vector<Piece>& pieces, const std::string& wanted) : WantedStep(pieces, wanted, 2) {}

  void check(const std::vector<std::int32_t>& best, const std::vector<std::int32_t>& of_highest) const {
    BOOST_TEST(best_tokens == best, boost::test_tools::per_element());
    BOOST_TEST_REQUIRE(summaries.size() == of_highest.size());
    for (std::size_t i = 0; i < summaries.size(); ++i) {
      BOOST_TEST(summaries[i].best_token == of_highest[i]);
      BOOST_TEST(highest[2 * i + 1].logit == static_cast<float>(of_highest[i] - 1));
    }
  }
};

/// Fails the test if there are logits.
void await(const Fixture& f) {
  f.engine->await_step([](auto...) { BOOST_ERROR("logits"); }, {});
}

/// Decodes of three sequences at `position`; tokens are those of the first step.
std::vector<Piece> three_decodes(std::int32_t position) {
  return {next_token(6, position, {5, 4}), next_token(1, position, {2, 3}), next_token(7, position, {0, 1})};
}

BOOST_AUTO_TEST_CASE(two_steps_in_flight_have_results_of_their_own) {
  for (const StreamTime time : {StreamTime::kAtOnce, StreamTime::kLate}) {
    for (const bool cuda_graphs : {false, true}) {
      const Fixture f(cuda_graphs, model_with_best_tokens(), time);
      BOOST_TEST(f.engine->can_look_ahead());
      const std::vector<std::int32_t> same{0, 1, 2};
      const Flight first(three_decodes(0), "bhb");
      const Flight second(three_decodes(1), "bhb");
      const Flight third(three_decodes(2), "hbh");
      const Flight fourth({next_token(0, 3, {0, 1})}, "b");
      f.engine->begin_step(first.input);
      f.engine->begin_ahead(second.input, same);
      await(f);
      first.check({6, 7}, {1});
      BOOST_TEST(second.best_tokens == (std::vector<std::int32_t>{-9, -9}), boost::test_tools::per_element());
      f.engine->begin_ahead(third.input, same);
      await(f);
      second.check({12, 14}, {2});
      // The others have ended.
      f.engine->begin_ahead(fourth.input, std::vector<std::int32_t>{2});
      await(f);
      third.check({4}, {24, 28});
      await(f);
      fourth.check({56}, {});
      BOOST_TEST(f.log.takes == 3);
      // The next step takes its tokens from the host again.
      const Fixture::Sums sums = f.sums_of({next_token(6, 0, {5})}, "b");
      BOOST_TEST(sums.best_tokens == std::vector<std::int32_t>{6}, boost::test_tools::per_element());
      BOOST_TEST(f.log.takes == 3);
    }
  }
}

BOOST_AUTO_TEST_CASE(tokens_are_taken_from_any_row_of_the_step_before) {
  for (const StreamTime time : {StreamTime::kAtOnce, StreamTime::kLate}) {
    const Fixture f(true, model_with_best_tokens(), time);
    // Rows of highest logits come first in a run.
    const Flight first(three_decodes(0), "bbh");
    const Flight second(three_decodes(1), "bbb");
    f.engine->begin_step(first.input);
    f.engine->begin_ahead(second.input, std::vector<std::int32_t>{2, 0, 1});
    await(f);
    await(f);
    first.check({6, 1}, {7});
    second.check({6 + 7, 1 + 6, 7 + 1}, {});
  }
}

BOOST_AUTO_TEST_CASE(a_step_waits_for_itself_and_not_for_the_step_ahead) {
  const Fixture f(false, model_with_best_tokens());
  const Flight first(three_decodes(0), "bbb");
  const Flight second(three_decodes(1), "bbb");
  const std::int64_t waits = f.device->calls("synchronize");
  f.engine->begin_step(first.input);
  f.engine->begin_ahead(second.input, std::vector<std::int32_t>{0, 1, 2});
  await(f);
  BOOST_TEST(f.device->calls("synchronize") == waits);
  BOOST_TEST(f.log.computed == 1);
  await(f);
  BOOST_TEST(f.device->calls("synchronize") == waits + 1);
  BOOST_TEST(f.log.computed == 2);
}

BOOST_AUTO_TEST_CASE(only_engines_that_find_tokens_look_ahead) {
  const Fixture without;
  BOOST_TEST(!without.engine->can_look_ahead());
  const Flight decode(three_decodes(0), "---");
  without.engine->begin_step(decode.input);
  BOOST_CHECK_THROW(without.engine->begin_ahead(decode.input, std::vector<std::int32_t>{0, 1, 2}),
                    EngineError);
  without.engine->await_step([](auto...) {}, {});
  SummingModel::Log log;
  const auto off = make_gpu_engine(model_with_best_tokens(), std::make_unique<SummingModel>(log),
                                   std::make_shared<HostDevice>(), {.look_ahead = false});
  BOOST_TEST(!off->can_look_ahead());
}

BOOST_AUTO_TEST_CASE(steps_that_need_the_host_are_not_begun_ahead) {
  const Fixture f(true, model_with_best_tokens());
  const std::vector<std::int32_t> rows{0, 1, 2};
  const auto refuses = [&](const StepInput& first, const StepInput& second,
                           const std::vector<std::int32_t>& previous_rows) {
    f.engine->begin_step(first);
    BOOST_CHECK_EXCEPTION(f.engine->begin_ahead(second, previous_rows), StepError,
                          [](const StepError& error) {
                            return std::string(error.what()).find("begun ahead") != std::string::npos;
                          });
    f.engine->await_step([](auto...) {}, {});
  };
  const Flight plain(three_decodes(0), "bbb");
  const Flight next(three_decodes(1), "bbb");
  refuses(Flight(three_decodes(0), "bb-").input, next.input, rows);
  refuses(Flight(three_decodes(0), "bbl").input, next.input, {0, 1, 0});
  refuses(plain.input, Flight(three_decodes(1), "bbl").input, rows);
  refuses(plain.input, next.input, {0, 1});
  refuses(plain.input, next.input, {0, 1, 3});
  refuses(plain.input, next.input, {0, 1, -1});
  const std::vector<Piece> prompt{{.tokens = {1, 2, 3}, .prompt_length = 3, .blocks = {5}}};
  refuses(Flight(prompt, "bbb").input, next.input, rows);
  refuses(plain.input, Flight(prompt, "bbb").input, rows);
  // The engine goes on.
  const Flight last(three_decodes(1), "bbb");
  f.engine->begin_step(plain.input);
  f.engine->begin_ahead(last.input, rows);
  await(f);
  await(f);
  last.check({12, 2, 14}, {});
}

BOOST_AUTO_TEST_CASE(failures_with_two_steps_in_flight_do_not_break_the_next) {
  for (const std::string call : {"record", "copy_to_device", "copy_to_host", "launch"}) {
    const Fixture f(true, model_with_best_tokens());
    const std::vector<std::int32_t> rows{0, 1, 2};
    static_cast<void>(f.sums_of(three_decodes(0), "bbb"));  // captures the graph
    const Flight first(three_decodes(0), "bbb");
    const Flight second(three_decodes(1), "bbb");
    f.engine->begin_step(first.input);
    f.device->fail(call, Failure::kOnce);
    BOOST_CHECK_THROW(f.engine->begin_ahead(second.input, rows), StepError);
    await(f);
    first.check({6, 1, 7}, {});
    f.engine->begin_step(first.input);
    f.engine->begin_ahead(second.input, rows);
    await(f);
    await(f);
    second.check({12, 2, 14}, {});
  }
}

BOOST_AUTO_TEST_CASE(steps_in_flight_have_the_slots_of_their_adapters) {
  GpuModelDescription model = model_with_adapters(true);
  model.finds_best_tokens = true;
  const Fixture f(true, model);
  const DeviceAdapter adapter{.task_id = 1, .load_id = 1, .sites = std::vector<DeviceSite>(1)};
  std::vector<Piece> pieces = three_decodes(0);
  std::vector<Piece> next = three_decodes(1);
  // The base model's sequences come first in a run, so the order of tokens changes.
  pieces[0].adapter = next[0].adapter = &adapter;
  const Flight first(pieces, "bbb");
  const Flight second(next, "bbb");
  f.engine->begin_step(first.input);
  const std::int64_t copies = f.device->calls("copy_to_device");
  f.engine->begin_ahead(second.input, std::vector<std::int32_t>{0, 1, 2});
  BOOST_TEST(f.device->calls("copy_to_device") == copies + 1);  // the adapter is in the tables
  await(f);
  await(f);
  first.check({6, 1, 7}, {});
  second.check({12, 2, 14}, {});
}

BOOST_AUTO_TEST_CASE(runs_tell_models_that_skip_unused_adapters_whether_there_are_adapters) {
  for (const bool skips : {false, true}) {
    const Fixture f(true, model_with_adapters(skips));
    const DeviceAdapter adapter{.task_id = 1, .load_id = 1, .sites = std::vector<DeviceSite>(1)};
    std::vector<Piece> pieces{next_token(6, 0, {5}), next_token(7, 0, {2})};
    for (int time = 0; time < 2; ++time) {
      pieces[1].adapter = nullptr;
      (void)f.sums_of(pieces);
      pieces[1].adapter = &adapter;
      (void)f.sums_of(pieces);
    }
    // One graph for each.
    std::vector<bool> have_adapters;
    for (const RunShape& shape : f.log.shapes) have_adapters.push_back(shape.has_adapters);
    BOOST_TEST((have_adapters == (skips ? std::vector{false, true} : std::vector{true})));
  }
}

BOOST_AUTO_TEST_CASE(keys_that_are_values_are_stored_once) {
  GpuModelDescription model = small_model();
  const std::size_t row = kTokensPerBlock * sizeof(std::uint16_t);
  BOOST_TEST(Fixture(true, model).engine->info().kv_block_bytes == 2 * row);
  model.attention.front().values_are_keys = true;
  BOOST_TEST(Fixture(true, model).engine->info().kv_block_bytes == row);
}

BOOST_AUTO_TEST_CASE(states_are_copied_and_cleared_and_advance_once_in_a_step) {
  GpuModelDescription model = small_model();
  model.state_bytes = sizeof(std::int32_t);
  model.attention = {AttentionShape{}};
  for (const bool cuda_graphs : {false, true}) {
    const Fixture f(cuda_graphs, model);
    BOOST_TEST(f.engine->info().state_bytes == sizeof(std::int32_t));
    BOOST_TEST(f.engine->info().kv_block_bytes == 0U);
    f.engine->allocate_states(3);
    struct Copies {
      std::vector<std::int32_t> from;
      std::vector<std::int32_t> to;
    };
    const auto check = [&](const std::vector<Piece>& pieces, const std::vector<std::int32_t>& slots,
                           const std::vector<float>& expected, const Copies& copies = {}) {
      StepArrays arrays(pieces);
      arrays.state_slots = slots;
      arrays.state_copies_from = copies.from;
      arrays.state_copies_to = copies.to;
      const std::vector<float> logits = logits_of(f.engine.get(), arrays.input());
      std::vector<float> sums;
      for (std::size_t row = 0; row < logits.size(); row += kVocabSize) sums.push_back(logits[row]);
      BOOST_TEST(sums == expected, boost::test_tools::per_element());
    };
    const Piece prompt{.tokens = {1, 2, 3, 4, 5}, .prompt_length = 5, .blocks = {5, 1}};
    check({prompt}, {2}, {1, 3, 6, 10, 15});  // five rows, four at a time
    BOOST_TEST(f.log.shapes.size() == 2U);
    check({next_token(6, 5, {5, 1})}, {2}, {21});
    // A fork; both go on. Then a sequence that starts in a slot that another had.
    check({next_token(1, 6, {5, 1}), next_token(2, 6, {5, 2})}, {2, 0}, {22, 23}, {.from = {2}, .to = {0}});
    check({next_token(1, 7, {5, 1}), next_token(7, 0, {3}), next_token(3, 7, {5, 2})}, {2, 1, 0},
          {23, 7, 26});
    check({next_token(4, 0, {5})}, {2}, {4});
    // Copies are made in order.
    check({next_token(1, 1, {3}), next_token(1, 1, {4})}, {2, 1}, {8, 27}, {.from = {1, 0}, .to = {2, 1}});
    check({next_token(1, 1, {3})}, {1}, {28});
  }
}

BOOST_AUTO_TEST_CASE(states_are_allocated_once_and_only_for_models_that_keep_them) {
  const Fixture without;
  BOOST_CHECK_THROW(without.engine->allocate_states(3), EngineError);
  GpuModelDescription model = small_model();
  model.state_bytes = std::size_t{1} << 18;
  const Fixture f(true, model);
  BOOST_CHECK_EXCEPTION((void)f.sums_of({next_token(6, 0, {5})}), StepError, [](const StepError& error) {
    return std::string(error.what()).find("the states are not allocated") != std::string::npos;
  });
  BOOST_CHECK_THROW(f.engine->allocate_states(0), ConfigError);
  BOOST_CHECK_THROW(f.engine->allocate_states(5), ConfigError);  // more than the device's memory
  f.engine->allocate_states(2);
  BOOST_CHECK_THROW(f.engine->allocate_states(2), ConfigError);
}

BOOST_AUTO_TEST_CASE(a_model_that_cannot_be_loaded_leaves_nothing) {
  const auto device = std::make_shared<HostDevice>();
  SummingModel::Log log;
  log.fails_to_load = true;
  BOOST_CHECK_THROW((void)make_gpu_engine(small_model(), std::make_unique<SummingModel>(log), device, {}),
                    ConfigError);
  BOOST_TEST(device->num_allocations() == 0U);
}

BOOST_AUTO_TEST_CASE(an_inconsistent_description_is_refused_with_all_that_is_wrong) {
  GpuModelDescription model = small_model();
  model.num_layers = 2;
  model.num_adapter_slots = 4;
  model.prefill.max_sequences = 3;
  SummingModel::Log log;
  BOOST_CHECK_EXCEPTION(
      (void)make_gpu_engine(model, std::make_unique<SummingModel>(log), std::make_shared<HostDevice>(), {}),
      EngineError, [](const EngineError& error) {
        const std::string text = error.what();
        return text.find("attention has 1 layers, the model 2") != std::string::npos &&
               text.find("adapter slots, but no LoRA sites") != std::string::npos &&
               text.find("prefill.max_sequences is 3") != std::string::npos;
      });
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::gpu_engine_test
