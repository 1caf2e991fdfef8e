#include "step_message.h"

#include <cstddef>

namespace adaptrt {
namespace {

void add_adapters(std::span<const DeviceAdapter* const> adapters, MessageWriter* message) {
  std::vector<std::uint64_t> load_ids;
  for (const DeviceAdapter* adapter : adapters) {
    load_ids.push_back(adapter == nullptr ? 0 : adapter->load_id);
  }
  message->add_list(std::span<const std::uint64_t>(load_ids));
}

void add_encoder(const EncoderInputs& encoder, MessageWriter* message) {
  for (const auto list : {encoder.token_ids, encoder.offsets, encoder.block_tables}) message->add_list(list);
  add_adapters(encoder.adapters, message);
  std::vector<std::uint8_t> is_wanted;
  for (const float* output : encoder.outputs) is_wanted.push_back(output == nullptr ? 0 : 1);
  message->add_list(std::span<const std::uint8_t>(is_wanted));
}

}  // namespace

void add_step(const StepInput& input, MessageWriter* message) {
  for (const auto list :
       {input.token_ids, input.positions, input.token_types, input.sequence_offsets, input.prompt_lengths,
        input.block_tables, input.adapters_from, input.logit_rows, input.copies_from, input.copies_to,
        input.hidden_rows, input.encoder_lengths, input.cross_block_tables}) {
    message->add_list(list);
  }
  message->add(input.max_blocks_per_sequence);
  message->add(input.max_cross_blocks);
  add_adapters(input.adapters, message);
  add_encoder(input.encoder, message);
}

void ReceivedStep::read(MessageReader* message, const Find& find, std::int64_t encoder_hidden_size) {
  for (auto* list : {&token_ids_, &positions_, &token_types_, &sequence_offsets_, &prompt_lengths_,
                     &block_tables_, &adapters_from_, &logit_rows_, &copies_from_, &copies_to_, &hidden_rows_,
                     &encoder_lengths_, &cross_block_tables_}) {
    *list = message->list<std::int32_t>();
  }
  max_blocks_per_sequence_ = message->number<std::int32_t>();
  max_cross_blocks_ = message->number<std::int32_t>();
  read_adapters(message, find, &adapters_);
  read_encoder(message, find, encoder_hidden_size);
}

void ReceivedStep::read_adapters(MessageReader* message, const Find& find,
                                 std::vector<const DeviceAdapter*>* adapters) {
  adapters->clear();
  for (const std::uint64_t load_id : message->list<std::uint64_t>()) {
    adapters->push_back(load_id == 0 ? nullptr : find(load_id));
  }
}

void ReceivedStep::read_encoder(MessageReader* message, const Find& find, std::int64_t hidden_size) {
  for (auto* list : {&encoder_token_ids_, &encoder_offsets_, &encoder_block_tables_}) {
    *list = message->list<std::int32_t>();
  }
  read_adapters(message, find, &encoder_adapters_);
  const auto is_wanted = message->list<std::uint8_t>();
  encoder_outputs_.clear();
  encoder_outputs_.resize(is_wanted.size());
  encoder_output_places_.assign(is_wanted.size(), nullptr);
  for (std::size_t i = 0; i < is_wanted.size(); ++i) {
    if (is_wanted[i] == 0) continue;
    const std::int64_t tokens = encoder_offsets_.at(i + 1) - encoder_offsets_.at(i);
    encoder_outputs_[i].resize(static_cast<std::size_t>(tokens * hidden_size));
    encoder_output_places_[i] = encoder_outputs_[i].data();
  }
}

StepInput ReceivedStep::input() const {
  return {.token_ids = token_ids_,
          .positions = positions_,
          .token_types = token_types_,
          .sequence_offsets = sequence_offsets_,
          .prompt_lengths = prompt_lengths_,
          .block_tables = block_tables_,
          .max_blocks_per_sequence = max_blocks_per_sequence_,
          .adapters = adapters_,
          .adapters_from = adapters_from_,
          .logit_rows = logit_rows_,
          .copies_from = copies_from_,
          .copies_to = copies_to_,
          .hidden_rows = hidden_rows_,
          .encoder = {.token_ids = encoder_token_ids_,
                      .offsets = encoder_offsets_,
                      .block_tables = encoder_block_tables_,
                      .adapters = encoder_adapters_,
                      .outputs = encoder_output_places_},
          .encoder_lengths = encoder_lengths_,
          .cross_block_tables = cross_block_tables_,
          .max_cross_blocks = max_cross_blocks_};
}

}  // namespace adaptrt
