#include "bindings.h"

namespace adaptrt::bindings {

void bind_engine(pybind11::module_& /*module*/) {}

}  // namespace adaptrt::bindings
