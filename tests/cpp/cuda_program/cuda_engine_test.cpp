#include "adaptrt/cuda_program/cuda_engine.h"

#include <algorithm>
#include <array>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/core/thread_pool.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/cuda/sparse_kernels.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"
#include "cuda_program/rows_of_model.h"
#include "cuda_program/sparse_mlp_op.h"
#include "support/found_highest.h"
#include "support/host_device.h"

namespace adaptrt::testing {
namespace {

constexpr std::int32_t kNumBlocks = 40;

ModelOptions small_model(DType dtype) {
  ModelOptions options;
  options.dtype = dtype;
  options.vocab_size = 64;
  options.shape = {.hidden_size = 48, .attention = {4, 2, 16}};
  options.intermediate_size = 40;
  options.max_rank = 8;
  options.keep_logit_rows = false;
  options.max_num_tokens = 96;
  return options;
}

/// Changes an attention op of a model.
using AttentionChange = std::function<void(AttentionOp*)>;

void change_attention(RandomModel* model, const AttentionChange& change) {
  for (Op& op : model->program.body) {
    if (auto* attention = std::get_if<AttentionOp>(&op); attention != nullptr && change) change(attention);
  }
}

/// A model, and the same model with row-major matrices on an emulated GPU.
struct Pair {
  explicit Pair(const ModelOptions& options, bool cuda_graphs = true, const AttentionChange& change = {})
      : model(options),
        rows((change_attention(&model, change), model)),
        cpu(make_cpu_engine(model.program, std::make_shared<ThreadPool>(1))),
        gpu(make_cuda_engine(rows.program, std::make_shared<HostDevice>(), {.cuda_graphs = cuda_graphs})) {
    cpu->allocate_kv_blocks(kNumBlocks);
    gpu->allocate_kv_blocks(kNumBlocks);
  }

  RandomModel model;
  RowsOfModel rows;
  std::unique_ptr<Engine> cpu;
  std::unique_ptr<Engine> gpu;
};

std::vector<std::int32_t> tokens_of(std::int32_t count, std::int32_t seed) {
  std::vector<std::int32_t> tokens;
  for (std::int32_t i = 0; i < count; ++i) tokens.push_back((seed * 31 + i * i * 7 + i) % 61);
  return tokens;
}

/// Tokens [first, first + count) of a prompt of 60 tokens, in blocks of its own.
Piece piece_of(std::int32_t sequence, std::int32_t first, std::int32_t count, const DeviceAdapter* adapter) {
  const std::vector<std::int32_t> prompt = tokens_of(60, sequence);
  Piece piece{.tokens = {prompt.begin() + first, prompt.begin() + first + count},
              .first_position = first,
              .prompt_length = 60,
              .adapter = adapter};
  for (std::int32_t block = 0; block < 4; ++block) piece.blocks.push_back(4 * sequence + block);
  return piece;
}

std::vector<float> logits_of_pieces(Engine& engine, const std::vector<Piece>& pieces) {
  return logits_of(&engine, StepArrays(pieces).input());
}

/// Returns the logits of the pieces' last rows.
std::vector<float> last_rows(const std::vector<float>& logits, const std::vector<Piece>& pieces,
                             std::size_t piece) {
  std::size_t row = 0;
  for (std::size_t i = 0; i <= piece; ++i) row += pieces[i].tokens.size();
  const std::size_t width = logits.size() / [&] {
    std::size_t rows = 0;
    for (const Piece& each : pieces) rows += each.tokens.size();
    return rows;
  }();
  return {logits.begin() + static_cast<std::ptrdiff_t>((row - 1) * width),
          logits.begin() + static_cast<std::ptrdiff_t>(row * width)};
}

// Both engines round activations to 16 bits, at different places: the GPU also rounds the outputs of linear
// layers, and the float16 CPU engine rounds none. Two layers add up to a few units in the last place of the
// largest logits.
void expect_close(const std::vector<float>& expected, const std::vector<float>& found, DType dtype) {
  BOOST_REQUIRE_EQUAL(expected.size(), found.size());
  float range = 0.0F;
  float distance = 0.0F;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    range = std::max(range, std::fabs(expected[i]));
    distance = std::max(distance, std::fabs(expected[i] - found[i]));
  }
  BOOST_TEST_MESSAGE("distance " << distance << " of " << range);
  BOOST_TEST(distance <= range * (dtype == DType::kBFloat16 ? 0.02F : 0.003F));
}

}  // namespace

BOOST_AUTO_TEST_SUITE(cuda_engine)

BOOST_DATA_TEST_CASE(logits_equal_the_cpu_engines,
                     boost::unit_test::data::make({true, false}) *
                         boost::unit_test::data::make({true, false}),
                     is_bfloat16, has_head_norms) {
  const DType dtype = is_bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  ModelOptions options = small_model(dtype);
  options.biases = true;
  options.head_norms = has_head_norms;
  Pair pair(options);
  const DeviceAdapter cpu_lora = pair.model.adapter(3, false);
  const DeviceAdapter gpu_lora = pair.rows.adapter(3, false);
  const DeviceAdapter cpu_dora = pair.model.adapter(4, true, 0, /*shift=*/true);
  const DeviceAdapter gpu_dora = pair.rows.adapter(4, true, /*shift=*/true);
  const auto pieces = [](const DeviceAdapter* lora, const DeviceAdapter* dora) {
    return std::vector<Piece>{piece_of(0, 0, 20, nullptr), piece_of(1, 0, 33, lora), piece_of(2, 0, 7, dora)};
  };
  const auto expected = logits_of_pieces(*pair.cpu, pieces(&cpu_lora, &cpu_dora));
  const auto found = logits_of_pieces(*pair.gpu, pieces(&gpu_lora, &gpu_dora));
  expect_close(expected, found, dtype);
}

BOOST_DATA_TEST_CASE(other_attention_equals_the_cpu_engines, boost::unit_test::data::make({0, 1, 2, 3, 4}),
                     kind) {
  ModelOptions options = small_model(DType::kFloat16);
  options.head_norms = kind == 0 || kind == 4;
  const std::vector<float> sinks{-2.0F, 0.5F, 3.0F, 1.0F};
  const std::vector<float> weights(64, 0.8F);
  const AttentionChange change = [&](AttentionOp* op) {
    op->norms_after_rotation = kind == 0 || kind == 4;
    op->interleaved = kind == 1 || kind == 4;
    if (kind == 2) op->sinks = {sinks.data(), 4};
    // Interleaved heads need equal weights.
    if (kind == 4) op->query_norm = op->key_norm = {weights.data(), op->shape.head_dim};
    if (kind == 3) {
      op->chunk = 12;
      op->query_scaling_beta = 0.7F;
      op->query_scaling_length = 5;
      op->query_scaling_offset = 1;
    }
  };
  Pair pair(options, true, change);
  Pair plain(options);
  // Prompts, then decodes.
  for (const auto& [first, count] : {std::pair{0, 30}, {30, 1}}) {
    const std::vector<Piece> pieces{piece_of(0, first, count, nullptr),
                                    piece_of(1, first / 3, count, nullptr)};
    const auto found = logits_of_pieces(*pair.gpu, pieces);
    expect_close(logits_of_pieces(*pair.cpu, pieces), found, options.dtype);
    BOOST_TEST(found != logits_of_pieces(*plain.gpu, pieces));
  }
}

BOOST_DATA_TEST_CASE(experts_equal_the_cpu_engines, boost::unit_test::data::make({false, true}),
                     scales_inputs) {
  ModelOptions options = small_model(DType::kFloat16);
  options.biases = true;
  options.num_experts = 8;
  options.routing = {.top_k = 3, .norm_topk_prob = true, .scale = 1.5F, .scales_inputs = scales_inputs};
  Pair pair(options);
  Pair alone(options);
  Pair plain(options);
  const DeviceAdapter cpu_lora = pair.model.adapter(3, false);
  const DeviceAdapter gpu_lora = pair.rows.adapter(3, false);
  const DeviceAdapter cpu_dora = pair.model.adapter(4, true, 0, /*shift=*/true);
  const DeviceAdapter gpu_dora = pair.rows.adapter(4, true, /*shift=*/true);
  const DeviceAdapter own_dora = alone.rows.adapter(4, true, /*shift=*/true);
  for (const auto& [first, count] : {std::pair{0, 20}, {20, 1}}) {
    const auto pieces = [&](const DeviceAdapter* lora, const DeviceAdapter* dora) {
      return std::vector{piece_of(0, first, count, dora), piece_of(1, first, 3, nullptr),
                         piece_of(2, first, 7, lora)};
    };
    const auto found = logits_of_pieces(*pair.gpu, pieces(&gpu_lora, &gpu_dora));
    expect_close(logits_of_pieces(*pair.cpu, pieces(&cpu_lora, &cpu_dora)), found, options.dtype);
    BOOST_TEST(logits_of_pieces(*alone.gpu, {piece_of(0, first, count, &own_dora)}) ==
                   std::vector<float>(found.begin(), found.begin() + count * 64),
               boost::test_tools::per_element());
    // A step without adapters has other launches, and the same bits.
    BOOST_TEST(logits_of_pieces(*plain.gpu, {piece_of(1, first, 3, nullptr)}) ==
                   std::vector<float>(found.begin() + count * 64, found.begin() + (count + 3) * 64),
               boost::test_tools::per_element());
  }
}

/// Returns an adapter without all of its modules but one.
DeviceAdapter with_only(LoraModule module, DeviceAdapter adapter, const LoraLayout& layout) {
  for (std::size_t i = 0; i < adapter.sites.size(); ++i) {
    for (std::size_t p = 0; p < layout.sites[i].parts.size(); ++p) {
      if (layout.sites[i].parts[p].module != module) adapter.sites[i].parts[p].rank = 0;
    }
  }
  return adapter;
}

BOOST_AUTO_TEST_CASE(each_module_of_experts_is_adapted) {
  ModelOptions options = small_model(DType::kFloat16);
  options.num_experts = 8;
  options.routing = {.top_k = 2};
  using enum LoraModule;
  for (const LoraModule module : {kMoeHTo4H, kMoeGate, kMoe4HToH}) {
    Pair pair(options);
    const LoraLayout& layout = pair.model.program.lora;
    const DeviceAdapter cpu = with_only(module, pair.model.adapter(5, true), layout);
    const DeviceAdapter gpu = with_only(module, pair.rows.adapter(5, true), layout);
    const auto found = logits_of_pieces(*pair.gpu, {piece_of(0, 0, 24, &gpu)});
    expect_close(logits_of_pieces(*pair.cpu, {piece_of(0, 0, 24, &cpu)}), found, options.dtype);
    BOOST_TEST(found != logits_of_pieces(*pair.gpu, {piece_of(0, 0, 24, nullptr)}));
  }
}

BOOST_AUTO_TEST_CASE(a_sequence_has_the_same_bits_alone_and_in_a_crowd) {
  ModelOptions options = small_model(DType::kBFloat16);
  options.head_norms = true;
  Pair alone(options);
  Pair crowd(options);
  const DeviceAdapter lora = alone.rows.adapter(3, false);
  const DeviceAdapter dora = crowd.rows.adapter(4, true);
  const DeviceAdapter same = crowd.rows.adapter(3, false);
  const auto own = logits_of_pieces(*alone.gpu, {piece_of(0, 0, 30, &lora)});
  const std::vector<Piece> first{piece_of(1, 0, 17, &dora), piece_of(0, 0, 11, &same),
                                 piece_of(2, 0, 3, nullptr)};
  static_cast<void>(logits_of_pieces(*crowd.gpu, first));
  const std::vector<Piece> second{piece_of(2, 3, 1, nullptr), piece_of(0, 11, 19, &same),
                                  piece_of(1, 17, 1, &dora)};
  const auto found = last_rows(logits_of_pieces(*crowd.gpu, second), second, 1);
  BOOST_TEST(std::equal(found.begin(), found.end(), own.end() - 64));
  // Decodes: a graph alone, and one of more sequences.
  const auto own_next = logits_of_pieces(*alone.gpu, {piece_of(0, 30, 1, &lora)});
  const std::vector<Piece> third{piece_of(2, 4, 1, nullptr), piece_of(1, 18, 1, &dora),
                                 piece_of(0, 30, 1, &same)};
  const auto next = last_rows(logits_of_pieces(*crowd.gpu, third), third, 2);
  BOOST_TEST(next == own_next, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(an_adapter_acts_from_its_start_position_on) {
  Pair base(small_model(DType::kBFloat16));
  Pair whole(small_model(DType::kBFloat16));
  Pair split(small_model(DType::kBFloat16));
  const DeviceAdapter adapter = split.rows.adapter(3, true);
  Piece late = piece_of(0, 0, 30, &adapter);
  late.adapter_from = 12;
  const auto found = logits_of_pieces(*split.gpu, {late, piece_of(1, 0, 4, nullptr)});
  const auto expected = logits_of_pieces(*base.gpu, {piece_of(0, 0, 30, nullptr)});
  BOOST_TEST(std::equal(expected.begin(), expected.begin() + 12 * 64, found.begin()));
  BOOST_TEST(!std::equal(expected.begin() + 12 * 64, expected.begin() + 13 * 64, found.begin() + 12 * 64));
  // The same in two steps: without the adapter, then with it.
  const DeviceAdapter same = whole.rows.adapter(3, true);
  static_cast<void>(logits_of_pieces(*whole.gpu, {piece_of(0, 0, 12, nullptr)}));
  const auto rest = logits_of_pieces(*whole.gpu, {piece_of(0, 12, 18, &same)});
  BOOST_TEST(std::equal(rest.begin(), rest.end(), found.begin() + 12 * 64));
  // Decodes before and behind the start.
  for (const std::int32_t start : {31, 30}) {
    Piece next = piece_of(0, 30, 1, &adapter);
    next.adapter_from = start;
    Piece plain = piece_of(0, 30, 1, start == 31 ? nullptr : &adapter);
    BOOST_TEST(logits_of_pieces(*split.gpu, {next}) == logits_of_pieces(*split.gpu, {plain}),
               boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(graphs_change_no_bit) {
  Pair graphs(small_model(DType::kBFloat16), true);
  Pair plain(small_model(DType::kBFloat16), false);
  for (Pair* pair : {&graphs, &plain}) {
    static_cast<void>(logits_of_pieces(*pair->gpu, {piece_of(0, 0, 9, nullptr), piece_of(1, 0, 5, nullptr)}));
  }
  const DeviceAdapter first = graphs.rows.adapter(5, true);
  const DeviceAdapter second = plain.rows.adapter(5, true);
  for (std::int32_t step = 0; step < 4; ++step) {
    const bool adapts = step % 2 == 1;  // graphs with and without LoRA kernels
    const auto pieces = [&](const DeviceAdapter* adapter) {
      return std::vector<Piece>{piece_of(0, 9 + step, 1, adapts ? adapter : nullptr),
                                piece_of(1, 5 + step, 1, nullptr)};
    };
    BOOST_TEST(logits_of_pieces(*graphs.gpu, pieces(&first)) == logits_of_pieces(*plain.gpu, pieces(&second)),
               boost::test_tools::per_element());
  }
}

BOOST_AUTO_TEST_CASE(hopper_prefill_changes_no_bit) {
  ModelOptions options = small_model(DType::kBFloat16);
  options.shape.attention = {4, 2, 64};
  RandomModel model(options);
  RowsOfModel rows(model);
  const std::vector<Piece> pieces{piece_of(0, 0, 50, nullptr), piece_of(1, 0, 1, nullptr),
                                  piece_of(2, 0, 33, nullptr)};
  const auto logits = [&](bool hopper_prefill) {
    const auto engine = make_cuda_engine(rows.program, std::make_shared<HostDevice>(), {}, 0, hopper_prefill);
    engine->allocate_kv_blocks(kNumBlocks);
    return logits_of_pieces(*engine, pieces);
  };
  BOOST_TEST((logits(true) == logits(false)));
}

/// True if the engine of a program is refused with `message`.
bool refuses_hopper_prefill(const Program& program, const std::string& message) {
  try {
    static_cast<void>(make_cuda_engine(program, std::make_shared<HostDevice>(), {}, 0, true));
  } catch (const ConfigError& error) {
    BOOST_TEST_MESSAGE(error.what());
    return std::string(error.what()).find(message) != std::string::npos;
  }
  return false;
}

BOOST_AUTO_TEST_CASE(hopper_prefill_without_its_kernel_is_refused) {
  ModelOptions options = small_model(DType::kBFloat16);
  RandomModel narrow(options);
  RowsOfModel rows(narrow);
  BOOST_TEST(
      refuses_hopper_prefill(rows.program, "hopper_prefill is true for head_dim 16; it needs 64, 96 or 128"));
  rows.program.tokens_per_block = 24;
  BOOST_TEST(refuses_hopper_prefill(rows.program, "hopper_prefill is true for tokens_per_block 24"));
  for (Op& op : rows.program.body) {
    if (auto* attention = std::get_if<AttentionOp>(&op)) attention->shape.values_are_keys = true;
  }
  const std::vector<std::string> problems = hopper_prefill_problems(rows.program).list();
  BOOST_TEST(problems.front() ==
             "hopper_prefill is true; the engine has no attention with keys and values of their own");
}

/// Blocks that share a decode's keys count themselves. All layers use the same counters, and so do graphs.
BOOST_AUTO_TEST_CASE(long_decodes_have_the_bits_of_prompts) {
  constexpr std::int32_t kTokens = 260;  // several tiles of keys
  ModelOptions options = small_model(DType::kBFloat16);
  options.shape.attention = {2, 1, 128};
  Pair pair(options);
  const auto piece = [](std::int32_t first, std::int32_t count) {
    const std::vector<std::int32_t> prompt = tokens_of(kTokens, 1);
    Piece part{.tokens = {prompt.begin() + first, prompt.begin() + first + count},
               .first_position = first,
               .prompt_length = kTokens};
    for (std::int32_t block = 0; block < (kTokens + 15) / 16; ++block) part.blocks.push_back(block);
    return part;
  };
  for (std::int32_t first = 0; first < 192; first += 96) {
    static_cast<void>(logits_of_pieces(*pair.gpu, {piece(first, 96)}));
  }
  const auto expected = logits_of_pieces(*pair.gpu, {piece(192, kTokens - 192)});
  for (std::int32_t token = kTokens - 4; token < kTokens; ++token) {
    const auto found = logits_of_pieces(*pair.gpu, {piece(token, 1)});
    BOOST_TEST(std::equal(found.begin(), found.end(), expected.begin() + (token - 192) * 64));
  }
}

BOOST_AUTO_TEST_CASE(streamed_layers_change_no_bit) {
  ModelOptions options = small_model(DType::kBFloat16);
  options.num_layers = 5;
  options.biases = true;
  Pair resident(options);
  std::size_t free_bytes = 0;
  for (const std::size_t weight_memory : {250'000U, 130'000U, 90'000U}) {
    BOOST_TEST_INFO_SCOPE("weight_memory " << weight_memory);
    RandomModel model(options);
    RowsOfModel rows(model);
    const auto device = std::make_shared<HostDevice>(std::size_t{1} << 32, StreamTime::kLate);
    const auto engine = make_cuda_engine(rows.program, device, {}, weight_memory);
    engine->allocate_kv_blocks(kNumBlocks);
    // A smaller limit leaves more of the device free.
    BOOST_TEST(device->memory().free_bytes > free_bytes);
    free_bytes = device->memory().free_bytes;
    const std::int64_t before = device->calls("wait");
    for (const auto& [first, count] : {std::pair{0, 20}, {20, 1}, {21, 1}}) {
      const std::vector<Piece> pieces{piece_of(0, first, count, nullptr), piece_of(1, first, 1, nullptr)};
      BOOST_TEST(logits_of_pieces(*engine, pieces) == logits_of_pieces(*resident.gpu, pieces),
                 boost::test_tools::per_element());
    }
    BOOST_TEST((device->calls("wait") > before) == (weight_memory < 250'000U));
  }
  RandomModel model(options);
  RowsOfModel rows(model);
  BOOST_CHECK_EXCEPTION(
      static_cast<void>(make_cuda_engine(rows.program, std::make_shared<HostDevice>(), {}, 40'000)),
      ConfigError, [](const ConfigError& error) {
        return std::string(error.what()).find("weight_memory is 40000; expected at least ") == 0;
      });
}

ModelOptions relu_model(DType dtype) {
  ModelOptions options = small_model(dtype);
  options.num_layers = 5;
  options.activation = LinearEpilogue::kReluMul;
  options.threshold = 0.05F;
  options.biases = true;
  return options;
}

/// An engine whose weights may take `weight_memory` bytes on a device.
struct Limited {
  Limited(const ModelOptions& options, std::size_t weight_memory, GpuEngineOptions engine_options = {},
          NeuronUsage usage = {})
      : model(options),
        rows(model),
        device(std::make_shared<HostDevice>(std::size_t{1} << 32, StreamTime::kLate)),
        engine(make_cuda_engine(with_sparse_inputs(rows.program), device, engine_options, weight_memory,
                                /*hopper_prefill=*/false, std::move(usage))) {
    engine->allocate_kv_blocks(kNumBlocks);
  }

  RandomModel model;
  RowsOfModel rows;
  std::shared_ptr<HostDevice> device;
  std::unique_ptr<Engine> engine;
};

/// Bytes of weights with which no neuron stays on the device, a sixth of them, and two fifths.
constexpr std::size_t kColdMemory = 154'000;
constexpr std::size_t kMixedMemory = 160'000;
constexpr std::size_t kHotMemory = 170'000;

/// Logits of a prompt, of decodes and of short chunks: steps of 3 to 21 rows.
std::vector<std::vector<float>> logits_of_steps(Engine& engine, const DeviceAdapter* first,
                                                const DeviceAdapter* second) {
  const std::vector<std::vector<Piece>> steps{
      {piece_of(0, 0, 18, first), piece_of(1, 0, 1, second), piece_of(2, 0, 2, nullptr)},
      {piece_of(0, 18, 1, first), piece_of(1, 1, 1, second), piece_of(2, 2, 1, nullptr)},
      {piece_of(1, 2, 5, second), piece_of(0, 19, 3, first)},
      {piece_of(1, 7, 6, second), piece_of(0, 22, 3, first)},
      {piece_of(2, 3, 1, nullptr)}};
  std::vector<std::vector<float>> logits;
  for (const std::vector<Piece>& pieces : steps) logits.push_back(logits_of_pieces(engine, pieces));
  return logits;
}

BOOST_DATA_TEST_CASE(active_neurons_have_the_bits_of_whole_matrices,
                     boost::unit_test::data::make({true, false}) *
                         boost::unit_test::data::make({kColdMemory, kMixedMemory, kHotMemory}),
                     is_other, weight_memory) {
  ModelOptions options = relu_model(is_other ? DType::kFloat16 : DType::kBFloat16);
  if (is_other) options.activation = LinearEpilogue::kReluMulRelu;
  Pair whole(options);
  Limited limited(options, weight_memory, {.cuda_graphs = !is_other});
  BOOST_TEST(
      (logits_of_steps(*limited.engine, nullptr, nullptr) == logits_of_steps(*whole.gpu, nullptr, nullptr)));
  const DeviceAdapter lora = whole.rows.adapter(3, false);
  const DeviceAdapter dora = whole.rows.adapter(4, true, /*shift=*/true);
  const DeviceAdapter same_lora = limited.rows.adapter(3, false);
  const DeviceAdapter same_dora = limited.rows.adapter(4, true, /*shift=*/true);
  BOOST_TEST((logits_of_steps(*limited.engine, &same_lora, &same_dora) ==
              logits_of_steps(*whole.gpu, &lora, &dora)));
}

BOOST_AUTO_TEST_CASE(each_module_of_an_mlp_with_neurons_is_adapted) {
  const ModelOptions options = relu_model(DType::kBFloat16);
  using enum LoraModule;
  for (const LoraModule module : {kMlpHTo4H, kMlpGate, kMlp4HToH}) {
    Pair whole(options);
    Limited limited(options, kMixedMemory);
    const LoraLayout& layout = whole.model.program.lora;
    const DeviceAdapter expected = with_only(module, whole.rows.adapter(5, true), layout);
    const DeviceAdapter found = with_only(module, limited.rows.adapter(5, true), layout);
    const auto logits = logits_of_pieces(*limited.engine, {piece_of(0, 0, 4, &found)});
    BOOST_TEST(logits == logits_of_pieces(*whole.gpu, {piece_of(0, 0, 4, &expected)}),
               boost::test_tools::per_element());
    BOOST_TEST(logits != logits_of_pieces(*whole.gpu, {piece_of(0, 0, 4, nullptr)}));
  }
}

BOOST_AUTO_TEST_CASE(steps_of_few_rows_copy_no_layers_and_are_graphs) {
  ModelOptions options = relu_model(DType::kBFloat16);
  options.max_batch_size = 9;
  Pair whole(options);
  std::size_t step = 0;
  const auto waits_and_graphs = [&](std::size_t weight_memory, std::int32_t sequences, std::int32_t tokens) {
    Limited limited(options, weight_memory);
    const auto waits = limited.device->calls("wait");
    const auto graphs = limited.device->calls("capture");
    std::vector<Piece> pieces;
    for (std::int32_t i = 0; i < sequences; ++i) pieces.push_back(piece_of(i, 0, tokens, nullptr));
    BOOST_TEST_INFO_SCOPE("step " << step++);
    BOOST_TEST((logits_of_pieces(*limited.engine, pieces) == logits_of_pieces(*whole.gpu, pieces)));
    return std::pair{limited.device->calls("wait") > waits, limited.device->calls("capture") > graphs};
  };
  BOOST_TEST((waits_and_graphs(kColdMemory, 1, 1) == std::pair{false, true}));
  BOOST_TEST((waits_and_graphs(kColdMemory, 8, 1) == std::pair{false, true}));
  BOOST_TEST((waits_and_graphs(kColdMemory, 9, 1) == std::pair{true, false}));
  BOOST_TEST((waits_and_graphs(kColdMemory, 4, 2) == std::pair{false, false}));
  BOOST_TEST((waits_and_graphs(kColdMemory, 4, 3) == std::pair{true, false}));
  // Too little for attention and gates: layers are copied.
  BOOST_TEST((waits_and_graphs(kColdMemory - 5000, 1, 1) == std::pair{true, false}));
  BOOST_TEST((waits_and_graphs(1'000'000, 1, 1) == std::pair{false, true}));
}

// No norm is between attention's output and the MLP, so nothing else adds the output to the stream.
BOOST_AUTO_TEST_CASE(an_mlp_may_read_the_input_of_attention) {
  const auto logits_with = [](std::size_t weight_memory) {
    RandomModel model(relu_model(DType::kBFloat16));
    RowsOfModel rows(model);
    std::vector<Op>& body = rows.program.body;
    for (std::size_t i = body.size() - 1; i > 0; --i) {
      const auto* dense = std::get_if<LinearOp>(&body[i - 1]);
      if (std::holds_alternative<RmsNormOp>(body[i]) && dense != nullptr && dense->parts[0].weight.k == 64) {
        body.erase(body.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    const auto engine =
        make_cuda_engine(with_sparse_inputs(rows.program), std::make_shared<HostDevice>(), {}, weight_memory);
    engine->allocate_kv_blocks(kNumBlocks);
    return logits_of_steps(*engine, nullptr, nullptr);
  };
  BOOST_TEST((logits_with(kMixedMemory) == logits_with(0)));
}

BOOST_AUTO_TEST_CASE(sparse_mlps_are_two_layers_with_a_relu_gate) {
  const auto is_sparse = [](const std::function<void(LinearOp&, LinearOp&)>& change = {}) {
    const LinearPart up{.weight = {.n = 16, .k = 8}, .bias = {}};
    LinearOp gated{.input = 1, .output = 2, .epilogue = LinearEpilogue::kReluMul, .parts = {up, up}};
    LinearOp down{.input = 2, .output = 3, .epilogue = LinearEpilogue::kAdd, .parts = {up}};
    down.has_sparse_input = true;
    if (change) change(gated, down);
    const Op first = gated;
    const Op second = down;
    return sparse_gate(first, second) == &std::get<LinearOp>(first);
  };
  BOOST_TEST(is_sparse());
  BOOST_TEST(is_sparse([](auto& gated, auto&) { gated.epilogue = LinearEpilogue::kReluMulRelu; }));
  BOOST_TEST(is_sparse([](auto& gated, auto&) { gated.parts[1].weight.n = cuda::kMaxNeurons; }));
  BOOST_TEST(!is_sparse([](auto& gated, auto&) { gated.parts[1].weight.n = cuda::kMaxNeurons + 8; }));
  BOOST_TEST(!is_sparse([](auto& gated, auto&) { gated.epilogue = LinearEpilogue::kSiluMul; }));
  BOOST_TEST(!is_sparse([](auto& gated, auto&) { gated.output = 4; }));
  BOOST_TEST(!is_sparse([](auto& gated, auto&) { gated.scale = 0.5F; }));
  BOOST_TEST(!is_sparse([](auto& gated, auto&) { gated.softcap = 0.5F; }));
  BOOST_TEST(
      !is_sparse([](auto& gated, auto&) { gated.parts[1].weight.quantization.algo = QuantAlgo::kW8A16; }));
  BOOST_TEST(!is_sparse([](auto&, auto& down) { down.has_sparse_input = false; }));
  BOOST_TEST(!is_sparse([](auto&, auto& down) { down.epilogue = LinearEpilogue::kRelu; }));
  BOOST_TEST(!is_sparse([](auto&, auto& down) { down.parts.push_back(down.parts.front()); }));
  const Op other = XieluOp{};
  BOOST_TEST(sparse_gate(other, other) == nullptr);
}

BOOST_AUTO_TEST_CASE(weights_with_neurons_keep_to_their_limit) {
  const ModelOptions options = relu_model(DType::kBFloat16);
  const auto used = [&](std::size_t weight_memory, NeuronUsage usage = {}) {
    return (std::size_t{1} << 32) -
           Limited(options, weight_memory, {}, std::move(usage)).device->memory().free_bytes;
  };
  const std::size_t cold = used(kColdMemory);
  for (const std::size_t more : {4'000U, 10'000U, 16'000U}) {
    for (const NeuronUsage& usage : {NeuronUsage{}, NeuronUsage{{}, {}, std::vector<std::uint32_t>(40, 7)}}) {
      const std::size_t taken = used(kColdMemory + more, usage) - cold;
      BOOST_TEST(taken <= more + 1'000);  // allocations are aligned
      BOOST_TEST(taken + 2'000 >= more);
    }
  }
}

/// Decodes of two or three sequences, and their results. Of the second one the highest logits
/// are wanted, of the others the best tokens.
struct Decode : FoundRows {
  explicit Decode(const std::vector<Piece>& pieces) : arrays(pieces) {
    arrays.logit_rows.clear();
    for (std::int32_t row = 0; row < static_cast<std::int32_t>(pieces.size()); ++row) {
      (row == 1 ? highest_rows : best_rows).push_back(row);
    }
    input = arrays.input();
    add_to(input, 3);
  }
  Decode(const Decode&) = delete;
  Decode& operator=(const Decode&) = delete;

  /// Token of each sequence.
  [[nodiscard]] std::vector<std::int32_t> tokens() const {
    std::vector<std::int32_t> tokens{best_tokens[0], summaries[0].best_token};
    if (best_tokens.size() > 1) tokens.push_back(best_tokens[1]);
    return tokens;
  }

  StepArrays arrays;
  StepInput input;
};

/// Decodes greedily after three prompts: of the base model, with an adapter, and with one that acts from a
/// position on. The third sequence ends after some tokens. Returns the tokens of each step, and the logits of
/// the second sequence.
struct Decoded {
  std::vector<std::vector<std::int32_t>> tokens;
  std::vector<float> highest;
};
Decoded decode_greedily(Engine& engine, const DeviceAdapter* adapter, bool looks_ahead) {
  constexpr std::size_t kSteps = 9;
  constexpr std::size_t kEnd = 4;  // steps of the third sequence
  constexpr std::array kLengths = {9, 14, 5};
  const auto piece = [&](std::int32_t sequence, std::int32_t first, std::int32_t count) {
    Piece made = piece_of(sequence, first, count, sequence == 0 ? nullptr : adapter);
    if (sequence == 2) made.adapter_from = 2;
    return made;
  };
  static_cast<void>(logits_of_pieces(
      engine, {piece(0, 0, kLengths[0]), piece(1, 0, kLengths[1]), piece(2, 0, kLengths[2])}));
  std::vector<std::unique_ptr<Decode>> steps;
  const auto make = [&](const std::vector<std::int32_t>& tokens) {
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      pieces.push_back(
          piece(static_cast<std::int32_t>(i), kLengths.at(i) + static_cast<std::int32_t>(steps.size()), 1));
      pieces.back().tokens = {tokens[i]};
    }
    steps.push_back(std::make_unique<Decode>(pieces));
  };
  const std::vector<std::int32_t> rows{0, 1, 2};
  make({7, 8, 9});
  engine.begin_step(steps[0]->input);
  Decoded decoded;
  while (decoded.tokens.size() < kSteps) {
    const std::size_t done = decoded.tokens.size();
    if (looks_ahead && done + 1 < kSteps) {
      // The host has seen the third sequence's end when it begins the step after the next one.
      const std::size_t count = done + 1 > kEnd ? 2 : 3;
      make(std::vector<std::int32_t>(count, 0));
      engine.begin_ahead(steps.back()->input, std::span(rows).first(count));
    }
    engine.await_step([](auto...) { BOOST_ERROR("logits"); }, {});
    const Decode& step = *steps[done];
    decoded.tokens.push_back(step.tokens());
    if (done >= kEnd) decoded.tokens.back().resize(2);
    for (const TokenLogit& logit : step.highest) decoded.highest.push_back(logit.logit);
    if (looks_ahead || done + 1 == kSteps) continue;
    std::vector<std::int32_t> next = decoded.tokens.back();
    if (done + 1 >= kEnd) next.resize(2);
    make(next);
    engine.begin_step(steps.back()->input);
  }
  return decoded;
}

BOOST_DATA_TEST_CASE(steps_begun_ahead_change_no_bit,
                     boost::unit_test::data::make({0, 1, 2, 3, 4}) *
                         boost::unit_test::data::make({true, false}),
                     kind, is_late) {
  ModelOptions options = kind == 4 ? relu_model(DType::kBFloat16) : small_model(DType::kBFloat16);
  options.num_layers = 5;
  options.biases = true;
  if (kind == 4) options.seed = 3;
  if (kind == 1) {
    options.num_experts = 8;
    options.routing = {.top_k = 3, .norm_topk_prob = true, .scale = 1.5F};
  }
  const auto decoded = [&](bool looks_ahead) {
    RandomModel model(options);
    RowsOfModel rows(model);
    const auto device =
        std::make_shared<HostDevice>(std::size_t{1} << 32, is_late ? StreamTime::kLate : StreamTime::kAtOnce);
    const auto engine = make_cuda_engine(rows.program, device, {.cuda_graphs = kind != 2},
                                         kind == 3   ? 130'000U
                                         : kind == 4 ? kMixedMemory
                                                     : 0U);
    engine->allocate_kv_blocks(kNumBlocks);
    BOOST_TEST(engine->can_look_ahead());
    const DeviceAdapter adapter = rows.adapter(4, true, /*shift=*/true);
    return decode_greedily(*engine, &adapter, looks_ahead);
  };
  const Decoded ahead = decoded(true);
  const Decoded one_by_one = decoded(false);
  BOOST_TEST((ahead.tokens == one_by_one.tokens));
  BOOST_TEST(ahead.highest == one_by_one.highest, boost::test_tools::per_element());
  std::set<std::int32_t> different;
  for (const auto& tokens : ahead.tokens) different.insert(tokens.begin(), tokens.end());
  BOOST_TEST(different.size() > 2U);
}

BOOST_AUTO_TEST_CASE(best_tokens_are_those_of_the_logits) {
  Pair pair(small_model(DType::kFloat16));
  const std::vector<Piece> pieces{piece_of(0, 0, 12, nullptr), piece_of(1, 0, 4, nullptr)};
  const auto logits = logits_of_pieces(*pair.gpu, pieces);
  StepArrays arrays(pieces);
  const std::vector<std::int32_t> rows = std::exchange(arrays.logit_rows, {});
  StepInput input = arrays.input();
  std::vector<std::int32_t> best(rows.size(), -9);
  input.best_token_rows = rows;
  input.best_tokens = best;
  pair.gpu->step(input, {});
  for (std::size_t row = 0; row < rows.size(); ++row) {
    const auto begin = logits.begin() + static_cast<std::ptrdiff_t>(row * 64);
    BOOST_TEST(best[row] == std::max_element(begin, begin + 64) - begin);
  }
}

BOOST_AUTO_TEST_CASE(highest_logits_are_those_of_the_logits) {
  Pair pair(small_model(DType::kFloat16));
  const std::vector<Piece> pieces{piece_of(0, 0, 12, nullptr), piece_of(1, 0, 4, nullptr)};
  const auto logits = logits_of_pieces(*pair.gpu, pieces);
  StepArrays arrays(pieces);
  // The last row is one of logits, and comes first in the run.
  std::vector<std::int32_t> rows = std::exchange(arrays.logit_rows, {});
  const std::size_t last = rows.size() - 1;
  arrays.logit_rows = {rows.back()};
  rows.pop_back();
  StepInput input = arrays.input();
  constexpr std::size_t kCount = 5;
  std::vector<RowSummary> summaries(rows.size());
  std::vector<TokenLogit> highest(kCount * rows.size());
  input.highest = {.rows = rows, .count = kCount, .summaries = summaries, .logits = highest};
  const auto row_at = [&](std::size_t row) { return std::span(logits).subspan(row * 64, 64); };
  pair.gpu->step(input, [&](std::int64_t first, std::int64_t count, const float* of_row) {
    BOOST_TEST(first == 0);
    BOOST_TEST(count == 1);
    BOOST_TEST(std::ranges::equal(std::span(of_row, 64), row_at(last)));
  });
  for (std::size_t row = 0; row < rows.size(); ++row) {
    const FoundHighest expected(row_at(row), kCount);
    BOOST_TEST(summaries[row].best_token == expected.summary.best_token);
    BOOST_TEST(summaries[row].sum_of_exponentials == expected.summary.sum_of_exponentials);
    for (std::size_t i = 0; i < kCount; ++i) {
      BOOST_TEST(highest[row * kCount + i].token == expected.highest[i].token);
      BOOST_TEST(highest[row * kCount + i].logit == expected.highest[i].logit);
    }
  }
}

BOOST_AUTO_TEST_CASE(what_gpus_cannot_run_is_named) {
  const auto finds = [](const std::string& words, const ModelOptions& options,
                        const AttentionChange& change = {}) {
    RandomModel model(options);
    change_attention(&model, change);
    RowsOfModel rows(model);
    std::string all;
    const Problems problems = problems_on_cuda(rows.program);
    for (const std::string& problem : problems.list()) all += problem + "\n";
    BOOST_TEST(all.find(words) != std::string::npos, "'" << words << "' is not in: " << all);
    BOOST_CHECK_THROW(static_cast<void>(make_cuda_engine(rows.program, std::make_shared<HostDevice>(), {})),
                      EngineError);
  };
  ModelOptions options = small_model(DType::kBFloat16);
  options.intermediate_size = 36;
  finds("an output's width is 36; expected a multiple of 8", options);
  options = small_model(DType::kBFloat16);
  options.head_norms = true;
  finds("(attention) has a norm after the rotation of either queries or keys; expected both", options,
        [](AttentionOp* op) {
          op->norms_after_rotation = true;
          op->key_norm = {};
        });
  options.shape.attention.head_dim = 24;
  finds("half of the rotated part of a head with norms after the rotation is 12; expected a multiple of 8",
        options, [](AttentionOp* op) { op->norms_after_rotation = true; });
  options = small_model(DType::kBFloat16);
  static const std::vector<float> sinks(4);
  finds("(attention) has sinks with keys as values", options, [](AttentionOp* op) {
    op->shape.values_are_keys = true;
    op->sinks = {sinks.data(), 4};
  });
  finds("(attention) has a soft cap with keys as values", options, [](AttentionOp* op) {
    op->shape.values_are_keys = true;
    op->softcap = 1.0F;
  });
  finds("(attention) has norms of heads with keys as values", options, [](AttentionOp* op) {
    op->shape.values_are_keys = true;
    op->query_norm = {sinks.data(), 4};
  });
  finds("(attention) has chunks with keys as values", options, [](AttentionOp* op) {
    op->shape.values_are_keys = true;
    op->chunk = 8;
  });
  finds("(attention) has queries that are scaled by their position, with keys as values", options,
        [](AttentionOp* op) {
          op->shape.values_are_keys = true;
          op->query_scaling_beta = 0.5F;
        });
  finds("(attention) has head_dim 584; expected at most 576", options, [](AttentionOp* op) {
    op->shape.values_are_keys = true;
    op->shape.head_dim = 584;
  });
  options.shape.attention.head_dim = 24;
  finds("the rotated part of a key that is a value is 24; expected a multiple of 16", options,
        [](AttentionOp* op) { op->shape.values_are_keys = true; });
  options = small_model(DType::kBFloat16);
  finds("(attention) has biases of positions", options, [](AttentionOp* op) {
    static const std::vector<float> biases(4 * 3);
    op->position_bias = {biases.data(), 12};
  });
  options.keep_logit_rows = true;
  finds("(keep logit rows) is one that GPUs do not run yet", options);
  const auto finds_in = [](const std::string& words, const Op& op) {
    RandomModel model(small_model(DType::kBFloat16));
    RowsOfModel rows(model);
    rows.program.body.push_back(op);
    std::string all;
    const Problems problems = problems_on_cuda(rows.program);
    for (const std::string& problem : problems.list()) all += problem + "\n";
    BOOST_TEST(all.find(words) != std::string::npos, "'" << words << "' is not in: " << all);
  };
  finds_in("(linear) has a sparse input without a ReLU-gated layer before it",
           LinearOp{.parts = {}, .has_sparse_input = true});
  finds_in("(linear) has predicted scores of neurons", LinearOp{.parts = {}, .scores = 0});
  finds_in("(linear) has records of neurons", LinearOp{.parts = {}, .neurons = {.count = 1}});
  finds_in("(causal convolution) has taps 5; expected at most 4",
           CausalConvolutionOp{.weight = {}, .taps = 5});
  finds_in("(gated convolution) has taps 5; expected at most 4", GatedConvolutionOp{.weight = {}, .taps = 5});
  finds_in("(gated delta) has key_dim 257; expected at most 256",
           GatedDeltaOp{.shape = {1, 1, 257, 8}, .log_decay = {}, .time_bias = {}});
  finds_in("(selective scan) has state_dim 257; expected at most 256",
           SelectiveScanOp{.shape = {1, 8, 1, 257}, .log_decay = {}, .time_bias = {}, .skip = {}});
  finds_in("latent_dim is 12; expected a multiple of 8",
           LatentQueriesOp{.shape = {1, 12, 16, 8, 8}, .norm = {}, .keys = {}});
  finds_in("plain_dim is 12; expected a multiple of 8",
           LatentQueriesOp{.shape = {1, 8, 16, 12, 8}, .norm = {}, .keys = {}});
  finds_in("has num_heads 1025; expected at most 1024",
           LatentQueriesOp{.shape = {1025, 8, 16, 8, 8}, .norm = {}, .keys = {}});
  finds_in("value_dim is 4; expected a multiple of 8",
           LatentValuesOp{.shape = {1, 8, 16, 8, 4}, .values = {}});
  finds_in("(latent values) has quantised matrices of heads", [] {
    LatentValuesOp op{.shape = {1, 8, 16, 8, 8}, .values = {LinearPart{}}};
    op.values.front().weight.quantization.algo = QuantAlgo::kW8A16;
    return op;
  }());
  finds_in("(gated rms norm) has groups of several ranks", GatedRmsNormOp{.weight = {}, .group_ranks = 2});

  RandomModel model(small_model(DType::kBFloat16));
  BOOST_CHECK_THROW(static_cast<void>(make_cuda_engine(model.program, std::make_shared<HostDevice>(), {})),
                    EngineError);
  RowsOfModel rows(model);
  BOOST_TEST(problems_on_cuda(rows.program).empty());
  BOOST_CHECK_THROW(static_cast<void>(make_cpu_engine(rows.program, std::make_shared<ThreadPool>(1))),
                    EngineError);
}

BOOST_AUTO_TEST_CASE(an_engine_without_adapters_runs) {
  ModelOptions options = small_model(DType::kBFloat16);
  options.max_rank = 0;
  Pair pair(options);
  const std::vector<Piece> pieces{piece_of(0, 0, 8, nullptr)};
  const auto expected = logits_of_pieces(*pair.cpu, pieces);
  const auto found = logits_of_pieces(*pair.gpu, pieces);
  for (std::size_t i = 0; i < expected.size(); ++i) BOOST_TEST(std::fabs(expected[i] - found[i]) < 0.3F);
}

BOOST_AUTO_TEST_CASE(too_little_memory_is_refused) {
  RandomModel model(small_model(DType::kBFloat16));
  RowsOfModel rows(model);
  BOOST_CHECK_THROW(static_cast<void>(make_cuda_engine(
                        rows.program, std::make_shared<HostDevice>(std::size_t{1} << 16), {})),
                    ConfigError);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace adaptrt::testing
