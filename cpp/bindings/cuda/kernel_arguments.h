#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/error.h"

namespace adaptrt::bindings {

/// A device address as Python has it.
using Address = std::uint64_t;

template <typename T>
T* at_address(Address address) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));
}

/// Throws ConfigError for a number that is not a value of DType.
inline DType dtype_of(int value) {
  if (value < 0 || value > static_cast<int>(DType::kBFloat16)) {
    throw ConfigError("dtype " + std::to_string(value) + " is not a value of DType");
  }
  return static_cast<DType>(value);
}

/// Throws ConfigError unless there are as many addresses as the plugin has `names`.
inline void check_addresses(const std::vector<Address>& addresses, std::size_t expected, const char* names) {
  if (addresses.size() != expected) {
    throw ConfigError(std::to_string(addresses.size()) + " addresses; expected " + std::to_string(expected) +
                      ": " + names);
  }
}

}  // namespace adaptrt::bindings
