#pragma once

#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
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
inline pybind11::object array_from(pybind11::handle given) {
  const pybind11::module_ numpy = pybind11::module_::import("numpy");
  if (pybind11::hasattr(given, "__array__")) return numpy.attr("asarray")(given);
  if (pybind11::hasattr(given, "__dlpack__")) return numpy.attr("from_dlpack")(given);
  return pybind11::none();
}

/// Returns arrays and tensors of integers as lists, also within a list of `depth` > 1, and other objects
/// unchanged. Returns None for an array of another type.
inline pybind11::object integers_of(const pybind11::object& given, int depth) {
  if (given.is_none()) return given;
  if (PyList_Check(given.ptr()) == 0 && PyTuple_Check(given.ptr()) == 0) {
    const pybind11::object array = array_from(given);
    if (array.is_none()) return given;
    const std::string kind = pybind11::str(array.attr("dtype").attr("kind"));
    return kind == "i" || kind == "u" ? array.attr("tolist")() : pybind11::object(pybind11::none());
  }
  if (depth == 1) return given;
  pybind11::list lists;
  for (const pybind11::handle item : given) {
    lists.append(integers_of(pybind11::reinterpret_borrow<pybind11::object>(item), depth - 1));
  }
  return lists;
}

/// Returns the value of the field `name` of `title`. Throws TypeError with both names, the given value and
/// the accepted types.
template <class Member>
Member field_value(const FieldArgument<Member>& argument, const std::string& title, const char* name) {
  try {
    if constexpr (std::is_same_v<Member, bool>) {
      // No conversion: any object can be converted to bool.
      pybind11::detail::make_caster<bool> value;
      if (value.load(argument.given, false)) return pybind11::detail::cast_op<bool>(value);
    } else if (PyAnySet_Check(argument.given.ptr()) == 0) {  // pybind11 would accept a set as a list
      if constexpr (kIntegerDepth<Member> > 0) {
        const pybind11::object integers = integers_of(argument.given, kIntegerDepth<Member>);
        if (!integers.is_none() || argument.given.is_none()) return integers.template cast<Member>();
      } else {
        return argument.given.template cast<Member>();
      }
    }
  } catch (const pybind11::cast_error&) {
    // Reported below, with the field's name.
  } catch (const pybind11::reference_cast_error&) {
    // None instead of a struct.
  } catch (pybind11::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;  // an array whose values cannot be read
  }
  const pybind11::object type = pybind11::type::handle_of(argument.given).attr("__name__");
  throw pybind11::type_error(pybind11::str("{}.{} is {!r:.80} ({}); accepted: {}")
                                 .format(title, name, argument.given, type, Accepted<Member>::text()));
}

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

template <class Struct, class Member>
void def_field(pybind11::class_<Struct>& cls, const char* title, const Field<Struct, Member>& field) {
  cls.def_property(
      field.name,
      pybind11::cpp_function(
          [member = field.member](const Struct& self) -> const Member& { return self.*member; },
          is_handed_out_as_copy<Member>() ? pybind11::return_value_policy::copy
                                          : pybind11::return_value_policy::reference_internal),
      [title = std::string(title), field](Struct& self, const FieldArgument<Member>& argument) {
        Member value = field_value(argument, title, field.name);
        Member& place = self.*(field.member);
        if constexpr (IsOptionalClass<Member>::value && !is_handed_out_as_copy<Member>()) {
          // Python may hold references to the value, so None resets it in place instead of destroying it.
          if (!value && place) {
            *place = typename Member::value_type{};
            return;
          }
        }
        place = std::move(value);
      },
      field.doc);
}

/// Defines the constructor. Parameters before `kRequired` have no default.
template <std::size_t kRequired, std::size_t kPositional, class Struct, class... Members,
          std::size_t... kIndex>
void def_constructor(pybind11::class_<Struct>& cls, const char* title,
                     std::index_sequence<kIndex...> /*indices*/, const Field<Struct, Members>&... fields) {
  namespace py = pybind11;
  const Struct defaults;
  auto argument = [&](auto index, const auto& field) {
    if constexpr (decltype(index)::value < kRequired) {
      return std::tuple{py::arg(field.name)};
    } else if constexpr (decltype(index)::value == kPositional) {
      return std::tuple{py::kw_only(), py::arg(field.name) = defaults.*(field.member)};
    } else {
      return std::tuple{py::arg(field.name) = defaults.*(field.member)};
    }
  };
  std::apply(
      [&](const auto&... arguments) {
        cls.def(py::init([fields..., title = std::string(title)](const FieldArgument<Members>&... values) {
                  Struct result;
                  ((result.*(fields.member) = field_value(values, title, fields.name)), ...);
                  if constexpr (requires { result.check_constructed(); }) result.check_constructed();
                  return result;
                }),
                arguments...);
      },
      std::tuple_cat(argument(std::integral_constant<std::size_t, kIndex>{}, fields)...));
}

template <class Value>
struct IsReadOnlyField : std::false_type {};
template <class Struct, class Member>
struct IsReadOnlyField<ReadOnlyField<Struct, Member>> : std::true_type {};

template <class Value>
struct IsWrittenField : std::false_type {};
template <class Struct, class Member>
struct IsWrittenField<WrittenField<Struct, Member>> : std::true_type {};

/// The names of the fields that `condition` is true for, in the order of the table.
template <class... Fields, class Condition>
pybind11::tuple names_if(const std::tuple<Fields...>& table, Condition condition) {
  pybind11::list names;
  std::apply([&](const auto&... fields) { ((condition(fields) ? names.append(fields.name) : void()), ...); },
             table);
  return pybind11::tuple(names);
}

/// A keyword parameter with the field's default; a RequiredField has none.
template <class Struct, class Member>
pybind11::arg_v keyword(const Struct& defaults, const Field<Struct, Member>& field) {
  return pybind11::arg(field.name) = defaults.*(field.member);
}
template <class Struct, class Member>
pybind11::arg keyword(const Struct& /*defaults*/, const RequiredField<Struct, Member>& field) {
  return pybind11::arg(field.name);
}

/// Defines a constructor with a keyword for each of `fields`.
template <class Struct, template <class, class> class... Kinds, class... Members>
void def_keywords(pybind11::class_<Struct>& cls, const char* title, const Kinds<Struct, Members>&... fields) {
  const Struct defaults;
  cls.def(pybind11::init([fields..., title = std::string(title)](const FieldArgument<Members>&... values) {
            Struct result;
            ((result.*(fields.member) = field_value(values, title, fields.name)), ...);
            return result;
          }),
          pybind11::kw_only(), keyword(defaults, fields)...);
}

template <class Struct, class... Members>
void def_repr(pybind11::class_<Struct>& cls, const char* name, const Field<Struct, Members>&... fields) {
  cls.def("__repr__", [fields..., title = std::string(name)](const pybind11::object& self) {
    std::string text = title + "(";
    const char* separator = "";
    ((text.append(separator)
          .append(fields.name)
          .append("=")
          .append(std::string(pybind11::repr(self.attr(fields.name)))),
      separator = ", "),
     ...);
    return text + ")";
  });
}

template <class Struct, class... Members>
void def_pickle(pybind11::class_<Struct>& cls, const Field<Struct, Members>&... fields) {
  namespace py = pybind11;
  cls.def(py::pickle(
      [fields...](const Struct& self) {
        py::dict state;
        ((state[fields.name] = self.*(fields.member)), ...);
        return state;
      },
      [fields...](const py::dict& state) {
        Struct result;
        ((result.*(fields.member) = state[fields.name].template cast<Members>()), ...);
        return result;
      }));
}

}  // namespace detail

/// Binds a struct of plain values from the table of its fields, in the order of the constructor's parameters.
/// The class has a constructor with the struct's defaults, properties, ==, repr, pickle and copy. Structs
/// inside it are changed in place; if they may be None, only with kNoneIsDefault. The first kRequired
/// parameters are required, and those from kPositional on are keywords. Types of fields must be bound before.
/// Returns the class, so that methods can be added.
template <class Struct, std::size_t kRequired = 0, std::size_t kPositional = kAllPositional, class... Members>
pybind11::class_<Struct> bind_struct(pybind11::module_& module, const char* name, const char* doc,
                                     Field<Struct, Members>... fields) {
  namespace py = pybind11;
  py::class_<Struct> cls(module, name, doc);
  detail::def_constructor<kRequired, kPositional>(cls, name, std::index_sequence_for<Members...>{},
                                                  fields...);
  (detail::def_field(cls, name, fields), ...);
  if constexpr (std::equality_comparable<Struct>) {
    cls.def(py::self == py::self);
    cls.attr("__hash__") = py::none();
  }
  detail::def_repr(cls, name, fields...);
  detail::def_pickle(cls, fields...);
  return cls;
}

/// Does the same with the struct's own table, fields_of(const Struct*).
template <class Struct, std::size_t kRequired = 0, std::size_t kPositional = kAllPositional>
pybind11::class_<Struct> bind_struct(pybind11::module_& module, const char* name, const char* doc) {
  return std::apply(
      [&](const auto&... fields) {
        return bind_struct<Struct, kRequired, kPositional>(module, name, doc, fields...);
      },
      fields_of(static_cast<const Struct*>(nullptr)));
}

/// Binds a struct that Python can read but not construct, from its own table.
template <class Struct>
pybind11::class_<Struct> bind_read_only(pybind11::module_& module, const char* name, const char* doc) {
  pybind11::class_<Struct> cls(module, name, doc);
  std::apply([&](const auto&... fields) { (cls.def_readonly(fields.name, fields.member, fields.doc), ...); },
             fields_of(static_cast<const Struct*>(nullptr)));
  return cls;
}

/// Binds a struct that Python constructs and then only reads, from its own table. The class has a constructor
/// with keywords (see RequiredField and ReadOnlyField), properties and repr. Types of fields must be bound
/// before. The class lists its buffers (FieldRole::kBuffer) in `buffer_fields`, and its WrittenFields in
/// `written_fields`.
template <class Struct>
pybind11::class_<Struct> bind_record(pybind11::module_& module, const char* name, const char* doc) {
  constexpr auto kFields = fields_of(static_cast<const Struct*>(nullptr));
  pybind11::class_<Struct> cls = bind_read_only<Struct>(module, name, doc);
  const auto parameter = [](const auto& field) {
    if constexpr (detail::IsReadOnlyField<std::decay_t<decltype(field)>>::value) {
      return std::tuple{};
    } else {
      return std::tuple{field};
    }
  };
  const auto parameters =
      std::apply([&](const auto&... fields) { return std::tuple_cat(parameter(fields)...); }, kFields);
  std::apply([&](const auto&... fields) { detail::def_keywords<Struct>(cls, name, fields...); }, parameters);
  std::apply([&](const auto&... fields) { detail::def_repr<Struct>(cls, name, fields...); }, kFields);
  cls.attr("buffer_fields") =
      detail::names_if(kFields, [](const auto& field) { return field.role == FieldRole::kBuffer; });
  cls.attr("written_fields") = detail::names_if(kFields, [](const auto& field) {
    return detail::IsWrittenField<std::decay_t<decltype(field)>>::value;
  });
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
