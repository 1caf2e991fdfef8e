#pragma once

#include <cstddef>
#include <tuple>
#include <utility>

namespace adaptrt {

enum class FieldRole : unsigned char {
  kValue,
  kBuffer,  ///< an index into Program::buffers, or several; engine files have the buffers' names
};

/// A data member by name. Structs that are bound to Python, written as JSON or sent to other processes list
/// their members once, as a tuple of these in the order of the constructor's parameters:
///
///   constexpr auto fields_of(const Example*) { return std::tuple{Field{"size", &Example::size, "In
///   bytes."}}; }
///   static_assert(lists_every_member<Example>());
template <class Struct, class Member>
struct Field {
  const char* name;
  Member Struct::* member;
  const char* doc;
  FieldRole role = FieldRole::kValue;
};

template <class Struct, class Member>
Field(const char*, Member Struct::*, const char*) -> Field<Struct, Member>;
template <class Struct, class Member>
Field(const char*, Member Struct::*, const char*, FieldRole) -> Field<Struct, Member>;

/// A field that Python's constructor must be given.
template <class Struct, class Member>
struct RequiredField : Field<Struct, Member> {};

template <class Struct, class Member>
RequiredField(const char*, Member Struct::*, const char*) -> RequiredField<Struct, Member>;
template <class Struct, class Member>
RequiredField(const char*, Member Struct::*, const char*, FieldRole) -> RequiredField<Struct, Member>;

/// A field that every engine file has, although it has a default. Other fields with a default are left out
/// of files if they equal it.
template <class Struct, class Member>
struct WrittenField : Field<Struct, Member> {};

template <class Struct, class Member>
WrittenField(const char*, Member Struct::*, const char*) -> WrittenField<Struct, Member>;
template <class Struct, class Member>
WrittenField(const char*, Member Struct::*, const char*, FieldRole) -> WrittenField<Struct, Member>;

/// A field that C++ sets: Python reads it, and its constructor does not take it.
template <class Struct, class Member>
struct ReadOnlyField : Field<Struct, Member> {};

template <class Struct, class Member>
ReadOnlyField(const char*, Member Struct::*, const char*) -> ReadOnlyField<Struct, Member>;

namespace detail {

struct AnyValue {
  template <class Value>
  constexpr operator Value() const;  // NOLINT(google-explicit-constructor): never called
};

template <class Struct, std::size_t... kIndex>
consteval bool has_members(std::index_sequence<kIndex...> /*indices*/) {
  return requires { Struct{(static_cast<void>(kIndex), AnyValue{})...}; };
}

}  // namespace detail

/// Number of data members of an aggregate without bases and arrays.
template <class Struct, std::size_t kAtLeast = 0>
consteval std::size_t num_members() {
  if constexpr (detail::has_members<Struct>(std::make_index_sequence<kAtLeast + 1>{})) {
    return num_members<Struct, kAtLeast + 1>();
  } else {
    return kAtLeast;
  }
}

/// True if the table of the struct's fields has all of its members but `omitted`.
template <class Struct>
consteval bool lists_every_member(std::size_t omitted = 0) {
  using Fields = decltype(fields_of(static_cast<const Struct*>(nullptr)));
  return std::tuple_size_v<Fields> + omitted == num_members<Struct>();
}

}  // namespace adaptrt
