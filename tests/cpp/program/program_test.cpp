#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <functional>
#include <limits>
#include <string>
#include <variant>
#include <vector>

#include "adaptrt/core/error.h"
#include "program/program_fixture.h"

namespace adaptrt::testing::program_test {
namespace {

bool has_attention(const Program& program) {
  return std::ranges::any_of(program.body,
                             [](const Op& op) { return std::holds_alternative<AttentionOp>(op); });
}

/// Returns the attention shape of the program's first attention op.
AttentionShape& heads_of(Program* program) {
  const auto found = std::ranges::find_if(
      program->body, [](const Op& op) { return std::holds_alternative<AttentionOp>(op); });
  return std::get<AttentionOp>(*found).shape;
}

constexpr std::ptrdiff_t kKeep = 12;

BOOST_FIXTURE_TEST_SUITE(program, ProgramFixture)

BOOST_AUTO_TEST_CASE(a_sound_program_has_no_problems) {
  BOOST_TEST(model.program.validate().empty());
}

BOOST_AUTO_TEST_CASE(unusable_sizes_are_found) {
  finds("vocab_size is 0", [](Program* p) { p->vocab_size = 0; });
  finds("vocab_size is", [](Program* p) { p->vocab_size = kHuge; });
  finds("num_layers is -1", [](Program* p) { p->num_layers = -1; });
  finds("head_dim is 11; it must be even", [](Program* p) { heads_of(p).head_dim = 11; });
  finds("not a multiple of num_key_value_heads", [](Program* p) { heads_of(p).num_key_value_heads = 3; });
  finds("num_key_value_heads is 0", [](Program* p) { heads_of(p).num_key_value_heads = 0; });
  finds("max_batch_size is 0", [](Program* p) { p->max_batch_size = 0; });
  finds("max_num_tokens is",
        [](Program* p) { p->max_num_tokens = std::numeric_limits<std::int32_t>::max(); });
  finds("max_input_len is 301", [](Program* p) { p->max_input_len = 301; });
  finds("max_beam_width is 0", [](Program* p) { p->max_beam_width = 0; });
  finds("max_beam_width is 9", [](Program* p) { p->max_beam_width = p->max_batch_size + 1; });
  finds("tokens_per_block is 0", [](Program* p) { p->tokens_per_block = 0; });
  finds("dtype is unknown", [](Program* p) { p->dtype = static_cast<DType>(9); });
}

BOOST_AUTO_TEST_CASE(sizes_end_where_they_are_said_to) {
  struct Limit {
    std::string name;
    std::int64_t most;
    std::function<void(Program*, std::int64_t)> set;
  };
  const auto as_int = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
  const std::vector<Limit> limits = {
      {"vocab_size", (std::int64_t{1} << 31) - 1, [](Program* p, std::int64_t n) { p->vocab_size = n; }},
      {"num_layers", 1 << 16, [&](Program* p, std::int64_t n) { p->num_layers = as_int(n); }},
      {"num_attention_heads", 1 << 16,
       [](Program* p, std::int64_t n) { heads_of(p).num_attention_heads = n; }},
      {"head_dim", 1 << 12, [](Program* p, std::int64_t n) { heads_of(p).head_dim = n; }},
      {"max_batch_size", 1 << 20, [&](Program* p, std::int64_t n) { p->max_batch_size = as_int(n); }},
      {"max_num_tokens", 1 << 24, [&](Program* p, std::int64_t n) { p->max_num_tokens = as_int(n); }},
      {"max_seq_len", 1 << 30, [&](Program* p, std::int64_t n) { p->max_seq_len = as_int(n); }},
      {"tokens_per_block", 1 << 16, [&](Program* p, std::int64_t n) { p->tokens_per_block = as_int(n); }},
      {"lora: max_rank", 1 << 20, [&](Program* p, std::int64_t n) { p->lora.max_rank = as_int(n); }},
  };
  for (const Limit& limit : limits) {
    finds(limit.name + " is " + std::to_string(limit.most + 1),
          [&](Program* p) { limit.set(p, limit.most + 1); });
    does_not_find(limit.name + " is " + std::to_string(limit.most) + ";",
                  [&](Program* p) { limit.set(p, limit.most); });
  }
}

BOOST_AUTO_TEST_CASE(unusable_buffers_are_found) {
  finds("'hidden' does not lie within arena_bytes",
        [](Program* p) { p->buffers[0].offset = p->arena_bytes; });
  finds("does not lie within",
        [](Program* p) { p->buffers[0].offset = std::numeric_limits<std::size_t>::max() - 63; });
  finds("does not lie within", [](Program* p) { p->arena_bytes = 0; });
  finds("not a multiple of 64", [](Program* p) { p->buffers[1].offset += 4; });
  finds("width is 0", [](Program* p) { p->buffers[1].width = 0; });
  finds("width is", [](Program* p) { p->buffers[1].width = kHuge; });
  finds("the dtype is unknown", [](Program* p) { p->buffers[1].dtype = static_cast<DType>(77); });
  finds("share bytes", [](Program* p) { p->buffers[1].offset = p->buffers[0].offset; });
  finds("'hidden' and 'logits' share bytes", [](Program* p) { p->buffers[8].offset = p->buffers[0].offset; });
}

BOOST_AUTO_TEST_CASE(buffers_may_share_bytes_when_their_lives_are_apart) {
  Program program = model.program;
  // The gated activations are written after the last use of the layer's qkv.
  program.buffers[4].offset = program.buffers[2].offset;
  BOOST_TEST(program.validate().empty());
  // The op that writes qkv reads the normed activations.
  program.buffers[1].offset = program.buffers[2].offset;
  BOOST_TEST(!program.validate().empty());
}

BOOST_AUTO_TEST_CASE(unusable_operands_are_found) {
  finds("output names buffer 9 of 9", [](Program* p) { op_at<EmbeddingOp>(p, 0).output = 9; });
  finds("output names buffer -1", [](Program* p) { op_at<EmbeddingOp>(p, 0).output = kNoBuffer; });
  finds("names buffer -2147483648",
        [](Program* p) { op_at<LinearOp>(p, 3).input = std::numeric_limits<std::int32_t>::min(); });
  finds("not a row of logits", [](Program* p) { p->logits = 0; });
  finds("not a token", [](Program* p) { op_at<RmsNormOp>(p, 2).output = 7; });
  finds("reads 'normed' before it is written", [](Program* p) { p->body.erase(p->body.begin() + 2); });
  finds("input and output are one buffer", [](Program* p) { op_at<LinearOp>(p, 5).input = 0; });
  finds("body has no ops", [](Program* p) { p->body.clear(); });
  finds("head has no ops", [](Program* p) { p->head.clear(); });
  finds("belongs in the body", [](Program* p) { p->head.insert(p->head.begin(), p->body[0]); });
  finds("gathers logit rows outside the head",
        [](Program* p) { op_at<RmsNormOp>(p, 2).gather_logit_rows = true; });
  finds("has a row a token", [](Program* p) { std::get<RmsNormOp>(p->head[0]).gather_logit_rows = false; });
}

BOOST_AUTO_TEST_CASE(rows_that_are_not_kept_cannot_be_used) {
  const auto keep = [](Program* p) -> std::vector<BufferId>& {
    return op_at<KeepLogitRowsOp>(p, static_cast<std::size_t>(kKeep)).buffers;
  };
  finds("reads 'hidden', whose rows were not kept", [&](Program* p) { keep(p) = {3}; });
  finds("reads 'attended', whose rows were not kept", [&](Program* p) { keep(p) = {0}; });
  finds("names buffer 9 of 9", [&](Program* p) { keep(p).push_back(9); });
  finds("names buffer -1 of 9", [&](Program* p) { keep(p).push_back(kNoBuffer); });
  finds("names 'hidden' twice", [&](Program* p) { keep(p).push_back(0); });
  finds("'logits' has a row a row of logits", [&](Program* p) { keep(p).push_back(8); });
  finds("reads 'gated' before it is written",
        [](Program* p) { p->body.insert(p->body.begin() + 5, KeepLogitRowsOp{{0, 3, 4}}); });
  finds("(attention): belongs before the op that keeps rows of logits alone",
        [&](Program* p) { p->body.insert(p->body.begin() + 2, KeepLogitRowsOp{{0, 5, 6}}); });
  finds("(keep logit rows): belongs before the op that keeps rows of logits alone",
        [&](Program* p) { p->body.push_back(KeepLogitRowsOp{{0}}); });
  finds("(keep logit rows): belongs in the body", [](Program* p) { p->head.push_back(KeepLogitRowsOp{}); });
  Program program = model.program;
  keep(&program).push_back(2);  // qkv was written before, and is not read again
  BOOST_TEST(program.validate().empty());
  program.body.erase(program.body.begin() + kKeep);
  BOOST_TEST(program.validate().empty());
}

BOOST_AUTO_TEST_CASE(unusable_attention_is_found) {
  finds("layer is 2", [](Program* p) { op_at<AttentionOp>(p, 4).layer = 2; });
  finds("layer 0 has 0 attention ops", [](Program* p) { op_at<AttentionOp>(p, 4).layer = 1; });
  finds("query_norm has 11 elements", [](Program* p) { op_at<AttentionOp>(p, 4).query_norm.size = 11; });
  finds("sliding_window is -1", [](Program* p) { op_at<AttentionOp>(p, 4).sliding_window = -1; });
  finds("scale is",
        [](Program* p) { op_at<AttentionOp>(p, 4).scale = std::numeric_limits<float>::infinity(); });
  finds("cosine 'cosine' is 6 wide; it must be 7",
        [](Program* p) { op_at<RopeTableOp>(p, 1).inverse_frequencies.size = 7; });
  finds("original_max_position is 0", [](Program* p) { op_at<RopeTableOp>(p, 1).kind = RopeKind::kDynamic; });
  finds("the kind is unknown", [](Program* p) { op_at<RopeTableOp>(p, 1).kind = static_cast<RopeKind>(4); });
  finds("cosine and sine are one buffer", [](Program* p) { op_at<RopeTableOp>(p, 1).sine = 5; });
}

BOOST_AUTO_TEST_CASE(unusable_ops_of_other_families_are_found) {
  Random random(3);
  const auto vector = [&](std::int64_t size) { return model.storage().vector(size, 0.5F, 1.5F, &random); };
  const VectorView ones = model.storage().vector(std::vector<float>(12, 1.0F));
  const auto positions = model.storage().matrix(DType::kFloat32, 10, 48, 1.0F, &random);
  finds("token types' table", [&](Program* p) {
    op_at<EmbeddingOp>(p, 0).types = model.storage().matrix(DType::kFloat32, 2, 47, 1.0F, &random);
  });
  finds("learned positions is 10", [&](Program* p) { op_at<EmbeddingOp>(p, 0).positions = positions; });
  finds("body op 0 (embedding): scale is", [](Program* p) { op_at<EmbeddingOp>(p, 0).scale = -1.0F; });
  finds("long_inverse_frequencies has 0 elements; it must have 6", [](Program* p) {
    op_at<RopeTableOp>(p, 1).kind = RopeKind::kLong;
    op_at<RopeTableOp>(p, 1).original_max_position = 8;
  });
  finds("body op 2 (layer norm): the bias has 3 elements", [&](Program* p) {
    p->body.at(2) =
        LayerNormOp{.input = 0, .output = 1, .weight = vector(48), .bias = vector(3), .epsilon = 1e-5F};
  });
  finds("body op 2 (layer norm): its lora_site 0 is not that of a norm with a bias of 48", [&](Program* p) {
    p->body.at(2) = LayerNormOp{
        .input = 0, .output = 1, .weight = vector(48), .bias = vector(48), .epsilon = 1e-5F, .lora_site = 0};
  });
  does_not_find("op 2", [&](Program* p) {
    p->body.at(2) = LayerNormOp{.input = 0, .output = 1, .weight = vector(48), .bias = {}, .epsilon = 1e-5F};
  });
  finds("body op 2 (cast): input and output are one buffer",
        [](Program* p) { p->body.at(2) = CastOp{.input = 0, .output = 0}; });
  does_not_find("op 2", [](Program* p) { p->body.at(2) = CastOp{.input = 0, .output = 1}; });
  finds("body op 2 (rms norm): input and output are one buffer", [](Program* p) {
    op_at<RmsNormOp>(p, 2).add = true;
    op_at<RmsNormOp>(p, 2).output = 0;
  });
  finds("head op 0 (rms norm): adds outside the body",
        [](Program* p) { std::get<RmsNormOp>(p->head.at(0)).add = true; });
  finds("query_scaling_length is 0", [&](Program* p) { op_at<AttentionOp>(p, 4).query_scaling_length = 0; });
  finds("query_scaling_beta is -1", [&](Program* p) { op_at<AttentionOp>(p, 4).query_scaling_beta = -1.0F; });
  finds("query_scaling_offset is -1",
        [&](Program* p) { op_at<AttentionOp>(p, 4).query_scaling_offset = -1; });
  finds("norms after the rotation must be of each head", [&](Program* p) {
    op_at<AttentionOp>(p, 4).norms_after_rotation = true;
    op_at<AttentionOp>(p, 4).query_norm = vector(48);
    op_at<AttentionOp>(p, 4).key_norm = vector(24);
  });
  finds("chunk is -1", [](Program* p) { op_at<AttentionOp>(p, 4).chunk = -1; });
  finds("chunk is given, and it is not causal, or has a sliding window", [](Program* p) {
    op_at<AttentionOp>(p, 4).chunk = 8;
    op_at<AttentionOp>(p, 4).sliding_window = 8;
  });
  does_not_find("op 4", [](Program* p) { op_at<AttentionOp>(p, 4).chunk = 8; });
  finds("interleaved heads have a norm of their own", [&](Program* p) {
    op_at<AttentionOp>(p, 4).interleaved = true;
    op_at<AttentionOp>(p, 4).query_norm = ones;
  });
  finds("interleaved heads have a norm of their own", [&](Program* p) {
    op_at<AttentionOp>(p, 4).interleaved = true;
    op_at<AttentionOp>(p, 4).norms_after_rotation = true;
    op_at<AttentionOp>(p, 4).key_norm = vector(12);
  });
  does_not_find("op 4", [&](Program* p) {
    op_at<AttentionOp>(p, 4).interleaved = true;
    op_at<AttentionOp>(p, 4).norms_after_rotation = true;
    op_at<AttentionOp>(p, 4).query_norm = ones;
    op_at<AttentionOp>(p, 4).key_norm = ones;
  });
  does_not_find("op 4", [&](Program* p) {
    op_at<AttentionOp>(p, 4).interleaved = true;
    op_at<AttentionOp>(p, 4).query_norm = vector(48);
    op_at<AttentionOp>(p, 4).key_norm = vector(24);
  });
  finds("body op 4 (attention): softcap is", [](Program* p) { op_at<AttentionOp>(p, 4).softcap = -1.0F; });
  finds("body op 5 (linear): softcap is", [](Program* p) { op_at<LinearOp>(p, 5).softcap = -1.0F; });
  finds("body op 5 (linear): scale is",
        [](Program* p) { op_at<LinearOp>(p, 5).scale = std::numeric_limits<float>::infinity(); });
}

BOOST_AUTO_TEST_CASE(unusable_convolutions_scans_and_activations_are_found) {
  Random random(3);
  const auto vector = [&](std::int64_t size) { return model.storage().vector(size, 0.5F, 1.5F, &random); };
  const auto with = [](Op op) {
    return [op = std::move(op)](Program* p) { p->body.insert(p->body.begin() + 4, op); };
  };
  // Buffer 0 is the residual stream, 48 wide.
  finds("(gated convolution): taps is 0",
        with(GatedConvolutionOp{.input = 0, .output = 1, .weight = vector(48), .taps = 0}));
  finds("(gated convolution): the weight has 47 elements; it must have some for each of 3 taps",
        with(GatedConvolutionOp{.input = 0, .output = 1, .weight = vector(47), .taps = 3}));
  finds("(gated convolution): input 'hidden' is 48 wide; it must be 51",
        with(GatedConvolutionOp{.input = 0, .output = 1, .weight = vector(34), .taps = 2}));
  finds(
      "(gated convolution): the bias has 15 elements",
      with(GatedConvolutionOp{.input = 0, .output = 1, .weight = vector(32), .taps = 2, .bias = vector(15)}));
  SelectiveScanOp scan{.shape = {.num_heads = 4, .head_dim = 8, .num_groups = 2, .state_dim = 3},
                       .values = 0,
                       .output = 1,
                       .log_decay = vector(4),
                       .time_bias = vector(4),
                       .skip = vector(4)};
  finds("layer 0 has 2 selective scans, not one", [&](Program* p) {
    with(scan)(p);
    with(scan)(p);
  });
  const auto changed = [&](auto change) {
    SelectiveScanOp op = scan;
    change(&op);
    return with(op);
  };
  finds("(selective scan): skip has 3 elements", changed([&](auto* op) { op->skip = vector(3); }));
  finds("(selective scan): state_dim is 0", changed([](auto* op) { op->shape.state_dim = 0; }));
  finds("(selective scan): num_heads is 4; expected a multiple of 3 groups",
        changed([](auto* op) { op->shape.num_groups = 3; }));
  finds("(selective scan): time_max is 0.500000; it must be finite and at least 1",
        changed([](auto* op) { op->time_min = 1.0F, op->time_max = 0.5F; }));
  finds("(selective scan): values 'hidden' is 48 wide; it must be at least 52",
        changed([](auto* op) { op->shape.state_dim = 4; }));
  finds("(xielu): parameters has 3 elements",
        with(XieluOp{.input = 0, .output = 1, .parameters = vector(3)}));
  finds("(xielu): input and output are one buffer",
        with(XieluOp{.input = 0, .output = 0, .parameters = vector(4)}));
  finds("(gated rms norm): num_groups 5 does not divide a weight of 48 elements",
        with(GatedRmsNormOp{.input = 0, .gate = 0, .output = 1, .weight = vector(48), .num_groups = 5}));
}

BOOST_AUTO_TEST_CASE(unusable_shared_keys_sums_and_columns_are_found) {
  Random random(3);
  const auto vector = [&](std::int64_t size) { return model.storage().vector(size, 0.5F, 1.5F, &random); };
  const auto attention = [](std::size_t at, const std::function<void(AttentionOp*)>& change) {
    return [=](Program* p) { change(&op_at<AttentionOp>(p, at)); };
  };
  does_not_find("(attention)", attention(11, [](AttentionOp* op) { op->shared_layer = 0; }));
  finds("shared_layer is 0; expected an earlier layer that has stored",
        attention(4, [](AttentionOp* op) { op->shared_layer = 0; }));
  finds("shared_layer is -2; expected", attention(11, [](AttentionOp* op) { op->shared_layer = -2; }));
  finds("shared_layer is 2; expected", attention(11, [](AttentionOp* op) { op->shared_layer = 2; }));
  finds("shared_layer is 0; expected",
        attention(11, [](AttentionOp* op) { op->shared_layer = 0, op->shape.num_key_value_heads *= 2; }));
  finds("(attention): shared_layer is given, and it is not causal", attention(11, [](AttentionOp* op) {
          op->shared_layer = 0, op->kind = AttentionKind::kBidirectional;
        }));
  finds("(attention): value_norm has 3 elements",
        attention(4, [&](AttentionOp* op) { op->value_norm = vector(3); }));
  finds("(attention): its values come from its keys, and keys are interleaved, shared",
        attention(4, [](AttentionOp* op) { op->values_from_keys = op->interleaved = true; }));
  finds("(attention): its values come from its keys, and keys are interleaved, shared",
        attention(11, [](AttentionOp* op) { op->values_from_keys = true, op->shared_layer = 0; }));
  finds("(rms norm): has sum_scale, and adds nothing",
        [&](Program* p) { op_at<RmsNormOp>(p, 2).sum_scale = vector(1); });
  finds("(rms norm): sum_scale has 2 elements",
        [&](Program* p) { op_at<RmsNormOp>(p, 2).sum_scale = vector(2); });
  finds("(rms norm): the weight has 7 elements; it must have 48",
        [&](Program* p) { op_at<RmsNormOp>(p, 2).weight = vector(7); });
  does_not_find("the weight has", [&](Program* p) { op_at<RmsNormOp>(p, 2).weight = vector(12); });
  finds("is not the first embedding; adapters cannot change it", [](Program* p) {
    EmbeddingOp second = op_at<EmbeddingOp>(p, 0);
    second.lora_site = 0;
    p->body.insert(p->body.begin() + 1, second);
  });
  const auto with = [](const GatedColumnsOp& op) {
    return [=](Program* p) { p->body.insert(p->body.begin() + 4, op); };
  };
  finds("(gated columns): values 'hidden' is 48 wide; it must be at least 49",
        with({.gate = 0, .values = 0, .output = 1, .first_column = 1}));
  finds("(gated columns): first_column is -1",
        with({.gate = 0, .values = 0, .output = 1, .first_column = -1}));
  finds("(gated columns): the activation is not a gated one without a threshold",
        with({.gate = 0, .values = 0, .output = 1, .activation = LinearEpilogue::kReluMul}));
  finds("(gated columns): the output is one of the inputs", with({.gate = 0, .values = 0, .output = 0}));
}

BOOST_AUTO_TEST_CASE(unusable_sites_are_found) {
  finds("lora_site is 8 of 8", [](Program* p) { op_at<LinearOp>(p, 3).lora_site = 8; });
  finds("lora_site is -2", [](Program* p) { op_at<LinearOp>(p, 3).lora_site = -2; });
  finds("site 0 is used by 0 ops", [](Program* p) { op_at<LinearOp>(p, 3).lora_site = -1; });
  finds("has 3 parts, its lora_site 1", [](Program* p) { op_at<LinearOp>(p, 3).lora_site = 1; });
  finds("part 1 and its lora_site differ", [](Program* p) { p->lora.sites[0].parts[1].out_size = 25; });
  finds("site 0 output_ranges are not ascending ranges of", [](Program* p) {
    LoraPart& part = p->lora.sites[0].parts[0];
    part.output_ranges = {1, static_cast<std::int32_t>(part.out_size)};  // beyond the module's last output
  });
  finds("site 0 output_ranges are not ascending ranges of", [](Program* p) {
    LoraPart& part = p->lora.sites[0].parts[0];
    part.num_remote_outputs = 9;
    part.output_ranges = {2, static_cast<std::int32_t>(part.out_size) - 1, 1, 1};
  });
  finds("site 0 is shared by 2 ranks, and is not of a layer that is cut",
        [](Program* p) { p->lora.sites[0].num_shares = 2; });
  finds("site 0 is share 0 of 2; the program is that of rank 0 of 1", [](Program* p) {
    p->lora.sites[0].num_shares = 2;
    p->lora.sites[0].num_remote_inputs = 8;
  });
  finds("site 0 is share 1 of 1; the program is that of rank 0 of 1",
        [](Program* p) { p->lora.sites[0].share = 1; });
  finds("number of parts is 0", [](Program* p) { p->lora.sites[0].parts.clear(); });
  finds("lora: max_rank is 0", [](Program* p) { p->lora.max_rank = 0; });
  finds("max_base_positions is 7", [](Program* p) { p->lora.max_base_positions = 7; });
  finds("max_base_positions is 0", [](Program* p) { p->lora.rotary_factors = {2}; });
  const auto divided = [](Program* p, std::vector<std::int32_t> factors) {
    p->lora.max_base_positions = 8;
    p->lora.rotary_factors = std::move(factors);
  };
  finds("a rotary factor is 1", [&](Program* p) { divided(p, {1}); });
  finds("a rotary factor is 2", [&](Program* p) { divided(p, {4, 2}); });
  finds("a rotary factor is 1025", [&](Program* p) { divided(p, {4, 1025}); });
  finds("angles that do not depend on the length", [&](Program* p) {
    divided(p, {2});
    for (Op& op : p->body) {
      if (auto* rope = std::get_if<RopeTableOp>(&op)) rope->kind = RopeKind::kDynamic;
    }
  });
  finds("lora: the dtype differs", [](Program* p) { p->lora.dtype = DType::kFloat16; });
  finds("no target_modules", [](Program* p) { p->lora.target_modules.clear(); });
  finds("site 2 layer is 5", [](Program* p) { p->lora.sites[2].layer = 5; });
}

BOOST_AUTO_TEST_CASE(unusable_experts_are_found) {
  RandomModel mixture({.num_experts = 6, .routing = {.top_k = 2}, .max_rank = 4});
  // Ops of the first layer: embedding, rope, norm, qkv, attention, dense, norm, router, experts.
  constexpr std::size_t kExperts = 8;
  BOOST_TEST(mixture.program.validate().list().empty());
  const auto finds_in_mixture = [&](const std::string& problem, const auto& damage) {
    Program program = mixture.program;
    damage(op_at<ExpertsOp>(&program, kExperts), program);
    const auto problems = program.validate().list();
    BOOST_TEST(
        std::ranges::any_of(
            problems, [&](const std::string& found) { return found.find(problem) != std::string::npos; }),
        "'" << problem << "' is not among the problems");
  };
  const auto finds = [&](const std::string& problem, void (*damage)(ExpertsOp&)) {
    finds_in_mixture(problem, [&](ExpertsOp& op, Program&) { damage(op); });
  };
  finds("top_k is 7; it must lie in [1, 6]", [](ExpertsOp& op) { op.routing.top_k = 7; });
  finds("top_k is 0", [](ExpertsOp& op) { op.routing.top_k = 0; });
  finds("6 experts cannot stand in 4 equal groups", [](ExpertsOp& op) { op.routing.num_groups = 4; });
  finds("topk_groups is 3", [](ExpertsOp& op) {
    op.routing.num_groups = 2;
    op.routing.topk_groups = 3;
  });
  finds("scale is", [](ExpertsOp& op) { op.routing.scale = -1.0F; });
  finds("the kind of scores is unknown",
        [](ExpertsOp& op) { op.routing.scores = static_cast<RouterScores>(9); });
  finds("the program has one rank", [](ExpertsOp& op) { op.num_remote_experts = 6; });
  finds("the sum of those here is added to the output", [](ExpertsOp& op) { op.num_remote_experts = 6; });
  finds("router_logits 'router_logits' is 6 wide; it must be 12",
        [](ExpertsOp& op) { op.num_remote_experts = 6; });
  finds("first_expert is 1; it must lie in [0, 0]", [](ExpertsOp& op) { op.first_expert = 1; });
  finds("not a gated one", [](ExpertsOp& op) { op.activation = LinearEpilogue::kGelu; });
  finds("there are 11 gate and up weights for 6 experts", [](ExpertsOp& op) { op.gate_up.pop_back(); });
  finds("down is [47, 37]; it must be [48, 37]", [](ExpertsOp& op) { op.down[3].weight.n = 47; });
  finds("quantised in different ways",
        [](ExpertsOp& op) { op.down[3].weight.quantization.algo = QuantAlgo::kW8A16; });
  finds("adapters act on one of its layers only", [](ExpertsOp& op) { op.down_site = -1; });
  finds("lora_site is 1000 of", [](ExpertsOp& op) { op.gate_up_site = 1000; });
  finds("is used by 0 ops, not one", [](ExpertsOp& op) { ++op.down_site; });
  finds("router_logits names buffer 99", [](ExpertsOp& op) { op.router_logits = 99; });
  finds_in_mixture("body op 9 (gated add): gate", [](ExpertsOp& op, Program& program) {
    program.body.at(9) = GatedAddOp{.input = op.output, .gate = op.output, .output = op.output};
  });
}

BOOST_AUTO_TEST_CASE(all_problems_come_at_once) {
  Program program = model.program;
  program.vocab_size = 0;
  program.buffers[1].width = -4;
  op_at<AttentionOp>(&program, 4).layer = -7;
  BOOST_TEST(program.validate().list().size() >= 3U);
}

BOOST_AUTO_TEST_CASE(random_damage_never_crashes_the_validator) {
  Random random(std::uint64_t{6});
  const auto hostile = [&]() -> std::int64_t {
    static constexpr std::int64_t kValues[] = {0,     -1,    1, 7, 63, 1 << 20, std::int64_t{1} << 31,
                                               kHuge, -kHuge};
    return kValues[random.below(std::size(kValues))];
  };
  for (int round = 0; round < 3000; ++round) {
    Program program = model.program;
    for (int damage = 0; damage < 3; ++damage) {
      const auto op = static_cast<std::size_t>(random.below(static_cast<std::int64_t>(program.body.size())));
      auto& buffer = program.buffers[static_cast<std::size_t>(random.below(9))];
      auto& site = program.lora.sites[static_cast<std::size_t>(random.below(8))];
      switch (random.below(12)) {
        case 0:
          buffer.width = hostile();
          break;
        case 1:
          buffer.offset = static_cast<std::size_t>(hostile());
          break;
        case 2:
          program.body.erase(program.body.begin() + static_cast<std::ptrdiff_t>(op));
          break;
        case 3:
          std::swap(program.body[op], program.body[0]);
          break;
        case 4:
          site.in_size = hostile();
          break;
        case 5:
          site.parts[0].out_size = hostile();
          break;
        case 6:
          if (has_attention(program)) heads_of(&program).head_dim = hostile();
          break;
        case 7:
          if (has_attention(program)) heads_of(&program).num_attention_heads = hostile();
          break;
        case 8:
          program.num_layers = static_cast<std::int32_t>(hostile());
          break;
        case 9:
          program.max_num_tokens = static_cast<std::int32_t>(hostile());
          break;
        case 10:
          program.arena_bytes = static_cast<std::size_t>(hostile());
          break;
        default:
          if (auto* linear = std::get_if<LinearOp>(&program.body[op])) {
            linear->parts[0].weight.n = hostile();
            linear->output = static_cast<BufferId>(hostile());
            linear->lora_site = static_cast<std::int32_t>(hostile());
          }
      }
      if (program.body.empty()) break;
    }
    (void)program.validate();
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::program_test
