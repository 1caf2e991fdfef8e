#include "constructors.h"

#include "adaptrt/core/error.h"

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

/// Puts construct(constructor, args, kwargs) in the place of the constructor. Its docstring, which holds the
/// signature, stays.
template <class Construct>
void replace_constructor(py::handle cls, Construct construct) {
  const py::object constructor = cls.attr("__init__");
  const std::string doc = py::str(constructor.attr("__doc__"));
  py::options options;
  options.disable_function_signatures();
  cls.attr("__init__") = py::cpp_function(
      [constructor, construct](const py::args& args, const py::kwargs& kwargs) {
        construct(constructor, args, kwargs);
      },
      py::name("__init__"), py::is_method(cls), py::doc(doc.c_str()));
}

/// Puts change(args, kwargs) -> args before the constructor.
template <class Change>
void change_arguments(py::handle cls, Change change) {
  replace_constructor(
      cls, [change](const py::object& constructor, const py::tuple& args, const py::kwargs& kwargs) {
        const py::tuple changed = change(args, kwargs);
        constructor(*changed, **kwargs);
      });
}

}  // namespace

void accept_old_names(py::handle cls, const OldNames& names) {
  change_arguments(cls, [names](py::tuple args, const py::kwargs& kwargs) {
    for (const auto& [old_name, name] : names) {
      if (!kwargs.contains(old_name)) continue;
      const py::object value = kwargs.attr("pop")(old_name);
      if (!kwargs.contains(name)) kwargs[py::str(name)] = value;
    }
    return args;
  });
  for (const auto& [old_name, name] : names) py::setattr(cls, old_name.c_str(), cls.attr(name.c_str()));
}

void accept_second_as(py::handle cls, const std::string& name) {
  change_arguments(cls, [name](py::tuple args, const py::kwargs& kwargs) -> py::tuple {
    constexpr std::size_t kSelfAndTwo = 3;
    if (args.size() != kSelfAndTwo || kwargs.contains(name)) return args;
    const py::object second = args[2];
    if (PyLong_Check(second.ptr()) == 0 || PyBool_Check(second.ptr()) != 0) return args;
    kwargs[py::str(name)] = second;
    return py::make_tuple(args[0], args[1]);
  });
}

void validate_when_made(py::handle cls) {
  const std::string name = py::str(cls.attr("__name__"));
  replace_constructor(cls,
                      [name](const py::object& constructor, const py::tuple& args, const py::kwargs& kwargs) {
                        constructor(*args, **kwargs);
                        Problems problems;
                        for (const py::handle problem : args[0].attr("validate")())
                          problems.add(problem.cast<std::string>());
                        problems.throw_if_any<ConfigError>(name);
                      });
}

}  // namespace adaptrt::bindings
