#include "adaptrt/lora/host_adapter.h"

#include <array>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <functional>
#include <limits>

#include "adapters.h"
#include "adaptrt/core/error.h"
#include "adaptrt/lora/lora_cache.h"
#include "adaptrt/lora/pack_adapter.h"

namespace adaptrt::host_adapter_test {
namespace {

using namespace testing;
using enum LoraModule;

/// One rule: a way to break it, and the text of the refusal.
struct Rule {
  const char* name;
  std::function<void(SentAdapter&)> spoil_tensors;
  std::function<void(LoraConfig&)> spoil_request;
  std::vector<std::string> says;
  std::function<void(LoraLayout&)> change_engine = [](LoraLayout&) {};
};

std::ostream& operator<<(std::ostream& out, const Rule& rule) {
  return out << rule.name;
}

// The adapter to damage. Row 0: attn_q of layer 0, rank 2, 8 inputs, 6 outputs: 28 elements. Row 1:
// attn_dense of layer 1, rank 3, 6 inputs, 8 outputs, magnitudes: 50 elements. 53 columns.
const std::vector<SentRow> kRows{{kAttnQ, 0, 2, false}, {kAttnDense, 1, 3, true}};
const auto kNoTensors = [](SentAdapter&) {};
const auto kNoRequest = [](LoraConfig&) {};

std::vector<Rule> rules() {
  const float infinity = std::numeric_limits<float>::infinity();
  const auto field = [](std::size_t row, std::size_t column, std::int32_t value) {
    return [=](SentAdapter& adapter) { adapter.field(row, column) = value; };
  };
  const auto element = [](std::size_t row, std::size_t column, float value) {
    return [=](SentAdapter& adapter) { adapter.set(row, column, value); };
  };
  const auto shape_of_weights = [](std::vector<std::int64_t> shape) {
    return [=](LoraConfig& request) { request.weights->shape = shape; };
  };
  return {
      {"weights alone", kNoTensors, [](LoraConfig& r) { r.config.reset(); }, {"weights came without config"}},
      {"config alone", kNoTensors, [](LoraConfig& r) { r.weights.reset(); }, {"config came without weights"}},
      {"one dimension", kNoTensors, shape_of_weights({106}), {"weights has shape [106]", "two dimensions"}},
      {"three dimensions", kNoTensors, shape_of_weights({2, 2, 53}), {"weights has shape [2, 2, 53]"}},
      {"negative size", kNoTensors, shape_of_weights({2, -53}), {"weights has shape [2, -53]"}},
      {"huge declared rows",
       kNoTensors,
       [](LoraConfig& r) {
         r.weights->shape = {std::int64_t{1} << 60, 53};
         r.config->shape = {std::int64_t{1} << 60, 4};
       },
       {"config has 1152921504606846976 rows, more than the 64"}},
      {"rows differ", kNoTensors, shape_of_weights({1, 53}), {"weights has 1 rows and config has 2"}},
      {"no rows",
       kNoTensors,
       [](LoraConfig& r) {
         r.weights->shape = {0, 53};
         r.config->shape = {0, 4};
       },
       {"config has no rows"}},
      {"weights type",
       kNoTensors,
       [](LoraConfig& r) {
         r.weights->type = TensorType::kOther;
         r.weights->type_name = "float64";
       },
       {"weights is of type float64; accepted: float32, float16, bfloat16"}},
      {"integer weights",
       kNoTensors,
       [](LoraConfig& r) {
         r.weights->type = TensorType::kInt32;
         r.weights->type_name = "int32";
       },
       {"weights is of type int32"}},
      {"config type",
       kNoTensors,
       [](LoraConfig& r) {
         r.config->type = TensorType::kOther;
         r.config->type_name = "int64";
       },
       {"config is of type int64; accepted: int32"}},
      {"config columns",
       kNoTensors,
       [](LoraConfig& r) { r.config->shape = {2, 5}; },
       {"config has 5 columns; accepted: 3", "or 4"}},
      {"unknown module", field(1, 0, 52), kNoRequest, {"row 1: module_id 52 is unknown; accepted: 0 to 51"}},
      {"negative module", field(1, 0, -1), kNoRequest, {"row 1: module_id -1 is unknown"}},
      {"not a decoder module",
       field(0, 0, 24),
       kNoRequest,
       {"row 0: module_id 24 (moe_latent_fc1) is not part of"}},
      {"module not enabled",
       kNoTensors,
       kNoRequest,
       {"row 1: module_id 4 (attn_dense) is not enabled", "lora_target_modules are attn_q, attn_k"},
       [](LoraLayout& layout) { layout.target_modules = {kAttnQ, kAttnK}; }},
      {"engine without LoRA",
       kNoTensors,
       kNoRequest,
       {"built without LoRA"},
       [](LoraLayout& layout) {
         layout.target_modules.clear();
         layout.sites.clear();
       }},
      {"negative layer",
       field(0, 1, -1),
       kNoRequest,
       {"row 0: layer -1 of attn_q is out of range; accepted: 0 to 1"}},
      {"layer too large", field(0, 1, 2), kNoRequest, {"row 0: layer 2 of attn_q is out of range"}},
      {"rank zero",
       field(0, 2, 0),
       kNoRequest,
       {"row 0 (attn_q, layer 0): rank 0 is out of range; accepted: 1 to"}},
      {"rank negative", field(0, 2, -7), kNoRequest, {"row 0 (attn_q, layer 0): rank -7"}},
      {"rank above the engine's", field(0, 2, 9), kNoRequest, {"rank 9 is out of range", "max_lora_rank 8"}},
      {"huge rank", field(0, 2, std::numeric_limits<std::int32_t>::max()), kNoRequest, {"rank 2147483647"}},
      {"too narrow",
       field(1, 2, 4),
       kNoRequest,
       {"row 1 (attn_dense, layer 1): weights has 53 columns, but A[4, 6] and B[8, 4] and magnitude[8] need "
        "64"}},
      {"narrower than the magnitudes",
       kNoTensors,
       [](LoraConfig& r) { r.weights->shape = {2, 3}; },
       {"row 0 (attn_q, layer 0): weights has 3 columns",
        "row 1 (attn_dense, layer 1): weights has 3 columns"}},
      {"vectors",
       field(1, 3, 4),
       kNoRequest,
       {"row 1 (attn_dense, layer 1): vectors is 4; accepted: 0, 1 (a magnitude), 2 (a shift) or 3 (both)"}},
      {"negative vectors", field(1, 3, -1), kNoRequest, {"row 1 (attn_dense, layer 1): vectors is -1"}},
      {"too narrow for a shift",
       field(1, 3, 3),
       kNoRequest,
       {"A[3, 6] and B[8, 3] and magnitude[8] and shift[8] need 58"}},
      {"shifts not enabled",
       field(1, 3, 2),
       kNoRequest,
       {"row 1 (attn_dense, layer 1): it has a shift (of a bias), which TensorRT engines do not add"},
       [](LoraLayout& layout) { layout.shifts_enabled = false; }},
      {"DoRA not enabled",
       kNoTensors,
       kNoRequest,
       {"row 1 (attn_dense, layer 1): it has a magnitude", "--dora_plugin enable"},
       [](LoraLayout& layout) { layout.dora_enabled = false; }},
      {"repeated row",
       [](SentAdapter& adapter) {
         adapter.field(1, 0) = 1;
         adapter.field(1, 1) = 0;
         adapter.field(1, 2) = 2;
       },
       kNoRequest,
       {"row 1 (attn_q, layer 0): repeats row 0 (attn_q, layer 0)"}},
      {"fused beside a part",
       [](SentAdapter& adapter) {
         adapter.field(1, 0) = 0;
         adapter.field(1, 1) = 0;
         adapter.field(1, 2) = 1;
       },
       kNoRequest,
       {"row 1 (attn_qkv, layer 0): changes the same outputs as row 0 (attn_q, layer 0)"}},
      {"NaN",
       element(0, 17, std::nanf("")),
       kNoRequest,
       {"row 0 (attn_q, layer 0): element 17, B[0, 1], is nan"}},
      {"infinity",
       element(1, 7, -infinity),
       kNoRequest,
       {"row 1 (attn_dense, layer 1): element 7, A[1, 1], is -inf"}},
      {"shift not finite",
       [=](SentAdapter& adapter) {
         adapter.field(1, 3) = 2;
         adapter.set(1, 49, infinity);
       },
       kNoRequest,
       {"row 1 (attn_dense, layer 1): element 49, shift[7], is inf"}},
      {"magnitude not finite",
       element(1, 49, infinity),
       kNoRequest,
       {"row 1 (attn_dense, layer 1): element 49, magnitude[7], is inf"}},
      {"overflow",
       element(0, 16, 70000.0F),
       kNoRequest,
       {"element 16, B[0, 0], is 70000, too large for the engine's float16"},
       [](LoraLayout& layout) { layout.dtype = DType::kFloat16; }},
      {"padding",
       element(0, 30, 0.5F),
       kNoRequest,
       {"row 0 (attn_q, layer 0): element 30 is 0.5, but rank 2 without vectors describes 28 elements"}},
      {"padding of the last column",
       element(1, 52, -1.0F),
       kNoRequest,
       {"row 1 (attn_dense, layer 1): element 52"}},
      {"several at once",
       [](SentAdapter& adapter) {
         adapter.field(0, 2) = 99;
         adapter.field(1, 1) = -3;
       },
       [](LoraConfig& r) {
         r.weights->type = TensorType::kOther;
         r.weights->type_name = "float64";
       },
       {"LoRA task 7: ", "float64", "rank 99", "layer -3"}},
  };
}

BOOST_AUTO_TEST_SUITE(host_adapter)

BOOST_DATA_TEST_CASE(a_broken_rule_is_refused_by_name_and_changes_nothing,
                     boost::unit_test::data::make(rules()), rule) {
  LoraLayout layout = small_layout();
  SentAdapter adapter = make_adapter(kRows, layout);
  rule.change_engine(layout);
  LoraCache cache = make_host_cache(layout, {1 << 20, 8192, 4});
  rule.spoil_tensors(adapter);
  LoraConfig request = adapter.send(7);
  rule.spoil_request(request);
  const LoraCacheStats before = cache.stats();
  std::string text;
  try {
    (void)cache.admit(request);
  } catch (const AdapterError& error) {
    text = error.what();
  }
  for (const std::string& part : rule.says)
    BOOST_TEST(contains(text, part), text << "\n  does not say: " << part);
  BOOST_TEST((cache.stats() == before));
  BOOST_TEST(!cache.contains(7));
  BOOST_TEST(cache.check_invariants().empty());
}

BOOST_AUTO_TEST_CASE(all_wrong_rows_are_counted_and_the_first_ones_named) {
  const LoraLayout layout = small_layout();
  std::vector<SentRow> rows(30, {kAttnQ, 0, 1, false});
  const SentAdapter adapter = make_adapter(rows, layout);
  BOOST_CHECK_EXCEPTION(
      (void)make_host_adapter(adapter.send(1), layout), AdapterError, [](const AdapterError& error) {
        const std::string text = error.what();
        return contains(text, "row 20 (") && !contains(text, "row 21 (") && contains(text, "and 9 more");
      });
}

BOOST_DATA_TEST_CASE(rows_are_kept_as_submitted_without_padding, boost::unit_test::data::make({0, 1, 2}),
                     dtype_index) {
  const DType dtype = std::array{DType::kFloat32, DType::kFloat16, DType::kBFloat16}[dtype_index];
  const LoraLayout layout = small_layout(DType::kBFloat16);
  const SentAdapter sent = make_adapter(kRows, layout, 5, dtype);
  const auto adapter = make_host_adapter(sent.send(7, false, true), layout);
  BOOST_TEST(adapter->task_id() == 7U);
  BOOST_TEST((adapter->dtype() == dtype));
  BOOST_TEST(adapter->bytes() == (28 + 50) * size_of(dtype));
  BOOST_REQUIRE(adapter->rows().size() == 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    const AdapterRow& row = adapter->rows()[i];
    BOOST_TEST((row.module == kRows[i].module));
    BOOST_TEST(row.layer == kRows[i].layer);
    BOOST_TEST(row.rank == kRows[i].rank);
    BOOST_TEST(row.vectors.flags() == kRows[i].vectors().flags());
    for (std::size_t j = 0; j < elements_of(kRows[i], layout); ++j) {
      BOOST_TEST(load_as_float(adapter->data(), dtype, row.offset + j) == sent.get(i, j));
    }
  }
}

/// small_layout() with lm_head and the embedding of a vocabulary of two slices.
LoraLayout layout_with_vocabulary() {
  constexpr std::int64_t kRest = 100;
  LoraLayout layout = small_layout();
  for (std::int32_t slice = 0; slice < 2; ++slice) {
    const std::int64_t tokens = slice == 0 ? kVocabularySlice : kRest;
    layout.sites.push_back({slice, tokens, {{kEmbedding, 8}}});
  }
  for (std::int32_t slice = 0; slice < 2; ++slice) {
    layout.sites.push_back({slice, 8, {{kLmHead, slice == 0 ? kVocabularySlice : kRest}}});
  }
  layout.target_modules.insert(layout.target_modules.end(), {kLmHead, kEmbedding});
  return layout;
}

/// Returns the error, which is the same however the adapter is kept.
std::string refusal_of(const SentAdapter& sent, const LoraLayout& layout) {
  const auto refusal = [](const auto& make) -> std::string {
    try {
      make();
    } catch (const AdapterError& error) {
      return error.what();
    }
    return "";
  };
  const SiteIndex index(layout);
  const std::string as_sent = refusal([&] { (void)HostAdapter::make(sent.send(1), layout, index); });
  BOOST_TEST(refusal([&] {
               (void)HostAdapter::make_packed(sent.send(1), layout, index, std::size_t{1} << 24);
             }) == as_sent);
  return as_sent;
}

/// Copies the first elements of one row to another.
void copy_a(SentAdapter* sent, std::size_t from, std::size_t to, std::size_t elements) {
  for (std::size_t i = 0; i < elements; ++i) sent->set(to, i, sent->get(from, i));
}

BOOST_AUTO_TEST_CASE(rows_of_lm_head_are_all_slices_and_have_one_a) {
  const LoraLayout layout = layout_with_vocabulary();
  SentAdapter sent = make_adapter({{kLmHead, 0, 2}, {kLmHead, 0, 2}}, layout);
  sent.field(1, 1) = 1;
  for (std::size_t i = 2 * (8 + 100); i < sent.width; ++i) sent.set(1, i, 0.0F);
  BOOST_TEST(
      contains(refusal_of(sent, layout), "lm_head's slices 0 and 1 have different A; all have the same"));
  copy_a(&sent, 0, 1, 2 * 8);
  BOOST_TEST(refusal_of(sent, layout) == "");
  sent.field(1, 0) = static_cast<std::int32_t>(kAttnQ);
  for (std::size_t i = 28; i < sent.width; ++i) sent.set(1, i, 0.0F);
  BOOST_TEST(contains(refusal_of(sent, layout), "lm_head has rows for 1 of the vocabulary's 2 slices"));
  sent.field(1, 0) = static_cast<std::int32_t>(kLmHead);
  sent.field(1, 1) = 2;
  BOOST_TEST(contains(refusal_of(sent, layout), "this engine's vocabulary has no slice 2 for lm_head"));
}

BOOST_AUTO_TEST_CASE(slices_of_the_embedding_stand_by_themselves) {
  const LoraLayout layout = layout_with_vocabulary();
  SentAdapter sent = make_adapter({{kEmbedding, 0, 1}}, layout);
  sent.field(0, 1) = 1;
  for (std::size_t i = 100 + 8; i < sent.width; ++i) sent.set(0, i, 0.0F);
  BOOST_TEST(refusal_of(sent, layout) == "");
}

BOOST_AUTO_TEST_CASE(settings_have_no_weights) {
  LoraLayout layout = small_layout();
  layout.rotary_factors = {2, 4};
  layout.max_base_positions = 16;
  const SentAdapter plain = make_adapter(kRows, layout);
  const auto with = [&](const std::vector<std::array<std::int32_t, 4>>& settings) {
    SentAdapter sent = plain;
    for (const auto& row : settings) sent.add_row(row);
    return sent;
  };
  const auto adapter = make_host_adapter(with({{29, 0, 4, 0}, {30, 0, 3, 0}}).send(1), layout);
  BOOST_TEST(adapter->terms().rotary_factor == 4);
  BOOST_TEST(adapter->terms().vocabulary_change == -3);
  const auto base = make_host_adapter(plain.send(1), layout);
  BOOST_TEST(adapter->bytes() == base->bytes());
  BOOST_TEST(!adapter->same_weights(*base));
  BOOST_TEST((adapter->content_digest() != base->content_digest()));
  const SiteIndex index(layout);
  BOOST_TEST(plan_device_images(adapter->rows(), layout, index, 1 << 20).sites.size() ==
             plan_device_images(base->rows(), layout, index, 1 << 20).sites.size());
  // A copy that is received from another process has the same values.
  HugeArray data(adapter->bytes());
  std::copy_n(adapter->data(), adapter->bytes(), data.data());
  BOOST_TEST((HostAdapter::received(1, adapter->dtype(), adapter->rows(), std::move(data))->terms() ==
              adapter->terms()));

  const std::string where = "row " + std::to_string(plain.rows) + " ";
  BOOST_TEST(contains(refusal_of(with({{29, 0, 3, 0}}), layout),
                      where + "(rotary_scaling, layer 0): it divides rotary positions by 3; the engine's "
                              "long_lora_scaling_factors are 2, 4"));
  BOOST_TEST(contains(refusal_of(with({{30, 0, -1, 0}}), layout), "its number of absent tokens is -1"));
  BOOST_TEST(contains(refusal_of(with({{30, 1, 1, 0}}), layout), "accepted: 0 of both"));
  BOOST_TEST(contains(refusal_of(with({{30, 0, 1, 0}, {30, 0, 2, 0}}), layout), "repeats row"));
  layout.rotary_factors.clear();
  BOOST_TEST(contains(refusal_of(with({{29, 0, 3, 0}}), layout), "was built without such factors"));
  layout.max_extra_tokens = 2;
  layout.sites.push_back({0, 8, {{kNewTokens, 8}}});
  SentAdapter both = make_adapter({{kNewTokens, 0, 2}}, layout);
  both.add_row({30, 0, 1, 0});
  BOOST_TEST(contains(refusal_of(both, layout), "it brings new_tokens and has absent_tokens"));
}

BOOST_AUTO_TEST_CASE(norms_have_shifts_alone) {
  LoraLayout layout = small_layout();
  layout.sites.push_back({5, 1, {{kNorm, 8}}});
  SentAdapter sound = make_adapter(kRows, layout);
  sound.add_row({31, 5, 1, 2});
  const std::size_t row = sound.rows - 1;
  for (std::size_t i = 0; i < 8; ++i) sound.set(row, 9 + i, 0.5F);  // after A[1, 1] and B[8, 1]
  const auto adapter = make_host_adapter(sound.send(1), layout);
  const SiteIndex index(layout);
  const DevicePlan plan = plan_device_images(adapter->rows(), layout, index, 1 << 20);
  BOOST_TEST(plan.sites.back().site == static_cast<std::int32_t>(layout.sites.size()) - 1);

  const auto refusal = [&](const std::function<void(SentAdapter&)>& spoil) {
    SentAdapter sent = sound;
    spoil(sent);
    return refusal_of(sent, layout);
  };
  const std::string where = "row " + std::to_string(row) + " (norm, layer 5): ";
  const std::string alone = "because a norm has only a shift";
  BOOST_TEST(contains(refusal([&](SentAdapter& sent) { sent.field(row, 2) = 2; }), where + "rank is 2"));
  BOOST_TEST(contains(refusal([&](SentAdapter& sent) { sent.field(row, 3) = 0; }), alone));
  BOOST_TEST(contains(refusal([&](SentAdapter& sent) { sent.field(row, 3) = 3; }), alone));
  BOOST_TEST(contains(refusal([&](SentAdapter& sent) { sent.set(row, 0, 1.0F); }),
                      "A[0, 0], is 1; accepted: 0, " + alone));
  BOOST_TEST(contains(refusal([&](SentAdapter& sent) { sent.set(row, 8, 2.0F); }),
                      "B[7, 0], is 2; accepted: 0, " + alone));
  BOOST_TEST(contains(refusal([&](SentAdapter& sent) { sent.field(row, 1) = 4; }),
                      "this engine has no norm 4 whose bias adapters can shift"));
}

BOOST_AUTO_TEST_CASE(new_tokens_have_room_of_their_own) {
  LoraLayout layout = small_layout();
  const std::int32_t too_many = layout.max_rank + 3;
  layout.max_extra_tokens = layout.max_rank + 2;
  layout.sites.push_back({0, 8, {{kNewTokens, 8}}});
  SentAdapter sent = make_adapter({{kNewTokens, 0, layout.max_extra_tokens}}, layout);
  BOOST_TEST(refusal_of(sent, layout) == "");
  BOOST_TEST(make_host_adapter(sent.send(1), layout)->terms().vocabulary_change == layout.max_extra_tokens);
  BOOST_TEST(make_host_adapter(make_adapter(kRows, layout).send(1), layout)->terms().vocabulary_change == 0);
  sent.field(0, 2) = too_many;
  BOOST_TEST(contains(refusal_of(sent, layout), "accepted: 1 to the engine's max_extra_tokens"));
  BOOST_TEST(contains(refusal_of(sent, layout),
                      "(adaptrt build --max_extra_tokens " + std::to_string(too_many) + " makes room)"));
  sent.field(0, 2) = 1;
  sent.field(0, 3) = 1;
  BOOST_TEST(contains(refusal_of(sent, layout), "vectors is 1; accepted: 0"));
  sent.field(0, 1) = 1;
  BOOST_TEST(contains(refusal_of(sent, layout), "layer 1 of new_tokens; accepted: 0"));
  BOOST_TEST(contains(refusal_of(sent, small_layout()), "the engine was built without room for new tokens"));
}

BOOST_AUTO_TEST_CASE(three_columns_mean_no_vectors) {
  const LoraLayout layout = small_layout();
  SentAdapter sent = make_adapter({{kAttnQ, 0, 2, false}, {kMlpGateUp, 1, 8, false}}, layout);
  sent.drop_column_of_vectors();
  const auto adapter = make_host_adapter(sent.send(1), layout);
  BOOST_TEST(adapter->rows()[0].vectors.count() == 0);
  BOOST_TEST(adapter->rows()[1].vectors.count() == 0);
}

/// Rows of mlp_gate_up with the id of mlp_h_to_4h, as written by TensorRT-LLM's converter.
SentAdapter as_converter_writes(SentAdapter sent) {
  for (std::size_t row = 0; row < sent.rows; ++row) {
    if (sent.field(row, 0) == static_cast<std::int32_t>(kMlpGateUp)) {
      sent.field(row, 0) = static_cast<std::int32_t>(kMlpHTo4H);
    }
  }
  return sent;
}

BOOST_AUTO_TEST_CASE(mlp_h_to_4h_with_twice_its_outputs_is_mlp_gate_up) {
  LoraLayout layout = small_layout();
  const std::vector<SentRow> rows{{kAttnQ, 0, 2}, {kMlpGateUp, 0, 3}, {kMlpGateUp, 1, 2}};
  // The tensor has the width of its widest row, which is a fused one.
  SentAdapter fused = make_adapter(rows, layout, 1, DType::kFloat32, 0);
  // B of layer 1 is 0: the row of layer 0 shows that the row is fused.
  for (std::size_t column = 2 * 8; column < fused.width; ++column) fused.set(2, column, 0.0F);
  const auto expected = make_host_adapter(fused.send(1), layout);
  SentAdapter sent = as_converter_writes(fused);
  for (const std::size_t columns : {4U, 3U}) {
    if (columns == 3) sent.drop_column_of_vectors();
    BOOST_TEST(make_host_adapter(sent.send(1), layout)->same_weights(*expected));
  }
  std::erase(layout.target_modules, kMlpGateUp);
  BOOST_TEST(
      contains(refusal_of(sent, layout),
               "row 1: module_id 5 (mlp_h_to_4h) has twice its outputs, so it is mlp_gate_up, which is "
               "not enabled in this engine"));
}

BOOST_AUTO_TEST_CASE(mlp_h_to_4h_without_values_in_its_padding_stays_itself) {
  const LoraLayout layout = small_layout();
  const SentAdapter sent = make_adapter({{kMlpHTo4H, 0, 2}, {kMlpGateUp, 1, 8}}, layout);
  BOOST_TEST((make_host_adapter(sent.send(1), layout)->rows()[0].module == kMlpHTo4H));
}

BOOST_AUTO_TEST_CASE(fused_rows_with_magnitudes_or_next_to_a_part_are_refused) {
  const LoraLayout layout = small_layout();
  const SentAdapter dora = as_converter_writes(make_adapter({{kMlpGateUp, 0, 3, true}}, layout));
  BOOST_TEST(contains(refusal_of(dora, layout), "whose halves are not in the order of B's"));
  SentAdapter both = make_adapter({{kMlpGateUp, 0, 3}, {kMlpGate, 1, 3}}, layout);
  both.field(1, 1) = 0;
  BOOST_TEST(contains(refusal_of(as_converter_writes(both), layout), "changes the same outputs as row 0"));
}

BOOST_AUTO_TEST_CASE(negative_zero_is_padding_and_large_magnitudes_are_no_overflow) {
  const LoraLayout layout = small_layout(DType::kFloat16);
  SentAdapter sent = make_adapter(kRows, layout);
  sent.set(0, 28, -0.0F);
  sent.set(1, 42, 1e6F);
  BOOST_TEST(make_host_adapter(sent.send(1), layout)->bytes() == 78U * 4);
}

BOOST_AUTO_TEST_CASE(the_largest_value_of_each_type_passes_and_the_next_overflows) {
  const LoraLayout half = small_layout(DType::kFloat16);
  SentAdapter wide = make_adapter(kRows, half);
  wide.set(0, 0, -65519.996F);
  BOOST_CHECK_NO_THROW((void)make_host_adapter(wide.send(1), half));
  wide.set(0, 0, 65520.0F);
  BOOST_CHECK_THROW((void)make_host_adapter(wide.send(1), half), AdapterError);
  SentAdapter brain = make_adapter(kRows, half, 1, DType::kBFloat16);
  brain.set(0, 0, 65280.0F);
  BOOST_CHECK_NO_THROW((void)make_host_adapter(brain.send(1), half));
  brain.set(0, 0, 65536.0F);
  BOOST_CHECK_THROW((void)make_host_adapter(brain.send(1), half), AdapterError);
  const LoraLayout bfloat = small_layout(DType::kBFloat16);
  wide.set(0, 0, std::bit_cast<float>(0x7f7f7fffU));
  BOOST_CHECK_NO_THROW((void)make_host_adapter(wide.send(1), bfloat));
  wide.set(0, 0, std::bit_cast<float>(0x7f7f8000U));
  BOOST_CHECK_THROW((void)make_host_adapter(wide.send(1), bfloat), AdapterError);
}

BOOST_AUTO_TEST_CASE(weights_are_the_same_when_rows_types_and_bytes_are) {
  const LoraLayout layout = small_layout();
  const auto make = [&](const SentAdapter& sent) { return make_host_adapter(sent.send(1), layout); };
  const SentAdapter sent = make_adapter(kRows, layout);
  const auto adapter = make(sent);
  BOOST_TEST(adapter->same_weights(*make(sent)));
  BOOST_TEST(adapter->generation() != make(sent)->generation());
  BOOST_TEST(adapter->same_weights(*make(make_adapter(kRows, layout, 1, DType::kFloat32, 9))));
  BOOST_TEST(!adapter->same_weights(*make(make_adapter(kRows, layout, 1, DType::kFloat16))));
  SentAdapter other = sent;
  other.set(1, 49, 3.0F);
  BOOST_TEST(!adapter->same_weights(*make(other)));
  other = sent;
  other.field(0, 1) = 1;
  BOOST_TEST(!adapter->same_weights(*make(other)));
}

BOOST_AUTO_TEST_CASE(packed_weights_are_the_same_when_the_engine_cannot_tell_them_apart) {
  const LoraLayout layout = small_layout(DType::kBFloat16);
  const auto make = [&](const SentAdapter& sent) {
    return HostAdapter::make_packed(sent.send(1), layout, SiteIndex(layout), 8192);
  };
  const SentAdapter sent = make_adapter(kRows, layout);
  const auto adapter = make(sent);
  SentAdapter other = sent;
  other.set(0, 0, std::nextafter(sent.get(0, 0), 9.0F));
  BOOST_TEST(
      (adapter->same_weights(*make(other)) && adapter->content_digest() == make(other)->content_digest()));
  other.set(0, 0, 3.0F);
  BOOST_TEST(!adapter->same_weights(*make(other)));
  BOOST_TEST((adapter->content_digest() != make(other)->content_digest()));
  BOOST_TEST(!adapter->same_weights(*make(make_adapter(kRows, layout, 1, DType::kFloat16))));
  BOOST_TEST(adapter->same_weights(*make(make_adapter(kRows, layout, 1, DType::kFloat32, 9))));
}

BOOST_AUTO_TEST_CASE(every_bad_row_of_a_packed_adapter_is_named_in_the_order_of_the_rows) {
  const LoraLayout layout = small_layout(DType::kFloat16);
  // Images come in the order of the layers; the rows here do not.
  SentAdapter sent = make_adapter({{kAttnDense, 1, 2, true, true}, {kAttnQ, 0, 3}, {kAttnK, 0, 2}}, layout);
  const std::size_t vectors = 2 * (6 + 8);
  sent.set(0, vectors + 9, std::numeric_limits<float>::infinity());   // shift[1]
  sent.set(0, vectors + 3, std::numeric_limits<float>::quiet_NaN());  // magnitude[3]
  sent.set(1, 3 * 8 + 2, 1e30F);                                      // B[0, 2]
  sent.set(1, 9, 70000.0F);                                           // A[1, 1]
  sent.set(2, 2 * (8 + 3), 1.0F);                                     // padding
  const std::string text = refusal_of(sent, layout);
  const std::size_t first = text.find("row 0 (attn_dense, layer 1): element 31, magnitude[3], is nan");
  const std::size_t second = text.find("row 1 (attn_q, layer 0): element 9, A[1, 1], is 70000, too large");
  const std::size_t third = text.find("row 2 (attn_k, layer 0): element 22 is 1");
  BOOST_TEST((first < second && second < third && third != std::string::npos), text);
}

BOOST_AUTO_TEST_CASE(the_content_digest_is_that_of_the_weights_alone) {
  const LoraLayout layout = small_layout();
  const auto digest_of = [&](const SentAdapter& sent, std::uint64_t task_id) {
    return make_host_adapter(sent.send(task_id), layout)->content_digest();
  };
  const SentAdapter sent = make_adapter(kRows, layout);
  const Sha256Digest digest = digest_of(sent, 1);
  BOOST_TEST((digest_of(sent, 2) == digest));
  BOOST_TEST((digest_of(make_adapter(kRows, layout, 1, DType::kFloat16), 1) != digest));
  SentAdapter other = sent;
  other.set(1, 49, 3.0F);
  BOOST_TEST((digest_of(other, 1) != digest));
  other = sent;
  other.field(0, 1) = 1;
  BOOST_TEST((digest_of(other, 1) != digest));
}

BOOST_AUTO_TEST_CASE(the_content_digest_is_known_when_it_was_asked_for) {
  const LoraLayout layout = small_layout();
  const auto adapter = make_host_adapter(make_adapter(kRows, layout).send(1), layout);
  BOOST_TEST((adapter->known_content_digest() == Sha256Digest{}));
  const Sha256Digest digest = adapter->content_digest();
  BOOST_TEST((adapter->known_content_digest() == digest));
  BOOST_TEST((digest != Sha256Digest{}));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::host_adapter_test
