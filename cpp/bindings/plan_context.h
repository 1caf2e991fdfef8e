#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "adaptrt/tensorrt/plan_context.h"

namespace adaptrt::bindings {

/// A PlanContext over a Python object with TensorRT's own methods: set_input_shape(name, dims) -> bool,
/// set_tensor_address(name, address) -> bool, execute_async_v3(stream) -> bool, and with another(), which
/// makes one more for the same profile. The GIL is held during its calls only; what they raise becomes a
/// StepError with its text.
[[nodiscard]] std::unique_ptr<PlanContext> make_plan_context(pybind11::object context);

}  // namespace adaptrt::bindings
