#pragma once

namespace adaptrt {

/// A data member by name. Structs that are bound to Python or written as JSON list their members once, as a
/// tuple of these in the order of the constructor's parameters:
///
///   constexpr auto fields_of(const Example*) { return std::tuple{Field{"size", &Example::size, "In
///   bytes."}}; }
template <class Struct, class Member>
struct Field {
  const char* name;
  Member Struct::* member;
  const char* doc;
};

template <class Struct, class Member>
Field(const char*, Member Struct::*, const char*) -> Field<Struct, Member>;

}  // namespace adaptrt
