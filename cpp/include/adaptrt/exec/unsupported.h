#pragma once

#include <string>

namespace adaptrt {

/// A field of TensorRT-LLM's that has no meaning here: None, or refused with the type of what was given.
struct Unsupported {
  /// Empty: None.
  std::string type_name;

  [[nodiscard]] bool is_set() const { return !type_name.empty(); }
  bool operator==(const Unsupported&) const = default;
};

}  // namespace adaptrt
