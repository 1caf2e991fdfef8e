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
        step_memory_(device_->allocate(arrays_.max_bytes())),
        staging_(device_->allocate_pinned(arrays_.max_bytes())),
        logits_(device_->allocate(
            logits_bytes(std::max(description_.prefill.max_logit_rows, description_.decode.max_logit_rows)))),
        host_logits_(device_->allocate_pinned(logits_bytes(description_.max_batch_size))),
        model_(std::move(model)),
        stream_(device_->make_stream()) {
    if (!description_.lora.sites.empty()) table_.emplace(description_, *device_, *stream_);
    GpuModelArrays arrays;
    arrays.step_memory = step_memory_.data();
    arrays.logits = logits_.data();
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

  using Engine::step;
  /// The checker refuses hidden_rows, because models have no output for them.
  void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& /*hidden_sink*/) override {
    checker_.check(input, info_, kv_pools_.num_blocks());
    try {
      run(input, sink);
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
  [[nodiscard]] std::size_t logits_bytes(std::int64_t rows) const {
    return static_cast<std::size_t>(rows * description_.vocab_size) * sizeof(float);
  }

  void run(const StepInput& input, const LogitsSink& sink) {
    kv_pools_.copy_blocks(input.copies_from, input.copies_to, *stream_);
    const bool is_decode = input.token_ids.size() == input.prompt_lengths.size();
    const std::span<const std::int32_t> slots = place_adapters(input);
    const auto rows = input.logit_rows;
    const auto slice = static_cast<std::size_t>(
        is_decode ? description_.max_batch_size
                  : std::min(description_.prefill.max_logit_rows, description_.max_batch_size));
    std::size_t first = 0;
    do {  // a step without logit rows must still write the KV pool
      const auto slice_rows = rows.subspan(first, std::min(slice, rows.size() - first));
      run_model(input, slots, slice_rows, is_decode);
      if (!slice_rows.empty()) {
        sink(static_cast<std::int64_t>(first), static_cast<std::int64_t>(slice_rows.size()),
             reinterpret_cast<const float*>(host_logits_.data()));
      }
      first += slice;
    } while (first < rows.size());
  }

  [[nodiscard]] std::span<const std::int32_t> place_adapters(const StepInput& input) {
    if (table_) return table_->place(input.adapters, *stream_);
    no_slots_.assign(input.adapters.size(), kNoSlot);
    return no_slots_;
  }

  void run_model(const StepInput& input, std::span<const std::int32_t> slots,
                 std::span<const std::int32_t> rows, bool is_decode) {
    const bool by_graph = is_decode && options_.cuda_graphs;
    const RunShape shape = by_graph ? graph_shape(input) : exact_shape(input, rows);
    const std::size_t bytes = arrays_.write(staging_.data(), shape, input, slots, rows);
    stream_->copy_to_device(step_memory_.data(), staging_.data(), bytes);
    if (by_graph) {
      graphs_.run(shape, *stream_, [&] { return model_->make_graph_work(shape); });
    } else {
      model_->run(is_decode ? GpuStepKind::kDecode : GpuStepKind::kPrefill, shape, *stream_);
    }
    stream_->copy_to_host(host_logits_.data(), logits_.data(),
                          logits_bytes(static_cast<std::int64_t>(rows.size())));
    stream_->synchronize();
  }

  /// The minimum of a run is one row of logits, even if none is wanted.
  [[nodiscard]] RunShape exact_shape(const StepInput& input, std::span<const std::int32_t> rows) const {
    return {.tokens = static_cast<std::int32_t>(input.token_ids.size()),
            .sequences = static_cast<std::int32_t>(input.prompt_lengths.size()),
            .blocks_per_sequence = arrays_.padded_blocks(input.max_blocks_per_sequence),
            .logit_rows = std::max<std::int32_t>(1, static_cast<std::int32_t>(rows.size()))};
  }

  [[nodiscard]] RunShape graph_shape(const StepInput& input) const {
    const auto power = static_cast<std::int32_t>(std::bit_ceil(input.prompt_lengths.size()));
    const std::int32_t sequences = std::min(power, description_.max_batch_size);
    return {.tokens = sequences,
            .sequences = sequences,
            .blocks_per_sequence = arrays_.padded_blocks(input.max_blocks_per_sequence),
            .logit_rows = sequences};
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
  Allocation step_memory_;
  Allocation staging_;
  Allocation logits_;
  Allocation host_logits_;
  std::optional<AdapterTable> table_;
  std::unique_ptr<GpuModel> model_;
  StepGraphs graphs_;
  /// Destroyed before the members that its work uses; its destructor waits for the work.
  std::unique_ptr<Stream> stream_;
  std::vector<std::int32_t> no_slots_;
};

}  // namespace

std::unique_ptr<Engine> make_gpu_engine(GpuModelDescription description, std::unique_ptr<GpuModel> model,
                                        std::shared_ptr<Device> device, GpuEngineOptions options) {
  description.validate().throw_if_any<EngineError>("the model's description is inconsistent");
  return std::make_unique<GpuEngine>(std::move(description), std::move(model), std::move(device), options);
}

}  // namespace adaptrt
