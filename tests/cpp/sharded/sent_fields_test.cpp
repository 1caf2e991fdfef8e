// Every field of EngineInfo and every array of a step reaches another process, and every micro-batch.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "adaptrt/engine/engine_fields.h"
#include "adaptrt/sharded/remote_engine.h"
#include "adaptrt/sharded/step_microbatches.h"
#include "sharded/thread_ranks.h"

namespace adaptrt::testing::sent_fields_test {
namespace {

template <class Struct, class Visit>
void for_each_field(const Visit& visit) {
  fields_of(static_cast<const Struct*>(nullptr)).apply([&](const auto&... fields) { (visit(fields), ...); });
}

/// Gives a value, its fields and its elements values that no default has.
template <class Value>
void fill(Value& value, int& last) {
  if constexpr (std::is_same_v<Value, bool>) {
    value = !value;
  } else if constexpr (std::is_enum_v<Value>) {
    value = static_cast<Value>(static_cast<int>(value) + 1);
  } else if constexpr (std::is_arithmetic_v<Value>) {
    value = static_cast<Value>(++last);
  } else if constexpr (std::is_same_v<Value, std::string>) {
    value = "text " + std::to_string(++last);
  } else if constexpr (requires { fields_of(static_cast<const Value*>(nullptr)); }) {
    for_each_field<Value>([&](const auto& field) { fill(value.*(field.member), last); });
  } else {
    value.resize(2);
    for (auto& item : value) fill(item, last);
  }
}

/// Adds "name = value" of a value's fields and elements.
template <class Value>
void describe(const std::string& name, const Value& value, std::vector<std::string>& lines) {
  if constexpr (std::is_enum_v<Value>) {
    lines.push_back(name + " = " + std::to_string(static_cast<int>(value)));
  } else if constexpr (std::is_arithmetic_v<Value>) {
    lines.push_back(name + " = " + std::to_string(value));
  } else if constexpr (std::is_same_v<Value, std::string>) {
    lines.push_back(name + " = " + value);
  } else if constexpr (requires { fields_of(static_cast<const Value*>(nullptr)); }) {
    for_each_field<Value>(
        [&](const auto& field) { describe(name + "." + field.name, value.*(field.member), lines); });
  } else {
    lines.push_back(name + " = " + std::to_string(value.size()) + " items");
    for (const auto& item : value) describe(name + "[]", item, lines);
  }
}

std::vector<std::string> described(const EngineInfo& info) {
  std::vector<std::string> lines;
  describe("info", info, lines);
  return lines;
}

/// The arrays of a step, by number in kStepInputArrays and after those in kEncoderArrays.
std::vector<std::vector<std::int32_t>> arrays_of(const StepInput& input) {
  std::vector<std::vector<std::int32_t>> arrays;
  const auto add = [&](const auto& array) { arrays.emplace_back(array.begin(), array.end()); };
  for (const StepInputArray& array : kStepInputArrays) add(input.*(array.member));
  for (const auto member : kEncoderArrays) add(input.encoder.*member);
  return arrays;
}

/// Keeps the step that it gets. Returns zeros, and 1, 2, ... as the encoder's outputs.
class Recording final : public Engine {
 public:
  explicit Recording(EngineInfo info) : info_(std::move(info)) {}
  [[nodiscard]] const EngineInfo& info() const override { return info_; }
  void allocate_kv_blocks(std::int32_t /*num_blocks*/) override {}
  void allocate_cross_kv_blocks(std::int32_t /*num_blocks*/) override {}
  void allocate_states(std::int32_t /*num_slots*/) override {}
  using Engine::step;
  void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) override {
    arrays = arrays_of(input);
    widths = {input.max_blocks_per_sequence, input.max_cross_blocks};
    const auto rows_of = [](std::span<const std::int32_t> rows, std::int64_t width) {
      return std::vector<float>(rows.size() * static_cast<std::size_t>(width));
    };
    sink(0, std::ssize(input.logit_rows), rows_of(input.logit_rows, info_.logits_width()).data());
    hidden_sink(0, std::ssize(input.hidden_rows), rows_of(input.hidden_rows, info_.hidden_size).data());
    const EncoderInputs& encoder = input.encoder;
    for (std::size_t i = 0; i < encoder.outputs.size(); ++i) {
      const std::int64_t tokens = encoder.offsets[i + 1] - encoder.offsets[i];
      if (encoder.outputs[i] != nullptr) {
        std::fill_n(encoder.outputs[i], tokens * info_.encoder_hidden_size, static_cast<float>(i + 1));
      }
    }
  }

  std::vector<std::vector<std::int32_t>> arrays;
  std::vector<std::int32_t> widths;

 private:
  EngineInfo info_;
};

/// The engine as another process sees it.
class Served {
 public:
  explicit Served(Engine& engine) : room_(std::make_shared<MailRoom>(2)) {
    thread_ = std::jthread([this, &engine] {
      ThreadCommunicator leader(room_, 1);
      serve_engine(engine, leader);
    });
    remote = make_remote_engine(std::make_shared<ThreadCommunicator>(room_, 0));
  }
  ~Served() { remote->end_steps(); }

 private:
  std::shared_ptr<MailRoom> room_;
  std::jthread thread_;

 public:
  std::unique_ptr<Engine> remote;
};

/// A step of 3 and 2 tokens in which no array is empty.
struct WholeStep {
  std::vector<std::int32_t> tokens = {11, 12, 13, 14, 15};
  std::vector<std::int32_t> positions = {0, 1, 2, 4, 5};
  std::vector<std::int32_t> types = {0, 1, 2, 1, 0};
  std::vector<std::int32_t> rotary_positions = {0, 1, 1, 3, 4};
  std::vector<std::int32_t> offsets = {0, 3, 5};
  std::vector<std::int32_t> prompts = {3, 6};
  std::vector<std::int32_t> tables = {0, -1, -1, 1, 2, -1};
  std::vector<std::int32_t> adapter_start_positions = {1, 2};
  std::vector<std::int32_t> logit_rows = {2, 4};
  std::vector<std::int32_t> copies_from = {3};
  std::vector<std::int32_t> copies_to = {4};
  std::vector<std::int32_t> hidden_rows = {0, 3};
  std::vector<std::int32_t> state_slots = {4, 2};
  std::vector<std::int32_t> state_copies_from = {4, 0};
  std::vector<std::int32_t> state_copies_to = {2, 1};
  std::vector<std::int32_t> lengths = {2, 3};
  std::vector<std::int32_t> cross_tables = {5, -1, 6, -1};
  std::vector<const DeviceAdapter*> adapters = {nullptr, nullptr};
  std::vector<std::int32_t> encoder_tokens = {21, 22};
  std::vector<std::int32_t> encoder_offsets = {0, 2};
  std::vector<std::int32_t> encoder_tables = {5, -1};
  std::vector<const DeviceAdapter*> encoder_adapters = {nullptr};

  [[nodiscard]] StepInput input() const {
    return {.token_ids = tokens,
            .positions = positions,
            .token_types = types,
            .rotary_positions = rotary_positions,
            .sequence_offsets = offsets,
            .prompt_lengths = prompts,
            .block_tables = tables,
            .max_blocks_per_sequence = 3,
            .adapters = adapters,
            .adapter_start_positions = adapter_start_positions,
            .logit_rows = logit_rows,
            .copies_from = copies_from,
            .copies_to = copies_to,
            .hidden_rows = hidden_rows,
            .state_slots = state_slots,
            .state_copies_from = state_copies_from,
            .state_copies_to = state_copies_to,
            .encoder = {.token_ids = encoder_tokens,
                        .offsets = encoder_offsets,
                        .block_tables = encoder_tables,
                        .adapters = encoder_adapters},
            .encoder_lengths = lengths,
            .cross_block_tables = cross_tables,
            .max_cross_blocks = 2};
  }
};

EngineInfo info_of_whole_step() {
  EngineInfo info;
  info.vocab_size = 30;
  info.max_batch_size = 2;
  info.max_num_tokens = 8;
  info.max_seq_len = 8;
  info.tokens_per_block = 4;
  info.has_adapter_start_positions = true;
  info.num_token_types = 3;
  info.hidden_size = 4;
  info.max_encoder_input_len = 4;
  info.encoder_hidden_size = 4;
  info.state_bytes = 8;
  return info;
}

BOOST_AUTO_TEST_SUITE(sent_fields)

BOOST_AUTO_TEST_CASE(every_field_of_an_engine_arrives) {
  EngineInfo info;
  int last = 1;
  fill(info, last);
  Recording engine(info);
  const Served served(engine);
  // An engine of another process has no second level of the KV cache, takes no embeddings, and finds no best
  // tokens or highest logits.
  info.kv_identity.clear();
  info.prompt_embedding_size = 0;
  info.num_coordinates = 0;
  info.joint_column = -1;
  info.finds_best_tokens = false;
  info.finds_highest_logits = false;
  BOOST_TEST(described(served.remote->info()) == described(info), boost::test_tools::per_element());
  BOOST_TEST(described(info).size() > 50U);
}

BOOST_AUTO_TEST_CASE(every_array_of_a_step_arrives) {
  Recording engine(info_of_whole_step());
  const Served served(engine);
  served.remote->allocate_kv_blocks(7);
  served.remote->allocate_cross_kv_blocks(7);
  served.remote->allocate_states(5);
  const WholeStep step;
  const auto expected = arrays_of(step.input());
  for (const auto& array : expected) BOOST_TEST(!array.empty());
  const auto ignore = [](std::int64_t, std::int64_t, const float*) {};
  served.remote->step(step.input(), ignore, ignore);
  BOOST_TEST((engine.arrays == expected));
  BOOST_TEST(engine.widths == (std::vector<std::int32_t>{3, 2}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(the_wanted_outputs_of_the_encoder_arrive) {
  Recording engine(info_of_whole_step());
  const Served served(engine);
  served.remote->allocate_kv_blocks(7);
  served.remote->allocate_cross_kv_blocks(7);
  served.remote->allocate_states(5);
  WholeStep step;
  step.encoder_offsets = {0, 1, 2};
  step.encoder_tables = {5, -1, 6, -1};
  step.encoder_adapters = {nullptr, nullptr};
  const auto ignore = [](std::int64_t, std::int64_t, const float*) {};
  for (const std::size_t wanted : {0U, 1U}) {
    std::vector<float> output(4);
    std::vector<float*> places(2, nullptr);
    places[wanted] = output.data();
    StepInput input = step.input();
    input.encoder.outputs = places;
    served.remote->step(input, ignore, ignore);
    BOOST_TEST(output == std::vector<float>(4, static_cast<float>(wanted + 1)),
               boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(a_microbatch_has_its_part_of_every_array) {
  const WholeStep step;
  WholeStep first;
  first.tokens = {11, 12};
  first.positions = {0, 1};
  first.types = {0, 1};
  first.rotary_positions = {0, 1};
  first.offsets = {0, 2};
  first.prompts = {3};
  first.tables = {0, -1, -1};
  first.adapter_start_positions = {1};
  first.logit_rows = {};
  first.hidden_rows = {0};
  first.state_slots = {4};
  first.lengths = {2};
  first.cross_tables = {5, -1};
  BOOST_TEST((arrays_of(Microbatch(step.input(), 0, 2).input()) == arrays_of(first.input())));
  WholeStep second;
  second.tokens = {13, 14, 15};
  second.positions = {2, 4, 5};
  second.types = {2, 1, 0};
  second.rotary_positions = {1, 3, 4};
  second.offsets = {0, 1, 3};
  second.logit_rows = {0, 2};
  second.copies_from = second.copies_to = {};
  second.state_copies_from = second.state_copies_to = {};
  second.hidden_rows = {1};
  BOOST_TEST((arrays_of(Microbatch(step.input(), 2, 5).input()) == arrays_of(second.input())));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::sent_fields_test
