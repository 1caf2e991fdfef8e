#pragma once

#include <concepts>
#include <ranges>
#include <type_traits>
#include <variant>

#include "adaptrt/program/program_fields.h"

namespace adaptrt {

/// Calls visit(member) for each member of type `Wanted` of an op, in the order of fields_of(). Looks into
/// vectors and into structs that have such a table.
template <class Wanted, class Value, class Visit>
void for_each_member(Value& value, const Visit& visit) {
  using Plain = std::remove_const_t<Value>;
  if constexpr (std::same_as<Plain, Wanted>) {
    visit(value);
  } else if constexpr (std::same_as<Plain, Op>) {
    std::visit([&](auto& op) { for_each_member<Wanted>(op, visit); }, value);
  } else if constexpr (std::ranges::range<Value>) {
    for (auto& element : value) for_each_member<Wanted>(element, visit);
  } else if constexpr (requires { fields_of(static_cast<const Plain*>(nullptr)); }) {
    fields_of(static_cast<const Plain*>(nullptr)).apply([&](const auto&... fields) {
      (for_each_member<Wanted>(value.*fields.member, visit), ...);
    });
  }
}

}  // namespace adaptrt
