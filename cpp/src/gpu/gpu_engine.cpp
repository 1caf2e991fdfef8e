#include "adaptrt/gpu/gpu_engine.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <utility>

#include "adapter_table.h"
#include "adaptrt/engine/check_step_input.h"
#include "adaptrt/gpu/device_pages.h"
#include "adaptrt/gpu/step_arrays.h"
#include "kv_pools.h"
#include "state_slots.h"
#include "step_graphs.h"

namespace adaptrt {
namespace {

class GpuEngine final : public Engine {
 public:
  GpuEngine(GpuModelDescription description, std::unique_ptr<GpuModel> model, std::shared_ptr<Device> device,
            GpuEngineOptions options)
      : description_(std::move(description)),
        options_(options),
        device_(std::move(device)),
        arrays_(description_),
        kv_pools_(description_),
        states_(description_.state_bytes),
        step_memory_(device_->allocate(arrays_.max_bytes())),
        staging_(device_->allocate_pinned(arrays_.max_bytes())),
        logits_(device_->allocate(logits_bytes(max_logit_rows()))),
        host_logits_(device_->allocate_pinned(logits_bytes(description_.max_batch_size))),
        model_(std::move(model)),
        stream_(device_->make_stream()) {
    if (!description_.lora.sites.empty()) table_.emplace(description_, *device_, *stream_);
    GpuModelArrays arrays;
    arrays.step_memory = step_memory_.data();
    arrays.logits = logits_.data();
    if (description_.finds_best_tokens) {
      best_tokens_ = device_->allocate(static_cast<std::size_t>(max_logit_rows()) * sizeof(std::int32_t));
      host_best_tokens_ = device_->allocate_pinned(static_cast<std::size_t>(description_.max_batch_size) *
                                                   sizeof(std::int32_t));
      arrays.best_tokens = reinterpret_cast<std::int32_t*>(best_tokens_.data());
    }
    if (description_.finds_highest_logits) {
      const auto allocate = [this](std::size_t bytes) {
        return FoundArray{.on_device = device_->allocate(static_cast<std::size_t>(max_logit_rows()) * bytes),
                          .on_host = device_->allocate_pinned(
                              static_cast<std::size_t>(description_.max_batch_size) * bytes)};
      };
      summaries_ = allocate(sizeof(RowSummary));
      highest_ = allocate(sizeof(TokenLogit) * kMaxHighestLogits);
      arrays.summaries = reinterpret_cast<RowSummary*>(summaries_.on_device.data());
      arrays.highest = reinterpret_cast<TokenLogit*>(highest_.on_device.data());
    }
    if (table_) arrays.adapters = table_->arrays();
    model_->load(arrays_, arrays, *device_, *stream_);
    options_.cuda_graphs = options_.cuda_graphs && model_->can_be_captured();
    stream_->synchronize();
    info_ = description_.engine_info(kv_pools_.block_bytes());
  }

  [[nodiscard]] const EngineInfo& info() const override { return info_; }

  void allocate_kv_blocks(std::int32_t num_blocks) override {
    kv_pools_.allocate(num_blocks, *device_, *stream_);
    model_->set_kv_pools(kv_pools_.arrays());
  }

  void allocate_states(std::int32_t num_slots) override {
    if (!info_.has_states()) return Engine::allocate_states(num_slots);
    states_.allocate(num_slots, *device_);
    model_->set_states(states_.data());
  }

  using Engine::step;
  void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) override {
    begin_step(input);
    await_step(sink, hidden_sink);
  }

  void begin_step(const StepInput& input) override {
    checker_.check(input, info_, kv_pools_.num_blocks(), states_.num_slots());
    try {
      begin(input);
    } catch (...) {
      settle_after_failure();
      throw;
    }
  }

  /// The checker refuses hidden_rows, because models have no output for them.
  void await_step(const LogitsSink& sink, const HiddenSink& /*hidden_sink*/) override {
    try {
      finish(sink);
    } catch (...) {
      settle_after_failure();
      throw;
    }
  }

  [[nodiscard]] std::optional<std::size_t> free_device_memory() const override {
    return device_->memory().free_bytes;
  }

  [[nodiscard]] std::unique_ptr<AdapterPages> make_adapter_pages(std::size_t page_bytes,
                                                                 std::int64_t num_pages,
                                                                 std::int32_t num_copy_streams) override {
    return std::make_unique<DevicePages>(device_, page_bytes, num_pages, num_copy_streams);
  }

 private:
  [[nodiscard]] std::int32_t max_logit_rows() const {
    return std::max(description_.prefill.max_logit_rows, description_.decode.max_logit_rows);
  }
  [[nodiscard]] std::size_t logits_bytes(std::int64_t rows) const {
    return static_cast<std::size_t>(rows * description_.logits_width()) * sizeof(float);
  }

  /// The step that has begun. Its rows of logits are computed in slices, one run for each; even a step
  /// without rows has a run, which writes the KV pool.
  struct BegunStep {
    StepInput input;
    std::span<const std::int32_t> slots;
    bool is_decode = false;
    bool has_adapters = true;
    std::size_t max_slice = 1;
    std::size_t first_row = 0;  ///< of the newest slice
    std::size_t slice = 0;      ///< rows of the newest slice
    /// Rows of the newest slice whose logits are wanted, which are its first, and of which the highest logits
    /// are wanted, which come next. Of the rest, the best tokens are wanted.
    std::size_t num_logits = 0;
    std::size_t num_highest = 0;
  };

  /// Results of a kernel, and their copy.
  struct FoundArray {
    Allocation on_device;
    Allocation on_host;
  };

  void begin(const StepInput& input) {
    kv_pools_.copy_blocks(input.copies_from, input.copies_to, *stream_);
    prepare_states(input);
    begun_ = {.input = input, .slots = place_adapters(input)};
    begun_.is_decode = input.token_ids.size() == input.prompt_lengths.size();
    begun_.has_adapters =
        !description_.skips_unused_adapters ||
        std::ranges::any_of(begun_.slots, [](std::int32_t slot) { return slot != kNoSlot; });
    begun_.max_slice = static_cast<std::size_t>(
        begun_.is_decode ? description_.max_batch_size
                         : std::min(description_.prefill.max_logit_rows, description_.max_batch_size));
    // Rows of one kind are together, so that one copy moves those of a slice.
    rows_.assign(input.logit_rows.begin(), input.logit_rows.end());
    rows_.insert(rows_.end(), input.highest.rows.begin(), input.highest.rows.end());
    rows_.insert(rows_.end(), input.best_token_rows.begin(), input.best_token_rows.end());
    enqueue_slice(0);
  }

  /// Copies states, and clears those of sequences that start.
  void prepare_states(const StepInput& input) const {
    states_.copy(input.state_copies_from, input.state_copies_to, *stream_);
    for (std::size_t sequence = 0; sequence < input.state_slots.size(); ++sequence) {
      const auto first = static_cast<std::size_t>(input.sequence_offsets[sequence]);
      if (input.positions[first] == 0) states_.clear(input.state_slots[sequence], *stream_);
    }
  }

  void finish(const LogitsSink& sink) {
    for (;;) {
      stream_->synchronize();
      const std::size_t first = begun_.first_row;
      take_highest();
      take_best_tokens();
      if (begun_.num_logits > 0) {
        sink(static_cast<std::int64_t>(first), static_cast<std::int64_t>(begun_.num_logits),
             reinterpret_cast<const float*>(host_logits_.data()));
      }
      if (first + begun_.slice == rows_.size()) return;
      enqueue_slice(first + begun_.slice);
    }
  }

  void take_highest() const {
    if (begun_.num_highest == 0) return;
    const HighestRows& found = begun_.input.highest;
    const std::size_t first = begun_.first_row + begun_.num_logits - begun_.input.logit_rows.size();
    const auto count = static_cast<std::size_t>(found.count);
    std::copy_n(reinterpret_cast<const RowSummary*>(summaries_.on_host.data()), begun_.num_highest,
                found.summaries.begin() + static_cast<std::ptrdiff_t>(first));
    std::copy_n(reinterpret_cast<const TokenLogit*>(highest_.on_host.data()), begun_.num_highest * count,
                found.logits.begin() + static_cast<std::ptrdiff_t>(first * count));
  }

  void take_best_tokens() const {
    const StepInput& input = begun_.input;
    const auto* best = reinterpret_cast<const std::int32_t*>(host_best_tokens_.data());
    for (std::size_t row = begun_.num_logits + begun_.num_highest; row < begun_.slice; ++row) {
      input.best_tokens[begun_.first_row + row - input.logit_rows.size() - input.highest.rows.size()] =
          best[row];
    }
  }

  /// Enqueues the run of the rows from `first` on, and the copies of its results to the host.
  void enqueue_slice(std::size_t first) {
    const std::span rows = std::span<const std::int32_t>(rows_).subspan(first);
    begun_.first_row = first;
    begun_.slice = std::min(begun_.max_slice, rows.size());
    // The rows of a kind that ends before row `end`, among the rows of the slice from `begin` on.
    const auto rows_until = [&](std::size_t end, std::size_t begin) {
      return std::clamp(end, begin, first + begun_.slice) - begin;
    };
    const HighestRows& highest = begun_.input.highest;
    const std::size_t num_logits = begun_.input.logit_rows.size();
    begun_.num_logits = rows_until(num_logits, first);
    begun_.num_highest = rows_until(num_logits + highest.rows.size(), first + begun_.num_logits);
    enqueue_run(rows.first(begun_.slice));
    if (begun_.num_logits > 0) {
      stream_->copy_to_host(host_logits_.data(), logits_.data(),
                            logits_bytes(static_cast<std::int64_t>(begun_.num_logits)));
    }
    if (begun_.num_highest > 0) {
      model_->find_highest(static_cast<std::int32_t>(begun_.num_logits),
                           static_cast<std::int32_t>(begun_.num_highest), highest.count, *stream_);
      const auto copy = [&](const FoundArray& array, std::size_t row_bytes) {
        stream_->copy_to_host(array.on_host.data(), array.on_device.data(), begun_.num_highest * row_bytes);
      };
      copy(summaries_, sizeof(RowSummary));
      copy(highest_, static_cast<std::size_t>(highest.count) * sizeof(TokenLogit));
    }
    if (begun_.num_logits + begun_.num_highest < begun_.slice) {
      stream_->copy_to_host(host_best_tokens_.data(), best_tokens_.data(),
                            begun_.slice * sizeof(std::int32_t));
    }
  }

  [[nodiscard]] std::span<const std::int32_t> place_adapters(const StepInput& input) {
    if (table_) return table_->place(input.adapters, *stream_);
    no_slots_.assign(input.adapters.size(), kNoSlot);
    return no_slots_;
  }

  void enqueue_run(std::span<const std::int32_t> rows) {
    const StepInput& input = begun_.input;
    const bool by_graph = begun_.is_decode && options_.cuda_graphs;
    const RunShape shape = by_graph ? graph_shape() : exact_shape(rows);
    const std::size_t bytes = arrays_.write(staging_.data(), shape, input, begun_.slots, rows);
    stream_->copy_to_device(step_memory_.data(), staging_.data(), bytes);
    if (by_graph) {
      graphs_.run(shape, *stream_, [&] { return model_->make_graph_work(shape); });
    } else {
      model_->run(begun_.is_decode ? GpuStepKind::kDecode : GpuStepKind::kPrefill, shape, *stream_);
    }
  }

  /// The minimum of a run is one row of logits, even if none is wanted.
  [[nodiscard]] RunShape exact_shape(std::span<const std::int32_t> rows) const {
    const StepInput& input = begun_.input;
    return {.tokens = static_cast<std::int32_t>(input.token_ids.size()),
            .sequences = static_cast<std::int32_t>(input.prompt_lengths.size()),
            .blocks_per_sequence = arrays_.padded_blocks(input.max_blocks_per_sequence),
            .logit_rows = std::max<std::int32_t>(1, static_cast<std::int32_t>(rows.size())),
            .has_adapters = begun_.has_adapters,
            .split_sequences = arrays_.split_sequences(input, begun_.slots),
            .advances_states = begun_.first_row + begun_.slice == rows_.size()};
  }

  [[nodiscard]] RunShape graph_shape() const {
    const auto power = static_cast<std::int32_t>(std::bit_ceil(begun_.input.prompt_lengths.size()));
    const std::int32_t sequences = std::min(power, description_.max_batch_size);
    return {.tokens = sequences,
            .sequences = sequences,
            .blocks_per_sequence = arrays_.padded_blocks(begun_.input.max_blocks_per_sequence),
            .logit_rows = sequences,
            .has_adapters = begun_.has_adapters};
  }

  /// Waits for work that already started, because it still reads the staging memory. If the device is lost,
  /// throws that error.
  void settle_after_failure() {
    if (table_) table_->forget();
    try {
      stream_->synchronize();
    } catch (const StepError&) {  // NOLINT(bugprone-empty-catch): the first StepError is already being thrown
    }
  }

  GpuModelDescription description_;
  GpuEngineOptions options_;
  std::shared_ptr<Device> device_;
  EngineInfo info_;
  StepInputChecker checker_;
  StepArrays arrays_;
  KvPools kv_pools_;
  StateSlots states_;
  Allocation step_memory_;
  Allocation staging_;
  Allocation logits_;
  Allocation host_logits_;
  Allocation best_tokens_;
  Allocation host_best_tokens_;
  FoundArray summaries_;
  FoundArray highest_;
  std::optional<AdapterTable> table_;
  std::unique_ptr<GpuModel> model_;
  StepGraphs graphs_;
  /// Destroyed before the members that its work uses; its destructor waits for the work.
  std::unique_ptr<Stream> stream_;
  std::vector<std::int32_t> no_slots_;
  BegunStep begun_;
  /// Rows of the begun step: logit_rows, the rows of `highest`, best_token_rows.
  std::vector<std::int32_t> rows_;
};

}  // namespace

void GpuModel::set_states(std::byte* /*slots*/) {
  throw EngineError("the model keeps no states");
}

void GpuModel::find_highest(std::int32_t /*first_row*/, std::int32_t /*rows*/, std::int32_t /*count*/,
                            Stream& /*stream*/) {
  throw StepError("the model does not find highest logits");
}

std::unique_ptr<Engine> make_gpu_engine(GpuModelDescription description, std::unique_ptr<GpuModel> model,
                                        std::shared_ptr<Device> device, GpuEngineOptions options) {
  description.validate().throw_if_any<EngineError>("the model's description is inconsistent");
  return std::make_unique<GpuEngine>(std::move(description), std::move(model), std::move(device), options);
}

}  // namespace adaptrt
