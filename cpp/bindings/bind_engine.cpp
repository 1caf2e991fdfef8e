#include "bindings.h"

namespace adaptrt::bindings {

void bind_engine(pybind11::module_& module) {
  bind_program(module);
}

}  // namespace adaptrt::bindings
