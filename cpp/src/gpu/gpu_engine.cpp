#include "adaptrt/gpu/gpu_engine.h"

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <optional>
#include <utility>

#include "adapter_table.h"
#include "adaptrt/core/error.h"
#include "adaptrt/engine/check_step_input.h"
#include "adaptrt/gpu/adapter_arrivals.h"
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
        logits_(device_->allocate(logits_bytes(max_logit_rows()))),
        host_logits_(device_->allocate_pinned(logits_bytes(description_.max_batch_size))),
        model_(std::move(model)),
        stream_(device_->make_stream()) {
    options_.look_ahead = options_.look_ahead && description_.finds_best_tokens;
    if (!description_.lora.sites.empty()) table_.emplace(description_, *device_, *stream_);
    GpuModelArrays arrays;
    arrays.step_memory = step_memory_.data();
    arrays.logits = logits_.data();
    const auto rows_on_device = [this](std::size_t bytes) {
      return device_->allocate(static_cast<std::size_t>(max_logit_rows()) * bytes);
    };
    if (description_.finds_best_tokens) {
      best_tokens_ = rows_on_device(sizeof(std::int32_t));
      arrays.best_tokens = reinterpret_cast<std::int32_t*>(best_tokens_.data());
    }
    if (description_.finds_highest_logits) {
      summaries_ = rows_on_device(sizeof(RowSummary));
      highest_ = rows_on_device(kHighestBytes);
      arrays.summaries = reinterpret_cast<RowSummary*>(summaries_.data());
      arrays.highest = reinterpret_cast<TokenLogit*>(highest_.data());
    }
    allocate_host_memory(steps_[0]);
    if (options_.look_ahead) allocate_host_memory(steps_[1]);
    if (table_) arrays.adapters = table_->arrays();
    model_->load(arrays_, arrays, *device_, *stream_);
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
      begin(steps_[oldest_], input, /*is_ahead=*/false);
    } catch (...) {
      settle_after_failure();
      throw;
    }
  }

  [[nodiscard]] bool can_look_ahead() const override { return options_.look_ahead; }

  void begin_ahead(const StepInput& input, std::span<const std::int32_t> previous_rows) override {
    if (!options_.look_ahead) return Engine::begin_ahead(input, previous_rows);
    checker_.check(input, info_, kv_pools_.num_blocks(), states_.num_slots());
    BegunStep& step = steps_[1 - oldest_];
    step.token_ids = ids_of_best_tokens(previous_rows);
    if (!is_decode(input) || !input.logit_rows.empty() || step.token_ids.size() != input.token_ids.size()) {
      throw StepError("a step that is begun ahead has other rows than decodes whose tokens the device finds");
    }
    StepInput ahead = input;
    ahead.token_ids = step.token_ids;
    try {
      stream_->record(*steps_[oldest_].done);
      begin(step, ahead, /*is_ahead=*/true);
    } catch (...) {
      // Part of its work may run. The older step, which now ends with all work of the stream, waits for it.
      if (table_) table_->forget();
      throw;
    }
    is_ahead_ = true;
  }

  /// The checker refuses hidden_rows, because models have no output for them.
  void await_step(const LogitsSink& sink, const HiddenSink& /*hidden_sink*/) override {
    try {
      finish(sink);
      end_oldest();
    } catch (...) {
      end_oldest();
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
    return std::make_unique<DevicePages>(device_, page_bytes, num_pages, num_copy_streams, arrivals_);
  }

 private:
  [[nodiscard]] std::int32_t max_logit_rows() const {
    return std::max(description_.prefill.max_logit_rows, description_.decode.max_logit_rows);
  }
  [[nodiscard]] std::size_t logits_bytes(std::int64_t rows) const {
    return static_cast<std::size_t>(rows * description_.logits_width()) * sizeof(float);
  }

  static constexpr std::size_t kHighestBytes = sizeof(TokenLogit) * kMaxHighestLogits;  // of a row

  /// A step that has begun. Its rows of logits are computed in slices, one run for each; even a step
  /// without rows has a run, which writes the KV pool. Each of two steps in flight has host memory of its
  /// own. Device memory is the same for both, because the stream runs one step after the other.
  struct BegunStep {
    StepInput input;
    std::span<const std::int32_t> slots;
    StepArrivals arrivals;
    bool is_ahead = false;  ///< it takes its tokens from the run before
    bool is_decode = false;
    bool has_adapters = true;
    std::size_t max_slice = 1;
    std::size_t first_row = 0;  ///< of the newest slice
    std::size_t slice = 0;      ///< rows of the newest slice
    /// Rows of the newest slice whose logits are wanted, which are its first, and of which the highest logits
    /// are wanted, which come next. Of the rest, the best tokens are wanted.
    std::size_t num_logits = 0;
    std::size_t num_highest = 0;
    /// logit_rows, the rows of `highest`, best_token_rows.
    std::vector<std::int32_t> rows;
    /// Input of a step that is begun ahead: see GpuModel::take_tokens.
    std::vector<std::int32_t> token_ids;
    // Host memory:
    Allocation staging;
    Allocation best_tokens;
    Allocation summaries;
    Allocation highest;
    std::unique_ptr<Event> done;  ///< recorded when the next step is begun ahead
  };

  void allocate_host_memory(BegunStep& step) {
    const auto rows_of = [this](std::size_t bytes) {
      return device_->allocate_pinned(static_cast<std::size_t>(description_.max_batch_size) * bytes);
    };
    step.staging = device_->allocate_pinned(arrays_.max_bytes());
    if (description_.finds_best_tokens) step.best_tokens = rows_of(sizeof(std::int32_t));
    if (description_.finds_highest_logits) {
      step.summaries = rows_of(sizeof(RowSummary));
      step.highest = rows_of(kHighestBytes);
    }
    if (options_.look_ahead) step.done = device_->make_event();
  }

  [[nodiscard]] static bool is_decode(const StepInput& input) {
    return input.token_ids.size() == input.prompt_lengths.size();
  }

  /// Returns the ids of tokens that are the best ones of rows of the begun step (see GpuModel::take_tokens).
  [[nodiscard]] std::vector<std::int32_t> ids_of_best_tokens(std::span<const std::int32_t> rows) const {
    const BegunStep& step = steps_[oldest_];
    // By row; 0 if the device does not find the row's token.
    std::vector<std::int32_t> ids(step.input.token_ids.size());
    if (step.is_decode && step.num_logits == 0) {
      for (std::size_t i = 0; i < step.rows.size(); ++i) {
        ids[static_cast<std::size_t>(step.rows[i])] = -1 - static_cast<std::int32_t>(i);
      }
    }
    std::vector<std::int32_t> found;
    for (const std::int32_t row : rows) {
      const auto at = static_cast<std::size_t>(row);
      if (at >= ids.size() || ids[at] == 0) {
        throw StepError("a step is begun ahead, but the device does not find its tokens");
      }
      found.push_back(ids[at]);
    }
    return found;
  }

  void begin(BegunStep& step, const StepInput& input, bool is_ahead) {
    kv_pools_.copy_blocks(input.copies_from, input.copies_to, *stream_);
    prepare_states(input);
    step.input = input;
    step.slots = place_adapters(input);
    step.arrivals = find_arrivals(input);
    step.is_ahead = is_ahead;
    step.is_decode = is_decode(input);
    step.has_adapters = !description_.skips_unused_adapters ||
                        std::ranges::any_of(step.slots, [](std::int32_t slot) { return slot != kNoSlot; });
    step.max_slice = static_cast<std::size_t>(
        step.is_decode ? description_.max_batch_size
                       : std::min(description_.prefill.max_logit_rows, description_.max_batch_size));
    // Rows of one kind are together, so that one copy moves those of a slice.
    step.rows.assign(input.logit_rows.begin(), input.logit_rows.end());
    step.rows.insert(step.rows.end(), input.highest.rows.begin(), input.highest.rows.end());
    step.rows.insert(step.rows.end(), input.best_token_rows.begin(), input.best_token_rows.end());
    enqueue_slice(step, 0);
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
    BegunStep& step = steps_[oldest_];
    for (;;) {
      if (is_ahead_) {
        step.done->synchronize();
      } else {
        stream_->synchronize();
      }
      // The run waited for them, so they are done or have failed.
      for (const auto& arrival : std::exchange(step.arrivals, {})) arrival->synchronize();
      const std::size_t first = step.first_row;
      take_highest(step);
      take_best_tokens(step);
      if (step.num_logits > 0) {
        sink(static_cast<std::int64_t>(first), static_cast<std::int64_t>(step.num_logits),
             reinterpret_cast<const float*>(host_logits_.data()));
      }
      if (first + step.slice == step.rows.size()) return;
      enqueue_slice(step, first + step.slice);
    }
  }

  void end_oldest() {
    if (std::exchange(is_ahead_, false)) oldest_ = 1 - oldest_;
  }

  static void take_highest(const BegunStep& step) {
    if (step.num_highest == 0) return;
    const HighestRows& found = step.input.highest;
    const std::size_t first = step.first_row + step.num_logits - step.input.logit_rows.size();
    const auto count = static_cast<std::size_t>(found.count);
    std::copy_n(reinterpret_cast<const RowSummary*>(step.summaries.data()), step.num_highest,
                found.summaries.begin() + static_cast<std::ptrdiff_t>(first));
    std::copy_n(reinterpret_cast<const TokenLogit*>(step.highest.data()), step.num_highest * count,
                found.logits.begin() + static_cast<std::ptrdiff_t>(first * count));
  }

  static void take_best_tokens(const BegunStep& step) {
    const StepInput& input = step.input;
    const auto* best = reinterpret_cast<const std::int32_t*>(step.best_tokens.data());
    for (std::size_t row = step.num_logits + step.num_highest; row < step.slice; ++row) {
      input.best_tokens[step.first_row + row - input.logit_rows.size() - input.highest.rows.size()] =
          best[row];
    }
  }

  /// Enqueues the run of the rows from `first` on, and the copies of its results to the host.
  void enqueue_slice(BegunStep& step, std::size_t first) {
    const std::span rows = std::span<const std::int32_t>(step.rows).subspan(first);
    step.first_row = first;
    step.slice = std::min(step.max_slice, rows.size());
    // The rows of a kind that ends before row `end`, among the rows of the slice from `begin` on.
    const auto rows_until = [&](std::size_t end, std::size_t begin) {
      return std::clamp(end, begin, first + step.slice) - begin;
    };
    const HighestRows& highest = step.input.highest;
    const std::size_t num_logits = step.input.logit_rows.size();
    step.num_logits = rows_until(num_logits, first);
    step.num_highest = rows_until(num_logits + highest.rows.size(), first + step.num_logits);
    enqueue_run(step, rows.first(step.slice));
    if (step.num_logits > 0) {
      stream_->copy_to_host(host_logits_.data(), logits_.data(),
                            logits_bytes(static_cast<std::int64_t>(step.num_logits)));
    }
    if (step.num_highest > 0) {
      model_->find_highest(static_cast<std::int32_t>(step.num_logits),
                           static_cast<std::int32_t>(step.num_highest), highest.count, *stream_);
      stream_->copy_to_host(step.summaries.data(), summaries_.data(), step.num_highest * sizeof(RowSummary));
      stream_->copy_to_host(step.highest.data(), highest_.data(),
                            step.num_highest * static_cast<std::size_t>(highest.count) * sizeof(TokenLogit));
    }
    if (step.num_logits + step.num_highest < step.slice) {
      stream_->copy_to_host(step.best_tokens.data(), best_tokens_.data(), step.slice * sizeof(std::int32_t));
    }
  }

  [[nodiscard]] std::span<const std::int32_t> place_adapters(const StepInput& input) {
    if (table_) return table_->place(input.adapters, *stream_);
    no_slots_.assign(input.adapters.size(), kNoSlot);
    return no_slots_;
  }

  /// Returns the adapters of the step that are still being copied.
  [[nodiscard]] StepArrivals find_arrivals(const StepInput& input) const {
    StepArrivals arrivals;
    if (arrivals_->is_empty()) return arrivals;  // most steps: one lock instead of one for each adapter
    for (const DeviceAdapter* adapter : input.adapters) {
      if (adapter == nullptr) continue;
      auto arrival = arrivals_->find(adapter->load_id);
      if (arrival && std::ranges::find(arrivals, arrival) == arrivals.end()) {
        arrivals.push_back(std::move(arrival));
      }
    }
    return arrivals;
  }

  void enqueue_run(const BegunStep& step, std::span<const std::int32_t> rows) {
    const StepInput& input = step.input;
    const bool by_graph =
        step.is_decode && options_.cuda_graphs && model_->can_be_captured(graph_shape(step));
    const RunShape shape = by_graph ? graph_shape(step) : exact_shape(step, rows);
    const std::size_t bytes = arrays_.write(step.staging.data(), shape, input, step.slots, rows);
    stream_->copy_to_device(step_memory_.data(), step.staging.data(), bytes);
    if (step.is_ahead) model_->take_tokens(shape, *stream_);
    const GpuStepKind kind = step.is_decode ? GpuStepKind::kDecode : GpuStepKind::kPrefill;
    if (by_graph) {
      ArrivalWaits(step.arrivals, *stream_).await_all();
      graphs_.run(shape, *stream_, [&] { return model_->make_graph_work(shape); });
    } else if (!step.arrivals.empty()) {
      model_->run_on_arrival(kind, shape, step.arrivals, *stream_);
    } else {
      model_->run(kind, shape, *stream_);
    }
  }

  /// The minimum of a run is one row of logits, even if none is wanted.
  [[nodiscard]] RunShape exact_shape(const BegunStep& step, std::span<const std::int32_t> rows) const {
    const StepInput& input = step.input;
    return {.tokens = static_cast<std::int32_t>(input.token_ids.size()),
            .sequences = static_cast<std::int32_t>(input.prompt_lengths.size()),
            .blocks_per_sequence = arrays_.padded_blocks(input.max_blocks_per_sequence),
            .logit_rows = std::max<std::int32_t>(1, static_cast<std::int32_t>(rows.size())),
            .has_adapters = step.has_adapters,
            .split_sequences = arrays_.split_sequences(input, step.slots),
            .advances_states = step.first_row + step.slice == step.rows.size()};
  }

  [[nodiscard]] RunShape graph_shape(const BegunStep& step) const {
    const auto power = static_cast<std::int32_t>(std::bit_ceil(step.input.prompt_lengths.size()));
    const std::int32_t sequences = std::min(power, description_.max_batch_size);
    return {.tokens = sequences,
            .sequences = sequences,
            .blocks_per_sequence = arrays_.padded_blocks(step.input.max_blocks_per_sequence),
            .logit_rows = sequences,
            .has_adapters = step.has_adapters};
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
  Allocation logits_;
  Allocation host_logits_;
  Allocation best_tokens_;
  Allocation summaries_;
  Allocation highest_;
  std::optional<AdapterTable> table_;
  std::shared_ptr<AdapterArrivals> arrivals_ = std::make_shared<AdapterArrivals>();
  std::unique_ptr<GpuModel> model_;
  StepGraphs graphs_;
  std::array<BegunStep, 2> steps_;
  std::size_t oldest_ = 0;  ///< index of the step that await_step() waits for
  bool is_ahead_ = false;   ///< true if the other one is in flight too
  /// Destroyed before the members that its work uses; its destructor waits for the work.
  std::unique_ptr<Stream> stream_;
  std::vector<std::int32_t> no_slots_;
};

}  // namespace

void GpuModel::run_on_arrival(GpuStepKind kind, const RunShape& shape, const StepArrivals& arrivals,
                              Stream& stream) {
  ArrivalWaits(arrivals, stream).await_all();
  run(kind, shape, stream);
}

void GpuModel::set_states(std::byte* /*slots*/) {
  throw EngineError("the model keeps no states");
}

void GpuModel::find_highest(std::int32_t /*first_row*/, std::int32_t /*rows*/, std::int32_t /*count*/,
                            Stream& /*stream*/) {
  throw StepError("the model does not find highest logits");
}

void GpuModel::take_tokens(const RunShape& /*shape*/, Stream& /*stream*/) {
  throw StepError("the model does not take tokens of the run before");
}

std::unique_ptr<Engine> make_gpu_engine(GpuModelDescription description, std::unique_ptr<GpuModel> model,
                                        std::shared_ptr<Device> device, GpuEngineOptions options) {
  description.validate().throw_if_any<EngineError>("the model's description is inconsistent");
  return std::make_unique<GpuEngine>(std::move(description), std::move(model), std::move(device), options);
}

}  // namespace adaptrt
