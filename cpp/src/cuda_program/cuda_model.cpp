#include "cuda_model.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>

#include "neuron_weights.h"
#include "row_ops.h"
#include "sparse_mlp_op.h"
#include "weight_sections.h"

namespace adaptrt {

void CudaModel::load(const StepArrays& step_arrays, const GpuModelArrays& arrays, Device& device,
                     Stream& stream) {
  step_arrays_ = &step_arrays;
  step_memory_ = arrays.step_memory;
  best_tokens_ = arrays.best_tokens;
  memory_.emplace(program_, arrays, device, stream);
  pools_.resize(static_cast<std::size_t>(program_.num_layers));
  LoweredProgram lowered = load_weights(device, stream);
  ops_ = std::move(lowered.ops);
  read_positions_ = std::move(lowered.read_positions);
  ops_.push_back(make_best_tokens(program_, *memory_, arrays.best_tokens));
  find_highest_ = {.width = program_.vocab_size,
                   .stride = program_.logits_width(),
                   .logits = reinterpret_cast<const float*>(arrays.logits),
                   .summaries = arrays.summaries,
                   .highest = arrays.highest};
}

LoweredProgram CudaModel::load_weights(Device& device, Stream& stream) {
  ResidentWeights resident(device, stream);
  const auto finish = [&](LoweredProgram lowered) {
    resident.finish();
    weights_ = resident.take();
    return lowered;
  };
  if (weight_memory_ == 0) return finish(lower_with(resident));
  const auto measure = [&](bool has_neurons) {
    MeasuredWeights measured(has_neurons);
    static_cast<void>(lower_with(measured));
    return measured.sizes();
  };
  const WeightSizes sizes = measure(/*has_neurons=*/false);
  const std::vector<bool> is_streamed = streamed_sections(sizes, weight_memory_);
  std::vector<std::size_t> section_bytes;
  for (std::size_t i = 0; i < is_streamed.size(); ++i) {
    if (is_streamed[i]) section_bytes.push_back(sizes.sections[i]);
  }
  if (section_bytes.empty()) return finish(lower_with(resident));
  const WeightSizes split = measure(/*has_neurons=*/true);
  if (const auto plan = plan_neurons(split, weight_memory_, usage_)) {
    section_bytes.clear();
    for (std::size_t i = 0; i < plan->size(); ++i) {
      if (!(*plan)[i].empty()) section_bytes.push_back(split.mlps[i].section);
    }
    ring_.emplace(device, section_bytes);
    PlacedNeurons weights(*plan, device, stream, resident, *ring_);
    LoweredProgram lowered = lower_with(weights);
    for (const std::size_t op : lowered.sparse_mlps) streamed_.push_back({.begin = op, .end = op + 1});
    neurons_ = weights.take();
    return finish(std::move(lowered));
  }
  ring_.emplace(device, section_bytes);
  StreamedWeights weights(is_streamed, resident, *ring_);
  LoweredProgram lowered = lower_with(weights);
  for (std::size_t i = 0; i < is_streamed.size(); ++i) {
    if (is_streamed[i]) {
      streamed_.push_back({.begin = lowered.sections[i], .end = lowered.sections[i + 1]});
    }
  }
  return finish(std::move(lowered));
}

bool CudaModel::uses_ring(const RunShape& shape) const {
  return ring_ && (neurons_.empty() || !reads_active_neurons(shape));
}

LoweredProgram CudaModel::lower_with(DeviceWeights& weights) const {
  return lower(program_, *memory_, pools_, states_, weights, hopper_prefill_);
}

void CudaModel::set_kv_pools(std::span<const DeviceArray> pools) {
  for (std::size_t layer = 0; layer < pools.size(); ++layer) pools_[layer] = pools[layer].address;
}

void CudaModel::run(GpuStepKind /*kind*/, const RunShape& shape, Stream& stream) {
  enqueue(shape, stream);
}

void CudaModel::run_on_arrival(GpuStepKind /*kind*/, const RunShape& shape, const StepArrivals& arrivals,
                               Stream& stream) {
  ArrivalWaits waits(arrivals, stream);
  enqueue(shape, stream, &waits);
}

std::function<void(Stream&)> CudaModel::make_graph_work(const RunShape& shape) {
  return [this, shape](Stream& stream) { enqueue(shape, stream); };
}

void CudaModel::find_highest(std::int32_t first_row, std::int32_t rows, std::int32_t count, Stream& stream) {
  cuda::FindHighest work = find_highest_;
  work.rows = rows;
  work.count = count;
  work.logits += first_row * work.stride;
  cuda::enqueue(work, stream.handle());
}

void CudaModel::take_tokens(const RunShape& shape, Stream& stream) {
  const StepArray token_ids = step_arrays_->places(shape).token_ids;
  cuda::enqueue(
      cuda::TakeTokens{.tokens = shape.tokens,
                       .best_tokens = best_tokens_,
                       .token_ids = reinterpret_cast<std::int32_t*>(step_memory_ + token_ids.offset)},
      stream.handle());
}

void CudaModel::enqueue(const RunShape& shape, Stream& stream, ArrivalWaits* waits) {
  const StepPlaces places = step_arrays_->places(shape);
  const auto at = [this](const StepArray& array) {
    return reinterpret_cast<const std::int32_t*>(step_memory_ + array.offset);
  };
  const auto at_optional = [&](const std::optional<StepArray>& array) {
    return array ? at(*array) : nullptr;
  };
  const CudaRun run{.shape = shape,
                    .token_ids = at(places.token_ids),
                    .positions = at(places.positions),
                    .sequence_offsets = at(places.sequence_offsets),
                    .block_tables = at(places.block_tables),
                    .logit_rows = at(places.logit_rows),
                    .prompt_lengths = at_optional(places.prompt_lengths),
                    .adapter_slots = at_optional(places.adapter_slots),
                    .adapter_offsets = at_optional(places.adapter_offsets),
                    .token_adapter_slots = at_optional(places.token_adapter_slots),
                    .row_adapter_slots = at_optional(places.row_adapter_slots),
                    .row_adapter_offsets = at_optional(places.row_adapter_offsets),
                    .state_slots = at_optional(places.state_slots),
                    .stream = stream.handle()};
  std::size_t next = 0;
  const auto enqueue_until = [&](std::size_t end) {
    for (; next < end; ++next) {
      if (waits != nullptr && next < read_positions_.size()) waits->await(read_positions_[next]);
      ops_[next]->enqueue(run);
    }
  };
  for (std::size_t section = 0; uses_ring(shape) && section < streamed_.size(); ++section) {
    enqueue_until(streamed_[section].begin);
    ring_->begin(section, stream);
    enqueue_until(streamed_[section].end);
    ring_->end(section, stream);
  }
  enqueue_until(ops_.size());
}

GpuModelDescription describe(const Program& program) {
  const std::int32_t sequences = program.max_batch_size;
  GpuModelDescription model{
      .dtype = program.dtype,
      .int8_kv_cache = program.int8_kv_cache,
      .vocab_size = program.vocab_size,
      .num_layers = program.num_layers,
      .attention = {},
      .max_batch_size = program.max_batch_size,
      .max_num_tokens = program.max_num_tokens,
      .max_input_len = program.max_input_len,
      .max_seq_len = program.max_seq_len,
      .max_beam_width = program.max_beam_width,
      .tokens_per_block = program.tokens_per_block,
      .max_reusable_prompt_len = program.max_seq_len,
      .max_kv_blocks = std::numeric_limits<std::int32_t>::max(),
      .num_adapter_slots = program.lora.sites.empty() ? 0 : program.max_batch_size,
      .prefill = {.max_tokens = program.max_num_tokens,
                  .max_sequences = sequences,
                  .max_logit_rows = sequences},
      .decode = {.max_tokens = sequences, .max_sequences = sequences, .max_logit_rows = sequences},
      .lora = program.lora,
      .finds_best_tokens = true,
      .finds_highest_logits = true,
      .skips_unused_adapters = true,
      .has_adapter_start_positions = true,
      .adds_shifts = true,
      .state_bytes = StateLayout(program).slot_bytes()};
  model.attention.resize(static_cast<std::size_t>(program.num_layers));
  for (const Op& op : program.body) {
    if (const auto* attention = std::get_if<AttentionOp>(&op);
        attention != nullptr && attention->shared_layer < 0) {
      model.attention[static_cast<std::size_t>(attention->layer)] = attention->shape;
    }
    const auto* rope = std::get_if<RopeTableOp>(&op);
    if (rope != nullptr && rope->kind != RopeKind::kStatic) {
      model.has_prompt_lengths = true;
      model.max_reusable_prompt_len = std::min(model.max_reusable_prompt_len, rope->original_max_position);
    }
  }
  return model;
}

}  // namespace adaptrt
