#pragma once

#include <cstddef>
#include <utility>

namespace adaptrt {

enum class FieldRole : unsigned char {
  kValue,
  kBuffer,  ///< an index into Program::buffers, or several; engine files have the buffers' names
};

/// A data member by name. Structs that are bound to Python, written as JSON or sent to other processes list
/// their members once, as a list of these in the order of the constructor's parameters:
///
///   constexpr auto fields_of(const Example*) { return FieldList{Field{"size", &Example::size, "In
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

template <std::size_t kIndex, class Of>
struct FieldAt {
  Of field;
};

template <class Indices, class... Fields>
struct IndexedFields;
template <std::size_t... kIndex, class... Fields>
struct IndexedFields<std::index_sequence<kIndex...>, Fields...> : FieldAt<kIndex, Fields>... {
  /// Calls visit(fields...) and returns its result.
  template <class Visit>
  constexpr decltype(auto) apply(const Visit& visit) const {
    return visit(static_cast<const FieldAt<kIndex, Fields>&>(*this).field...);
  }
};

struct AnyValue {
  template <class Value>
  constexpr operator Value() const;  // NOLINT(google-explicit-constructor): never called
};

template <class Struct, std::size_t... kIndex>
consteval bool has_members(std::index_sequence<kIndex...> /*indices*/) {
  return requires { Struct{(static_cast<void>(kIndex), AnyValue{})...}; };
}

}  // namespace detail

/// A struct's fields. Many sources include such lists: a std::tuple takes several times as long to compile.
template <class... Fields>
struct FieldList : detail::IndexedFields<std::index_sequence_for<Fields...>, Fields...> {
  static constexpr std::size_t kSize = sizeof...(Fields);

  /// Returns these fields, then others.
  template <class... Others>
  constexpr FieldList<Fields..., Others...> followed_by(const FieldList<Others...>& others) const {
    return this->apply([&](const auto&... first) {
      return others.apply(
          [&](const auto&... second) { return FieldList<Fields..., Others...>{first..., second...}; });
    });
  }
};
template <class... Fields>
FieldList(Fields...) -> FieldList<Fields...>;

/// True if an aggregate without bases and arrays has so many data members. Counting them would take longer to
/// compile: each conversion of AnyValue considers all constructors of a member.
template <class Struct, std::size_t kCount>
consteval bool has_num_members() {
  return detail::has_members<Struct>(std::make_index_sequence<kCount>{}) &&
         !detail::has_members<Struct>(std::make_index_sequence<kCount + 1>{});
}

/// True if the table of the struct's fields has all of its members but `kOmitted`.
template <class Struct, std::size_t kOmitted = 0>
consteval bool lists_every_member() {
  using Fields = decltype(fields_of(static_cast<const Struct*>(nullptr)));
  return has_num_members<Struct, Fields::kSize + kOmitted>();
}

}  // namespace adaptrt
