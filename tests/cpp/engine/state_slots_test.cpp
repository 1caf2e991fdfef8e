// The checks of a step's state slots.

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/engine/check_step_input.h"

namespace adaptrt::testing::state_slots_test {
namespace {

constexpr std::int32_t kSlots = 4;

/// An engine with states, and a valid step of two sequences.
struct Fixture {
  Fixture() {
    info.vocab_size = 10;
    info.max_batch_size = 3;
    info.max_num_tokens = 8;
    info.max_seq_len = 8;
    info.tokens_per_block = 4;
    info.state_bytes = 8;
  }

  void check(std::int32_t num_slots = kSlots) {
    checker.check({.token_ids = tokens,
                   .positions = tokens,
                   .sequence_offsets = offsets,
                   .prompt_lengths = prompts,
                   .block_tables = tables,
                   .max_blocks_per_sequence = 1,
                   .adapters = adapters,
                   .logit_rows = {},
                   .state_slots = slots,
                   .state_copies_from = from,
                   .state_copies_to = to},
                  info, 2, num_slots);
  }

  /// Checks that the step is refused with these words.
  void refuses(const std::string& words, std::int32_t num_slots = kSlots) {
    BOOST_CHECK_EXCEPTION(check(num_slots), StepError, [&](const StepError& error) {
      BOOST_TEST_INFO(error.what());
      return std::string(error.what()).find(words) != std::string::npos;
    });
  }

  EngineInfo info;
  StepInputChecker checker;
  std::vector<std::int32_t> tokens = {0, 1, 0};
  std::vector<std::int32_t> offsets = {0, 2, 3};
  std::vector<std::int32_t> prompts = {2, 1};
  std::vector<std::int32_t> tables = {0, 1};
  std::vector<const DeviceAdapter*> adapters = {nullptr, nullptr};
  std::vector<std::int32_t> slots = {3, 0};
  std::vector<std::int32_t> from = {3, 0};
  std::vector<std::int32_t> to = {0, 1};
};

BOOST_FIXTURE_TEST_SUITE(state_slots, Fixture)

BOOST_AUTO_TEST_CASE(valid_slots_are_accepted_again_and_again) {
  for (int step = 0; step < 3; ++step) BOOST_CHECK_NO_THROW(check());
}

BOOST_AUTO_TEST_CASE(steps_need_allocated_states) {
  refuses("the states are not allocated", 0);
}

BOOST_AUTO_TEST_CASE(each_sequence_needs_a_slot) {
  slots.pop_back();
  refuses("state_slots has 1 elements, not 2");
}

BOOST_AUTO_TEST_CASE(slots_must_exist) {
  slots[1] = kSlots;
  refuses("sequence 1: its state slot is 4; the engine has 4 slots");
  slots[1] = -1;
  refuses("sequence 1: its state slot is -1");
}

BOOST_AUTO_TEST_CASE(sequences_do_not_share_a_slot) {
  slots[1] = 3;
  refuses("sequence 1: its state slot 3 is another sequence's too");
}

BOOST_AUTO_TEST_CASE(copies_must_be_sound) {
  to.pop_back();
  refuses("state_copies_to has 1 elements, not 2");
  to = {0, kSlots};
  refuses("copy 1 is of state 0 to state 4; the engine has 4 states");
  to = {0, 0};
  refuses("copy 1 is of state 0 to itself");
  from = {3, 2};
  refuses("copy 1 is to state 0, as one before it");
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::state_slots_test
