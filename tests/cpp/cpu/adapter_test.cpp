// An adapter must change the logits like its update merged into the base weights.

#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "adaptrt/cpu/cpu_engine.h"
#include "adaptrt/cpu/kernel_table.h"
#include "cpu/random_model.h"
#include "cpu/step_arrays.h"
#include "emulated_tiles/kernel_tables.h"

namespace adaptrt::testing::adapter_test {
namespace {

namespace data = boost::unit_test::data;

std::unique_ptr<Engine> engine_of(const Program& program, const std::string& kernels) {
  auto engine = make_cpu_engine(program, std::make_shared<ThreadPool>(2), kernel_table(kernels));
  engine->allocate_kv_blocks(16);
  return engine;
}

/// Returns the program with (W + B A) * magnitude instead of W, shifts added to the biases, and no adapters.
Program merged(const Program& program, const DeviceAdapter& adapter, Storage* storage) {
  Program result = program;
  result.lora = {};
  for (auto& op : result.body) {
    auto* linear = std::get_if<LinearOp>(&op);
    if (linear == nullptr) continue;
    const DeviceSite& site = adapter.sites[static_cast<std::size_t>(linear->lora_site)];
    linear->lora_site = -1;
    for (std::size_t p = 0; p < linear->parts.size(); ++p) {
      const DevicePart& part = site.parts[p];
      if (part.rank == 0) continue;
      PanelMatrix& weight = linear->parts[p].weight;
      if (part.shift != nullptr) {
        VectorView& bias = linear->parts[p].bias;
        std::vector<float> shifted(part.shift, part.shift + weight.n);
        for (std::int64_t n = 0; n < bias.size; ++n) shifted[static_cast<std::size_t>(n)] += bias.data[n];
        bias = storage->vector(shifted);
      }
      const auto a = unpack({site.a, weight.dtype, site.total_rank, weight.k});
      const auto b = unpack({part.b, weight.dtype, weight.n, part.rank});
      auto w = unpack(weight);
      for (std::int64_t n = 0; n < weight.n; ++n) {
        for (std::int64_t k = 0; k < weight.k; ++k) {
          double sum = w[static_cast<std::size_t>(n * weight.k + k)];
          for (std::int64_t r = 0; r < part.rank; ++r) {
            sum += static_cast<double>(b[static_cast<std::size_t>(n * part.rank + r)]) *
                   a[static_cast<std::size_t>((part.rank_offset + r) * weight.k + k)];
          }
          if (part.magnitude != nullptr) sum *= part.magnitude[n];
          w[static_cast<std::size_t>(n * weight.k + k)] = static_cast<float>(sum);
        }
      }
      weight = storage->matrix(weight.dtype, weight.n, weight.k, w);
    }
  }
  return result;
}

Piece prompt(std::int64_t vocab, const DeviceAdapter* adapter, std::int32_t first_block) {
  Piece piece{.prompt_length = 40, .adapter = adapter};
  Random random(3);
  for (int i = 0; i < 40; ++i) piece.tokens.push_back(static_cast<std::int32_t>(random.below(vocab)));
  for (std::int32_t i = 0; i < 3; ++i) piece.blocks.push_back(first_block + i);
  return piece;
}

BOOST_AUTO_TEST_SUITE(adapters)

BOOST_DATA_TEST_CASE(an_adapter_acts_like_its_merged_weights,
                     kernel_tables() * data::make({false, true}) * data::make({false, true}), kernels, dora,
                     shift) {
  // Covers float32 rounding in two layers with values of a few units; merged weights are rounded once more.
  constexpr float kTolerance = 2e-4F;
  RandomModel model({.dtype = DType::kFloat32, .biases = true, .max_rank = 17});
  const auto adapter = model.adapter(21, dora, 0, shift);
  const auto plain = engine_of(merged(model.program, adapter, &model.storage()), kernels);
  const auto engine = engine_of(model.program, kernels);
  const auto expected = logits_of(plain.get(), StepArrays({prompt(61, nullptr, 0)}).input());
  const auto base = logits_of(engine.get(), StepArrays({prompt(61, nullptr, 0)}).input());
  const auto found = logits_of(engine.get(), StepArrays({prompt(61, &adapter, 3)}).input());
  float change = 0.0F;
  for (std::size_t i = 0; i < found.size(); ++i) {
    BOOST_TEST_REQUIRE(std::abs(found[i] - expected[i]) < kTolerance, found[i] << " " << expected[i]);
    change = std::max(change, std::abs(found[i] - base[i]));
  }
  BOOST_TEST(change > 100 * kTolerance);
}

BOOST_AUTO_TEST_CASE(an_adapter_that_changes_nothing_gives_the_base_bits) {
  RandomModel model({.dtype = DType::kBFloat16, .max_rank = 4});
  DeviceAdapter empty{.task_id = 1, .sites = std::vector<DeviceSite>(model.program.lora.sites.size())};
  const auto engine = engine_of(model.program, "");
  const auto base = logits_of(engine.get(), StepArrays({prompt(61, nullptr, 0)}).input());
  const auto found = logits_of(engine.get(), StepArrays({prompt(61, &empty, 3)}).input());
  BOOST_TEST(std::memcmp(base.data(), found.data(), base.size() * sizeof(float)) == 0);
}

// Rows of adapters that share A lie next to each other, between others, and in steps of one and of many rows.
BOOST_DATA_TEST_CASE(adapters_that_share_a_give_the_bits_of_each_alone,
                     kernel_tables() * data::make({false, true}), kernels, is_bfloat16) {
  RandomModel model({.dtype = is_bfloat16 ? DType::kBFloat16 : DType::kFloat32, .max_rank = 17});
  const auto first = model.adapter(21, false, 17);
  auto second = model.adapter(22, true, 17);
  auto third = model.adapter(23, false, 17);
  for (std::size_t i = 0; i < first.sites.size(); ++i) {
    second.sites[i].a = first.sites[i].a;
    if (i % 2 == 0) third.sites[i].a = first.sites[i].a;
    // All parts have one A, which ends before that of the other adapter.
    if (i % 3 == 0) {
      for (DevicePart& part : third.sites[i].parts) part.rank_offset = 0;
      third.sites[i].total_rank = 17;
    }
  }
  const auto engine = engine_of(model.program, kernels);
  const std::vector<const DeviceAdapter*> adapters{&first, &second, nullptr, &third, &first};
  std::vector<Piece> pieces;
  std::vector<float> alone;
  for (std::size_t i = 0; i < adapters.size(); ++i) {
    Piece piece = prompt(61, adapters[i], static_cast<std::int32_t>(3 * i));
    if (i % 2 == 1) piece.tokens.resize(1), piece.prompt_length = 1;
    const auto logits = logits_of(engine.get(), StepArrays({piece}).input());
    alone.insert(alone.end(), logits.begin(), logits.end());
    pieces.push_back(piece);
  }
  const auto together = logits_of(engine.get(), StepArrays(pieces).input());
  BOOST_TEST_REQUIRE(together.size() == alone.size());
  BOOST_TEST(std::memcmp(together.data(), alone.data(), alone.size() * sizeof(float)) == 0);
}

// Kernels add the products of several adapters in one call.
BOOST_DATA_TEST_CASE(a_step_of_many_adapters_gives_the_bits_of_each_alone, kernel_tables(), kernels) {
  RandomModel model({.dtype = DType::kBFloat16, .max_batch_size = 16, .max_rank = 40});
  auto compressed = model.adapter(23, false, 40);
  BOOST_TEST_REQUIRE(model.compress(&compressed) > 0);
  const auto exact = model.adapter(21, false, 17);
  const auto with_magnitudes = model.adapter(22, true, 16);
  const std::vector<const DeviceAdapter*> adapters{&exact, &compressed, &with_magnitudes};
  const auto engine = engine_of(model.program, kernels);
  std::vector<Piece> pieces;
  std::vector<float> alone;
  for (std::int32_t i = 0; i < 15; ++i) {
    const Piece piece{
        .tokens = {i}, .blocks = {i}, .adapter = adapters[static_cast<std::size_t>(i) % adapters.size()]};
    const auto logits = logits_of(engine.get(), StepArrays({piece}).input());
    alone.insert(alone.end(), logits.begin(), logits.end());
    pieces.push_back(piece);
  }
  const auto together = logits_of(engine.get(), StepArrays(pieces).input());
  BOOST_TEST_REQUIRE(together.size() == alone.size());
  BOOST_TEST(std::memcmp(together.data(), alone.data(), alone.size() * sizeof(float)) == 0);
}

BOOST_AUTO_TEST_CASE(a_long_prompt_reads_an_adapter_of_many_panels) {
  // More rows than a tile, and an A with more than one panel.
  constexpr float kTolerance = 5e-4F;
  RandomModel model({.dtype = DType::kFloat32, .num_layers = 1, .max_rank = 40});
  const auto adapter = model.adapter(22, true, 40);
  const auto plain = engine_of(merged(model.program, adapter, &model.storage()), "");
  const auto engine = engine_of(model.program, "");
  Piece piece{.prompt_length = 200};
  Random random(4);
  for (int i = 0; i < 200; ++i) piece.tokens.push_back(static_cast<std::int32_t>(random.below(61)));
  for (std::int32_t i = 0; i < 13; ++i) piece.blocks.push_back(i);
  const auto expected = logits_of(plain.get(), StepArrays({piece}).input());
  piece.adapter = &adapter;
  const auto found = logits_of(engine.get(), StepArrays({piece}).input());
  for (std::size_t i = 0; i < found.size(); ++i) {
    BOOST_TEST_REQUIRE(std::abs(found[i] - expected[i]) < kTolerance, found[i] << " " << expected[i]);
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::adapter_test
