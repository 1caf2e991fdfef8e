#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>
#include <vector>

namespace adaptrt::bindings {

/// (a parameter's name in older releases of TensorRT-LLM, its name now)
using OldNames = std::vector<std::pair<std::string, std::string>>;

/// Makes the constructor take parameters by their old names as well, of which the new name wins when both are
/// given, and the fields known by them.
void accept_old_names(pybind11::handle cls, const OldNames& names);

/// Makes the constructor take a second positional argument that is an int, not a bool, as `name`, unless a
/// third is given.
void accept_second_as(pybind11::handle cls, const std::string& name);

/// Makes the constructor raise ConfigError for what validate() finds.
void validate_when_made(pybind11::handle cls);

}  // namespace adaptrt::bindings
