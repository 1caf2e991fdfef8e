#include "adaptrt/gpu/step_arrays.h"

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lora/adapters.h"

namespace adaptrt::testing::step_arrays_test {
namespace {

GpuModelDescription model(bool has_prompt_lengths, bool has_adapters) {
  GpuModelDescription model;
  model.max_seq_len = 22;
  model.tokens_per_block = 4;
  model.has_prompt_lengths = has_prompt_lengths;
  model.prefill = {.max_tokens = 100, .max_sequences = 3, .max_logit_rows = 2};
  model.decode = {.max_tokens = 5, .max_sequences = 5, .max_logit_rows = 5};
  if (has_adapters) model.lora = small_layout();
  return model;
}

std::vector<std::int32_t> values_of(const std::vector<std::byte>& memory, const StepArray& array) {
  std::size_t count = 1;
  for (const std::int64_t dim : array.dims) count *= static_cast<std::size_t>(dim);
  const auto* first = reinterpret_cast<const std::int32_t*>(memory.data() + array.offset);
  return {first, first + count};
}

BOOST_AUTO_TEST_SUITE(step_arrays)

BOOST_AUTO_TEST_CASE(arrays_are_contiguous_and_aligned) {
  const adaptrt::StepArrays arrays(model(true, true));
  const StepPlaces places =
      arrays.places({.tokens = 65, .sequences = 3, .blocks_per_sequence = 4, .logit_rows = 2});
  BOOST_TEST(places.token_ids.offset == 0U);
  BOOST_TEST(places.positions.offset == 512U);
  BOOST_TEST(places.sequence_offsets.offset == 1024U);
  BOOST_TEST(places.block_tables.offset == 1280U);
  BOOST_TEST(places.logit_rows.offset == 1536U);
  BOOST_TEST(places.prompt_lengths.value().offset == 1792U);
  BOOST_TEST(places.adapter_slots.value().offset == 2048U);
  BOOST_TEST(places.bytes == 2304U);
  BOOST_TEST(places.block_tables.dims == (std::vector<std::int64_t>{3, 4}), boost::test_tools::per_element());
  BOOST_TEST(arrays.max_bytes() == 2304U);  // of a prefill of 100 tokens
}

BOOST_AUTO_TEST_CASE(a_model_has_only_the_arrays_that_it_reads) {
  const RunShape shape{.tokens = 1, .sequences = 1, .blocks_per_sequence = 1, .logit_rows = 1};
  const StepPlaces places = adaptrt::StepArrays(model(false, false)).places(shape);
  BOOST_TEST(!places.prompt_lengths.has_value());
  BOOST_TEST(!places.adapter_slots.has_value());
  BOOST_TEST(!places.state_slots.has_value());
  BOOST_TEST(places.bytes == 5U * 256);
}

BOOST_AUTO_TEST_CASE(blocks_are_padded_to_a_power_of_two_and_no_further_than_a_sequence) {
  const adaptrt::StepArrays arrays(model(false, false));
  BOOST_TEST(arrays.padded_blocks(1) == 1);
  BOOST_TEST(arrays.padded_blocks(3) == 4);
  BOOST_TEST(arrays.padded_blocks(4) == 4);
  BOOST_TEST(arrays.padded_blocks(5) == 6);  // 22 tokens in blocks of 4
}

BOOST_AUTO_TEST_CASE(sequences_are_sorted_by_slot_and_padded) {
  const std::vector<std::int32_t> tokens{10, 11, 20, 30};
  const std::vector<std::int32_t> positions{4, 5, 0, 2};
  const std::vector<std::int32_t> offsets{0, 2, 3, 4};
  const std::vector<std::int32_t> lengths{7, 8, 9};
  const std::vector<std::int32_t> tables{3, 4, 5, -1, 6, -1};
  const std::vector<std::int32_t> slots{1, kNoSlot, 0};
  const std::vector<std::int32_t> rows{1, 2, 3};
  const std::vector<std::int32_t> state_slots{6, 7, 5};
  const StepInput input{.token_ids = tokens,
                        .positions = positions,
                        .sequence_offsets = offsets,
                        .prompt_lengths = lengths,
                        .block_tables = tables,
                        .max_blocks_per_sequence = 2,
                        .adapters = {},
                        .logit_rows = rows,
                        .state_slots = state_slots};
  GpuModelDescription described = model(true, true);
  described.state_bytes = 64;
  adaptrt::StepArrays arrays(described);
  const RunShape shape{.tokens = 5, .sequences = 4, .blocks_per_sequence = 4, .logit_rows = 4};
  std::vector<std::byte> memory(arrays.max_bytes(), std::byte{0x7F});
  BOOST_TEST(arrays.write(memory.data(), shape, input, slots, rows) == arrays.places(shape).bytes);
  const StepPlaces places = arrays.places(shape);
  const auto check = [&](const StepArray& array, const std::vector<std::int32_t>& expected) {
    BOOST_TEST(values_of(memory, array) == expected, boost::test_tools::per_element());
  };
  check(places.token_ids, {20, 30, 10, 11, 0});
  check(places.positions, {0, 2, 4, 5, 0});
  check(places.sequence_offsets, {0, 1, 2, 4, 5});
  check(places.block_tables, {5, -1, -1, -1, 6, -1, -1, -1, 3, 4, -1, -1, -1, -1, -1, -1});
  check(places.logit_rows, {3, 0, 1, 0});
  check(places.prompt_lengths.value(), {8, 9, 7, 1});
  check(places.adapter_slots.value(), {kNoSlot, 0, 1, kNoSlot});
  check(places.state_slots.value(), {7, 5, 6, kNoSlot});
}

BOOST_AUTO_TEST_CASE(tokens_before_their_adapter_are_a_range_of_their_own) {
  const std::vector<std::int32_t> tokens{10, 11, 12, 20, 21, 30, 31};
  const std::vector<std::int32_t> positions{4, 5, 6, 0, 1, 2, 3};
  const std::vector<std::int32_t> offsets{0, 3, 5, 7};
  const std::vector<std::int32_t> lengths{7, 8, 9};
  const std::vector<std::int32_t> tables(6, 0);
  const std::vector<std::int32_t> slots{0, 1, 1};
  const std::vector<std::int32_t> starts{5, 9, 2};  // within the sequence, behind it, at its first token
  const StepInput input{.token_ids = tokens,
                        .positions = positions,
                        .sequence_offsets = offsets,
                        .prompt_lengths = lengths,
                        .block_tables = tables,
                        .max_blocks_per_sequence = 2,
                        .adapters = {},
                        .adapter_start_positions = starts,
                        .logit_rows = {}};
  GpuModelDescription described = model(false, true);
  described.has_adapter_start_positions = true;
  adaptrt::StepArrays arrays(described);
  BOOST_TEST(arrays.split_sequences(input, slots) == 1);
  const RunShape shape{
      .tokens = 8, .sequences = 4, .blocks_per_sequence = 2, .logit_rows = 1, .split_sequences = 1};
  std::vector<std::byte> memory(arrays.max_bytes(), std::byte{0x7F});
  BOOST_TEST(arrays.write(memory.data(), shape, input, slots, {}) == arrays.places(shape).bytes);
  const StepPlaces places = arrays.places(shape);
  BOOST_TEST(values_of(memory, places.adapter_slots.value()) ==
                 (std::vector<std::int32_t>{kNoSlot, 0, kNoSlot, 1, kNoSlot}),
             boost::test_tools::per_element());
  BOOST_TEST(
      values_of(memory, places.adapter_offsets.value()) == (std::vector<std::int32_t>{0, 1, 3, 5, 7, 8}),
      boost::test_tools::per_element());
  BOOST_TEST(!places.token_adapter_slots.has_value());
  BOOST_TEST(!places.row_adapter_slots.has_value());
  // Adapters of the embedding and of lm_head find their slot by token and by row.
  described.lora.sites.push_back({0, 8, {{LoraModule::kLmHead, 40}}});
  described.lora.sites.push_back({0, 40, {{LoraModule::kEmbedding, 8}}});
  adaptrt::StepArrays of_vocabulary(described);
  RunShape rows_shape = shape;
  rows_shape.logit_rows = 4;
  const std::vector<std::int32_t> rows{6, 0, 1};
  memory.assign(of_vocabulary.max_bytes(), std::byte{0x7F});
  static_cast<void>(of_vocabulary.write(memory.data(), rows_shape, input, slots, rows));
  const StepPlaces wider = of_vocabulary.places(rows_shape);
  const auto check = [&](const StepArray& array, const std::vector<std::int32_t>& expected) {
    BOOST_TEST(values_of(memory, array) == expected, boost::test_tools::per_element());
  };
  check(wider.token_adapter_slots.value(), {kNoSlot, 0, 0, kNoSlot, kNoSlot, 1, 1, kNoSlot});
  check(wider.row_adapter_slots.value(), {1, kNoSlot, 0, kNoSlot});
  check(wider.row_adapter_offsets.value(), {0, 1, 2, 3, 4});
  // So do adapters of experts, by token.
  described.lora.sites.resize(described.lora.sites.size() - 2);
  described.lora.sites.push_back({0, 8, {{LoraModule::kMoe4HToH, 8}}});
  const StepPlaces of_experts = adaptrt::StepArrays(described).places(shape);
  BOOST_TEST(of_experts.token_adapter_slots.has_value());
  BOOST_TEST(!of_experts.row_adapter_slots.has_value());
  // Adapters of norms, and those that add tokens, need both.
  for (const LoraModule module : {LoraModule::kNorm, LoraModule::kNewTokens}) {
    described.lora.sites.back() = {0, 1, {{module, 8}}};
    const StepPlaces both = adaptrt::StepArrays(described).places(shape);
    BOOST_TEST(both.token_adapter_slots.has_value());
    BOOST_TEST(both.row_adapter_slots.has_value());
  }
  described.lora.sites.pop_back();
  // Models without start positions have one range for each sequence.
  described.has_adapter_start_positions = false;
  BOOST_TEST(adaptrt::StepArrays(described).split_sequences(input, slots) == 0);
  BOOST_TEST(!adaptrt::StepArrays(described).places(shape).adapter_offsets.has_value());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::step_arrays_test
