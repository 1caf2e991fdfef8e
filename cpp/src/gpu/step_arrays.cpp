#include "adaptrt/gpu/step_arrays.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "adaptrt/gpu/adapter_entries.h"

namespace adaptrt {
namespace {

/// Alignment of every array: that of Device::allocate, which TensorRT requires of tensors.
constexpr std::size_t kAlignment = 256;
constexpr std::int32_t kNoBlock = -1;

std::size_t bytes_of(const StepArray& array) {
  std::int64_t elements = 1;
  for (const std::int64_t dim : array.dims) elements *= dim;
  return static_cast<std::size_t>(elements) * sizeof(std::int32_t);
}

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

bool has_site(const GpuModelDescription& model, bool (LoraSite::*is_kind)() const) {
  return std::ranges::any_of(model.lora.sites, is_kind);
}

std::int32_t tokens_of(const StepInput& input, std::size_t sequence) {
  return input.sequence_offsets[sequence + 1] - input.sequence_offsets[sequence];
}

/// Returns the number of a sequence's tokens in the step that come before its adapter's start position; 0
/// without an adapter.
std::int32_t tokens_before_adapter(const StepInput& input, std::span<const std::int32_t> slots,
                                   std::size_t sequence) {
  if (slots[sequence] == kNoSlot || input.adapter_start_positions.empty()) return 0;
  const std::int32_t first = input.positions[static_cast<std::size_t>(input.sequence_offsets[sequence])];
  return std::clamp(input.adapter_start_positions[sequence] - first, 0, tokens_of(input, sequence));
}

/// Returns the elements of an array, filled with `padding`.
std::span<std::int32_t> filled(std::byte* memory, const StepArray& array, std::int32_t padding) {
  const std::span<std::int32_t> elements(reinterpret_cast<std::int32_t*>(memory + array.offset),
                                         bytes_of(array) / sizeof(std::int32_t));
  std::ranges::fill(elements, padding);
  return elements;
}

}  // namespace

StepArrays::StepArrays(const GpuModelDescription& model)
    : has_prompt_lengths_(model.has_prompt_lengths),
      has_adapters_(!model.lora.sites.empty()),
      has_adapter_starts_(has_adapters_ && model.has_adapter_start_positions),
      has_token_adapters_(has_site(model, &LoraSite::is_embedding) ||
                          has_site(model, &LoraSite::is_new_tokens) || has_site(model, &LoraSite::is_norm) ||
                          std::ranges::any_of(model.lora.sites, is_of_slots)),
      has_row_adapters_(has_site(model, &LoraSite::is_lm_head) || has_site(model, &LoraSite::is_new_tokens) ||
                        has_site(model, &LoraSite::is_norm)),
      has_states_(model.state_bytes > 0),
      max_blocks_per_sequence_((model.max_seq_len + model.tokens_per_block - 1) / model.tokens_per_block) {
  for (const GpuStepLimits& limits : {model.prefill, model.decode}) {
    const RunShape largest{.tokens = limits.max_tokens,
                           .sequences = limits.max_sequences,
                           .blocks_per_sequence = max_blocks_per_sequence_,
                           .logit_rows = limits.max_logit_rows,
                           .split_sequences = has_adapter_starts_ ? limits.max_sequences : 0};
    max_bytes_ = std::max(max_bytes_, places(largest).bytes);
  }
}

StepPlaces StepArrays::places(const RunShape& shape) const {
  StepPlaces places;
  const auto add = [&](std::vector<std::int64_t> dims) {
    StepArray array{.dims = std::move(dims), .offset = places.bytes};
    places.bytes += aligned(bytes_of(array));
    return array;
  };
  places.token_ids = add({shape.tokens});
  places.positions = add({shape.tokens});
  places.sequence_offsets = add({shape.sequences + 1});
  places.block_tables = add({shape.sequences, shape.blocks_per_sequence});
  places.logit_rows = add({shape.logit_rows});
  if (has_prompt_lengths_) places.prompt_lengths = add({shape.sequences});
  const std::int32_t ranges = shape.sequences + shape.split_sequences;
  if (has_adapters_) places.adapter_slots = add({ranges});
  if (has_adapter_starts_) places.adapter_offsets = add({ranges + 1});
  if (has_token_adapters_) places.token_adapter_slots = add({shape.tokens});
  if (has_row_adapters_) {
    places.row_adapter_slots = add({shape.logit_rows});
    places.row_adapter_offsets = add({shape.logit_rows + 1});
  }
  if (has_states_) places.state_slots = add({shape.sequences});
  return places;
}

std::int32_t StepArrays::split_sequences(const StepInput& input, std::span<const std::int32_t> slots) const {
  if (!has_adapter_starts_) return 0;
  std::int32_t count = 0;
  for (std::size_t sequence = 0; sequence < slots.size(); ++sequence) {
    const std::int32_t before = tokens_before_adapter(input, slots, sequence);
    if (before > 0 && before < tokens_of(input, sequence)) ++count;
  }
  return count;
}

std::int32_t StepArrays::padded_blocks(std::int32_t blocks_per_sequence) const {
  const auto power =
      static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint32_t>(blocks_per_sequence)));
  return static_cast<std::int32_t>(std::min<std::int64_t>(power, max_blocks_per_sequence_));
}

std::size_t StepArrays::write(std::byte* memory, const RunShape& shape, const StepInput& input,
                              std::span<const std::int32_t> slots, std::span<const std::int32_t> logit_rows) {
  const std::size_t sequences = input.prompt_lengths.size();
  order_.resize(sequences);
  std::iota(order_.begin(), order_.end(), 0);
  std::ranges::stable_sort(order_, {},
                           [&](std::int32_t sequence) { return slots[static_cast<std::size_t>(sequence)]; });

  const StepPlaces places = this->places(shape);
  const auto token_ids = filled(memory, places.token_ids, 0);
  const auto positions = filled(memory, places.positions, 0);
  const auto offsets = filled(memory, places.sequence_offsets, 0);
  const auto block_tables = filled(memory, places.block_tables, kNoBlock);
  const auto rows = filled(memory, places.logit_rows, 0);
  std::span<std::int32_t> prompt_lengths;
  std::span<std::int32_t> adapter_slots;
  if (places.prompt_lengths) prompt_lengths = filled(memory, *places.prompt_lengths, 1);
  if (places.adapter_slots) adapter_slots = filled(memory, *places.adapter_slots, kNoSlot);
  std::span<std::int32_t> adapter_offsets;
  if (places.adapter_offsets) adapter_offsets = filled(memory, *places.adapter_offsets, 0);
  std::span<std::int32_t> token_slots;
  if (places.token_adapter_slots) token_slots = filled(memory, *places.token_adapter_slots, kNoSlot);
  std::span<std::int32_t> state_slots;
  if (places.state_slots) state_slots = filled(memory, *places.state_slots, kNoSlot);

  // Maps a sequence's number in the step to its first token in the run.
  first_rows_.resize(sequences);
  const auto blocks =
      static_cast<std::size_t>(std::min(input.max_blocks_per_sequence, shape.blocks_per_sequence));
  std::int32_t row = 0;
  std::size_t range = 0;
  for (std::size_t i = 0; i < sequences; ++i) {
    const auto sequence = static_cast<std::size_t>(order_[i]);
    const auto first = static_cast<std::size_t>(input.sequence_offsets[sequence]);
    const auto count = static_cast<std::size_t>(input.sequence_offsets[sequence + 1]) - first;
    first_rows_[sequence] = row;
    offsets[i] = row;
    std::ranges::copy(input.token_ids.subspan(first, count), token_ids.begin() + row);
    std::ranges::copy(input.positions.subspan(first, count), positions.begin() + row);
    std::ranges::copy(input.block_tables.subspan(
                          sequence * static_cast<std::size_t>(input.max_blocks_per_sequence), blocks),
                      block_tables.begin() + static_cast<std::ptrdiff_t>(i) * shape.blocks_per_sequence);
    if (has_prompt_lengths_) prompt_lengths[i] = input.prompt_lengths[sequence];
    if (has_states_) state_slots[i] = input.state_slots[sequence];
    const std::int32_t before = has_adapter_starts_ ? tokens_before_adapter(input, slots, sequence) : 0;
    if (has_token_adapters_) {
      std::fill_n(token_slots.begin() + row + before, static_cast<std::int32_t>(count) - before,
                  slots[sequence]);
    }
    if (has_adapter_starts_) {
      if (before > 0) adapter_offsets[range++] = row;  // its slot is kNoSlot
      if (before < static_cast<std::int32_t>(count)) {
        adapter_slots[range] = slots[sequence];
        adapter_offsets[range++] = row + before;
      }
    } else if (has_adapters_) {
      adapter_slots[i] = slots[sequence];
    }
    row += static_cast<std::int32_t>(count);
  }
  for (std::size_t i = sequences; i < offsets.size(); ++i)
    offsets[i] = row + static_cast<std::int32_t>(i - sequences);
  for (std::size_t i = range; i < adapter_offsets.size(); ++i)
    adapter_offsets[i] = row + static_cast<std::int32_t>(i - range);

  std::span<std::int32_t> row_slots;
  if (has_row_adapters_) {
    row_slots = filled(memory, *places.row_adapter_slots, kNoSlot);
    const auto row_offsets = filled(memory, *places.row_adapter_offsets, 0);
    std::iota(row_offsets.begin(), row_offsets.end(), 0);
  }
  for (std::size_t i = 0; i < logit_rows.size(); ++i) {
    const auto after = std::ranges::upper_bound(input.sequence_offsets, logit_rows[i]);
    const auto sequence = static_cast<std::size_t>(after - input.sequence_offsets.begin()) - 1;
    const std::int32_t token = logit_rows[i] - input.sequence_offsets[sequence];
    rows[i] = first_rows_[sequence] + token;
    if (!has_row_adapters_) continue;
    const std::int32_t before = has_adapter_starts_ ? tokens_before_adapter(input, slots, sequence) : 0;
    row_slots[i] = token < before ? kNoSlot : slots[sequence];
  }
  return places.bytes;
}

}  // namespace adaptrt
