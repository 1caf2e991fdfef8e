#pragma once

#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <concepts>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "adaptrt/core/fields.h"

namespace adaptrt::bindings {

inline constexpr std::size_t kAllPositional = std::numeric_limits<std::size_t>::max();

namespace detail {

/// True for std::optional of a bound class, whose property hands out a reference to the value inside.
template <class Member>
struct IsOptionalClass : std::false_type {};
template <class Value>
struct IsOptionalClass<std::optional<Value>>
    : std::is_base_of<pybind11::detail::type_caster_generic, pybind11::detail::make_caster<Value>> {};

template <class Struct, class Member>
void def_field(pybind11::class_<Struct>& cls, const Field<Struct, Member>& field) {
  if constexpr (IsOptionalClass<Member>::value) {
    // References to the value may be held in Python, so None resets it where it is instead of destroying it.
    cls.def_property(
        field.name,
        pybind11::cpp_function(
            [member = field.member](const Struct& self) -> const Member& { return self.*member; },
            pybind11::return_value_policy::reference_internal),
        [member = field.member](Struct& self, const Member& value) {
          if (!value && self.*member) {
            *(self.*member) = typename Member::value_type{};
          } else {
            self.*member = value;
          }
        },
        field.doc);
  } else {
    cls.def_readwrite(field.name, field.member, field.doc);
  }
}

/// The constructor's parameters from `first` on; those before `kRequired` have no default.
template <std::size_t kRequired, std::size_t kPositional, class Struct, class... Members,
          std::size_t... kIndex>
void def_constructor(pybind11::class_<Struct>& cls, std::index_sequence<kIndex...> /*indices*/,
                     const Field<Struct, Members>&... fields) {
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
        cls.def(py::init([fields...](Members... values) {
                  Struct result;
                  ((result.*(fields.member) = std::move(values)), ...);
                  return result;
                }),
                arguments...);
      },
      std::tuple_cat(argument(std::integral_constant<std::size_t, kIndex>{}, fields)...));
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

}  // namespace detail

/// Binds a struct of plain values from the table of its fields, in the order of the constructor's parameters:
/// construction with the struct's own defaults, properties (structs inside it are changed in place), ==,
/// repr, pickle and copy. The first kRequired parameters must be given, those from kPositional on by keyword.
/// Types of fields must be bound before. Returns the class, for more methods.
template <class Struct, std::size_t kRequired = 0, std::size_t kPositional = kAllPositional, class... Members>
pybind11::class_<Struct> bind_struct(pybind11::module_& module, const char* name, const char* doc,
                                     Field<Struct, Members>... fields) {
  namespace py = pybind11;
  py::class_<Struct> cls(module, name, doc);
  detail::def_constructor<kRequired, kPositional>(cls, std::index_sequence_for<Members...>{}, fields...);
  (detail::def_field(cls, fields), ...);
  if constexpr (std::equality_comparable<Struct>) {
    cls.def(py::self == py::self);
    cls.attr("__hash__") = py::none();
  }
  detail::def_repr(cls, name, fields...);
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
  return cls;
}

/// The same from the struct's own table, fields_of(const Struct*).
template <class Struct, std::size_t kRequired = 0, std::size_t kPositional = kAllPositional>
pybind11::class_<Struct> bind_struct(pybind11::module_& module, const char* name, const char* doc) {
  return std::apply(
      [&](const auto&... fields) {
        return bind_struct<Struct, kRequired, kPositional>(module, name, doc, fields...);
      },
      fields_of(static_cast<const Struct*>(nullptr)));
}

/// Binds a struct that only C++ makes: properties without setters, and repr.
template <class Struct>
pybind11::class_<Struct> bind_readonly_struct(pybind11::module_& module, const char* name, const char* doc) {
  pybind11::class_<Struct> cls(module, name, doc);
  std::apply(
      [&](const auto&... fields) {
        (cls.def_readonly(fields.name, fields.member, fields.doc), ...);
        detail::def_repr(cls, name, fields...);
      },
      fields_of(static_cast<const Struct*>(nullptr)));
  return cls;
}

}  // namespace adaptrt::bindings
