#include "step_arrays.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace adaptrt {
namespace {

/// TensorRT's required alignment of tensor addresses.
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

}  // namespace

/// Fills the arrays in the order of places().
class StepArrays::Writer {
 public:
  Writer(std::byte* memory, const std::vector<StepArray>& places) : memory_(memory), next_(places.begin()) {}

  /// Returns the next array, filled with `padding`.
  std::span<std::int32_t> take(std::int32_t padding) {
    const StepArray& array = *next_++;
    const std::span<std::int32_t> elements(reinterpret_cast<std::int32_t*>(memory_ + array.offset),
                                           bytes_of(array) / sizeof(std::int32_t));
    std::ranges::fill(elements, padding);
    return elements;
  }

 private:
  std::byte* memory_;
  std::vector<StepArray>::const_iterator next_;
};

StepArrays::StepArrays(const TensorRtProgram& program)
    : has_prompt_lengths_(program.has_prompt_lengths),
      has_adapters_(!program.lora.sites.empty()),
      max_blocks_per_sequence_((program.max_seq_len + program.tokens_per_block - 1) /
                               program.tokens_per_block) {
  for (const TensorRtProfile& profile : {program.prefill, program.decode}) {
    max_bytes_ = std::max(max_bytes_, bytes({profile.max_tokens, profile.max_sequences,
                                             max_blocks_per_sequence_, profile.max_logit_rows}));
  }
}

std::vector<StepArray> StepArrays::places(const RunShape& shape) const {
  std::vector<StepArray> arrays = {
      {"input_ids", {shape.tokens}},
      {"positions", {shape.tokens}},
      {"sequence_offsets", {shape.sequences + 1}},
      {"block_tables", {shape.sequences, shape.blocks_per_sequence}},
      {"logit_rows", {shape.logit_rows}},
  };
  if (has_prompt_lengths_) arrays.push_back({"prompt_lengths", {shape.sequences}});
  if (has_adapters_) arrays.push_back({"adapter_slots", {shape.sequences}});
  std::size_t offset = 0;
  for (StepArray& array : arrays) {
    array.offset = offset;
    offset += aligned(bytes_of(array));
  }
  return arrays;
}

std::size_t StepArrays::bytes(const RunShape& shape) const {
  const StepArray last = places(shape).back();
  return last.offset + aligned(bytes_of(last));
}

std::int32_t StepArrays::padded_blocks(std::int32_t blocks_per_sequence) const {
  const auto power =
      static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint32_t>(blocks_per_sequence)));
  return static_cast<std::int32_t>(std::min<std::int64_t>(power, max_blocks_per_sequence_));
}

void StepArrays::write(std::byte* memory, const RunShape& shape, const StepInput& input,
                       std::span<const std::int32_t> slots, std::span<const std::int32_t> logit_rows) {
  const std::size_t sequences = input.prompt_lengths.size();
  order_.resize(sequences);
  std::iota(order_.begin(), order_.end(), 0);
  std::ranges::stable_sort(order_, {},
                           [&](std::int32_t sequence) { return slots[static_cast<std::size_t>(sequence)]; });

  const std::vector<StepArray> places = this->places(shape);
  Writer writer(memory, places);
  const auto token_ids = writer.take(0);
  const auto positions = writer.take(0);
  const auto offsets = writer.take(0);
  const auto block_tables = writer.take(kNoBlock);
  const auto rows = writer.take(0);
  const auto prompt_lengths = has_prompt_lengths_ ? writer.take(1) : std::span<std::int32_t>();
  const auto adapter_slots = has_adapters_ ? writer.take(kNoSlot) : std::span<std::int32_t>();

  // Maps a sequence's number in the step to its first token in the run.
  first_rows_.resize(sequences);
  const auto blocks =
      static_cast<std::size_t>(std::min(input.max_blocks_per_sequence, shape.blocks_per_sequence));
  std::int32_t row = 0;
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
    if (has_adapters_) adapter_slots[i] = slots[sequence];
    row += static_cast<std::int32_t>(count);
  }
  for (std::size_t i = sequences; i < offsets.size(); ++i)
    offsets[i] = row + static_cast<std::int32_t>(i - sequences);

  for (std::size_t i = 0; i < logit_rows.size(); ++i) {
    const auto after = std::ranges::upper_bound(input.sequence_offsets, logit_rows[i]);
    const auto sequence = static_cast<std::size_t>(after - input.sequence_offsets.begin()) - 1;
    rows[i] = first_rows_[sequence] + logit_rows[i] - input.sequence_offsets[sequence];
  }
}

}  // namespace adaptrt
