#include "adaptrt/guide/guided_decoding.h"

namespace adaptrt {

Problems GuidedDecodingParams::validate() const {
  Problems problems;
  if (guide_type == GuideType::kJson && guide) {
    problems.add("guide is given, but guide_type is JSON; accepted: None, or guide_type JSON_SCHEMA");
  }
  if (guide_type != GuideType::kJson && !guide) {
    problems.add("guide is None; expected a guide, because only guide_type JSON has none");
  }
  if (guide && guide->find('\0') != std::string::npos) problems.add("guide has a NUL character");
  return problems;
}

void GuidedDecodingParams::check_constructed() const {
  validate().throw_if_any<RequestError>("GuidedDecodingParams");
}

Problems GuidedDecodingConfig::validate() const {
  Problems problems;
  if (backend != GuidedDecodingBackend::kLlguidance) {
    problems.add("backend is XGRAMMAR; accepted: LLGUIDANCE");
  }
  if (encoded_vocab && !tokenizer_str) {
    problems.add("encoded_vocab is given without tokenizer_str, which says what the bytes of its tokens are");
  }
  if (stop_token_ids && stop_token_ids->empty()) {
    problems.add("stop_token_ids is empty; accepted: one token or more, or None");
  }
  return problems;
}

}  // namespace adaptrt
