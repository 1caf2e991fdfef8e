#pragma once

#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>

namespace adaptrt::bindings {

/// A data member as Python sees it.
template <class Struct, class Member>
struct Field {
  const char* name;
  Member Struct::* member;
  const char* doc;
};

template <class Struct, class Member>
Field(const char*, Member Struct::*, const char*) -> Field<Struct, Member>;

/// Binds a struct of plain values from the table of its fields, in the order of the constructor's parameters:
/// keyword or positional construction with the struct's own defaults, properties, ==, repr, pickle and copy.
/// Types of fields must be bound before. Returns the class, for more methods.
template <class Struct, class... Members>
pybind11::class_<Struct> bind_struct(pybind11::module_& module, const char* name, const char* doc,
                                     Field<Struct, Members>... fields) {
  namespace py = pybind11;
  const Struct defaults;
  py::class_<Struct> cls(module, name, doc);
  cls.def(py::init([fields...](Members... values) {
            Struct result;
            ((result.*(fields.member) = std::move(values)), ...);
            return result;
          }),
          (py::arg(fields.name) = defaults.*(fields.member))...);
  (cls.def_readwrite(fields.name, fields.member, fields.doc), ...);
  cls.def(py::self == py::self);
  cls.def("__repr__", [fields..., title = std::string(name)](const py::object& self) {
    std::string text = title + "(";
    const char* separator = "";
    ((text.append(separator)
          .append(fields.name)
          .append("=")
          .append(std::string(py::repr(self.attr(fields.name)))),
      separator = ", "),
     ...);
    return text + ")";
  });
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

}  // namespace adaptrt::bindings
