#include "encoder_step.h"

#include <cstddef>

namespace adaptrt {

void EncoderStep::set(const StepInput& step, const SequenceRun& run) {
  const EncoderInputs& inputs = step.encoder;
  const std::int32_t begin = inputs.offsets[run.first];
  offsets_.assign(1, 0);
  positions_.clear();
  lengths_.clear();
  for (std::size_t i = run.first; i < run.last; ++i) {
    offsets_.push_back(inputs.offsets[i + 1] - begin);
    lengths_.push_back(inputs.offsets[i + 1] - inputs.offsets[i]);
    for (std::int32_t place = 0; place < lengths_.back(); ++place) positions_.push_back(place);
  }
  const std::size_t count = run.last - run.first;
  const auto blocks = static_cast<std::size_t>(step.max_cross_blocks);
  input_ = {.token_ids = inputs.token_ids.subspan(static_cast<std::size_t>(begin), positions_.size()),
            .positions = positions_,
            .sequence_offsets = offsets_,
            .prompt_lengths = lengths_,
            .block_tables = inputs.block_tables.subspan(run.first * blocks, count * blocks),
            .max_blocks_per_sequence = step.max_cross_blocks,
            .adapters = inputs.adapters.subspan(run.first, count),
            .logit_rows = {}};
}

}  // namespace adaptrt
