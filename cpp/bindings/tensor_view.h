#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "adaptrt/lora/host_adapter.h"

namespace adaptrt::bindings {

/// A view of a NumPy array or of a torch tensor in CPU memory, which is kept alive; an array that is not
/// contiguous is copied. `name` is what messages call it. nullopt for None. An element type that adapters
/// cannot have becomes kOther, for validation to refuse. Throws TypeError for other objects, and AdapterError
/// for an array that claims more elements than it has memory for, as broadcast ones do: copying those could
/// take any amount.
[[nodiscard]] std::optional<TensorView> tensor_view(const pybind11::object& tensor, const char* name);

/// The array that a view was made of; None for nullopt.
[[nodiscard]] pybind11::object array_of(const std::optional<TensorView>& view);

}  // namespace adaptrt::bindings
