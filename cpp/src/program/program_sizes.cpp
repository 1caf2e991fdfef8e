#include "program_sizes.h"

#include <algorithm>

namespace adaptrt {

bool known(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

std::optional<std::size_t> product(std::initializer_list<std::int64_t> sizes) {
  std::size_t result = 1;
  for (const auto size : sizes) {
    if (size < 0 || __builtin_mul_overflow(result, static_cast<std::size_t>(size), &result))
      return std::nullopt;
  }
  return result;
}

void RangeCheck::operator()(std::string_view name, std::int64_t value, std::int64_t low,
                            std::int64_t high) const {
  if (value < low || value > high) {
    problems->add(std::string(name) + " is " + text(value) + "; it must lie in [" + text(low) + ", " +
                  text(high) + "]");
  }
}

void check_sizes(const Program& program, Problems* problems) {
  const RangeCheck check_range{problems};
  if (!known(program.dtype)) problems->add("dtype is unknown");
  if (program.matrix_layout > MatrixLayout::kRows) {
    problems->add("matrix_layout is unknown");
  } else if (program.matrix_layout == MatrixLayout::kRows && program.dtype == DType::kFloat32) {
    problems->add("dtype is float32, and matrices are row-major; they may be float16 or bfloat16");
  }
  check_range("vocab_size", program.vocab_size, 1, kSizeLimit - 1);
  check_range("num_layers", program.num_layers, 1, 1 << 16);
  check_range("max_batch_size", program.max_batch_size, 1, 1 << 20);
  check_range("max_num_tokens", program.max_num_tokens, 1, 1 << 24);
  check_range("max_seq_len", program.max_seq_len, 1, 1 << 30);
  check_range("max_input_len", program.max_input_len, 1, std::max(1, program.max_seq_len));
  // Beams are sequences of the batch.
  if (program.has_encoder()) {
    check_range("num_encoder_layers", program.num_encoder_layers, 1, 1 << 16);
    // An input is computed in one step.
    check_range("max_encoder_input_len", program.max_encoder_input_len, 1,
                std::max(1, program.max_num_tokens));
  } else if (program.num_encoder_layers != 0 || program.max_encoder_input_len != 0) {
    problems->add("num_encoder_layers or max_encoder_input_len is given, but there is no encoder");
  }
  check_range("max_beam_width", program.max_beam_width, 1, std::max(1, program.max_batch_size));
  check_range("tokens_per_block", program.tokens_per_block, 1, 1 << 16);
  check_range("num_ranks", program.num_ranks, 1, 1 << 16);
  check_range("rank", program.rank, 0, std::max(0, program.num_ranks - 1));
  check_range("num_stages", program.num_stages, 1, std::max(1, program.num_ranks));
  if (program.num_stages > 0 && program.num_ranks % program.num_stages != 0) {
    problems->add("num_ranks " + text(program.num_ranks) + " is not a multiple of num_stages " +
                  text(program.num_stages));
  }
}

Problems problems_of_shape(const AttentionShape& shape) {
  Problems problems;
  const RangeCheck check_range{&problems};
  check_range("num_attention_heads", shape.num_attention_heads, 1, 1 << 16);
  check_range("num_key_value_heads", shape.num_key_value_heads, 1, 1 << 16);
  check_range("head_dim", shape.head_dim, 2, 1 << 12);
  if (shape.head_dim % 2 != 0) problems.add("head_dim is " + text(shape.head_dim) + "; it must be even");
  if (shape.num_key_value_heads > 0 && shape.num_attention_heads % shape.num_key_value_heads != 0) {
    problems.add("num_attention_heads " + text(shape.num_attention_heads) +
                 " is not a multiple of num_key_value_heads " + text(shape.num_key_value_heads));
  }
  return problems;
}

/// The site of tokens beyond the vocabulary, which the embedding and lm_head read, exists if there is room
/// for such tokens.
void check_new_tokens(const Program& program, Problems* problems) {
  const auto& lora = program.lora;
  RangeCheck{problems}("lora: max_extra_tokens", lora.max_extra_tokens, 0, 1 << 16);
  const auto sites = std::ranges::count_if(lora.sites, &LoraSite::is_new_tokens);
  const std::int32_t last = new_tokens_site(lora);
  if (sites != (lora.max_extra_tokens > 0 ? 1 : 0) || (sites == 1 && last < 0)) {
    problems->add("lora: " + text(sites) + " sites of new tokens, of max_extra_tokens " +
                  text(lora.max_extra_tokens) + "; it must be the last one, or none");
    return;
  }
  if (sites == 0) return;
  const LoraSite& site = lora.sites.back();
  if (site.layer != 0 || site.in_size != site.parts[0].out_size) {
    problems->add("lora: the site of new tokens is not of layer 0, or its sizes are not the hidden size");
  }
  if (program.num_ranks != 1 || program.has_encoder() || program.logits == kNoBuffer) {
    problems->add("lora: max_extra_tokens is for decoders with an lm_head, on one rank");
  }
}

/// Factors by which adapters may divide rotary positions.
void check_rotary_factors(const Program& program, Problems* problems) {
  const auto& lora = program.lora;
  const RangeCheck check_range{problems};
  if (lora.rotary_factors.empty()) {
    check_range("lora: max_base_positions", lora.max_base_positions, 0, 0);
    return;
  }
  check_range("lora: max_base_positions", lora.max_base_positions, 1, 1 << 30);
  std::int32_t before = 1;
  for (const std::int32_t factor : lora.rotary_factors) {
    check_range("lora: a rotary factor", factor, before + 1, kMostRotaryFactor);
    before = std::clamp(factor, before, kMostRotaryFactor - 1);
  }
  if (program.has_encoder()) problems->add("lora: rotary_factors are for decoders alone");
  for (const Op& op : program.body) {
    const auto* rope = std::get_if<RopeTableOp>(&op);
    if (rope != nullptr && rope->kind != RopeKind::kStatic) {
      problems->add("lora: rotary_factors are for angles that do not depend on the length");
    }
  }
}

/// The ranks that share the layer also share its adapters: those of the stage, or, for experts, those with
/// the same experts.
void check_shares(const Program& program, const LoraSite& site, const std::string& where,
                  Problems* problems) {
  if (site.num_shares == 1 && site.share == 0) return;
  const bool is_cut =
      site.num_remote_inputs > 0 ||
      std::ranges::any_of(
          site.parts, [](std::int64_t size) { return size > 0; }, &LoraPart::num_remote_outputs);
  if (!site.is_of_layer() || !is_cut) {
    problems->add(where + " is shared by " + text(site.num_shares) +
                  " ranks, and is not of a layer that is cut");
  }
  const std::int32_t ranks = program.ranks_per_stage();
  const std::int32_t apart = std::max(1, site.experts_for_each);  // ranks in between have other experts
  if (site.num_shares != ranks / apart || site.share != program.rank % ranks / apart) {
    problems->add(where + " is share " + text(site.share) + " of " + text(site.num_shares) +
                  "; the program is that of rank " + text(program.rank % ranks) + " of " + text(ranks));
  }
}

/// Ranges of a module's outputs, one after another, that a part consists of.
void check_output_ranges(const LoraSite& site, const LoraPart& part, const std::string& where,
                         Problems* problems) {
  if (part.output_ranges.empty()) return;
  std::int64_t outputs = 0;
  std::int64_t end = 0;
  bool fits = part.output_ranges.size() % 2 == 0 && part.first_output == 0 && site.num_remote_inputs == 0;
  for (const MatrixRows& range : part.module_rows({})) {
    fits = fits && range.first >= end && range.count >= 1;
    end = range.first + range.count;
    outputs += range.count;
  }
  if (!fits || outputs != part.out_size || end > part.whole_out_size()) {
    problems->add(where + " output_ranges are not ascending ranges of " + text(part.out_size) + " of " +
                  text(part.whole_out_size()) + " outputs");
  }
}

void check_layout(const Program& program, Problems* problems) {
  const auto& lora = program.lora;
  if (lora.sites.empty()) {
    if (!lora.rotary_factors.empty()) problems->add("lora: rotary_factors are given but there are no sites");
    if (lora.max_extra_tokens != 0) problems->add("lora: max_extra_tokens is given but there are no sites");
    if (!lora.target_modules.empty()) problems->add("lora: target_modules are given but there are no sites");
    return;
  }
  const RangeCheck check_range{problems};
  if (lora.dtype != program.dtype) problems->add("lora: the dtype differs from the program's");
  if (lora.num_stages != program.num_stages || lora.stage != program.stage()) {
    problems->add("lora: the stage differs from the program's");
  }
  const auto layers_here = [&](std::int32_t of_all) {
    return stage_layers(of_all, std::max(1, program.num_stages), program.stage()).count;
  };
  if (layers_here(lora.num_layers - lora.num_encoder_layers) != program.num_layers ||
      layers_here(lora.num_encoder_layers) != program.num_encoder_layers) {
    problems->add("lora: num_layers or num_encoder_layers differ from the program's");
  }
  check_range("lora: max_rank", lora.max_rank, 1, 1 << 20);
  if (lora.target_modules.empty()) problems->add("lora: there are sites but no target_modules");
  check_new_tokens(program, problems);
  check_rotary_factors(program, problems);
  for (std::size_t i = 0; i < lora.sites.size(); ++i) {
    const auto& site = lora.sites[i];
    const std::string where = "lora: site " + std::to_string(i);
    // Slices of the vocabulary are checked with their ops. A norm's layer may have any number.
    if (site.is_of_layer()) {
      check_range(where + " layer", site.layer, 0, std::max(1, lora.num_layers) - 1);
    }
    if (site.is_norm() && program.num_stages > 1) problems->add(where + " is a norm's, and there are stages");
    check_range(where + " in_size", site.in_size, 1, kSizeLimit - 1);
    check_range(where + " num_remote_inputs", site.num_remote_inputs, 0, kSizeLimit - 1);
    check_range(where + " first_input", site.first_input, 0, site.num_remote_inputs);
    check_shares(program, site, where, problems);
    check_range(where + " number of parts", static_cast<std::int64_t>(site.parts.size()), 1,
                static_cast<std::int64_t>(kMaxPartsPerSite));
    for (const auto& part : site.parts) {
      check_range(where + " out_size", part.out_size, 1, kSizeLimit - 1);
      check_range(where + " num_remote_outputs", part.num_remote_outputs, 0, kSizeLimit - 1);
      check_range(where + " first_output", part.first_output, 0, part.num_remote_outputs);
      check_output_ranges(site, part, where, problems);
    }
  }
}

}  // namespace adaptrt
