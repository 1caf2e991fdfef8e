#include "adaptrt/gpu/gpu_engine.h"

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "cpu/step_arrays.h"
#include "support/host_device.h"

namespace adaptrt::testing::gpu_engine_test {
namespace {

constexpr std::int64_t kVocabSize = 8;
constexpr std::int32_t kTokensPerBlock = 4;

/// A model without names or contexts: its KV pool holds token ids, and its logits tell the sum of a
/// sequence's tokens up to a row's.
class SummingModel final : public GpuModel {
 public:
  /// Calls of the engine, in order; it outlives the model.
  struct Log {
    std::vector<GpuStepKind> runs;
    int graph_works = 0;
    bool fails_to_load = false;
  };

  explicit SummingModel(Log& log) : log_(log) {}

  void load(const adaptrt::StepArrays& step_arrays, const GpuModelArrays& arrays, Device& /*device*/,
            Stream& /*stream*/) override {
    if (log_.fails_to_load) throw ConfigError("no memory for weights");
    step_arrays_ = &step_arrays;
    arrays_ = arrays;
  }
  void set_kv_pools(std::span<const DeviceArray> pools) override { pool_ = pools[0]; }
  void run(GpuStepKind kind, const RunShape& shape, Stream& stream) override {
    log_.runs.push_back(kind);
    enqueue(shape, stream);
  }
  [[nodiscard]] std::function<void(Stream&)> make_graph_work(const RunShape& shape) override {
    ++log_.graph_works;
    return [this, shape](Stream& stream) { enqueue(shape, stream); };
  }

 private:
  void enqueue(const RunShape& shape, Stream& stream) {
    submit(host_stream(stream.handle()), [this, shape] { compute(shape); });
  }

  [[nodiscard]] const std::int32_t* at(const StepArray& array) const {
    return reinterpret_cast<const std::int32_t*>(arrays_.step_memory + array.offset);
  }

  void compute(const RunShape& shape) const {
    const StepPlaces places = step_arrays_->places(shape);
    auto* pool = reinterpret_cast<std::uint16_t*>(pool_.address);
    const std::int32_t* offsets = at(places.sequence_offsets);
    std::vector<float> sums;
    for (std::int32_t sequence = 0; sequence < shape.sequences; ++sequence) {
      const std::int32_t* blocks = at(places.block_tables) + sequence * shape.blocks_per_sequence;
      for (std::int32_t token = offsets[sequence]; token < offsets[sequence + 1]; ++token) {
        sums.push_back(sum_to(at(places.positions)[token], at(places.token_ids)[token], blocks, pool));
      }
    }
    auto* logits = reinterpret_cast<float*>(arrays_.logits);
    for (std::int32_t row = 0; row < shape.logit_rows; ++row) {
      logits[row * kVocabSize] = sums[static_cast<std::size_t>(at(places.logit_rows)[row])];
    }
  }

  /// Writes a token to the pool; padding has no block.
  static float sum_to(std::int32_t position, std::int32_t token, const std::int32_t* blocks,
                      std::uint16_t* pool) {
    const auto place = [&](std::int32_t i) {
      return pool + 2 * blocks[i / kTokensPerBlock] * kTokensPerBlock + i % kTokensPerBlock;
    };
    if (blocks[position / kTokensPerBlock] < 0) return 0.0F;
    *place(position) = static_cast<std::uint16_t>(token);
    float sum = 0.0F;
    for (std::int32_t i = 0; i <= position; ++i) sum += static_cast<float>(*place(i));
    return sum;
  }

  Log& log_;
  const adaptrt::StepArrays* step_arrays_ = nullptr;
  GpuModelArrays arrays_;
  DeviceArray pool_;
};

GpuModelDescription small_model() {
  return {.dtype = DType::kFloat16,
          .vocab_size = kVocabSize,
          .num_layers = 1,
          .attention = {{.num_attention_heads = 1, .num_key_value_heads = 1, .head_dim = 1}},
          .max_batch_size = 4,
          .max_num_tokens = 16,
          .max_input_len = 14,
          .max_seq_len = 16,
          .tokens_per_block = kTokensPerBlock,
          .max_reusable_prompt_len = 14,
          .max_kv_blocks = 8,
          .prefill = {.max_tokens = 16, .max_sequences = 4, .max_logit_rows = 4},
          .decode = {.max_tokens = 4, .max_sequences = 4, .max_logit_rows = 4},
          .lora = {}};
}

struct Fixture {
  explicit Fixture(bool cuda_graphs = true, StreamTime time = StreamTime::kLate)
      : device(std::make_shared<HostDevice>(std::size_t{1} << 20, time)) {
    engine = make_gpu_engine(small_model(), std::make_unique<SummingModel>(log), device,
                             {.cuda_graphs = cuda_graphs});
    engine->allocate_kv_blocks(8);
  }

  /// The sum of each row.
  std::vector<float> sums_of(const std::vector<Piece>& pieces) const {
    const std::vector<float> logits = logits_of(engine.get(), StepArrays(pieces).input());
    std::vector<float> sums;
    for (std::size_t row = 0; row < logits.size(); row += kVocabSize) sums.push_back(logits[row]);
    return sums;
  }

  std::shared_ptr<HostDevice> device;
  SummingModel::Log log;
  std::unique_ptr<Engine> engine;
};

Piece next_token(std::int32_t token, std::int32_t position, std::vector<std::int32_t> blocks) {
  return {.tokens = {token}, .first_position = position, .prompt_length = 2, .blocks = std::move(blocks)};
}

BOOST_AUTO_TEST_SUITE(gpu_engine)

BOOST_AUTO_TEST_CASE(a_model_that_is_no_plan_runs_prefills_and_captured_decodes) {
  const Fixture f;
  const std::vector<float> prefill = f.sums_of({{.tokens = {1, 2}, .prompt_length = 2, .blocks = {5}},
                                                {.tokens = {3, 4, 5}, .prompt_length = 3, .blocks = {2}}});
  BOOST_TEST(prefill == (std::vector<float>{1, 3, 3, 7, 12}), boost::test_tools::per_element());
  // Five rows, four at a time.
  BOOST_TEST((f.log.runs == std::vector{GpuStepKind::kPrefill, GpuStepKind::kPrefill}));
  // Three sequences are padded to four.
  const std::vector<Piece> decode{next_token(6, 2, {5}), next_token(7, 3, {2}), next_token(1, 0, {0})};
  for (int time = 0; time < 3; ++time) {
    BOOST_TEST(f.sums_of(decode) == (std::vector<float>{9, 19, 1}), boost::test_tools::per_element());
  }
  BOOST_TEST(f.log.graph_works == 1);
  BOOST_TEST(f.device->calls("launch") == 2);
  BOOST_TEST(f.log.runs.size() == 2U);
}

BOOST_AUTO_TEST_CASE(without_graphs_a_model_is_told_the_kind_of_each_step) {
  const Fixture f(false);
  BOOST_TEST(f.sums_of({next_token(7, 0, {1})}) == (std::vector<float>{7}), boost::test_tools::per_element());
  BOOST_TEST(f.sums_of({{.tokens = {1, 2}, .prompt_length = 2, .blocks = {5}}}) == (std::vector<float>{1, 3}),
             boost::test_tools::per_element());
  BOOST_TEST((f.log.runs == std::vector{GpuStepKind::kDecode, GpuStepKind::kPrefill}));
  BOOST_TEST(f.log.graph_works == 0);
}

BOOST_AUTO_TEST_CASE(a_model_that_cannot_be_loaded_leaves_nothing) {
  const auto device = std::make_shared<HostDevice>();
  SummingModel::Log log;
  log.fails_to_load = true;
  BOOST_CHECK_THROW((void)make_gpu_engine(small_model(), std::make_unique<SummingModel>(log), device, {}),
                    ConfigError);
  BOOST_TEST(device->num_allocations() == 0U);
}

BOOST_AUTO_TEST_CASE(an_inconsistent_description_is_refused_with_all_that_is_wrong) {
  GpuModelDescription model = small_model();
  model.num_layers = 2;
  model.num_adapter_slots = 4;
  model.prefill.max_sequences = 3;
  SummingModel::Log log;
  BOOST_CHECK_EXCEPTION(
      (void)make_gpu_engine(model, std::make_unique<SummingModel>(log), std::make_shared<HostDevice>(), {}),
      EngineError, [](const EngineError& error) {
        const std::string text = error.what();
        return text.find("attention has 1 layers, the model 2") != std::string::npos &&
               text.find("adapter slots, but no LoRA sites") != std::string::npos &&
               text.find("prefill.max_sequences is 3") != std::string::npos;
      });
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::gpu_engine_test
