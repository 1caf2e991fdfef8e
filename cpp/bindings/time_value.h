#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace adaptrt::bindings {

/// The seconds of a datetime.timedelta, or an int or float as it is.
struct TimeValue {
  double value = 0.0;
  bool is_timedelta = false;
};

/// nullopt for anything else, and for NaN.
std::optional<TimeValue> time_value_of(pybind11::handle source);

}  // namespace adaptrt::bindings
