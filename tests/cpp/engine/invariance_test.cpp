// Logits have the same bits whatever shares a step with a token: decision by decision of how a request is
// served.

#include <algorithm>
#include <array>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "adaptrt/kernels/kernel_table.h"
#include "emulated_tiles/kernel_tables.h"
#include "engine/random_model.h"
#include "support/sanitized.h"

namespace adaptrt::testing::invariance_test {
namespace {

namespace data = boost::unit_test::data;

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr Quantization kQuantizations[] = {
    {.algo = QuantAlgo::kW8A16},
    {.algo = QuantAlgo::kW8A8},
    {.algo = QuantAlgo::kW4A16, .group_size = 16},
    {.algo = QuantAlgo::kW4A16, .group_size = 32, .zero_points = true},
    {.algo = QuantAlgo::kW4A16, .group_size = 8, .zero_points = true, .scale_type = DType::kFloat16},
    {.algo = QuantAlgo::kW8A16, .group_size = 24, .scale_type = DType::kFloat16},
    {.algo = QuantAlgo::kW8A16, .zero_points = true},
    {.algo = QuantAlgo::kW8A16, .group_size = 24, .zero_points = true, .reordered = true},
    {.algo = QuantAlgo::kW4A16, .group_size = 16, .scale_type = DType::kFloat16, .reordered = true},
    {.algo = QuantAlgo::kW4A8, .group_size = 16, .zero_points = true},
    {.algo = QuantAlgo::kW4A8, .group_size = 8, .scale_type = DType::kFloat16},
};
/// LLM.int8() as engines of a type hold it.
Quantization llm_int8(DType dtype) {
  return {.algo = QuantAlgo::kW8A16,
          .scale_type = DType::kFloat32,
          .code = WeightCode::kLLMInt8,
          .value_type = dtype};
}

/// NF4 as engines of a type hold it.
Quantization coded(DType dtype) {
  return {.algo = QuantAlgo::kW4A16,
          .group_size = 8,
          .scale_type = DType::kFloat32,
          .code = WeightCode::kNF4,
          .value_type = dtype == DType::kFloat32 ? DType::kBFloat16 : dtype};
}
/// FP8 with as many inputs in a group.
Quantization float8(DType dtype, std::int64_t group_size) {
  return {.algo = QuantAlgo::kW8A16,
          .group_size = group_size,
          .scale_type = DType::kFloat32,
          .code = WeightCode::kE4M3,
          .value_type = dtype};
}
constexpr std::int32_t kNumBlocks = 160;

/// A model and its adapters; engines of it differ in threads only.
struct Served {
  Served(ModelOptions options, std::string kernels_name) : model(options), kernels(std::move(kernels_name)) {
    adapters.push_back(model.adapter(11, false));
    adapters.push_back(model.adapter(12, true));
    adapters.push_back(model.adapter(13, true, 1));
    adapters.push_back(model.adapter(14, false, options.max_rank));
  }

  [[nodiscard]] std::unique_ptr<Engine> engine(int threads) const {
    auto made = make_cpu_engine(model.program, std::make_shared<ThreadPool>(threads), kernel_table(kernels));
    made->allocate_kv_blocks(kNumBlocks);
    return made;
  }

  /// The adapter of request i: one of them, or none.
  [[nodiscard]] const DeviceAdapter* adapter_of(std::size_t i) const {
    return i % 5 == 4 ? nullptr : &adapters[i % 5];
  }

  RandomModel model;
  std::string kernels;
  std::vector<DeviceAdapter> adapters;
};

/// A request whose tokens are all known, and what is done of it.
struct Request {
  Request(std::vector<std::int32_t> all, std::vector<std::int32_t> own_blocks,
          const DeviceAdapter* own_adapter)
      : tokens(std::move(all)), blocks(std::move(own_blocks)), adapter(own_adapter) {}

  /// The next `count` tokens as a piece of a step.
  [[nodiscard]] Piece next(std::size_t count) const {
    const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(done);
    return {.tokens = {begin, begin + static_cast<std::ptrdiff_t>(count)},
            .first_position = static_cast<std::int32_t>(done),
            .prompt_length = static_cast<std::int32_t>(tokens.size()),
            .blocks = blocks,
            .adapter = adapter,
            .adapter_from = adapter_from};
  }

  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> blocks;
  const DeviceAdapter* adapter;
  std::int32_t adapter_from = 0;
  std::size_t done = 0;
  std::vector<float> logits;
};

std::vector<Request> make_requests(const Served& served, std::size_t count, std::int64_t longest,
                                   Random* random) {
  const auto& program = served.model.program;
  std::vector<std::int32_t> blocks(kNumBlocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  for (std::size_t i = blocks.size() - 1; i > 0; --i) {
    std::swap(blocks[i], blocks[static_cast<std::size_t>(random->below(static_cast<std::int64_t>(i) + 1))]);
  }
  std::vector<Request> requests;
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(1 + random->below(longest)));
    for (auto& token : tokens) token = static_cast<std::int32_t>(random->below(program.vocab_size));
    std::vector<std::int32_t> own;
    for (std::size_t used = 0; used < tokens.size();
         used += static_cast<std::size_t>(program.tokens_per_block)) {
      own.push_back(blocks.back());
      blocks.pop_back();
    }
    requests.emplace_back(std::move(tokens), std::move(own), served.adapter_of(i));
    // Every other adapter acts from somewhere within its request on.
    Request& made = requests.back();
    if (i % 2 == 0) made.adapter_from = static_cast<std::int32_t>(made.tokens.size() / 2);
  }
  return requests;
}

/// Logits of all positions of each request, alone, in one chunk, with one thread.
void run_alone(const Served& served, std::vector<Request>* requests) {
  for (auto& request : *requests) {
    const auto engine = served.engine(1);
    const StepArrays arrays({request.next(request.tokens.size())});
    request.logits = logits_of(engine.get(), arrays.input());
  }
}

/// Runs all requests together in random chunks and crowds, and checks each logit as it comes.
void check_crowd(const Served& served, std::vector<Request> requests, int threads, Random* random) {
  const auto engine = served.engine(threads);
  const auto vocab = static_cast<std::size_t>(served.model.program.vocab_size);
  while (true) {
    std::vector<Request*> chosen;
    std::vector<Piece> pieces;
    std::vector<std::size_t> counts;
    for (auto& request : requests) {
      const std::size_t left = request.tokens.size() - request.done;
      if (left == 0 || random->below(3) == 0) continue;
      const std::size_t count = random->below(2) == 0
                                    ? 1
                                    : 1 + static_cast<std::size_t>(random->below(
                                              std::min<std::int64_t>(40, static_cast<std::int64_t>(left))));
      chosen.push_back(&request);
      counts.push_back(std::min(count, left));
      pieces.push_back(request.next(counts.back()));
    }
    if (pieces.empty()) {
      if (std::all_of(requests.begin(), requests.end(),
                      [](const Request& r) { return r.done == r.tokens.size(); })) {
        return;
      }
      continue;
    }
    const StepArrays arrays(pieces);
    const auto logits = logits_of(engine.get(), arrays.input());
    std::size_t row = 0;
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      const float* expected = chosen[i]->logits.data() + chosen[i]->done * vocab;
      BOOST_TEST_REQUIRE(
          std::memcmp(logits.data() + row * vocab, expected, counts[i] * vocab * sizeof(float)) == 0,
          "threads " << threads << " position " << chosen[i]->done << " count " << counts[i]);
      chosen[i]->done += counts[i];
      row += counts[i];
    }
  }
}

// Tokens of the longest request, and of how many threads crowds are computed: what a step does with memory
// and threads is the same for fewer.
constexpr std::int64_t kLongestRequest = sanitized(45, 150);
const std::vector<int> kThreadCounts = kSanitizedPart ? std::vector{3} : std::vector{1, 2, 3, 4};

void check_invariance(ModelOptions options, const std::string& kernels) {
  options.max_rank = 9;
  const Served served(options, kernels);
  Random random(options.seed + 100);
  auto requests = make_requests(served, 7, kLongestRequest, &random);
  run_alone(served, &requests);
  for (const int threads : kThreadCounts) check_crowd(served, requests, threads, &random);
}

BOOST_AUTO_TEST_SUITE(invariance)

BOOST_DATA_TEST_CASE(any_crowd_gives_the_bits_of_a_request_alone, kernel_tables() * data::make({0, 1, 2}),
                     kernels, dtype_index) {
  check_invariance({.dtype = kDTypes[dtype_index], .biases = true, .max_num_tokens = 400}, kernels);
}

BOOST_DATA_TEST_CASE(with_quantized_weights,
                     kernel_tables() * data::xrange(std::size(kQuantizations)) * data::make({0, 2}), kernels,
                     quantization_index, dtype_index) {
  check_invariance({.dtype = kDTypes[dtype_index],
                    .biases = true,
                    .max_num_tokens = 400,
                    .quantization = kQuantizations[quantization_index]},
                   kernels);
}

// A few rows read what a ReLU does not close, crowds and prompts all of it.
BOOST_DATA_TEST_CASE(with_what_a_relu_closes_left_out,
                     kernel_tables() * data::make({0, 1, 2}) * data::make({7, 8, 9}), kernels, dtype_index,
                     epilogue) {
  const DType dtype = kDTypes[dtype_index];
  const auto activation = static_cast<LinearEpilogue>(epilogue);
  if (dtype == DType::kFloat16 && is_relu_gated(activation)) return;  // there are no such weights
  check_invariance({.dtype = dtype,
                    .shape = {.hidden_size = 72, .attention = {4, 2, 12}},
                    .intermediate_size = 192,
                    .biases = true,
                    .activation = activation,
                    .threshold = activation == LinearEpilogue::kReluMul ? 0.1F : 0.0F,
                    .gate_bias = -1.2F,
                    .is_sparse = true,
                    .max_num_tokens = 400},
                   kernels);
}

// A few rows read what predictors leave of the gates, too, and each row has the gates of its own scores.
BOOST_DATA_TEST_CASE(with_gates_that_predictors_close,
                     kernel_tables() * data::make({0, 2}) * data::make({7, 8, 9}) *
                         data::make({0.15F, 0.35F}),
                     kernels, dtype_index, epilogue, least_score) {
  check_invariance({.dtype = kDTypes[dtype_index],
                    .shape = {.hidden_size = 72, .attention = {4, 2, 12}},
                    .intermediate_size = 192,
                    .biases = true,
                    .activation = static_cast<LinearEpilogue>(epilogue),
                    .gate_bias = 0.4F,
                    .is_sparse = true,
                    .predictor_rank = 20,
                    .least_score = least_score,
                    .max_num_tokens = 400},
                   kernels);
}

BOOST_DATA_TEST_CASE(with_numbers_of_a_table, kernel_tables() * data::make({0, 1, 2}), kernels, dtype_index) {
  check_invariance({.dtype = kDTypes[dtype_index],
                    .intermediate_size = 136,
                    .biases = true,
                    .max_num_tokens = 400,
                    .quantization = coded(kDTypes[dtype_index])},
                   kernels);
}

/// Of sizes that are whole words.
BOOST_DATA_TEST_CASE(with_fewer_bits, kernel_tables() * data::make({2, 3}) * data::make({0, 2}), kernels,
                     bits, dtype_index) {
  check_invariance({.dtype = kDTypes[dtype_index],
                    .shape = {.hidden_size = 96, .attention = {4, 2, 16}},
                    .intermediate_size = 160,
                    .biases = true,
                    .max_num_tokens = 400,
                    .quantization = {.algo = QuantAlgo::kW4A16,
                                     .group_size = bits == 2 ? 16 : 32,
                                     .zero_points = bits == 2,
                                     .scale_type = DType::kFloat16,
                                     .bits = bits}},
                   kernels);
}

BOOST_DATA_TEST_CASE(with_numbers_of_float8, kernel_tables() * data::make({0, 1, 2}) * data::make({0, 24}),
                     kernels, dtype_index, group_size) {
  check_invariance({.dtype = kDTypes[dtype_index],
                    .intermediate_size = 136,
                    .biases = true,
                    .max_num_tokens = 400,
                    .quantization = float8(kDTypes[dtype_index], group_size)},
                   kernels);
}

BOOST_DATA_TEST_CASE(with_llm_int8, kernel_tables() * data::make({0, 1, 2}), kernels, dtype_index) {
  check_invariance({.dtype = kDTypes[dtype_index],
                    .intermediate_size = 136,
                    .biases = true,
                    .max_num_tokens = 400,
                    .quantization = llm_int8(kDTypes[dtype_index])},
                   kernels);
}

BOOST_DATA_TEST_CASE(with_experts_whose_inputs_are_reordered, kernel_tables(), kernels) {
  check_invariance(
      {.dtype = DType::kBFloat16,
       .num_experts = 6,
       .routing = {.top_k = 2},
       .max_num_tokens = 400,
       .quantization = {.algo = QuantAlgo::kW4A16, .group_size = 8, .zero_points = true, .reordered = true}},
      kernels);
}

BOOST_DATA_TEST_CASE(with_an_int8_kv_cache, kernel_tables() * data::make({0, 1, 2}), kernels, dtype_index) {
  check_invariance({.dtype = kDTypes[dtype_index], .max_num_tokens = 400, .int8_kv_cache = true}, kernels);
}

BOOST_DATA_TEST_CASE(with_head_norms_a_window_and_odd_blocks, data::make({false, true}), int8_kv_cache) {
  check_invariance({.dtype = DType::kBFloat16,
                    .shape = {40, 6, 2, 20},
                    .intermediate_size = 129,
                    .head_norms = true,
                    .sliding_window = 70,
                    .max_num_tokens = 400,
                    .tokens_per_block = 23,
                    .seed = 2,
                    .int8_kv_cache = int8_kv_cache},
                   "");
}

BOOST_AUTO_TEST_CASE(with_heads_of_more_than_one_panel_and_one_key_value_head) {
  check_invariance({.dtype = DType::kFloat32,
                    .shape = {32, 5, 1, 80},
                    .intermediate_size = 64,
                    .max_num_tokens = 400,
                    .tokens_per_block = 64,
                    .seed = 3},
                   "");
}

BOOST_DATA_TEST_CASE(with_heads_that_differ_by_layer, kernel_tables() * data::make({false, true}), kernels,
                     int8_kv_cache) {
  check_invariance({.dtype = DType::kBFloat16,
                    .num_layers = 3,
                    .shape = {40, 6, 2, 20},
                    .other_attention = AttentionShape{4, 4, 36},
                    .intermediate_size = 64,
                    .head_norms = true,
                    .max_num_tokens = 400,
                    .tokens_per_block = 23,
                    .max_rank = 9,
                    .seed = 4,
                    .int8_kv_cache = int8_kv_cache},
                   kernels);
}

void check_experts(const std::string& kernels, const Quantization& quantization, DType dtype) {
  const float bias[] = {0.5F, -0.25F, 0.0F, 0.125F, -0.5F, 0.25F, 0.375F, 0.0F};
  check_invariance({.dtype = dtype,
                    .intermediate_size = 136,
                    .num_experts = 8,
                    .routing = {.scores = RouterScores::kSigmoid,
                                .top_k = 3,
                                .num_groups = 4,
                                .groups_taken = 2,
                                .normalised = true,
                                .bias = {bias, 8}},
                    .biases = true,
                    .max_num_tokens = 400,
                    .max_rank = 9,
                    .quantization = quantization},
                   kernels);
}

/// Places in kQuantizations; -1 is none. Threads share the same of all that are quantised.
#if defined(ADAPTRT_SANITIZE_PART) && defined(__SANITIZE_THREAD__)
constexpr std::array kExpertsQuantizations = {-1, 2};
#else
constexpr std::array kExpertsQuantizations = {-1, 0, 1, 2, 3, 4, 5};
#endif

BOOST_DATA_TEST_CASE(with_experts, kernel_tables() * data::make(kExpertsQuantizations), kernels,
                     quantization_index) {
  const Quantization quantization =
      quantization_index < 0 ? Quantization{} : kQuantizations[quantization_index];
  check_experts(kernels, quantization, DType::kBFloat16);
}

BOOST_DATA_TEST_CASE(with_experts_of_numbers_of_a_table, kernel_tables(), kernels) {
  check_experts(kernels, coded(DType::kBFloat16), DType::kBFloat16);
  check_experts(kernels, float8(DType::kBFloat16, 128), DType::kBFloat16);
}

BOOST_DATA_TEST_CASE(with_experts_of_other_types, data::make({0, 1}), dtype_index) {
  check_experts("", {}, kDTypes[dtype_index]);
}

// A step's tokens go through experts in slices of 8192 rows; the second prompt begins in one and ends in the
// next. Outputs of so many rows are made and added up some panels at a time.
BOOST_AUTO_TEST_CASE(with_more_rows_of_experts_than_a_slice_has) {
  const Served served({.dtype = DType::kFloat32,
                       .num_layers = 1,
                       .shape = {144, 1, 1, 8},
                       .intermediate_size = 16,
                       .num_experts = 8,
                       .routing = {.top_k = 4},
                       .max_num_tokens = 2500,
                       .max_seq_len = 1500,
                       .max_rank = 9},
                      "");
  Random random(9);
  std::vector<Request> requests;
  std::int32_t first_block = 0;
  for (const std::size_t length : {1400, 1100}) {
    std::vector<std::int32_t> tokens(length);
    for (auto& token : tokens) {
      token = static_cast<std::int32_t>(random.below(served.model.program.vocab_size));
    }
    std::vector<std::int32_t> blocks((length + 15) / 16);
    std::iota(blocks.begin(), blocks.end(), first_block);
    first_block += static_cast<std::int32_t>(blocks.size());
    requests.emplace_back(std::move(tokens), std::move(blocks), served.adapter_of(requests.size()));
  }
  run_alone(served, &requests);
  const StepArrays together({requests[0].next(1400), requests[1].next(1100)});
  const auto logits = logits_of(served.engine(2).get(), together.input());
  std::vector<float> expected = requests[0].logits;
  expected.insert(expected.end(), requests[1].logits.begin(), requests[1].logits.end());
  BOOST_TEST_REQUIRE(logits.size() == expected.size());
  BOOST_TEST(std::memcmp(logits.data(), expected.data(), expected.size() * sizeof(float)) == 0);
}

// A prompt's outputs are larger than those that are written through caches, and its rows are enough for all
// that is done for many; in pieces they are not.
BOOST_DATA_TEST_CASE(with_a_prompt_of_many_rows, kernel_tables(), kernels) {
  constexpr std::size_t kTokens = 300;
  for (const Quantization& quantization : {Quantization{}, Quantization{.algo = QuantAlgo::kW8A8}}) {
    const Served served({.dtype = DType::kBFloat16,
                         .num_layers = 1,
                         .shape = {64, 40, 8, 16},
                         .intermediate_size = 1792,
                         .max_num_tokens = kTokens,
                         .max_rank = 9,
                         .quantization = quantization},
                        kernels);
    Random random(7);
    std::vector<std::int32_t> tokens(kTokens);
    for (auto& token : tokens) {
      token = static_cast<std::int32_t>(random.below(served.model.program.vocab_size));
    }
    std::vector<std::int32_t> blocks(kNumBlocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::vector<Request> requests{{tokens, blocks, served.adapter_of(0)}};
    run_alone(served, &requests);
    check_crowd(served, requests, 2, &random);
  }
}

BOOST_AUTO_TEST_CASE(kernel_tables_agree_within_rounding) {
  ModelOptions options{.dtype = DType::kFloat32, .max_num_tokens = 400, .max_rank = 9};
  // The residual stream is some units wide; each of two layers adds roundings of sums over at most 48
  // products.
  constexpr float kTolerance = 1e-4F;
  std::vector<float> first;
  for (const auto* table : all_kernel_tables()) {
    const Served served(options, std::string(table->name));
    Random random(5);
    auto requests = make_requests(served, 3, 100, &random);
    run_alone(served, &requests);
    std::vector<float> all;
    for (const auto& request : requests) all.insert(all.end(), request.logits.begin(), request.logits.end());
    if (first.empty()) first = all;
    BOOST_TEST_REQUIRE(all.size() == first.size());
    for (std::size_t i = 0; i < all.size(); ++i) BOOST_TEST_REQUIRE(std::abs(all[i] - first[i]) < kTolerance);
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::invariance_test
