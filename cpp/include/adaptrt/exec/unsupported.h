#pragma once

#include <memory>
#include <string>

namespace adaptrt {

/// A value of the caller's own type. This library stores it and never looks into it.
class ForeignValue {
 public:
  virtual ~ForeignValue() = default;
  [[nodiscard]] virtual std::string type_name() const = 0;
  /// Compares by the caller's own rules.
  [[nodiscard]] virtual bool equals(const ForeignValue& other) const = 0;
};

/// A field of TensorRT-LLM that is unsupported here. It keeps the given value; the executor refuses it and
/// names its type.
struct Unsupported {
  /// nullptr: None.
  std::shared_ptr<const ForeignValue> value;

  [[nodiscard]] bool is_set() const { return value != nullptr; }
  friend bool operator==(const Unsupported& a, const Unsupported& b) {
    return a.value == b.value || (a.is_set() && b.is_set() && a.value->equals(*b.value));
  }
};

}  // namespace adaptrt
