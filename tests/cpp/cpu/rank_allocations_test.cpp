// Memory of exchanges between ranks: in steady state, steps of one kind allocate nothing.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"
#include "sharded/echo.h"
#include "sharded/rank_programs.h"
#include "support/allocations.h"

namespace adaptrt::testing::rank_allocations_test {
namespace {

namespace data = boost::unit_test::data;

/// Program with the sums of all layers, the sums of norms over all heads, and fully sharded adapters.
Program program_of(const Program& whole, std::int32_t num_ranks) {
  Program program = with_shared_adapters(with_cut_layers(whole, 0, num_ranks));
  for (std::size_t i = 0; i < program.body.size(); ++i) {
    auto* op = std::get_if<AttentionOp>(&program.body[i]);
    if (op == nullptr) continue;
    const AllHeadsNormOp norm{.qkv = op->qkv,
                              .query_norm = std::exchange(op->query_norm, {}),
                              .key_norm = std::exchange(op->key_norm, {}),
                              .whole_query_size = op->shape.query_size() * num_ranks,
                              .whole_key_size = op->shape.key_value_size() * num_ranks,
                              .counts_keys = true,
                              .epsilon = op->norm_epsilon};
    program.body.insert(program.body.begin() + static_cast<std::ptrdiff_t>(i++), norm);
  }
  return program;
}

BOOST_AUTO_TEST_SUITE(rank_allocations)

// 256 floats per token: sums of short steps are computed at once, those of 1600 tokens in chunks.
BOOST_DATA_TEST_CASE(steady_steps_allocate_nothing, data::make({2, 3}) * data::make({1, 100, 1600}),
                     num_ranks, tokens) {
  RandomModel model({.shape = {.hidden_size = 256, .attention = {2, 1, 8}},
                     .intermediate_size = 32,
                     .max_num_tokens = 1600,
                     .max_seq_len = 1600,
                     .max_rank = 4});
  for (Op& op : model.program.body) {
    auto* attention = std::get_if<AttentionOp>(&op);
    if (attention == nullptr) continue;
    Random random(1);
    attention->query_norm = model.storage().vector(attention->shape.query_size(), 0.5F, 1.5F, &random);
    attention->key_norm = model.storage().vector(attention->shape.key_value_size(), 0.5F, 1.5F, &random);
  }
  const DeviceAdapter adapter = model.adapter(1, true);
  const auto engine = make_cpu_engine(program_of(model.program, num_ranks), std::make_shared<ThreadPool>(2),
                                      "", nullptr, std::make_shared<Echo>(num_ranks));
  engine->allocate_kv_blocks(100);
  Piece piece{.tokens = std::vector<std::int32_t>(static_cast<std::size_t>(tokens), 7),
              .prompt_length = static_cast<std::int32_t>(tokens),
              .adapter = &adapter};
  for (std::int32_t block = 0; block < 100; ++block) piece.blocks.push_back(block);
  StepArrays arrays({piece});
  arrays.logit_rows = {0};
  const StepInput input = arrays.input();
  const LogitsSink sink = [](std::int64_t, std::int64_t, const float*) {};
  for (int before = 0; before < 2; ++before) engine->step(input, sink);
  AllocationWatch watch;
  engine->step(input, sink);
  const std::int64_t count = watch.stop();
  BOOST_TEST(count == 0, "a step allocates " << count << " times, first by\n" << watch.first_calls());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::rank_allocations_test
