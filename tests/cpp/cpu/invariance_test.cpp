// Batch invariance: logits have the same bits in any batch, for each decision in how a request is served.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <list>
#include <numeric>
#include <string>
#include <vector>

#include "adaptrt/cpu/kernel_table.h"
#include "cpu/crowds.h"
#include "cpu/random_model.h"
#include "cpu/weight_forms.h"
#include "emulated_tiles/kernel_tables.h"

namespace adaptrt::testing::invariance_test {
namespace {

namespace data = boost::unit_test::data;
using crowds::check_crowd;
using crowds::check_invariance;
using crowds::kNumBlocks;
using crowds::make_requests;
using crowds::random_tokens;
using crowds::Request;
using crowds::run_alone;
using crowds::Served;

BOOST_AUTO_TEST_SUITE(invariance)

BOOST_DATA_TEST_CASE(any_crowd_gives_the_bits_of_a_request_alone, kernel_tables() * data::make({0, 1, 2}),
                     kernels, dtype_index) {
  check_invariance({.dtype = kDTypes[dtype_index], .biases = true, .max_num_tokens = 400}, kernels,
                   crowds::kMoreThreadCounts);
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

constexpr LinearEpilogue kReluEpilogues[] = {LinearEpilogue::kRelu, LinearEpilogue::kReluMul,
                                             LinearEpilogue::kReluMulRelu};

// Steps of few rows read only the active neurons; larger batches and prompts read all.
BOOST_DATA_TEST_CASE(with_what_a_relu_closes_left_out,
                     kernel_tables() * data::make({0, 1, 2}) * data::xrange(std::size(kReluEpilogues)),
                     kernels, dtype_index, epilogue) {
  const DType dtype = kDTypes[dtype_index];
  const LinearEpilogue activation = kReluEpilogues[epilogue];
  if (dtype == DType::kFloat16 && is_relu_gated(activation)) return;  // no such weights exist
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

// Steps of few rows also skip the gates that predictors close, and each row has the gates of its own scores.
BOOST_DATA_TEST_CASE(with_gates_that_predictors_close,
                     kernel_tables() * data::make({0, 2}) * data::xrange(std::size(kReluEpilogues)) *
                         data::make({0.15F, 0.35F}),
                     kernels, dtype_index, epilogue, least_score) {
  check_invariance({.dtype = kDTypes[dtype_index],
                    .shape = {.hidden_size = 72, .attention = {4, 2, 12}},
                    .intermediate_size = 192,
                    .biases = true,
                    .activation = kReluEpilogues[epilogue],
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
                    .quantization = codebook(kDTypes[dtype_index])},
                   kernels);
}

/// Sizes in whole words.
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

// Compressed adapters give the bits of exact ones, with few rows and with many.
BOOST_DATA_TEST_CASE(with_compressed_adapters, kernel_tables() * data::make({16, 40}), kernels, max_rank) {
  ModelOptions options{.dtype = DType::kBFloat16,
                       .num_layers = 1,
                       .shape = {.hidden_size = 80, .attention = {4, 2, 16}},
                       .intermediate_size = 192,
                       .max_num_tokens = 400,
                       .max_rank = max_rank};
  Served served(options, kernels);
  Random random(options.seed + 100);
  auto requests = make_requests(served, 7, 100, &random);
  run_alone(served, &requests);
  int compressed = 0;
  for (std::size_t i = 0; i < served.adapters.size(); i += i == 0 ? 1 : 2) {  // one of four stays exact
    compressed += served.model.compress(&served.adapters[i]);
  }
  BOOST_TEST(compressed > 6);
  for (const int threads : {1, 3}) check_crowd(served, requests, threads, &random);
}

// Int8 adapters, with few rows and with many, next to an exact one. Two of them share A and differ in scales.
BOOST_DATA_TEST_CASE(with_int8_adapters, kernel_tables() * data::make({0, 1, 2}), kernels, dtype_index) {
  ModelOptions options{.dtype = kDTypes[dtype_index],
                       .num_layers = 1,
                       .shape = {.hidden_size = 80, .attention = {4, 2, 16}},
                       .intermediate_size = 192,
                       .max_num_tokens = 400,
                       .max_rank = 40};
  Served served(options, kernels);
  for (std::size_t i = 0; i < 2; ++i) served.model.round_to_int8(&served.adapters[i]);
  std::list<std::vector<float>> doubled;
  served.adapters[2] = served.adapters[1];
  for (DeviceSite& site : served.adapters[2].sites) {
    if (site.rank_scales == nullptr) continue;
    auto& scales = doubled.emplace_back(site.rank_scales, site.rank_scales + site.total_rank);
    for (float& scale : scales) scale *= 2;
    site.rank_scales = scales.data();
  }
  BOOST_TEST(doubled.size() == 4U);
  Random random(options.seed + 100);
  auto requests = make_requests(served, 7, 100, &random);
  run_alone(served, &requests);
  for (const int threads : {1, 3}) check_crowd(served, requests, threads, &random);
}

// A prompt's outputs are larger than those written through caches, and its rows are enough for every many-row
// optimisation; in chunks they are not.
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
    std::vector<std::int32_t> tokens = random_tokens(served, kTokens, &random);
    std::vector<std::int32_t> blocks(kNumBlocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::vector<Request> requests{{tokens, blocks, served.adapter_of(0)}};
    run_alone(served, &requests);
    check_crowd(served, requests, 2, &random);
  }
}

BOOST_AUTO_TEST_CASE(kernel_tables_agree_within_rounding) {
  ModelOptions options{.dtype = DType::kFloat32, .max_num_tokens = 400, .max_rank = 9};
  // The residual stream has values of a few units; each of two layers adds rounding errors of sums over at
  // most 48 products.
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
