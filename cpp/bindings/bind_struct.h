#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include "adaptrt/core/fields.h"

namespace adaptrt::bindings {

inline constexpr std::size_t kAllPositional = std::numeric_limits<std::size_t>::max();

/// A field's argument before its conversion. It accepts any object, so that the error for a wrong type names
/// the field instead of the signature of the whole class.
template <class Member>
struct FieldArgument {
  pybind11::object given;
};

namespace detail {

/// Names of the types that a field accepts, for errors. The general case is a bound class or enum.
template <class Value>
struct Accepted {
  static std::string text() {
    const pybind11::object example = pybind11::cast(Value{});
    return pybind11::str(pybind11::type::handle_of(example).attr("__name__"));
  }
};
template <std::integral Value>
struct Accepted<Value> {
  static std::string text() {
    using Limits = std::numeric_limits<Value>;
    return "int from " + std::to_string(Limits::min()) + " to " + std::to_string(Limits::max());
  }
};
template <>
struct Accepted<bool> {
  static std::string text() { return "bool"; }
};
template <std::floating_point Value>
struct Accepted<Value> {
  static std::string text() { return "float"; }
};
template <class... Values>
struct Accepted<std::variant<Values...>> {
  static std::string text() {
    std::string names;
    ((names += (names.empty() ? "" : ", ") + Accepted<Values>::text()), ...);
    return names;
  }
};
template <>
struct Accepted<std::string> {
  static std::string text() { return "str"; }
};
template <class Count, class Period>
struct Accepted<std::chrono::duration<Count, Period>> {
  static std::string text() { return "timedelta, milliseconds"; }
};
template <class Value>
struct Accepted<std::vector<Value>> {
  static std::string text() { return "list of (" + Accepted<Value>::text() + ")"; }
};
template <class Value>
struct Accepted<std::optional<Value>> {
  static std::string text() { return "None, " + Accepted<Value>::text(); }
};

/// Depth of the lists of integers in a member, optional or not; 0 for other members.
template <class Member>
inline constexpr int kIntegerDepth = 0;
template <std::integral Value>
inline constexpr int kIntegerDepth<std::vector<Value>> = 1;
template <std::integral Value>
inline constexpr int kIntegerDepth<std::vector<std::vector<Value>>> = 2;
template <class Value>
inline constexpr int kIntegerDepth<std::optional<Value>> = kIntegerDepth<Value>;

/// Returns a NumPy array for an array or tensor of any library, sharing its memory if possible; None for
/// other objects.
pybind11::object array_from(pybind11::handle given);

/// True if std::optional of a bound class means the same without a value and with a default value. Then its
/// property returns a reference to the value inside, and None resets that value; otherwise it returns a copy.
template <class Value>
inline constexpr bool kNoneIsDefault = false;

/// True for std::optional of a bound class.
template <class Member>
struct IsOptionalClass : std::false_type {};
template <class Value>
struct IsOptionalClass<std::optional<Value>>
    : std::is_base_of<pybind11::detail::type_caster_generic, pybind11::detail::make_caster<Value>> {};

/// Elements of a list are returned as copies, because references would outlive a vector that is reassigned.
template <class Member>
struct IsVector : std::false_type {};
template <class Value>
struct IsVector<std::vector<Value>> : std::true_type {};

/// True for members that may be destroyed while their struct lives.
template <class Member>
constexpr bool is_handed_out_as_copy() {
  if constexpr (IsOptionalClass<Member>::value) {
    return !kNoneIsDefault<typename Member::value_type>;
  } else {
    return IsVector<Member>::value;
  }
}

/// Conversions between a member's type and Python. Functions of classes call them through pointers, so that
/// pybind11's templates are instantiated once for each type instead of once for each field: this makes
/// bindings compile in less than half of the time.
struct MemberType {
  /// pybind11's text of the type, with "%" for each of `classes`, which end with a nullptr.
  const char* signature;
  const std::type_info* const* classes;
  pybind11::handle (*cast)(const void* member, pybind11::return_value_policy policy, pybind11::handle parent);
  /// Returns false if `given` has another type.
  bool (*assign)(void* member, pybind11::handle given);
  /// Replaces the value of an optional member by its default value. Returns false if there is no value.
  /// nullptr: None replaces the member like any other value.
  bool (*reset)(void* member);
  std::string (*accepted)();
  int integer_depth;
  bool is_handed_out_as_copy;
};

template <class Member>
const MemberType& member_type() {
  using Caster = pybind11::detail::make_caster<Member>;
  static constexpr auto kSignature = Caster::name;
  static constexpr auto kClasses = std::decay_t<decltype(kSignature)>::types();
  bool (*reset)(void*) = nullptr;
  if constexpr (IsOptionalClass<Member>::value && !is_handed_out_as_copy<Member>()) {
    reset = [](void* member) {
      Member& place = *static_cast<Member*>(member);
      if (!place) return false;
      *place = typename Member::value_type{};
      return true;
    };
  }
  static const MemberType kType{
      .signature = kSignature.text,
      .classes = kClasses.data(),
      .cast =
          [](const void* member, pybind11::return_value_policy policy, pybind11::handle parent) {
            return Caster::cast(*static_cast<const Member*>(member), policy, parent);
          },
      .assign =
          [](void* member, pybind11::handle given) {
            // Any object could be converted to bool.
            constexpr bool kConvert = !std::is_same_v<Member, bool>;
            Caster caster;
            if (!caster.load(given, kConvert)) return false;
            *static_cast<Member*>(member) = pybind11::detail::cast_op<Member>(std::move(caster));
            return true;
          },
      .reset = reset,
      .accepted = &Accepted<Member>::text,
      .integer_depth = kIntegerDepth<Member>,
      .is_handed_out_as_copy = is_handed_out_as_copy<Member>()};
  return kType;
}

// Types of many fields: instantiated in bind_struct.cpp.
extern template const MemberType& member_type<bool>();
extern template const MemberType& member_type<int>();
extern template const MemberType& member_type<long>();
extern template const MemberType& member_type<unsigned long>();
extern template const MemberType& member_type<float>();
extern template const MemberType& member_type<double>();
extern template const MemberType& member_type<std::string>();
extern template const MemberType& member_type<std::vector<int>>();
extern template const MemberType& member_type<std::vector<long>>();
extern template const MemberType& member_type<std::vector<std::vector<int>>>();
extern template const MemberType& member_type<std::optional<bool>>();
extern template const MemberType& member_type<std::optional<int>>();
extern template const MemberType& member_type<std::optional<long>>();
extern template const MemberType& member_type<std::optional<unsigned long>>();
extern template const MemberType& member_type<std::optional<float>>();
extern template const MemberType& member_type<std::optional<double>>();
extern template const MemberType& member_type<std::optional<std::string>>();
extern template const MemberType& member_type<std::optional<std::vector<int>>>();

/// A field of a bound class.
struct BoundField {
  const char* name;
  const char* doc;
  std::size_t offset;  ///< of the member in the struct
  const MemberType* type;
  bool is_parameter = true;  ///< of the constructor
  bool is_required = false;
  bool is_buffer = false;
  bool is_written = false;
};

/// A class that is bound from the table of its fields.
struct BoundStruct {
  std::string name;
  const std::type_info* type;
  void* (*make)();
  void (*destroy)(void* object);
  /// Throws for fields that do not fit together; nullptr: nothing to check.
  void (*check)(const void* object);
  /// nullptr: objects cannot be compared.
  bool (*equal)(const void* left, const void* right);
  std::vector<BoundField> fields;
};

/// Assigns an argument to the field `name` of `title`. Throws TypeError with both names, the given value and
/// the accepted types.
void assign_argument(const MemberType& type, void* member, const pybind11::object& given,
                     const std::string& title, const char* name);

template <class Member>
Member field_value(const FieldArgument<Member>& argument, const std::string& title, const char* name) {
  Member value{};
  assign_argument(member_type<Member>(), &value, argument.given, title, name);
  return value;
}

/// Defines the constructor. Parameters from number `first_keyword` on are keywords.
void def_constructor(pybind11::object& cls, const std::shared_ptr<const BoundStruct>& table,
                     std::size_t first_keyword);
void def_properties(pybind11::object& cls, const std::shared_ptr<const BoundStruct>& table);
void def_read_only_properties(pybind11::object& cls, const std::shared_ptr<const BoundStruct>& table);
void def_equality(pybind11::object& cls, const std::shared_ptr<const BoundStruct>& table);
void def_repr(pybind11::object& cls, const std::shared_ptr<const BoundStruct>& table);
void def_pickle(pybind11::object& cls, const std::shared_ptr<const BoundStruct>& table);
/// Lists a record's buffers (FieldRole::kBuffer) in `buffer_fields`, and its WrittenFields in
/// `written_fields`.
void list_fields(pybind11::object& cls, const BoundStruct& table);

template <class Value>
struct IsRequiredField : std::false_type {};
template <class Struct, class Member>
struct IsRequiredField<RequiredField<Struct, Member>> : std::true_type {};

template <class Value>
struct IsReadOnlyField : std::false_type {};
template <class Struct, class Member>
struct IsReadOnlyField<ReadOnlyField<Struct, Member>> : std::true_type {};

template <class Value>
struct IsWrittenField : std::false_type {};
template <class Struct, class Member>
struct IsWrittenField<WrittenField<Struct, Member>> : std::true_type {};

template <template <class, class> class Kind, class Struct, class Member>
BoundField bound_field(const Struct& example, const Kind<Struct, Member>& field) {
  const auto* begin = reinterpret_cast<const std::byte*>(&example);
  const auto* member = reinterpret_cast<const std::byte*>(&(example.*(field.member)));
  return {.name = field.name,
          .doc = field.doc,
          .offset = static_cast<std::size_t>(member - begin),
          .type = &member_type<Member>(),
          .is_parameter = !IsReadOnlyField<Kind<Struct, Member>>::value,
          .is_required = IsRequiredField<Kind<Struct, Member>>::value,
          .is_buffer = field.role == FieldRole::kBuffer,
          .is_written = IsWrittenField<Kind<Struct, Member>>::value};
}

template <class Struct, class... Fields>
std::shared_ptr<BoundStruct> bound_struct(const char* name, const Fields&... fields) {
  const Struct example{};
  void (*check)(const void*) = nullptr;
  if constexpr (requires { example.check_constructed(); }) {
    check = [](const void* object) { static_cast<const Struct*>(object)->check_constructed(); };
  }
  bool (*equal)(const void*, const void*) = nullptr;
  if constexpr (std::equality_comparable<Struct>) {
    equal = [](const void* left, const void* right) {
      return *static_cast<const Struct*>(left) == *static_cast<const Struct*>(right);
    };
  }
  return std::make_shared<BoundStruct>(
      BoundStruct{.name = name,
                  .type = &typeid(Struct),
                  .make = []() -> void* { return new Struct{}; },
                  .destroy = [](void* object) { delete static_cast<Struct*>(object); },
                  .check = check,
                  .equal = equal,
                  .fields = {bound_field(example, fields)...}});
}

/// Makes the table from the struct's own, fields_of(const Struct*).
template <class Struct>
std::shared_ptr<BoundStruct> bound_struct_of(const char* name) {
  return fields_of(static_cast<const Struct*>(nullptr)).apply([&](const auto&... fields) {
    return bound_struct<Struct>(name, fields...);
  });
}

/// Defines the functions of a struct of plain values.
void def_struct(pybind11::object& cls, const std::shared_ptr<BoundStruct>& table, std::size_t num_required,
                std::size_t first_keyword);

}  // namespace detail

/// Binds a struct of plain values from the table of its fields, in the order of the constructor's parameters.
/// The class has a constructor with the struct's defaults, properties, ==, repr, pickle and copy. Structs
/// inside it are changed in place; if they may be None, only with kNoneIsDefault. The first kRequired
/// parameters are required, and those from kPositional on are keywords. Types of fields must be bound before.
/// Returns the class, so that methods can be added.
template <class Struct, std::size_t kRequired = 0, std::size_t kPositional = kAllPositional, class... Members>
pybind11::class_<Struct> bind_struct(pybind11::module_& module, const char* name, const char* doc,
                                     Field<Struct, Members>... fields) {
  pybind11::class_<Struct> cls(module, name, doc);
  detail::def_struct(cls, detail::bound_struct<Struct>(name, fields...), kRequired, kPositional);
  return cls;
}

/// Does the same with the struct's own table, fields_of(const Struct*).
template <class Struct, std::size_t kRequired = 0, std::size_t kPositional = kAllPositional>
pybind11::class_<Struct> bind_struct(pybind11::module_& module, const char* name, const char* doc) {
  pybind11::class_<Struct> cls(module, name, doc);
  detail::def_struct(cls, detail::bound_struct_of<Struct>(name), kRequired, kPositional);
  return cls;
}

/// Binds a struct that Python can read but not construct, from its own table.
template <class Struct>
pybind11::class_<Struct> bind_read_only(pybind11::module_& module, const char* name, const char* doc) {
  pybind11::class_<Struct> cls(module, name, doc);
  detail::def_read_only_properties(cls, detail::bound_struct_of<Struct>(name));
  return cls;
}

/// Binds a struct that Python constructs and then only reads, from its own table. The class has a constructor
/// with keywords (see RequiredField and ReadOnlyField), properties and repr. Types of fields must be bound
/// before. The class lists its buffers (FieldRole::kBuffer) in `buffer_fields`, and its WrittenFields in
/// `written_fields`.
template <class Struct>
pybind11::class_<Struct> bind_record(pybind11::module_& module, const char* name, const char* doc) {
  pybind11::class_<Struct> cls(module, name, doc);
  const auto table = detail::bound_struct_of<Struct>(name);
  detail::def_read_only_properties(cls, table);
  detail::def_constructor(cls, table, 0);
  detail::def_repr(cls, table);
  detail::list_fields(cls, *table);
  return cls;
}

}  // namespace adaptrt::bindings

namespace pybind11::detail {

template <class Member>
struct type_caster<adaptrt::bindings::FieldArgument<Member>> {
  PYBIND11_TYPE_CASTER(adaptrt::bindings::FieldArgument<Member>, make_caster<Member>::name);

  bool load(handle source, bool /*convert*/) {
    value.given = reinterpret_borrow<object>(source);
    return true;
  }
};

}  // namespace pybind11::detail
