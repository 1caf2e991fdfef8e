#include "adaptrt/engine/step_profile.h"

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/core/thread_pool.h"
#include "adaptrt/cpu/cpu_engine.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"
#include "sharded/echo.h"
#include "sharded/rank_programs.h"

namespace adaptrt::step_profile_test {
namespace {

using testing::ModelOptions;
using testing::Piece;
using testing::RandomModel;
using testing::StepArrays;

constexpr std::int64_t kTwoBytes = 2;

/// bfloat16, one layer: hidden 48, 4 heads and 2 key-value heads of 12, inner size 37 (padded to 38 as k).
const ModelOptions kOptions{.dtype = DType::kBFloat16, .num_layers = 1, .biases = true, .max_rank = 3};

std::shared_ptr<StepProfile> profile_of(const RandomModel& model, const std::vector<Piece>& pieces,
                                        int threads = 2) {
  auto profile = std::make_shared<StepProfile>(4);
  const auto engine = make_cpu_engine(model.program, std::make_shared<ThreadPool>(threads), "", profile);
  engine->allocate_kv_blocks(8);
  StepArrays arrays(pieces);
  engine->step(arrays.input(), [](std::int64_t, std::int64_t, const float*) {});
  return profile;
}

/// Five prompt tokens after three that are already computed, and one generated token at position 9.
std::vector<Piece> prefill_and_decode(const DeviceAdapter* first, const DeviceAdapter* second) {
  return {
      {.tokens = {1, 2, 3, 4, 5}, .first_position = 3, .prompt_length = 8, .blocks = {0}, .adapter = first},
      {.tokens = {6}, .first_position = 9, .prompt_length = 8, .blocks = {1}, .adapter = second}};
}

template <class Wanted>
std::vector<OpCost> costs_of(const StepRecord& step, const std::vector<Op>& ops, StepSection section) {
  std::vector<OpCost> costs;
  for (const auto& record : step.ops) {
    if (record.section != section) continue;
    if (std::holds_alternative<Wanted>(ops[static_cast<std::size_t>(record.index)]))
      costs.push_back(record.cost);
  }
  return costs;
}

BOOST_AUTO_TEST_SUITE(step_profile)

BOOST_AUTO_TEST_CASE(a_step_has_all_of_its_ops_one_after_another) {
  RandomModel model(kOptions);
  model.program.max_batch_size = 4;  // six rows of logits then need two slices
  const auto steps = profile_of(model, prefill_and_decode(nullptr, nullptr), 3)->take_steps();
  BOOST_REQUIRE(steps.size() == 1);
  const StepRecord& step = steps[0];
  BOOST_TEST(step.num_tokens == 6);
  BOOST_TEST(step.num_sequences == 2);
  BOOST_TEST(step.num_adapters == 0);
  BOOST_TEST(step.num_logit_rows == 6);
  BOOST_REQUIRE(step.ops.size() == model.program.body.size() + 2 * (model.program.head.size() + 1));
  double before = step.begin;
  for (const auto& op : step.ops) {
    BOOST_TEST(op.begin >= before);
    BOOST_TEST(op.end >= op.begin);
    BOOST_REQUIRE(op.busy_seconds.size() == 3);
    for (const double busy : op.busy_seconds) BOOST_TEST((busy >= 0.0 && busy <= op.end - op.begin));
    before = op.end;
  }
  BOOST_TEST(step.end >= before);
  for (std::size_t i = 0; i < model.program.body.size(); ++i) {
    BOOST_TEST((step.ops[i].section == StepSection::kBody));
    BOOST_TEST(step.ops[i].index == static_cast<std::int32_t>(i));
  }
  BOOST_TEST((step.ops.back().section == StepSection::kSink));
}

BOOST_AUTO_TEST_CASE(linear_ops_count_weights_and_products) {
  RandomModel model(kOptions);
  const auto steps = profile_of(model, prefill_and_decode(nullptr, nullptr))->take_steps();
  const auto linear = costs_of<LinearOp>(steps.at(0), model.program.body, StepSection::kBody);
  BOOST_REQUIRE(linear.size() == 4);
  // qkv: 96 rows of 48, float32 biases; reads bfloat16[6, 48], writes float32[6, 96].
  BOOST_TEST((linear[0] == OpCost{.weight_bytes = 96 * 48 * kTwoBytes + 96 * 4,
                                  .activation_bytes = 6 * 48 * kTwoBytes + 6 * 96 * 4,
                                  .flops = 2 * 6 * 96 * 48}));
  // Down projection of the MLP: 48 rows of 37, padded to 38; adds to float32[6, 48].
  BOOST_TEST((linear[3] == OpCost{.weight_bytes = 48 * 38 * kTwoBytes + 48 * 4,
                                  .activation_bytes = 6 * 37 * kTwoBytes + 2 * 6 * 48 * 4,
                                  .flops = 2 * 6 * 48 * 37}));
  const auto head = costs_of<LinearOp>(steps[0], model.program.head, StepSection::kHead);
  BOOST_REQUIRE(head.size() == 1);
  BOOST_TEST(head[0].weight_bytes == 61 * 48 * kTwoBytes);
  BOOST_TEST(head[0].flops == 2 * 6 * 61 * 48);
}

BOOST_AUTO_TEST_CASE(attention_counts_what_each_token_sees) {
  RandomModel model(kOptions);
  const auto steps = profile_of(model, prefill_and_decode(nullptr, nullptr))->take_steps();
  const auto attention = costs_of<AttentionOp>(steps.at(0), model.program.body, StepSection::kBody);
  BOOST_REQUIRE(attention.size() == 1);
  // Positions 3 to 7 attend to 4 to 8 keys, position 9 to 10. A token's keys and values are 2 * 24 bfloat16.
  BOOST_TEST(attention[0].flops == (4 + 5 + 6 + 7 + 8 + 10) * 4 * 48);
  BOOST_TEST(attention[0].kv_bytes == (8 + 10 + 6) * 2 * 24 * kTwoBytes);

  ModelOptions windowed = kOptions;
  windowed.sliding_window = 4;
  RandomModel narrow(windowed);
  const auto narrow_steps = profile_of(narrow, prefill_and_decode(nullptr, nullptr))->take_steps();
  const auto seen = costs_of<AttentionOp>(narrow_steps.at(0), narrow.program.body, StepSection::kBody);
  // Each token attends to four keys; the prompt's five tokens attend to positions 0 to 7.
  BOOST_TEST(seen.at(0).flops == 6 * 4 * 4 * 48);
  BOOST_TEST(seen.at(0).kv_bytes == (8 + 4 + 6) * 2 * 24 * kTwoBytes);
}

BOOST_AUTO_TEST_CASE(an_adapter_is_read_once_and_multiplied_for_each_of_its_tokens) {
  RandomModel model(kOptions);
  const DeviceAdapter plain = model.adapter(5, false, 3);
  const DeviceAdapter dora = model.adapter(6, true, 2);
  const DeviceAdapter shifted = model.adapter(7, true, 2, /*shift=*/true);
  const auto cost = [&](const DeviceAdapter* first, const DeviceAdapter* second) {
    const auto steps = profile_of(model, prefill_and_decode(first, second))->take_steps();
    return costs_of<LinearOp>(steps.at(0), model.program.body, StepSection::kBody).at(3);
  };
  // Down projection: A[rank, 37] with k padded to 38, B[48, rank] with the rank padded to 4.
  const std::int64_t plain_bytes = (3 * 38 + 48 * 4) * kTwoBytes;
  const std::int64_t dora_bytes = (2 * 38 + 48 * 2) * kTwoBytes + 48 * 4;
  BOOST_TEST(cost(&plain, nullptr).adapter_bytes == plain_bytes);
  BOOST_TEST(cost(&plain, nullptr).adapter_flops == 2 * 5 * 3 * (37 + 48));
  BOOST_TEST(cost(&plain, &plain).adapter_bytes == plain_bytes);
  BOOST_TEST(cost(&plain, &plain).adapter_flops == 2 * 6 * 3 * (37 + 48));
  BOOST_TEST(cost(&plain, &dora).adapter_bytes == plain_bytes + dora_bytes);
  BOOST_TEST(cost(&shifted, nullptr).adapter_bytes == dora_bytes + 48 * 4);
  BOOST_TEST(cost(&plain, &dora).adapter_flops == 2 * (5 * 3 + 2) * (37 + 48));
}

// Each token has its own router logits, so the chosen experts must be derived from the op's own costs:
// experts times the bytes of each, and rows times the products of each.
BOOST_AUTO_TEST_CASE(experts_count_those_that_were_taken) {
  ModelOptions options = kOptions;
  options.num_experts = 40;
  options.routing = {.top_k = 2};
  RandomModel model(options);
  const DeviceAdapter plain = model.adapter(5, false, 3);
  const auto cost_with = [&](const DeviceAdapter* first) {
    const auto steps = profile_of(model, prefill_and_decode(first, nullptr))->take_steps();
    return costs_of<ExpertsOp>(steps.at(0), model.program.body, StepSection::kBody).at(0);
  };
  const OpCost cost = cost_with(nullptr);
  // Gate and up have 37 rows of 48; down has 48 rows of 37, padded to 38; all have float32 biases.
  const std::int64_t of_expert = (2 * 37 * 48 + 48 * 38) * kTwoBytes + (2 * 37 + 48) * 4;
  BOOST_TEST(cost.weight_bytes % of_expert == 0);
  BOOST_TEST(cost.weight_bytes / of_expert >= 2);
  BOOST_TEST(cost.weight_bytes / of_expert <= 12);
  BOOST_TEST(cost.flops == 2 * 12 * (2 * 37 + 37) * 48);
  BOOST_TEST(cost.adapter_bytes == 0);
  // Five of the six tokens have the adapter, each with two experts, on gate, up and down.
  BOOST_TEST(cost_with(&plain).adapter_flops == 2 * 10 * 3 * (2 * (48 + 37) + 37 + 48));
  BOOST_TEST(cost_with(&plain).adapter_bytes > 0);
}

BOOST_AUTO_TEST_CASE(the_newest_steps_are_kept_and_taken_once) {
  BOOST_CHECK_THROW(StepProfile(0), ConfigError);
  StepProfile profile(2);
  for (std::int64_t tokens : {1, 2, 3}) {
    StepRecord record;
    record.num_tokens = tokens;
    profile.add(std::move(record));
  }
  const auto steps = profile.take_steps();
  BOOST_REQUIRE(steps.size() == 2);
  BOOST_TEST(steps[0].num_tokens == 2);
  BOOST_TEST(steps[1].num_tokens == 3);
  BOOST_TEST(profile.take_steps().empty());
}

BOOST_AUTO_TEST_CASE(a_step_that_is_refused_leaves_no_record) {
  RandomModel model(kOptions);
  auto profile = std::make_shared<StepProfile>(4);
  const auto engine = make_cpu_engine(model.program, std::make_shared<ThreadPool>(1), "", profile);
  engine->allocate_kv_blocks(8);
  StepArrays arrays(prefill_and_decode(nullptr, nullptr));
  arrays.tokens[0] = -1;
  const auto ignore = [](std::int64_t, std::int64_t, const float*) {};
  BOOST_CHECK_THROW(engine->step(arrays.input(), ignore), StepError);
  arrays.tokens[0] = 1;
  engine->step(arrays.input(), ignore);
  BOOST_TEST(profile->take_steps().size() == 1);
}

// A layer with adapters has two parts; the ranks' exchange of x A^T comes between them.
BOOST_AUTO_TEST_CASE(a_low_rank_exchange_is_apart_from_its_layer) {
  RandomModel model(kOptions);
  const DeviceAdapter adapter = model.adapter(1, false, 3);
  const Program program = testing::with_shared_adapters(testing::with_cut_layers(model.program, 0, 2));
  const auto profile = std::make_shared<StepProfile>(4);
  const auto engine = make_cpu_engine(program, std::make_shared<ThreadPool>(2), "", profile,
                                      std::make_shared<testing::Echo>(2));
  engine->allocate_kv_blocks(8);
  for (const DeviceAdapter* of_first : {static_cast<const DeviceAdapter*>(nullptr), &adapter}) {
    const StepArrays arrays(prefill_and_decode(of_first, nullptr));
    engine->step(arrays.input(), [](std::int64_t, std::int64_t, const float*) {});
  }
  const auto steps = profile->take_steps();
  BOOST_REQUIRE(steps.size() == 2);
  for (const OpRecord& record : steps[0].ops) {
    BOOST_TEST((record.section != StepSection::kRanks));
    BOOST_TEST(!record.is_continued);
  }
  const std::vector<OpRecord>& ops = steps[1].ops;
  std::size_t exchanges = 0;
  for (std::size_t i = 0; i < ops.size(); ++i) {
    if (i > 0) BOOST_TEST(ops[i].begin >= ops[i - 1].end);
    if (ops[i].section != StepSection::kRanks) continue;
    ++exchanges;
    BOOST_TEST(ops[i].index == static_cast<std::int32_t>(RankWork::kLowRankExchange));
    BOOST_REQUIRE(i > 0);
    BOOST_REQUIRE(i + 1 < ops.size());
    BOOST_TEST((ops[i - 1].section == ops[i + 1].section));
    BOOST_TEST(ops[i - 1].index == ops[i + 1].index);
    BOOST_TEST(std::holds_alternative<LinearOp>(program.body[static_cast<std::size_t>(ops[i - 1].index)]));
    BOOST_TEST(!ops[i - 1].is_continued);
    BOOST_TEST(ops[i + 1].is_continued);
    BOOST_TEST((ops[i - 1].cost == OpCost{}));
    BOOST_TEST(ops[i + 1].cost.adapter_flops > 0);
  }
  BOOST_TEST(exchanges == program.lora.sites.size());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::step_profile_test
