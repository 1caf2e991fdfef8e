#pragma once

#include <memory>
#include <string>

namespace adaptrt {

/// A value of a caller's own kind, which this library keeps and does not look into.
class ForeignValue {
 public:
  virtual ~ForeignValue() = default;
  [[nodiscard]] virtual std::string type_name() const = 0;
  /// In the caller's own sense.
  [[nodiscard]] virtual bool equals(const ForeignValue& other) const = 0;
};

/// A field of TensorRT-LLM's that cannot be used here: whatever is given comes back out, and the executor
/// refuses it by the name of its type.
struct Unsupported {
  /// nullptr: None.
  std::shared_ptr<const ForeignValue> value;

  [[nodiscard]] bool is_set() const { return value != nullptr; }
  friend bool operator==(const Unsupported& a, const Unsupported& b) {
    return a.value == b.value || (a.is_set() && b.is_set() && a.value->equals(*b.value));
  }
};

}  // namespace adaptrt
