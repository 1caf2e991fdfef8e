// States in a pipeline, some of whose stages keep none.

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/sharded/sharded_engine.h"
#include "sharded/thread_ranks.h"

namespace adaptrt::testing::states_test {
namespace {

/// A stage that computes nothing and keeps the state slots that it gets.
class Stage final : public Engine {
 public:
  explicit Stage(std::size_t state_bytes) {
    info_.vocab_size = 10;
    info_.max_batch_size = 2;
    info_.max_num_tokens = 8;
    info_.max_seq_len = 8;
    info_.tokens_per_block = 4;
    info_.num_stages = 2;
    info_.state_bytes = state_bytes;
  }

  [[nodiscard]] const EngineInfo& info() const override { return info_; }
  void allocate_kv_blocks(std::int32_t /*num_blocks*/) override {}
  void allocate_states(std::int32_t num_slots) override {
    if (!info_.has_states()) return Engine::allocate_states(num_slots);
    allocated = num_slots;
  }
  using Engine::step;
  void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& /*hidden_sink*/) override {
    const auto add = [](std::span<const std::int32_t> array, std::vector<std::int32_t>& all) {
      all.insert(all.end(), array.begin(), array.end());
    };
    add(input.state_slots, slots);
    add(input.state_copies_from, copies_from);
    add(input.state_copies_to, copies_to);
    const std::vector<float> logits(input.logit_rows.size() * 10);
    if (!logits.empty()) sink(0, std::ssize(input.logit_rows), logits.data());
  }

  std::int32_t allocated = 0;
  std::vector<std::int32_t> slots;
  std::vector<std::int32_t> copies_from;
  std::vector<std::int32_t> copies_to;

 private:
  EngineInfo info_;
};

BOOST_AUTO_TEST_SUITE(states)

BOOST_AUTO_TEST_CASE(only_stages_with_states_get_them) {
  for (const std::size_t stage_with_states : {0U, 1U}) {
    const auto room = std::make_shared<MailRoom>(2);
    const auto first = std::make_shared<Stage>(stage_with_states == 0 ? 8 : 0);
    Stage last(stage_with_states == 1 ? 8 : 0);
    std::jthread thread([&] {
      ThreadCommunicator communicator(room, 1);
      serve_rank(last, communicator);
    });
    const auto engine = make_sharded_engine(first, std::make_shared<ThreadCommunicator>(room, 0),
                                            PipelineFacts{.num_layers = 2, .state_bytes = 8});
    BOOST_TEST(engine->info().state_bytes == 8U);
    engine->allocate_kv_blocks(2);
    engine->allocate_states(3);
    static_cast<void>(engine->make_adapter_pages(64, 1, 1));
    const std::vector<std::int32_t> tokens = {0, 1, 0};
    const std::vector<std::int32_t> offsets = {0, 2, 3};
    const std::vector<std::int32_t> prompts = {2, 1};
    const std::vector<std::int32_t> tables = {0, 1};
    const std::vector<const DeviceAdapter*> adapters(2);
    const std::vector<std::int32_t> logit_rows = {1, 2};
    std::vector<std::int32_t> slots = {2, 0};
    const std::vector<std::int32_t> from = {2};
    const std::vector<std::int32_t> to = {1};
    const auto ignore = [](std::int64_t, std::int64_t, const float*) {};
    const auto step = [&] {
      engine->step({.token_ids = tokens,
                    .positions = tokens,
                    .sequence_offsets = offsets,
                    .prompt_lengths = prompts,
                    .block_tables = tables,
                    .max_blocks_per_sequence = 1,
                    .adapters = adapters,
                    .logit_rows = logit_rows,
                    .state_slots = slots,
                    .state_copies_from = from,
                    .state_copies_to = to},
                   ignore, ignore);
    };
    step();
    slots[1] = 3;
    BOOST_CHECK_THROW(step(), StepError);
    engine->end_steps();
    thread.join();
    const Stage& with = stage_with_states == 0 ? *first : last;
    const Stage& without = stage_with_states == 0 ? last : *first;
    BOOST_TEST(with.allocated == 3);
    BOOST_TEST(with.slots == (std::vector<std::int32_t>{2, 0}), boost::test_tools::per_element());
    BOOST_TEST(with.copies_from == from, boost::test_tools::per_element());
    BOOST_TEST(with.copies_to == to, boost::test_tools::per_element());
    BOOST_TEST(without.slots.empty());
    BOOST_TEST(without.copies_from.empty());
    BOOST_TEST(without.copies_to.empty());
  }
}

BOOST_AUTO_TEST_CASE(a_pipeline_without_states_allocates_none) {
  const auto room = std::make_shared<MailRoom>(2);
  Stage last(0);
  std::jthread thread([&] {
    ThreadCommunicator communicator(room, 1);
    serve_rank(last, communicator);
  });
  const auto engine =
      make_sharded_engine(std::make_shared<Stage>(0), std::make_shared<ThreadCommunicator>(room, 0),
                          PipelineFacts{.num_layers = 2});
  BOOST_CHECK_THROW(engine->allocate_states(3), EngineError);
  engine->end_steps();
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::states_test
