#include "adaptrt/sample/sampling_config.h"

#include <array>
#include <charconv>
#include <cmath>
#include <string>
#include <utility>

namespace adaptrt {

namespace {

std::string text_of(double value) {
  std::array<char, 32> buffer;
  return {buffer.data(), std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr};
}

/// Comparisons are written so that NaN fails.
void check_ranges(const SamplingConfig& config, Problems& problems) {
  const auto require = [&](bool holds, const char* name, const std::string& value, const char* accepted) {
    if (!holds) problems.add(std::string(name) + " is " + value + "; it must be " + accepted);
  };
  const auto require_integer = [&](const char* name, std::optional<std::int32_t> value) {
    if (value) require(*value >= 0, name, std::to_string(*value), "at least 0");
  };
  const auto require_finite = [&](const char* name, std::optional<double> value) {
    if (value) require(std::isfinite(*value), name, text_of(*value), "finite");
  };
  require_integer("top_k", config.top_k);
  require_integer("min_tokens", config.min_tokens);
  require_integer("no_repeat_ngram_size", config.no_repeat_ngram_size);
  require(config.beam_width >= 1, "beam_width", std::to_string(config.beam_width), "at least 1");
  require_finite("length_penalty", config.length_penalty);
  if (const auto rate = config.beam_search_diversity_rate) {
    require(*rate >= 0.0 && std::isfinite(*rate), "beam_search_diversity_rate", text_of(*rate),
            "at least 0 and finite");
  }
  require_finite("presence_penalty", config.presence_penalty);
  require_finite("frequency_penalty", config.frequency_penalty);
  if (const auto n = config.num_return_sequences)
    require(*n >= 1, "num_return_sequences", std::to_string(*n), "at least 1");
  if (const auto p = config.top_p)
    require(*p > 0.0 && *p <= 1.0, "top_p", text_of(*p), "above 0 and at most 1");
  for (const auto& [name, p] :
       {std::pair{"top_p_min", config.top_p_min}, {"top_p_decay", config.top_p_decay}}) {
    if (p) require(*p > 0.0 && *p <= 1.0, name, text_of(*p), "above 0 and at most 1");
  }
  if (config.top_p_decay && !config.top_p) {
    problems.add("top_p_decay is " + text_of(*config.top_p_decay) + "; it must be given with top_p");
  }
  if (const auto id = config.top_p_reset_ids)
    require(*id >= -1, "top_p_reset_ids", std::to_string(*id), "at least -1");
  if (const auto p = config.min_p) require(*p >= 0.0 && *p <= 1.0, "min_p", text_of(*p), "between 0 and 1");
  if (const auto t = config.temperature) {
    require(*t >= 0.0 && std::isfinite(*t), "temperature", text_of(*t), "at least 0 and finite");
  }
  if (const auto r = config.repetition_penalty) {
    require(*r > 0.0 && std::isfinite(*r), "repetition_penalty", text_of(*r), "above 0 and finite");
  }
}

/// Adds the problems of fields that cannot be combined with beam search.
void check_beams(const SamplingConfig& config, Problems& problems) {
  if (config.beam_width_array) {
    problems.add("beam_width_array is set; accepted: None, because a search has one beam_width");
  }
  if (config.beam_width <= 1) return;
  const std::string with_beams = " with beam_width " + std::to_string(config.beam_width) + "; accepted: ";
  const auto require_neutral = [&](const char* name, const auto& value, auto neutral) {
    if (!value || *value == neutral) return;
    problems.add(std::string(name) + " is " + text_of(static_cast<double>(*value)) + with_beams + "None, " +
                 text_of(static_cast<double>(neutral)) + ", because nothing is drawn");
  };
  require_neutral("top_k", config.top_k, 0);
  require_neutral("top_p", config.top_p, 1.0);
  require_neutral("top_p_decay", config.top_p_decay, 1.0);
  require_neutral("min_p", config.min_p, 0.0);
  if (config.temperature == 0.0) {
    problems.add("temperature is 0" + with_beams + "above 0, because beams are compared by probabilities");
  }
  if (config.num_return_sequences && *config.num_return_sequences > config.beam_width) {
    problems.add("num_return_sequences is " + std::to_string(*config.num_return_sequences) + with_beams +
                 "1 to beam_width");
  }
}

}  // namespace

Problems SamplingConfig::validate() const {
  Problems problems;
  check_ranges(*this, problems);
  check_beams(*this, problems);
  return problems;
}

SamplingParams resolve(const SamplingConfig& config) {
  config.validate().throw_if_any<ConfigError>("SamplingConfig");
  SamplingParams params;
  params.top_k = config.top_k.value_or(0);
  params.top_p = config.top_p.value_or(1.0);
  params.top_p_decay = config.top_p_decay.value_or(params.top_p_decay);
  params.top_p_min = config.top_p_min.value_or(params.top_p_min);
  params.top_p_reset_id = config.top_p_reset_ids.value_or(params.top_p_reset_id);
  params.min_p = config.min_p.value_or(0.0);
  params.temperature = config.temperature.value_or(1.0);
  params.seed = config.seed.value_or(0);
  params.min_tokens = config.min_tokens.value_or(0);
  params.repetition_penalty = config.repetition_penalty.value_or(1.0);
  params.presence_penalty = config.presence_penalty.value_or(0.0);
  params.frequency_penalty = config.frequency_penalty.value_or(0.0);
  params.no_repeat_ngram_size = config.no_repeat_ngram_size.value_or(0);
  const bool nothing_given = params.top_k == 0 && !config.top_p && params.min_p == 0.0;
  params.greedy = nothing_given || params.top_k == 1 || params.temperature == 0.0;
  return params;
}

BeamSearchParams resolve_beams(const SamplingConfig& config) {
  BeamSearchParams params;
  params.beam_width = config.beam_width;
  params.length_penalty = config.length_penalty.value_or(params.length_penalty);
  params.diversity_rate = config.beam_search_diversity_rate.value_or(params.diversity_rate);
  switch (config.early_stopping.value_or(1)) {
    case 1:
      params.early_stopping = EarlyStopping::kWhenEnoughHaveEnded;
      break;
    case 0:
      params.early_stopping = EarlyStopping::kByEstimate;
      break;
    default:
      params.early_stopping = EarlyStopping::kNever;
  }
  return params;
}

}  // namespace adaptrt
