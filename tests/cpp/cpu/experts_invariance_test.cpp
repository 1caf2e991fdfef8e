// Batch invariance of models with experts: logits have the same bits in any batch.

#include <array>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cpu/crowds.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"
#include "cpu/weight_forms.h"
#include "emulated_tiles/kernel_tables.h"

namespace adaptrt::testing::experts_invariance_test {
namespace {

namespace data = boost::unit_test::data;
using crowds::check_crowd;
using crowds::check_invariance;
using crowds::random_tokens;
using crowds::Request;
using crowds::run_alone;
using crowds::Served;

BOOST_AUTO_TEST_SUITE(invariance)

BOOST_DATA_TEST_CASE(with_experts_in_act_order, kernel_tables(), kernels) {
  check_invariance(
      {.dtype = DType::kBFloat16,
       .num_experts = 6,
       .routing = {.top_k = 2, .scales_inputs = true},
       .max_num_tokens = 400,
       .quantization = {.algo = QuantAlgo::kW4A16, .group_size = 8, .zero_points = true, .act_order = true}},
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
                                .topk_groups = 2,
                                .norm_topk_prob = true,
                                .bias = {bias, 8}},
                    .biases = true,
                    .max_num_tokens = 400,
                    .max_rank = 9,
                    .quantization = quantization},
                   kernels);
}

/// Indices into kQuantizations; -1 is none. Threads share the same data for all quantised ones.
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
  check_experts(kernels, codebook(DType::kBFloat16), DType::kBFloat16);
  check_experts(kernels, float8(DType::kBFloat16, 128), DType::kBFloat16);
}

BOOST_DATA_TEST_CASE(with_experts_of_other_types, data::make({0, 1}), dtype_index) {
  check_experts("", {}, kDTypes[dtype_index]);
}

// Experts process a step's tokens in slices of 8192 rows; the second prompt begins in one slice and ends in
// the next. With so many rows, outputs are computed and summed a few panels at a time.
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
    std::vector<std::int32_t> tokens = random_tokens(served, length, &random);
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

// Each thread computes its own panels of `down` if there are enough for all threads; otherwise threads share
// them. With few threads and no adapter, each thread also packs the rows of its experts that have many. With
// five panels, one thread takes two at a time, five threads take one each, and two or three threads share
// them.
BOOST_DATA_TEST_CASE(with_experts_whose_rows_threads_pack, kernel_tables(), kernels) {
  constexpr std::size_t kTokens = 200;
  const Served served({.dtype = DType::kBFloat16,
                       .num_layers = 1,
                       .shape = {.hidden_size = 300, .attention = {4, 2, 12}},
                       .intermediate_size = 72,
                       .num_experts = 8,
                       .routing = {.top_k = 4, .norm_topk_prob = true},
                       .max_num_tokens = 400,
                       .max_rank = 9},
                      kernels);
  Random random(11);
  std::vector<Request> requests;
  for (std::int32_t i = 0; i < 2; ++i) {
    std::vector<std::int32_t> tokens = random_tokens(served, kTokens, &random);
    std::vector<std::int32_t> blocks((kTokens + 15) / 16);
    std::iota(blocks.begin(), blocks.end(), i * static_cast<std::int32_t>(blocks.size()));
    requests.emplace_back(std::move(tokens), std::move(blocks), i == 0 ? nullptr : &served.adapters[0]);
  }
  run_alone(served, &requests);
  const auto check = [&](const std::vector<Piece>& pieces, const std::vector<float>& expected, int threads) {
    const auto logits = logits_of(served.engine(threads).get(), StepArrays(pieces).input());
    BOOST_TEST_REQUIRE(logits.size() == expected.size());
    BOOST_TEST(std::memcmp(logits.data(), expected.data(), expected.size() * sizeof(float)) == 0,
               "threads " << threads << " pieces " << pieces.size());
  };
  std::vector<float> both = requests[0].logits;
  both.insert(both.end(), requests[1].logits.begin(), requests[1].logits.end());
  for (const int threads : {1, 2, 3, 5}) {
    check({requests[0].next(kTokens)}, requests[0].logits, threads);
    check({requests[0].next(kTokens), requests[1].next(kTokens)}, both, threads);
  }
  check_crowd(served, requests, 2, &random);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::experts_invariance_test
