// Programs that read adapters whose copies still run, on an emulated GPU.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "adaptrt/cuda_program/cuda_engine.h"
#include "adaptrt/lora/lora_cache.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"
#include "cuda_program/read_positions.h"
#include "lora/adapters.h"
#include "lora/hooked_pages.h"
#include "rows_of_model.h"
#include "support/host_device.h"

namespace adaptrt::testing::arriving_adapters_test {
namespace {

using enum LoraModule;

enum class Kind { kDense, kExperts, kStreamed, kNeurons };

ModelOptions options_of(Kind kind) {
  ModelOptions options;
  options.dtype = DType::kBFloat16;
  options.vocab_size = 64;
  options.num_layers = 4;
  options.shape = {.hidden_size = 48, .attention = {4, 2, 16}};
  options.intermediate_size = 40;
  options.max_rank = 8;
  options.keep_logit_rows = false;
  options.max_num_tokens = 96;
  if (kind == Kind::kExperts) {
    options.num_experts = 4;
    options.routing = {.top_k = 2, .norm_topk_prob = true, .scale = 1.5F};
  }
  if (kind == Kind::kNeurons) options.activation = LinearEpilogue::kReluMul;
  return options;
}

/// Bytes for weights on the device; 0: all.
std::size_t weight_memory_of(Kind kind) {
  return kind == Kind::kStreamed || kind == Kind::kNeurons ? 130'000 : 0;
}

std::vector<SentRow> rows_of(Kind kind, std::int32_t layers) {
  std::vector<SentRow> rows;
  for (std::int32_t layer = 0; layer < layers; ++layer) {
    // Without them, the MLP's op is the first one that waits for its layer.
    if (kind != Kind::kNeurons) {
      for (const LoraModule module : {kAttnQ, kAttnK, kAttnV, kAttnDense}) rows.push_back({module, layer, 8});
    }
    if (kind == Kind::kExperts) {
      for (const LoraModule module : {kMoeHTo4H, kMoeGate, kMoe4HToH}) rows.push_back({module, layer, 4});
    } else {
      for (const LoraModule module : {kMlpHTo4H, kMlpGate, kMlp4HToH}) rows.push_back({module, layer, 8});
    }
  }
  return rows;
}

/// The logits of a prompt with an adapter, while its copies run and after them.
struct Logits {
  std::vector<float> base;
  std::vector<float> cold;
  std::vector<float> warm;
  std::int64_t waits = 0;  ///< of the cold step
  std::int64_t waits_of_base = 0;
};

Logits logits_with_adapter(Kind kind, std::int32_t num_tokens, bool cuda_graphs) {
  const ModelOptions options = options_of(kind);
  RandomModel model(options);
  RowsOfModel rows(model);
  if (kind == Kind::kNeurons) with_sparse_inputs(rows.program);
  const auto device = std::make_shared<HostDevice>(std::size_t{1} << 28, StreamTime::kLate);
  Door door;
  device->before_event_waits([&door, executor = std::this_thread::get_id()] {
    if (std::this_thread::get_id() != executor) door.pass();
  });
  const auto engine =
      make_cuda_engine(rows.program, device, {.cuda_graphs = cuda_graphs}, weight_memory_of(kind));
  engine->allocate_kv_blocks(8);
  LoraCache cache(rows.program.lora, engine->make_adapter_pages(std::size_t{1} << 16, 8, 1),
                  {.host_bytes = std::size_t{1} << 24, .num_load_workers = 1});
  const SentAdapter sent =
      make_adapter(rows_of(kind, options.num_layers), rows.program.lora, 3, DType::kBFloat16);
  const auto run = [&](const DeviceAdapter* adapter) {
    Piece piece{.prompt_length = num_tokens, .blocks = {0, 1}, .adapter = adapter};
    for (std::int32_t i = 0; i < num_tokens; ++i) piece.tokens.push_back((i * 7 + 3) % 61);
    return logits_of(engine.get(), StepArrays({piece}).input());
  };
  Logits logits;
  static_cast<void>(run(nullptr));  // the first run fills the ring of weights
  std::int64_t waits = device->calls("wait");
  logits.base = run(nullptr);
  logits.waits_of_base = device->calls("wait") - waits;
  door.shut();
  const auto adapter = cache.admit(sent.send(1));
  while (cache.ensure(*adapter, 1) != AdapterReadiness::kReady) std::this_thread::yield();
  const auto lease = cache.acquire(adapter);
  door.await_waiting(1);
  waits = device->calls("wait");
  logits.cold = run(&lease->adapter());
  logits.waits = device->calls("wait") - waits;
  BOOST_TEST(cache.stats().loads_in_flight == 1);
  door.open();
  while (cache.stats().loads_in_flight > 0) std::this_thread::yield();
  logits.warm = run(&lease->adapter());
  return logits;
}

BOOST_AUTO_TEST_SUITE(arriving_adapters)

BOOST_DATA_TEST_CASE(a_prompt_has_the_same_bits_while_its_adapter_is_copied,
                     boost::unit_test::data::make({0, 1, 2}), kind) {
  const Logits logits = logits_with_adapter(static_cast<Kind>(kind), 9, true);
  BOOST_TEST(logits.cold == logits.warm, boost::test_tools::per_element());
  BOOST_TEST((logits.warm != logits.base));
  // One for each of the four layers, next to those for the weights.
  BOOST_TEST(logits.waits - logits.waits_of_base == 4);
}

BOOST_AUTO_TEST_CASE(an_mlp_that_reads_active_neurons_waits) {
  const Logits logits = logits_with_adapter(Kind::kNeurons, 5, true);
  BOOST_TEST(logits.cold == logits.warm, boost::test_tools::per_element());
  BOOST_TEST((logits.warm != logits.base));
  BOOST_TEST(logits.waits_of_base == 0);  // the step does not use the ring
  BOOST_TEST(logits.waits == 4);
}

BOOST_DATA_TEST_CASE(so_has_a_decode, boost::unit_test::data::make({true, false}), cuda_graphs) {
  const Logits logits = logits_with_adapter(Kind::kDense, 1, cuda_graphs);
  BOOST_TEST(logits.cold == logits.warm, boost::test_tools::per_element());
  BOOST_TEST((logits.warm != logits.base));
  BOOST_TEST(logits.waits - logits.waits_of_base == (cuda_graphs ? 1 : 4));
}

BOOST_AUTO_TEST_CASE(ops_wait_for_the_last_site_that_they_read) {
  LoraLayout layout;
  layout.max_extra_tokens = 4;
  layout.sites = {{0, 64, {{kEmbedding, 8}}},       // 0
                  {1, 64, {{kEmbedding, 8}}},       // 1
                  {0, 8, {{kAttnQ, 8}}},            // 2
                  {0, 8, {{kMoeHTo4H, 8}}, 0},      // 3
                  {0, 8, {{kMoeHTo4H, 8}}, 1},      // 4
                  {0, 8, {{kMoe4HToH, 8}}, 0},      // 5
                  {0, 8, {{kMoe4HToH, 8}}, 1},      // 6
                  {0, 1, {{kNorm, 8}}},             // 7
                  {1, 8, {{kAttnKvBKey, 8}}, 0},    // 8
                  {1, 8, {{kAttnKvBKey, 8}}, 1},    // 9
                  {1, 8, {{kAttnKvBValue, 8}}, 0},  // 10
                  {1, 8, {{kAttnKvBValue, 8}}, 1},  // 11
                  {2, 8, {{kAttnKvBKey, 8}}, 0},    // 12
                  {0, 8, {{kLmHead, 64}}},          // 13
                  {1, 8, {{kLmHead, 64}}},          // 14
                  {0, 8, {{kNewTokens, 8}}}};       // 15, whose position is 0
  const auto position = [&](const Op& op) { return last_read_position(op, layout); };
  EmbeddingOp embedding;
  embedding.lora_site = 0;
  BOOST_TEST(position(embedding) == 2);
  LinearOp linear;
  BOOST_TEST(position(linear) == -1);
  linear.lora_site = 2;
  BOOST_TEST(position(linear) == 3);
  linear.lora_site = 13;
  BOOST_TEST(position(linear) == 15);
  ExpertsOp experts;
  BOOST_TEST(position(experts) == -1);
  experts.gate_up_site = 3;
  BOOST_TEST(position(experts) == 5);
  experts.down_site = 5;
  BOOST_TEST(position(experts) == 7);
  LayerNormOp norm;
  norm.lora_site = 7;
  BOOST_TEST(position(norm) == 8);
  LatentQueriesOp queries;
  queries.lora_site = 8;
  BOOST_TEST(position(queries) == 10);
  LatentValuesOp values;
  values.lora_site = 10;
  BOOST_TEST(position(values) == 12);
  BOOST_TEST(position(CastOp{}) == -1);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::arriving_adapters_test
