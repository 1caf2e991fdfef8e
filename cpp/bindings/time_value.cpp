#include "time_value.h"

// Only here: each source that includes it has a pointer of its own to what PyDateTime_IMPORT finds, so that
// inline functions of a header could look at another source's, which is null.
#include <datetime.h>

#include <cmath>

namespace adaptrt::bindings {

std::optional<TimeValue> time_value_of(pybind11::handle source) {
  if (PyDateTimeAPI == nullptr) PyDateTime_IMPORT;
  if (PyDelta_Check(source.ptr()) != 0) {
    return TimeValue{.value = source.attr("total_seconds")().cast<double>(), .is_timedelta = true};
  }
  if (PyBool_Check(source.ptr()) != 0) return std::nullopt;
  if (PyFloat_Check(source.ptr()) == 0 && PyLong_Check(source.ptr()) == 0) return std::nullopt;
  const double value = PyFloat_AsDouble(source.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  return std::isnan(value) ? std::nullopt : std::optional(TimeValue{.value = value});
}

}  // namespace adaptrt::bindings
