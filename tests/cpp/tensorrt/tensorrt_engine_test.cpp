#include <array>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "cpu/step_arrays.h"
#include "tensorrt/fake_plan.h"

namespace adaptrt::testing::tensorrt_engine_test {
namespace {

/// An adapter with only FakePlan::kModule, at its own addresses.
class FakeAdapter {
 public:
  FakeAdapter(HostDevice& device, std::uint64_t load_id, std::int32_t rank, std::uint16_t a, std::uint16_t b,
              std::optional<float> magnitude = std::nullopt)
      : a_(device.allocate(64)), b_(device.allocate(64)), magnitude_(device.allocate(64)) {
    constexpr std::size_t kSite = 4;  // attention's q, k, v of layer 1
    constexpr std::size_t kPart = 1;
    constexpr std::int32_t kRankOffset = 1;
    adapter.task_id = load_id;
    adapter.load_id = load_id;
    adapter.sites.resize(8);
    DeviceSite& site = adapter.sites[kSite];
    site.total_rank = rank + kRankOffset;
    site.a = a_.data();
    site.parts[kPart] = {.rank = rank, .rank_offset = kRankOffset, .b = b_.data(), .magnitude = nullptr};
    constexpr std::size_t kInSize = 8;
    reinterpret_cast<std::uint16_t*>(a_.data())[kRankOffset * kInSize] = a;
    *reinterpret_cast<std::uint16_t*>(b_.data()) = b;
    if (magnitude) {
      *reinterpret_cast<float*>(magnitude_.data()) = *magnitude;
      site.parts[kPart].magnitude = reinterpret_cast<const float*>(magnitude_.data());
    }
  }
  DeviceAdapter adapter;

 private:
  Allocation a_;
  Allocation b_;
  Allocation magnitude_;
};

constexpr std::int32_t kBlocks = 20;

struct Fixture {
  explicit Fixture(GpuEngineOptions options = {}, StreamTime time = StreamTime::kAtOnce)
      : plan(make_fake_plan(time)) {
    engine = make_tensorrt_engine(plan->program, plan->device, make_contexts(plan), options);
    engine->allocate_kv_blocks(kBlocks);
  }

  using Row = std::array<float, kVocabSize>;
  std::vector<Row> rows_of(const StepInput& input) {
    const std::vector<float> logits = logits_of(engine.get(), input);
    std::vector<Row> rows(logits.size() / kVocabSize);
    for (std::size_t i = 0; i < rows.size(); ++i)
      std::copy_n(&logits[i * kVocabSize], kVocabSize, rows[i].begin());
    return rows;
  }
  std::vector<Row> rows_of(const std::vector<Piece>& pieces) { return rows_of(StepArrays(pieces).input()); }

  const DeviceAdapter* adapter(std::uint64_t load_id, std::int32_t rank = 3) {
    adapters.emplace_back(*plan->device, load_id, rank, static_cast<std::uint16_t>(100 + load_id),
                          static_cast<std::uint16_t>(200 + load_id));
    return &adapters.back().adapter;
  }

  std::int64_t table_copies() const { return plan->device->calls("copy_to_device"); }

  std::shared_ptr<FakePlan> plan;
  std::deque<FakeAdapter> adapters;
  std::unique_ptr<Engine> engine;
};

struct FixtureWithoutGraphs : Fixture {
  FixtureWithoutGraphs() : Fixture({.cuda_graphs = false}) {}
};

/// One token of a sequence whose prompt is in the pool.
Piece next_token(std::int32_t token, std::int32_t position, std::vector<std::int32_t> blocks,
                 const DeviceAdapter* adapter = nullptr) {
  return {.tokens = {token},
          .first_position = position,
          .prompt_length = 3,
          .blocks = std::move(blocks),
          .adapter = adapter};
}

std::function<bool(const std::exception&)> says(const std::string& words) {
  return [words](const std::exception& error) {
    BOOST_TEST_INFO(error.what());
    return std::string(error.what()).find(words) != std::string::npos;
  };
}

BOOST_AUTO_TEST_SUITE(tensorrt_engine)

BOOST_AUTO_TEST_CASE(chunks_and_decodes_see_their_own_pool) {
  for (const StreamTime time : {StreamTime::kAtOnce, StreamTime::kLate}) {
    Fixture f({}, time);
    const auto first = f.rows_of({{.tokens = {1, 2, 3, 4, 5}, .prompt_length = 7, .blocks = {3, 9}},
                                  {.tokens = {10, 20}, .prompt_length = 2, .blocks = {4}}});
    BOOST_TEST(first.size() == 7U);
    BOOST_TEST(first[4][kTokenSum] == 15.0F);
    BOOST_TEST(first[4][kPromptLength] == 7.0F);
    BOOST_TEST(first[5][kTokenSum] == 10.0F);
    BOOST_TEST(first[6][kTokenSum] == 30.0F);
    BOOST_TEST(first[6][kWeight] == 2.5F);
    const auto second =
        f.rows_of({{.tokens = {6, 7}, .first_position = 5, .prompt_length = 7, .blocks = {3, 9}},
                   next_token(30, 2, {4})});
    BOOST_TEST(second[1][kTokenSum] == 28.0F);
    BOOST_TEST(second[1][kPosition] == 6.0F);
    BOOST_TEST(second[2][kTokenSum] == 60.0F);
    const auto decode = f.rows_of({next_token(8, 7, {3, 9}), next_token(40, 3, {4})});
    BOOST_TEST(decode[0][kTokenSum] == 36.0F);
    BOOST_TEST(decode[1][kTokenSum] == 100.0F);
  }
}

BOOST_AUTO_TEST_CASE(sequences_of_one_adapter_come_together_and_rows_come_back_in_order) {
  FixtureWithoutGraphs f;
  const DeviceAdapter* a = f.adapter(1, 2);
  const DeviceAdapter* b = f.adapter(2, 5);
  std::vector<Piece> pieces;
  for (std::int32_t i = 0; i < 6; ++i) {
    const DeviceAdapter* adapter = i % 3 == 0 ? a : i % 3 == 1 ? nullptr : b;
    const std::int32_t tokens = 1 + i % 2;
    pieces.push_back({.tokens = std::vector<std::int32_t>(static_cast<std::size_t>(tokens), 10 * (i + 1)),
                      .prompt_length = i + 1,
                      .blocks = {i},
                      .adapter = adapter});
  }
  StepArrays arrays(pieces);
  arrays.logit_rows = {1, 2, 4, 5, 6, 8};  // 8 is the last of 9 tokens
  const auto rows = f.rows_of(arrays.input());
  const std::vector<float> lengths{2, 2, 4, 4, 5, 6};
  const std::vector<float> ranks{-1, -1, 2, 2, -1, 5};
  const std::vector<float> sums{20, 40, 40, 80, 50, 120};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    BOOST_TEST_CONTEXT("row " << i) {
      BOOST_TEST(rows[i][kPromptLength] == lengths[i]);
      BOOST_TEST(rows[i][kRank] == ranks[i]);
      BOOST_TEST(rows[i][kTokenSum] == sums[i]);
    }
  }
}

BOOST_AUTO_TEST_CASE(a_table_row_is_written_when_its_adapter_changes_and_not_before) {
  Fixture f;
  f.adapters.emplace_back(*f.plan->device, 1, 4, std::uint16_t{11}, std::uint16_t{12}, 0.5F);
  const DeviceAdapter* a = &f.adapters.back().adapter;
  const auto step = [&](const DeviceAdapter* adapter) {
    const std::int64_t before = f.table_copies();
    const auto rows = f.rows_of({next_token(5, 0, {0}, adapter)});
    return std::pair(rows[0], f.table_copies() - before - 1);  // the step has one copy of its own
  };
  const auto [first, first_copies] = step(a);
  BOOST_TEST(first[kRank] == 4.0F);
  BOOST_TEST(first[kFirstOfA] == 11.0F);
  BOOST_TEST(first[kFirstOfB] == 12.0F);
  BOOST_TEST(first[kMagnitude] == 0.5F);
  BOOST_TEST(first_copies == 2);
  BOOST_TEST(step(a).second == 0);
  BOOST_TEST(step(nullptr).second == 0);
  BOOST_TEST(step(a).second == 0);
  // Loaded again: the same task at other addresses.
  f.adapters.emplace_back(*f.plan->device, 2, 3, std::uint16_t{21}, std::uint16_t{22});
  f.adapters.back().adapter.task_id = 1;
  const auto [again, copies] = step(&f.adapters.back().adapter);
  BOOST_TEST(again[kRank] == 3.0F);
  BOOST_TEST(again[kFirstOfA] == 21.0F);
  BOOST_TEST(again[kMagnitude] == 0.0F);
  BOOST_TEST(copies == 2);
}

BOOST_AUTO_TEST_CASE(the_least_recently_used_adapter_gives_up_its_slot) {
  Fixture f;
  std::vector<const DeviceAdapter*> all;
  for (std::uint64_t id = 1; id <= 8; ++id) all.push_back(f.adapter(id));
  const auto copies_of = [&](const std::vector<std::size_t>& used) {
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < used.size(); ++i) {
      pieces.push_back(next_token(5, 0, {static_cast<std::int32_t>(i)}, all[used[i]]));
    }
    const std::int64_t before = f.table_copies();
    const auto rows = f.rows_of(pieces);
    for (std::size_t i = 0; i < used.size(); ++i) {
      BOOST_TEST(rows[i][kFirstOfA] == static_cast<float>(101 + used[i]));
    }
    return (f.table_copies() - before - 1) / 2;
  };
  BOOST_TEST(copies_of({0, 1, 2, 3, 4, 5}) == 6);
  BOOST_TEST(copies_of({1, 2, 3, 4, 5}) == 0);
  BOOST_TEST(copies_of({6}) == 1);  // takes the slot of 0
  BOOST_TEST(copies_of({1, 2, 3, 4, 5, 6}) == 0);
  BOOST_TEST(copies_of({7, 6, 5, 0, 4, 3}) == 2);  // take the slots of 1 and 2, in any order
  BOOST_TEST(copies_of({3, 4, 5, 6, 7, 0}) == 0);
  BOOST_TEST(copies_of({3, 4, 5, 6}) == 0);
  BOOST_TEST(copies_of({1}) == 1);  // takes the slot of 7 or 0, although other adapters came earlier
  BOOST_TEST(copies_of({3, 4, 5, 6}) == 0);
}

BOOST_AUTO_TEST_CASE(decodes_run_as_graphs_of_padded_sizes) {
  Fixture f;
  const auto decode = [&](std::int32_t sequences, std::size_t blocks) {
    std::vector<Piece> pieces;
    for (std::int32_t i = 0; i < sequences; ++i) {
      std::vector<std::int32_t> table(blocks, -1);
      table[0] = i;
      pieces.push_back(next_token(i + 1, 0, table, i == 1 ? f.adapter(9, 2) : nullptr));
    }
    const auto rows = f.rows_of(pieces);
    for (std::int32_t i = 0; i < sequences; ++i) {
      BOOST_TEST(rows[static_cast<std::size_t>(i)][kTokenSum] == static_cast<float>(i + 1));
      BOOST_TEST(rows[static_cast<std::size_t>(i)][kRank] == (i == 1 ? 2.0F : -1.0F));
    }
    return f.plan->num_tokens;
  };
  BOOST_TEST(decode(3, 1) == 4);
  BOOST_TEST(f.plan->enqueues["decode"] == 2);  // the run and its capture
  BOOST_TEST(decode(4, 1) == 4);
  BOOST_TEST(decode(3, 1) == 4);
  BOOST_TEST(f.plan->enqueues["decode"] == 2);
  BOOST_TEST(f.plan->device->calls("capture") == 1);
  BOOST_TEST(f.plan->device->calls("launch") == 2);
  BOOST_TEST(f.plan->runs["decode"] == 3);
  BOOST_TEST(decode(1, 1) == 1);
  BOOST_TEST(decode(2, 1) == 2);
  BOOST_TEST(decode(5, 1) == 6);  // limited to max_batch_size
  BOOST_TEST(decode(6, 1) == 6);
  BOOST_TEST(f.plan->device->calls("capture") == 4);
  BOOST_TEST(decode(3, 3) == 4);
  BOOST_TEST(f.plan->block_tables_shape == (std::vector<std::int64_t>{4, 4}),
             boost::test_tools::per_element());
  BOOST_TEST(decode(3, 9) == 4);
  BOOST_TEST(f.plan->block_tables_shape == (std::vector<std::int64_t>{4, 10}),
             boost::test_tools::per_element());
  BOOST_TEST(f.plan->device->calls("capture") == 6);
  BOOST_TEST(f.plan->runs["prefill"] == 0);
  BOOST_TEST(f.plan->contexts["decode"] == 1 + 6);  // one per graph
  BOOST_TEST(f.plan->contexts["prefill"] == 1);
}

BOOST_AUTO_TEST_CASE(without_graphs_a_decode_has_its_own_size) {
  FixtureWithoutGraphs f;
  (void)f.rows_of({next_token(1, 0, {0}), next_token(2, 0, {1}), next_token(3, 0, {2})});
  BOOST_TEST(f.plan->num_tokens == 3);
  BOOST_TEST(f.plan->runs["decode"] == 1);
  BOOST_TEST(f.plan->device->calls("capture") == 0);
}

BOOST_AUTO_TEST_CASE(a_context_is_told_what_changed) {
  FixtureWithoutGraphs f;
  const auto step = [&](std::int32_t token) {
    f.plan->shapes_set.clear();
    (void)f.rows_of({{.tokens = {token, token}, .prompt_length = 2, .blocks = {0}}});
    return f.plan->shapes_set.size();
  };
  BOOST_TEST(step(1) == 7U);  // pools, tables and weights stay where they are
  BOOST_TEST(step(2) == 0U);
}

BOOST_AUTO_TEST_CASE(more_logit_rows_than_the_profile_takes_come_in_slices) {
  Fixture f;
  std::vector<std::int32_t> tokens(11);
  std::iota(tokens.begin(), tokens.end(), 1);
  const StepArrays arrays({{.tokens = tokens, .prompt_length = 11, .blocks = {0, 1, 2}}});
  std::vector<std::int64_t> slices;
  f.engine->step(arrays.input(), [&](std::int64_t first, std::int64_t rows, const float* logits) {
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t n = first + i + 1;
      BOOST_TEST(logits[i * kVocabSize + kTokenSum] == static_cast<float>(n * (n + 1) / 2));
    }
    slices.push_back(rows);
  });
  BOOST_TEST(slices == (std::vector<std::int64_t>{4, 4, 3}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_step_without_logit_rows_writes_the_pool) {
  Fixture f;
  StepArrays arrays({{.tokens = {1, 2, 3}, .prompt_length = 4, .blocks = {0}}});
  arrays.logit_rows.clear();
  f.engine->step(arrays.input(), [](std::int64_t, std::int64_t, const float*) { BOOST_ERROR("no rows"); });
  BOOST_TEST(f.rows_of({next_token(4, 3, {0})})[0][kTokenSum] == 10.0F);
}

BOOST_AUTO_TEST_CASE(blocks_are_copied_in_their_order_before_anything_is_written) {
  for (const StreamTime time : {StreamTime::kAtOnce, StreamTime::kLate}) {
    Fixture f({}, time);
    (void)f.rows_of({{.tokens = {1, 2, 3}, .prompt_length = 3, .blocks = {4}},
                     {.tokens = {10, 20}, .prompt_length = 2, .blocks = {5}}});
    StepArrays arrays({next_token(4, 3, {6}), next_token(30, 2, {4})});
    arrays.copies_from = {4, 5};
    arrays.copies_to = {6, 4};
    const auto rows = f.rows_of(arrays.input());
    BOOST_TEST(rows[0][kTokenSum] == 10.0F);
    BOOST_TEST(rows[1][kTokenSum] == 60.0F);
    BOOST_TEST(f.plan->device->calls("copy_on_device") == 2 * f.plan->program.model.num_layers);
  }
}

BOOST_AUTO_TEST_CASE(bad_input_is_refused_as_by_the_cpu_engine) {
  Fixture f;
  BOOST_CHECK_EXCEPTION((void)f.rows_of({next_token(kVocabSize, 0, {0})}), StepError,
                        says("the vocabulary has 64"));
  BOOST_CHECK_EXCEPTION((void)f.rows_of({next_token(1, 0, {kBlocks})}), StepError,
                        says("the pool has 20 blocks"));
  BOOST_TEST(f.plan->runs.empty());
}

BOOST_AUTO_TEST_CASE(a_failed_step_is_the_only_one_that_fails) {
  const std::vector<std::string> calls{"copy_to_device", "copy_to_host", "synchronize", "launch"};
  for (const std::string& call : calls) {
    BOOST_TEST_CONTEXT(call) {
      Fixture f({}, StreamTime::kLate);
      const DeviceAdapter* a = f.adapter(1, 2);
      (void)f.rows_of({next_token(5, 0, {0}), next_token(5, 0, {1})});
      f.plan->device->fail(call);
      BOOST_CHECK_EXCEPTION((void)f.rows_of({next_token(6, 1, {0}, a), next_token(7, 1, {1})}), StepError,
                            says("an injected failure"));
      const auto rows = f.rows_of({next_token(6, 1, {0}, a), next_token(7, 1, {1})});
      BOOST_TEST(rows[0][kTokenSum] == 11.0F);
      BOOST_TEST(rows[0][kRank] == 2.0F);
      BOOST_TEST(rows[1][kTokenSum] == 12.0F);
    }
  }
}

BOOST_AUTO_TEST_CASE(a_capture_that_fails_is_made_again) {
  for (const StreamTime time : {StreamTime::kAtOnce, StreamTime::kLate}) {
    Fixture f({}, time);
    f.plan->device->fail("capture");
    BOOST_CHECK_EXCEPTION((void)f.rows_of({next_token(5, 0, {0})}), StepError, says("capture"));
    BOOST_TEST(f.rows_of({next_token(5, 0, {0})})[0][kTokenSum] == 5.0F);
    BOOST_TEST(f.rows_of({next_token(6, 1, {0})})[0][kTokenSum] == 11.0F);
    BOOST_TEST(f.plan->device->calls("launch") == 1);
    BOOST_TEST(f.plan->contexts["decode"] == 1 + 2);
  }
}

BOOST_AUTO_TEST_CASE(an_error_of_tensorrt_fails_only_the_step) {
  FixtureWithoutGraphs f;
  const std::vector<Piece> pieces{{.tokens = {1, 2}, .prompt_length = 2, .blocks = {0}}};
  f.plan->refused_tensor = "block_tables";
  BOOST_CHECK_EXCEPTION((void)f.rows_of(pieces), StepError, says("refuses block_tables"));
  f.plan->fail_next_enqueue = true;
  BOOST_CHECK_EXCEPTION((void)f.rows_of(pieces), StepError, says("execute_async_v3"));
  BOOST_TEST(f.rows_of(pieces)[1][kTokenSum] == 3.0F);
}

BOOST_AUTO_TEST_CASE(a_context_that_was_told_half_of_a_shape_is_told_all_of_the_next) {
  FixtureWithoutGraphs f;
  const std::vector<Piece> two{{.tokens = {1, 2}, .prompt_length = 3, .blocks = {0}}};
  const std::vector<Piece> three{{.tokens = {1, 2, 3}, .prompt_length = 3, .blocks = {0}}};
  (void)f.rows_of(two);
  f.plan->refused_tensor = "block_tables";
  BOOST_CHECK_THROW((void)f.rows_of(three), StepError);
  BOOST_TEST(f.rows_of(two)[1][kTokenSum] == 3.0F);
}

BOOST_AUTO_TEST_CASE(a_lost_device_is_an_engine_error_ever_after) {
  for (const std::string call : {"copy_to_device", "launch", "synchronize"}) {
    Fixture f;
    (void)f.rows_of({next_token(5, 0, {0})});
    f.plan->device->fail(call, Failure::kForGood);
    BOOST_CHECK_EXCEPTION((void)f.rows_of({next_token(5, 0, {0})}), EngineError,
                          says("cannot be used any more"));
    BOOST_CHECK_EXCEPTION((void)f.rows_of({next_token(5, 0, {0})}), EngineError,
                          says("cannot be used any more"));
  }
}

BOOST_AUTO_TEST_CASE(a_device_lost_under_tensorrt_is_an_engine_error) {
  FixtureWithoutGraphs f;
  f.plan->fail_next_enqueue = true;
  f.plan->device->fail("synchronize", Failure::kForGood);
  BOOST_CHECK_EXCEPTION((void)f.rows_of({next_token(5, 0, {0})}), EngineError,
                        says("cannot be used any more"));
}

BOOST_AUTO_TEST_CASE(the_pool_is_sized_by_the_device_and_the_plan) {
  const auto plan = make_fake_plan();
  const auto engine = make_tensorrt_engine(plan->program, plan->device, make_contexts(plan), {});
  const std::size_t free = plan->device->memory().free_bytes;
  BOOST_TEST(engine->free_device_memory().value() == free);
  BOOST_TEST(engine->info().kv_block_bytes == 2U * 4 * 2 * (1 * 3 + 2 * 5));
  BOOST_TEST(engine->info().max_beam_width == 2);
  BOOST_CHECK_EXCEPTION(engine->allocate_kv_blocks(0), ConfigError, says("1 to 64"));
  BOOST_CHECK_EXCEPTION(engine->allocate_kv_blocks(65), ConfigError, says("1 to 64"));
  plan->device->fail("fill_zero", Failure::kOnce, 1);
  BOOST_CHECK_THROW(engine->allocate_kv_blocks(8), StepError);
  BOOST_TEST(plan->device->memory().free_bytes == free);
  engine->allocate_kv_blocks(8);
  BOOST_TEST(plan->device->memory().free_bytes == free - 8 * engine->info().kv_block_bytes);
  BOOST_CHECK_EXCEPTION(engine->allocate_kv_blocks(8), ConfigError, says("allocated before"));
}

BOOST_AUTO_TEST_CASE(an_engine_gives_all_memory_back) {
  const auto plan = make_fake_plan();
  {
    const auto engine = make_tensorrt_engine(plan->program, plan->device, make_contexts(plan), {});
    engine->allocate_kv_blocks(8);
    BOOST_TEST(plan->device->num_allocations() > 8U);
  }
  BOOST_TEST(plan->device->num_allocations() == 0U);
}

BOOST_AUTO_TEST_CASE(an_engine_that_does_not_fit_says_so_and_leaves_nothing) {
  const auto plan = make_fake_plan();
  plan->device = std::make_shared<HostDevice>(1000);
  BOOST_CHECK_EXCEPTION((void)make_tensorrt_engine(plan->program, plan->device, make_contexts(plan), {}),
                        ConfigError, says("bytes are free"));
  BOOST_TEST(plan->device->num_allocations() == 0U);
}

BOOST_AUTO_TEST_CASE(an_inconsistent_program_is_refused_with_all_that_is_wrong) {
  const auto plan = make_fake_plan();
  TensorRtProgram program = plan->program;
  program.model.dtype = DType::kFloat32;
  program.model.decode.max_sequences = 5;
  program.model.num_adapter_slots = 3;
  BOOST_CHECK_EXCEPTION((void)make_tensorrt_engine(program, plan->device, make_contexts(plan), {}),
                        EngineError, [](const EngineError& error) {
                          return says("dtype is float32")(error) &&
                                 says("decode.max_sequences is 5")(error) &&
                                 says("num_adapter_slots is 3")(error);
                        });
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::tensorrt_engine_test
