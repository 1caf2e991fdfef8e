#include "bindings.h"

namespace adaptrt::bindings {

void bind_exec(pybind11::module_& /*module*/) {}

}  // namespace adaptrt::bindings
