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
  /// Throws StepError with TensorRT's message.
  virtual void set_input_shape(std::string_view tensor, std::span<const std::int64_t> dims) = 0;
  /// `address` is on the device; the tensor keeps it until the next call.
  virtual void set_tensor_address(std::string_view tensor, void* address) = 0;
  /// Enqueues one run of the plan on a stream. Throws StepError with TensorRT's message.
  virtual void enqueue(void* stream) = 0;
  /// Makes another context for the same profile, with nothing set. They share their memory, so only one may
  /// run at a time. Throws StepError with TensorRT's message.
  [[nodiscard]] virtual std::unique_ptr<PlanContext> another() = 0;
};

}  // namespace adaptrt
