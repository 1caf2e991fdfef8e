#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "adaptrt/core/error.h"
#include "adaptrt/program/program.h"

namespace adaptrt {

/// No size in a program may reach this: products of two sizes then fit in 64 bits.
inline constexpr std::int64_t kSizeLimit = std::int64_t{1} << 31;

/// True if a number from a file or caller is the number of a dtype.
[[nodiscard]] bool known(DType dtype);

/// Returns the product of sizes; nullopt if one is negative or the product does not fit.
[[nodiscard]] std::optional<std::size_t> product(std::initializer_list<std::int64_t> sizes);

/// Adds a problem to `problems` unless low <= value <= high.
struct RangeCheck {
  Problems* problems;
  void operator()(std::string_view name, std::int64_t value, std::int64_t low, std::int64_t high) const;
};

/// Adds problems of a program's sizes and limits.
void check_sizes(const Program& program, Problems* problems);

/// Returns the problem with an attention's heads; empty if there is none.
[[nodiscard]] Problems problems_of_shape(const AttentionShape& shape);

/// Adds problems of the sites in a program where adapters apply.
void check_layout(const Program& program, Problems* problems);

}  // namespace adaptrt
