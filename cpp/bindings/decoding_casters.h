#pragma once

// LookaheadDecodingConfig, ExternalDraftTokensConfig and DecodingConfig: value classes in Python
// (runtime/options/speculative.py), structs in C++. To be included wherever a struct with such a field is
// bound, after exec_casters.h.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "adaptrt/exec/decoding_config.h"
#include "bind_struct.h"
#include "exec_casters.h"

namespace adaptrt::bindings {

/// Returns a class of runtime/options/speculative.py.
inline pybind11::object speculative_class(const char* name) {
  return pybind11::module_::import("adaptrt.runtime.options.speculative").attr(name);
}

/// Objects of the class `name`, but no others.
inline bool is_speculative(pybind11::handle object, const char* name) {
  // So that values of other types need no import.
  const pybind11::object own = pybind11::type::handle_of(object).attr("__name__");
  return own.equal(pybind11::str(name)) && pybind11::isinstance(object, speculative_class(name));
}

namespace detail {

template <>
struct Accepted<LookaheadDecodingConfig> {
  static std::string text() { return "LookaheadDecodingConfig"; }
};
template <>
struct Accepted<ExternalDraftTokensConfig> {
  static std::string text() { return "ExternalDraftTokensConfig"; }
};
template <>
struct Accepted<DecodingConfig> {
  static std::string text() { return "DecodingConfig"; }
};

}  // namespace detail
}  // namespace adaptrt::bindings

namespace pybind11::detail {

template <>
struct type_caster<adaptrt::LookaheadDecodingConfig> {
  PYBIND11_TYPE_CASTER(adaptrt::LookaheadDecodingConfig, const_name("LookaheadDecodingConfig"));

  bool load(handle source, bool /*convert*/) {
    if (!adaptrt::bindings::is_speculative(source, "LookaheadDecodingConfig")) return false;
    value.max_window_size = source.attr("max_window_size").cast<std::int32_t>();
    value.max_ngram_size = source.attr("max_ngram_size").cast<std::int32_t>();
    value.max_verification_set_size = source.attr("max_verification_set_size").cast<std::int32_t>();
    return true;
  }

  static handle cast(const adaptrt::LookaheadDecodingConfig& config, return_value_policy /*policy*/,
                     handle /*parent*/) {
    return adaptrt::bindings::speculative_class("LookaheadDecodingConfig")(
               config.max_window_size, config.max_ngram_size, config.max_verification_set_size)
        .release();
  }
};

template <>
struct type_caster<adaptrt::ExternalDraftTokensConfig> {
  PYBIND11_TYPE_CASTER(adaptrt::ExternalDraftTokensConfig, const_name("ExternalDraftTokensConfig"));

  bool load(handle source, bool /*convert*/) {
    if (!adaptrt::bindings::is_speculative(source, "ExternalDraftTokensConfig")) return false;
    value.tokens = source.attr("tokens").cast<std::vector<std::int32_t>>();
    value.logits = source.attr("logits").cast<adaptrt::Unsupported>();
    value.acceptance_threshold = source.attr("acceptance_threshold").cast<std::optional<double>>();
    value.fast_logits = source.attr("fast_logits").cast<std::optional<bool>>();
    return true;
  }

  static handle cast(const adaptrt::ExternalDraftTokensConfig& config, return_value_policy /*policy*/,
                     handle /*parent*/) {
    return adaptrt::bindings::speculative_class("ExternalDraftTokensConfig")(
               config.tokens, config.logits, config.acceptance_threshold, config.fast_logits)
        .release();
  }
};

template <>
struct type_caster<adaptrt::DecodingConfig> {
  PYBIND11_TYPE_CASTER(adaptrt::DecodingConfig, const_name("DecodingConfig"));

  bool load(handle source, bool /*convert*/) {
    if (!adaptrt::bindings::is_speculative(source, "DecodingConfig")) return false;
    const object mode = source.attr("decoding_mode");
    value.decoding_mode.reset();
    if (!mode.is_none()) value.decoding_mode = mode.attr("name").cast<std::string>();
    value.lookahead_decoding_config =
        source.attr("lookahead_decoding_config").cast<std::optional<adaptrt::LookaheadDecodingConfig>>();
    value.medusa_choices = source.attr("medusa_choices").cast<adaptrt::Unsupported>();
    value.eagle_config = source.attr("eagle_config").cast<adaptrt::Unsupported>();
    return true;
  }

  static handle cast(const adaptrt::DecodingConfig& config, return_value_policy /*policy*/,
                     handle /*parent*/) {
    object made = adaptrt::bindings::speculative_class("DecodingConfig")(
        none(), config.lookahead_decoding_config, config.medusa_choices, config.eagle_config);
    // Last, because the other fields set it.
    made.attr("decoding_mode") =
        config.decoding_mode
            ? adaptrt::bindings::speculative_class("DecodingMode").attr(config.decoding_mode->c_str())()
            : object(none());
    return made.release();
  }
};

}  // namespace pybind11::detail
