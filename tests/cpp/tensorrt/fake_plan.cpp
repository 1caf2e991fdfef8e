#include "tensorrt/fake_plan.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "adaptrt/core/error.h"
#include "lora/adapters.h"

namespace adaptrt::testing {
namespace {

struct TensorState {
  std::vector<std::int64_t> dims;
  std::byte* address = nullptr;
};

[[noreturn]] void misuse(const std::string& what) {
  throw std::logic_error("fake plan: " + what);
}

/// One run of the plan with the tensors set when it was enqueued.
class FakeRun {
 public:
  FakeRun(FakePlan& plan, std::string profile, std::map<std::string, TensorState> tensors)
      : plan_(plan), profile_(std::move(profile)), tensors_(std::move(tensors)) {}

  void operator()() {
    ++plan_.runs[profile_];
    check_shapes();
    for (std::int64_t sequence = 0; sequence < sequences_; ++sequence) write_kv(sequence);
    check_slots();
    for (std::int64_t row = 0; row < logit_rows_; ++row) write_logits(row);
    plan_.num_tokens = tokens_;
    plan_.block_tables_shape = tensor("block_tables").dims;
  }

 private:
  const TensorState& tensor(const std::string& name) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end() || found->second.address == nullptr) misuse(name + " has no address");
    return found->second;
  }

  /// Returns the elements of an input after checking its sizes; -1 for any size.
  template <class Element>
  Element* input(const std::string& name, const std::vector<std::int64_t>& expected) {
    const TensorState& state = tensor(name);
    if (state.dims.size() != expected.size()) misuse(name + " has another number of dimensions");
    std::int64_t elements = 1;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (state.dims[i] < 1 || (expected[i] >= 0 && state.dims[i] != expected[i])) {
        misuse(name + " has " + std::to_string(state.dims[i]) + " in dimension " + std::to_string(i));
      }
      elements *= state.dims[i];
    }
    return elements_of<Element>(name, elements);
  }

  template <class Element>
  Element* elements_of(const std::string& name, std::int64_t elements) {
    std::byte* address = tensor(name).address;
    if (reinterpret_cast<std::uintptr_t>(address) % 256 != 0) misuse(name + " is not aligned to 256 bytes");
    if (!plan_.device->owns(address, static_cast<std::size_t>(elements) * sizeof(Element))) {
      misuse(name + " is not on the device");
    }
    return reinterpret_cast<Element*>(address);
  }

  void check_shapes() {
    const GpuModelDescription& model = plan_.program.model;
    const GpuStepLimits& profile = profile_ == "decode" ? model.decode : model.prefill;
    tokens_ = tensor("input_ids").dims.at(0);
    sequences_ = tensor("block_tables").dims.at(0);
    max_blocks_ = tensor("block_tables").dims.at(1);
    logit_rows_ = tensor("logit_rows").dims.at(0);
    if (tokens_ > profile.max_tokens || sequences_ > profile.max_sequences ||
        logit_rows_ > profile.max_logit_rows) {
      misuse("the run is larger than profile " + profile_);
    }
    if (profile_ == "decode" && tokens_ != sequences_) misuse("a decode run has other sequences than tokens");
    token_ids_ = input<std::int32_t>("input_ids", {tokens_});
    positions_ = input<std::int32_t>("positions", {tokens_});
    offsets_ = input<std::int32_t>("sequence_offsets", {sequences_ + 1});
    prompt_lengths_ = input<std::int32_t>("prompt_lengths", {sequences_});
    block_tables_ = input<std::int32_t>("block_tables", {sequences_, max_blocks_});
    logit_row_indices_ = input<std::int32_t>("logit_rows", {logit_rows_});
    slots_ = input<std::int32_t>("adapter_slots", {sequences_});
    const std::int64_t modules = std::int64_t{kNumLoraModules};
    num_slots_ = model.num_adapter_slots;
    ranks_ = input<std::int32_t>("lora_ranks", {num_slots_, model.num_layers, modules});
    pointers_ = input<std::int64_t>("lora_pointers", {num_slots_, model.num_layers, modules, 3});
    weight_ = input<float>("weight", {3});
    logits_ = elements_of<float>("logits", logit_rows_ * model.vocab_size);
    for (std::int32_t layer = 0; layer < model.num_layers; ++layer) {
      const std::string name = "kv_pool." + std::to_string(layer);
      const AttentionShape& shape = model.attention[static_cast<std::size_t>(layer)];
      pools_.push_back(input<std::uint16_t>(
          name, {-1, 2, shape.num_key_value_heads, model.tokens_per_block, shape.head_dim}));
      if (tensor("kv_pool_out." + std::to_string(layer)).address != tensor(name).address) {
        misuse(name + " is not written in place");
      }
      num_blocks_ = tensor(name).dims[0];
    }
    if (offsets_[0] != 0 || offsets_[sequences_] != tokens_)
      misuse("sequence_offsets do not cover the tokens");
  }

  /// Returns the address of a token's key; nullptr for a token without a block.
  std::uint16_t* key(std::int32_t layer, std::int64_t sequence, std::int64_t position) {
    const GpuModelDescription& model = plan_.program.model;
    const std::int64_t entry = position / model.tokens_per_block;
    if (entry >= max_blocks_) misuse("a position lies behind the block table");
    const std::int32_t block = block_tables_[sequence * max_blocks_ + entry];
    if (block == -1) return nullptr;
    if (block < 0 || block >= num_blocks_) misuse("a block table names no block");
    const AttentionShape& shape = model.attention[static_cast<std::size_t>(layer)];
    const std::int64_t row_size = shape.head_dim;
    const std::int64_t half = shape.num_key_value_heads * model.tokens_per_block * row_size;
    return pools_[static_cast<std::size_t>(layer)] + block * 2 * half +
           position % model.tokens_per_block * row_size;
  }

  void write_kv(std::int64_t sequence) {
    for (std::int32_t token = offsets_[sequence]; token < offsets_[sequence + 1]; ++token) {
      for (std::int32_t layer = 0; layer < plan_.program.model.num_layers; ++layer) {
        std::uint16_t* place = key(layer, sequence, positions_[token]);
        if (place != nullptr) *place = static_cast<std::uint16_t>(token_ids_[token]);
      }
    }
  }

  void check_slots() {
    std::set<std::int32_t> ended;
    for (std::int64_t sequence = 0; sequence < sequences_; ++sequence) {
      const std::int32_t slot = slots_[sequence];
      if (slot < -1 || slot >= num_slots_) misuse("there is no slot " + std::to_string(slot));
      if (sequence > 0 && slots_[sequence - 1] != slot) ended.insert(slots_[sequence - 1]);
      // The base model's tokens need no kernel; padding comes last and belongs to the base model.
      if (slot != -1 && ended.contains(slot)) misuse("sequences of one slot are apart");
    }
  }

  void write_logits(std::int64_t row) {
    const std::int32_t token = logit_row_indices_[row];
    if (token < 0 || token >= tokens_) misuse("logit_rows name no token");
    std::int64_t sequence = 0;
    while (offsets_[sequence + 1] <= token) ++sequence;
    float* out = logits_ + row * plan_.program.model.vocab_size;
    std::fill_n(out, plan_.program.model.vocab_size, 0.0F);
    for (std::int32_t position = 0; position <= positions_[token]; ++position) {
      const std::uint16_t* place = key(plan_.program.model.num_layers - 1, sequence, position);
      if (place != nullptr) out[kTokenSum] += static_cast<float>(*place);
    }
    out[kPosition] = static_cast<float>(positions_[token]);
    out[kPromptLength] = static_cast<float>(prompt_lengths_[sequence]);
    out[kWeight] = *weight_;
    out[kRank] = -1.0F;
    if (slots_[sequence] >= 0) write_adapter(slots_[sequence], out);
  }

  void write_adapter(std::int64_t slot, float* out) {
    const std::int64_t entry =
        (slot * plan_.program.model.num_layers + FakePlan::kLayer) * std::int64_t{kNumLoraModules} +
        static_cast<std::int64_t>(FakePlan::kModule);
    out[kRank] = static_cast<float>(ranks_[entry]);
    if (ranks_[entry] == 0) return;
    const auto at = [&](std::int64_t which, std::size_t bytes) {
      const auto* address = reinterpret_cast<const std::byte*>(pointers_[entry * 3 + which]);
      if (!plan_.device->owns(address, bytes)) misuse("an address in the tables is not on the device");
      return address;
    };
    out[kFirstOfA] = static_cast<float>(*reinterpret_cast<const std::uint16_t*>(at(0, 2)));
    out[kFirstOfB] = static_cast<float>(*reinterpret_cast<const std::uint16_t*>(at(1, 2)));
    if (pointers_[entry * 3 + 2] != 0) out[kMagnitude] = *reinterpret_cast<const float*>(at(2, 4));
  }

  FakePlan& plan_;
  std::string profile_;
  std::map<std::string, TensorState> tensors_;
  std::int64_t tokens_ = 0;
  std::int64_t sequences_ = 0;
  std::int64_t max_blocks_ = 0;
  std::int64_t logit_rows_ = 0;
  std::int64_t num_slots_ = 0;
  std::int64_t num_blocks_ = 0;
  const std::int32_t* token_ids_ = nullptr;
  const std::int32_t* positions_ = nullptr;
  const std::int32_t* offsets_ = nullptr;
  const std::int32_t* prompt_lengths_ = nullptr;
  const std::int32_t* block_tables_ = nullptr;
  const std::int32_t* logit_row_indices_ = nullptr;
  const std::int32_t* slots_ = nullptr;
  const std::int32_t* ranks_ = nullptr;
  const std::int64_t* pointers_ = nullptr;
  const float* weight_ = nullptr;
  float* logits_ = nullptr;
  std::vector<std::uint16_t*> pools_;
};

class FakePlanContext final : public PlanContext {
 public:
  FakePlanContext(std::shared_ptr<FakePlan> plan, std::string profile)
      : plan_(std::move(plan)), profile_(std::move(profile)) {
    ++plan_->contexts[profile_];
  }
  ~FakePlanContext() override { *is_alive_ = false; }
  FakePlanContext(const FakePlanContext&) = delete;
  FakePlanContext& operator=(const FakePlanContext&) = delete;

  void set_input_shape(std::string_view tensor, std::span<const std::int64_t> dims) override {
    if (is_captured_) misuse("a context of a graph is set to another shape");
    refuse_if_asked(tensor);
    plan_->shapes_set.insert(std::string(tensor));
    tensors_[std::string(tensor)].dims.assign(dims.begin(), dims.end());
  }
  void set_tensor_address(std::string_view tensor, void* address) override {
    if (is_captured_) misuse("a context of a graph is given another address");
    refuse_if_asked(tensor);
    tensors_[std::string(tensor)].address = static_cast<std::byte*>(address);
  }
  void enqueue(void* stream) override {
    ++plan_->enqueues[profile_];
    if (std::exchange(plan_->fail_next_enqueue, false)) throw StepError("execute_async_v3 failed");
    is_captured_ = is_captured_ || is_capturing(host_stream(stream));
    submit(host_stream(stream), [plan = plan_, profile = profile_, tensors = tensors_, is_alive = is_alive_] {
      if (!*is_alive) misuse("a run outlives its context");
      FakeRun(*plan, profile, tensors)();
    });
  }
  [[nodiscard]] std::unique_ptr<PlanContext> another() override {
    return std::make_unique<FakePlanContext>(plan_, profile_);
  }

 private:
  void refuse_if_asked(std::string_view tensor) {
    if (plan_->refused_tensor != tensor) return;
    plan_->refused_tensor.clear();
    throw StepError("set_input_shape refuses " + std::string(tensor));
  }

  std::shared_ptr<FakePlan> plan_;
  std::string profile_;
  std::map<std::string, TensorState> tensors_;
  bool is_captured_ = false;
  std::shared_ptr<bool> is_alive_ = std::make_shared<bool>(true);
};

}  // namespace

std::shared_ptr<FakePlan> make_fake_plan(StreamTime time) {
  static constexpr float kWeights[] = {2.5F, 0.0F, 0.0F};
  auto plan = std::make_shared<FakePlan>();
  plan->device = std::make_shared<HostDevice>(std::size_t{1} << 24, time);
  GpuModelDescription& model = plan->program.model;
  model.lora = small_layout(DType::kFloat16);
  model.dtype = DType::kFloat16;
  model.vocab_size = kVocabSize;
  model.num_layers = model.lora.num_layers;
  for (std::int32_t layer = 0; layer < model.num_layers; ++layer) {
    model.attention.push_back(
        {.num_attention_heads = 2, .num_key_value_heads = 1 + layer % 2, .head_dim = 3 + 2 * layer});
  }
  model.max_batch_size = 6;
  model.max_num_tokens = 24;
  model.max_input_len = 30;
  model.max_seq_len = 40;
  model.max_beam_width = 2;
  model.tokens_per_block = 4;
  model.max_reusable_prompt_len = 30;
  model.has_prompt_lengths = true;
  model.max_kv_blocks = 64;
  model.num_adapter_slots = 6;
  model.prefill = {.max_tokens = 24, .max_sequences = 6, .max_logit_rows = 4};
  model.decode = {.max_tokens = 6, .max_sequences = 6, .max_logit_rows = 6};
  plan->program.weights.push_back(
      {.name = "weight", .data = std::as_bytes(std::span(kWeights)), .shape = {3}, .owner = nullptr});
  return plan;
}

TensorRtContexts make_contexts(const std::shared_ptr<FakePlan>& plan) {
  return {.prefill = std::make_unique<FakePlanContext>(plan, "prefill"),
          .decode = std::make_unique<FakePlanContext>(plan, "decode")};
}

}  // namespace adaptrt::testing
