#include <pybind11/native_enum.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/guide/grammar.h"
#include "adaptrt/guide/guided_decoding.h"
#include "adaptrt/guide/llguidance.h"
#include "bind_exec.h"
#include "bind_struct.h"
#include "gil_safe_object.h"
#include "waiting.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

using Addresses = std::map<std::string, std::uintptr_t>;

LlguidanceFunctions functions_of(const Addresses& addresses) {
  LlguidanceFunctions functions;
  for_each_function(functions, [&](const char* name, auto& function) {
    using Function = std::remove_reference_t<decltype(function)>;
    function = reinterpret_cast<Function>(addresses.at(name));
    if (function == nullptr) throw ConfigError(std::string(name) + " has no address");
  });
  return functions;
}

std::vector<std::string> function_names() {
  LlguidanceFunctions functions;
  std::vector<std::string> names;
  for_each_function(functions, [&](const char* name, auto& /*function*/) { names.emplace_back(name); });
  return names;
}

/// Calls Python, where a request is queued.
LlguidanceGrammar translated(const GilSafeObject& translate, const GuidedDecodingParams& params) {
  const py::gil_scoped_acquire gil;
  try {
    auto [kind, text, num_bytes] =
        translate.object(params).cast<std::tuple<std::string, std::string, std::size_t>>();
    return {.kind = std::move(kind), .text = std::move(text), .num_bytes = num_bytes};
  } catch (const py::error_already_set& error) {
    throw RequestError(std::string(py::str(error.value())));
  }
}

std::shared_ptr<GrammarCompiler> make_compiler(const Addresses& functions,
                                               const std::vector<py::bytes>& tokens,
                                               std::vector<std::int32_t> stop_token_ids,
                                               py::object translate) {
  LlguidanceOptions options;
  options.tokens.assign(tokens.begin(), tokens.end());
  options.stop_token_ids = std::move(stop_token_ids);
  options.translate = [kept = std::make_shared<GilSafeObject>(std::move(translate))](
                          const GuidedDecodingParams& params) { return translated(*kept, params); };
  const LlguidanceFunctions addresses = functions_of(functions);
  return without_gil([&] { return make_llguidance_compiler(addresses, std::move(options)); });
}

}  // namespace

void bind_guide(py::module_& module) {
  using Params = GuidedDecodingParams;
  auto params = bind_struct<Params, 1>(
      module, "GuidedDecodingParams", "Guide that a request's output must follow.",
      Field{"guide_type", &Params::guide_type, "Kind of the guide."},
      Field{"guide", &Params::guide,
            "A JSON schema, a regular expression, a grammar (Lark or GBNF), or structural tags as JSON. None "
            "for guide_type JSON, which accepts any object."});
  py::native_enum<GuideType>(params, "GuideType", "enum.Enum", "Kind of a guide.")
      .value("JSON", GuideType::kJson)
      .value("JSON_SCHEMA", GuideType::kJsonSchema)
      .value("REGEX", GuideType::kRegex)
      .value("EBNF_GRAMMAR", GuideType::kEbnfGrammar)
      .value("STRUCTURAL_TAG", GuideType::kStructuralTag)
      .finalize();
  params.def(
      "validate", [](const Params& self) { return self.validate().list(); },
      "Returns every problem of the fields; [] if there is none.");

  using Config = GuidedDecodingConfig;
  auto config = bind_struct<Config, 1>(
      module, "GuidedDecodingConfig", "Backend and tokenizer of guided decoding.",
      Field{"backend", &Config::backend, "LLGUIDANCE; XGRAMMAR is refused."},
      Field{"encoded_vocab", &Config::encoded_vocab, "No effect: tokenizer_str has the vocabulary."},
      Field{"tokenizer_str", &Config::tokenizer_str,
            "Content of a tokenizer.json; None: the engine directory's."},
      Field{"stop_token_ids", &Config::stop_token_ids,
            "Tokens that end an output; None: the engine's eos_token_id."});
  py::native_enum<GuidedDecodingBackend>(config, "GuidedDecodingBackend", "enum.Enum",
                                         "Library that computes token masks from guides.")
      .value("XGRAMMAR", GuidedDecodingBackend::kXgrammar)
      .value("LLGUIDANCE", GuidedDecodingBackend::kLlguidance)
      .finalize();
  config.def(
      "validate", [](const Config& self) { return self.validate().list(); },
      "Returns every problem of the fields, without the engine's limits; [] if there is none.");

  py::class_<GrammarCompiler, std::shared_ptr<GrammarCompiler>>(module, "GrammarCompiler",
                                                                "Compiles guides for an executor.");
  module.def("llguidance_functions", &function_names,
             "Names of the functions of llguidance's C interface that are called.");
  module.def("make_llguidance_compiler", &make_compiler, py::arg("functions"), py::arg("tokens"),
             py::arg("stop_token_ids"), py::arg("translate"),
             "functions: addresses by name. tokens: bytes of each token of the vocabulary. translate: a "
             "function that takes GuidedDecodingParams and returns (language, grammar, bytes that the "
             "compiled grammar keeps) in one of llguidance's languages. Raises ConfigError.");
}

}  // namespace adaptrt::bindings
