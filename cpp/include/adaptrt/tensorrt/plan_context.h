#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace adaptrt {

/// An execution context of a compiled plan, for one of its optimization profiles. One thread at a time.
class PlanContext {
 public:
  virtual ~PlanContext() = default;
  /// Throws StepError with what TensorRT said.
  virtual void set_input_shape(std::string_view tensor, std::span<const std::int64_t> dims) = 0;
  /// `address` is on the device; it stays the tensor's until it is set again.
  virtual void set_tensor_address(std::string_view tensor, void* address) = 0;
  /// Puts one run of the plan into a stream. Throws StepError with what TensorRT said.
  virtual void enqueue(void* stream) = 0;
  /// Another context for the same profile, of which nothing is set. They share their memory, so one runs at a
  /// time. Throws StepError with what TensorRT said.
  [[nodiscard]] virtual std::unique_ptr<PlanContext> another() = 0;
};

}  // namespace adaptrt
