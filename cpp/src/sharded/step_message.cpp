#include "step_message.h"

namespace adaptrt {

void add_step(const StepInput& input, MessageWriter* message) {
  for (const auto list :
       {input.token_ids, input.positions, input.sequence_offsets, input.prompt_lengths, input.block_tables,
        input.adapters_from, input.logit_rows, input.copies_from, input.copies_to, input.hidden_rows}) {
    message->add_list(list);
  }
  message->add(input.max_blocks_per_sequence);
  std::vector<std::uint64_t> load_ids;
  for (const DeviceAdapter* adapter : input.adapters) {
    load_ids.push_back(adapter == nullptr ? 0 : adapter->load_id);
  }
  message->add_list(std::span<const std::uint64_t>(load_ids));
}

void ReceivedStep::read(MessageReader* message,
                        const std::function<const DeviceAdapter*(std::uint64_t)>& find) {
  for (auto* list : {&token_ids_, &positions_, &sequence_offsets_, &prompt_lengths_, &block_tables_,
                     &adapters_from_, &logit_rows_, &copies_from_, &copies_to_, &hidden_rows_}) {
    *list = message->list<std::int32_t>();
  }
  max_blocks_per_sequence_ = message->number<std::int32_t>();
  adapters_.clear();
  for (const std::uint64_t load_id : message->list<std::uint64_t>()) {
    adapters_.push_back(load_id == 0 ? nullptr : find(load_id));
  }
}

StepInput ReceivedStep::input() const {
  return {.token_ids = token_ids_,
          .positions = positions_,
          .sequence_offsets = sequence_offsets_,
          .prompt_lengths = prompt_lengths_,
          .block_tables = block_tables_,
          .max_blocks_per_sequence = max_blocks_per_sequence_,
          .adapters = adapters_,
          .adapters_from = adapters_from_,
          .logit_rows = logit_rows_,
          .copies_from = copies_from_,
          .copies_to = copies_to_,
          .hidden_rows = hidden_rows_};
}

}  // namespace adaptrt
