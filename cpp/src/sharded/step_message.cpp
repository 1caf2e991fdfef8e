#include "step_message.h"

#include <algorithm>
#include <cstddef>

namespace adaptrt {
namespace {

/// Number of the offsets among kEncoderArrays.
constexpr std::size_t kEncoderOffsets =
    std::ranges::find(kEncoderArrays, &EncoderInputs::offsets) - kEncoderArrays.begin();

void add_adapters(std::span<const DeviceAdapter* const> adapters, MessageWriter* message) {
  std::vector<std::uint64_t> load_ids;
  for (const DeviceAdapter* adapter : adapters) {
    load_ids.push_back(adapter == nullptr ? 0 : adapter->load_id);
  }
  message->add_list(std::span<const std::uint64_t>(load_ids));
}

void add_encoder(const EncoderInputs& encoder, MessageWriter* message) {
  for (const auto member : kEncoderArrays) message->add_list(encoder.*member);
  add_adapters(encoder.adapters, message);
  std::vector<std::uint8_t> is_wanted;
  for (const float* output : encoder.outputs) is_wanted.push_back(output == nullptr ? 0 : 1);
  message->add_list(std::span<const std::uint8_t>(is_wanted));
}

}  // namespace

void add_step(const StepInput& input, MessageWriter* message) {
  for (const StepInputArray& array : kStepInputArrays) message->add_list(input.*(array.member));
  message->add(input.max_blocks_per_sequence);
  message->add(input.max_cross_blocks);
  add_adapters(input.adapters, message);
  add_encoder(input.encoder, message);
}

void ReceivedStep::read(MessageReader* message, const Find& find, std::int64_t encoder_hidden_size) {
  for (auto& array : arrays_) array = message->list<std::int32_t>();
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
  for (auto& array : encoder_arrays_) array = message->list<std::int32_t>();
  read_adapters(message, find, &encoder_adapters_);
  const auto is_wanted = message->list<std::uint8_t>();
  encoder_outputs_.clear();
  encoder_outputs_.resize(is_wanted.size());
  encoder_output_places_.assign(is_wanted.size(), nullptr);
  const auto& offsets = encoder_arrays_[kEncoderOffsets];
  for (std::size_t i = 0; i < is_wanted.size(); ++i) {
    if (is_wanted[i] == 0) continue;
    const std::int64_t tokens = offsets.at(i + 1) - offsets.at(i);
    encoder_outputs_[i].resize(static_cast<std::size_t>(tokens * hidden_size));
    encoder_output_places_[i] = encoder_outputs_[i].data();
  }
}

StepInput ReceivedStep::input() const {
  StepInput input;
  for (std::size_t i = 0; i < kStepInputArrays.size(); ++i) input.*(kStepInputArrays[i].member) = arrays_[i];
  input.max_blocks_per_sequence = max_blocks_per_sequence_;
  input.max_cross_blocks = max_cross_blocks_;
  input.adapters = adapters_;
  for (std::size_t i = 0; i < kEncoderArrays.size(); ++i) {
    input.encoder.*(kEncoderArrays[i]) = encoder_arrays_[i];
  }
  input.encoder.adapters = encoder_adapters_;
  input.encoder.outputs = encoder_output_places_;
  return input;
}

}  // namespace adaptrt
