#include "bind_struct.h"

#include <cstdint>

namespace py = pybind11;

namespace adaptrt::bindings::detail {

template const MemberType& member_type<bool>();
template const MemberType& member_type<int>();
template const MemberType& member_type<long>();
template const MemberType& member_type<unsigned long>();
template const MemberType& member_type<float>();
template const MemberType& member_type<double>();
template const MemberType& member_type<std::string>();
template const MemberType& member_type<std::vector<int>>();
template const MemberType& member_type<std::vector<long>>();
template const MemberType& member_type<std::vector<std::vector<int>>>();
template const MemberType& member_type<std::optional<bool>>();
template const MemberType& member_type<std::optional<int>>();
template const MemberType& member_type<std::optional<long>>();
template const MemberType& member_type<std::optional<unsigned long>>();
template const MemberType& member_type<std::optional<float>>();
template const MemberType& member_type<std::optional<double>>();
template const MemberType& member_type<std::optional<std::string>>();
template const MemberType& member_type<std::optional<std::vector<int>>>();

namespace {

using py::detail::function_call;
using py::detail::function_record;
using Table = std::shared_ptr<const BoundStruct>;

/// Data of a class's function; functions of properties have a field, too.
struct Capture {
  Table table;
  const BoundField* field;
};

/// A pybind11 function whose signature is made at run time, from the table of a class.
class TableFunction : public py::cpp_function {
 public:
  using Body = py::handle (*)(function_call& call);

  TableFunction(Body body, const Table& table, const BoundField* field = nullptr)
      : record_(make_function_record()) {
    record_->impl = body;
    record_->data[0] = new Capture{table, field};
    record_->free_data = [](function_record* record) { delete static_cast<Capture*>(record->data[0]); };
  }

  // Arguments are added before attributes are applied.
  void add_argument(const MemberType& type) {
    add_argument(type.signature);
    add_classes(type);
  }
  void add_argument(const std::type_info& type) {
    add_argument("%");
    classes_.push_back(&type);
  }
  void add_argument(const char* text) {
    arguments_ += (num_arguments_ == 0 ? "{" : ", {") + std::string(text) + "}";
    record_->nargs_pos = static_cast<std::uint16_t>(++num_arguments_);
  }
  void add_classes(const MemberType& type) {
    for (const std::type_info* const* found = type.classes; *found != nullptr; ++found) {
      classes_.push_back(*found);
    }
  }

  /// Attributes of pybind11, in the order in which they would be given to def(). Call it after all arguments
  /// were added.
  template <class Attribute>
  void apply(const Attribute& attribute) {
    py::detail::process_attribute<Attribute>::init(attribute, record_.get());
  }
  void make_method(const py::object& cls, const char* name) {
    apply(py::name(name));
    apply(py::is_method(cls));
    sibling_ = py::getattr(cls, name, py::none());
    apply(py::sibling(sibling_));
  }

  function_record* finish(const std::string& result) {
    classes_.push_back(nullptr);
    function_record* record = record_.get();
    initialize_generic(std::move(record_), ("(" + arguments_ + ") -> " + result).c_str(), classes_.data(),
                       num_arguments_);
    return record;
  }

 private:
  unique_function_record record_;
  std::string arguments_;
  std::vector<const std::type_info*> classes_;
  std::size_t num_arguments_ = 0;
  py::object sibling_;
};

const Capture& capture_of(const function_call& call) {
  return *static_cast<const Capture*>(call.func.data[0]);
}

/// Returns the object of argument `index`, or nullptr if the argument has another class.
std::byte* object_at(const function_call& call, std::size_t index) {
  py::detail::type_caster_generic caster(*capture_of(call).table->type);
  if (!caster.load(call.args[index], call.args_convert[index])) return nullptr;
  return static_cast<std::byte*>(caster.value);
}

using NewObject = std::unique_ptr<std::byte, void (*)(void*)>;

NewObject make_object(const BoundStruct& table) {
  return {static_cast<std::byte*>(table.make()), table.destroy};
}

/// Gives the constructed object to `self`, the first argument.
py::handle put_object(const function_call& call, NewObject object) {
  auto& self = *reinterpret_cast<py::detail::value_and_holder*>(call.args[0].ptr());
  self.value_ptr() = object.release();
  return py::none().release();
}

py::handle construct(function_call& call) {
  const BoundStruct& table = *capture_of(call).table;
  NewObject object = make_object(table);
  std::size_t index = 1;
  for (const BoundField& field : table.fields) {
    if (!field.is_parameter) continue;
    assign_argument(*field.type, object.get() + field.offset,
                    py::reinterpret_borrow<py::object>(call.args[index++]), table.name, field.name);
  }
  if (table.check != nullptr) table.check(object.get());
  return put_object(call, std::move(object));
}

py::handle get_field(function_call& call) {
  const BoundField& field = *capture_of(call).field;
  const std::byte* self = object_at(call, 0);
  if (self == nullptr) return PYBIND11_TRY_NEXT_OVERLOAD;
  return field.type->cast(self + field.offset, call.func.policy, call.parent);
}

py::handle set_field(function_call& call) {
  const Capture& capture = capture_of(call);
  const BoundField& field = *capture.field;
  std::byte* self = object_at(call, 0);
  if (self == nullptr) return PYBIND11_TRY_NEXT_OVERLOAD;
  std::byte* member = self + field.offset;
  // Python may hold references to the value, so None resets it in place instead of destroying it.
  if (field.type->reset == nullptr || !call.args[1].is_none() || !field.type->reset(member)) {
    assign_argument(*field.type, member, py::reinterpret_borrow<py::object>(call.args[1]),
                    capture.table->name, field.name);
  }
  return py::none().release();
}

py::handle compare(function_call& call) {
  const std::byte* left = object_at(call, 0);
  const std::byte* right = object_at(call, 1);
  if (left == nullptr || right == nullptr) return PYBIND11_TRY_NEXT_OVERLOAD;
  return py::bool_(capture_of(call).table->equal(left, right)).release();
}

py::handle get_state(function_call& call) {
  const std::byte* self = object_at(call, 0);
  if (self == nullptr) return PYBIND11_TRY_NEXT_OVERLOAD;
  py::dict state;
  for (const BoundField& field : capture_of(call).table->fields) {
    state[field.name] = py::reinterpret_steal<py::object>(
        field.type->cast(self + field.offset, py::return_value_policy::copy, {}));
  }
  return state.release();
}

py::handle set_state(function_call& call) {
  if (!py::isinstance<py::dict>(call.args[1])) return PYBIND11_TRY_NEXT_OVERLOAD;
  const BoundStruct& table = *capture_of(call).table;
  const auto state = py::reinterpret_borrow<py::dict>(call.args[1]);
  NewObject object = make_object(table);
  for (const BoundField& field : table.fields) {
    assign_argument(*field.type, object.get() + field.offset, state[field.name], table.name, field.name);
  }
  return put_object(call, std::move(object));
}

TableFunction getter(const Table& table, const BoundField& field) {
  TableFunction function(get_field, table, &field);
  function.add_argument(*table->type);
  function.add_classes(*field.type);
  return function;
}

void def_property(py::object& cls, const BoundField& field, const py::object& get, const py::object& set) {
  cls.attr(field.name) = py::handle(reinterpret_cast<PyObject*>(&PyProperty_Type))(
      get, set, py::none(), py::str(field.doc == nullptr ? "" : field.doc));
}

/// Returns arrays and tensors of integers as lists, also within a list of `depth` > 1, and other objects
/// unchanged. Returns None for an array of another type.
py::object integers_of(const py::object& given, int depth) {
  if (given.is_none()) return given;
  if (PyList_Check(given.ptr()) == 0 && PyTuple_Check(given.ptr()) == 0) {
    const py::object array = array_from(given);
    if (array.is_none()) return given;
    const std::string kind = py::str(array.attr("dtype").attr("kind"));
    return kind == "i" || kind == "u" ? array.attr("tolist")() : py::object(py::none());
  }
  if (depth == 1) return given;
  py::list lists;
  for (const py::handle item : given) {
    lists.append(integers_of(py::reinterpret_borrow<py::object>(item), depth - 1));
  }
  return lists;
}

/// Returns the names of the fields with this flag, in the order of the table.
py::tuple names_with(const BoundStruct& table, bool BoundField::* flag) {
  py::list names;
  for (const BoundField& field : table.fields) {
    if (field.*flag) names.append(field.name);
  }
  return py::tuple(names);
}

}  // namespace

py::object array_from(py::handle given) {
  const py::module_ numpy = py::module_::import("numpy");
  if (py::hasattr(given, "__array__")) return numpy.attr("asarray")(given);
  if (py::hasattr(given, "__dlpack__")) return numpy.attr("from_dlpack")(given);
  return py::none();
}

void assign_argument(const MemberType& type, void* member, const py::object& given, const std::string& title,
                     const char* name) {
  try {
    if (type.integer_depth > 0) {
      if (PyAnySet_Check(given.ptr()) == 0) {  // pybind11 would accept a set as a list
        const py::object integers = integers_of(given, type.integer_depth);
        if ((!integers.is_none() || given.is_none()) && type.assign(member, integers)) return;
      }
    } else if (PyAnySet_Check(given.ptr()) == 0 && type.assign(member, given)) {
      return;
    }
  } catch (const py::cast_error&) {
    // Reported below, with the field's name.
  } catch (const py::reference_cast_error&) {
    // None instead of a struct.
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;  // an array whose values cannot be read
  }
  const py::object class_name = py::type::handle_of(given).attr("__name__");
  throw py::type_error(py::str("{}.{} is {!r:.80} ({}); accepted: {}")
                           .format(title, name, given, class_name, type.accepted()));
}

void def_constructor(py::object& cls, const Table& table, std::size_t first_keyword) {
  TableFunction function(construct, table);
  function.add_argument(typeid(py::detail::value_and_holder));
  for (const BoundField& field : table->fields) {
    if (field.is_parameter) function.add_argument(*field.type);
  }
  function.make_method(cls, "__init__");
  function.apply(py::detail::is_new_style_constructor());
  const NewObject defaults = make_object(*table);
  std::size_t index = 0;
  for (const BoundField& field : table->fields) {
    if (!field.is_parameter) continue;
    if (index++ == first_keyword) function.apply(py::kw_only());
    if (field.is_required) {
      function.apply(py::arg(field.name));
    } else {
      const auto value = py::reinterpret_steal<py::object>(
          field.type->cast(defaults.get() + field.offset, py::return_value_policy::copy, {}));
      function.apply(py::arg(field.name) = value);
    }
  }
  function.finish("None");
  py::detail::add_class_method(cls, "__init__", function);
}

void def_properties(py::object& cls, const Table& table) {
  for (const BoundField& field : table->fields) {
    TableFunction get = getter(table, field);
    get.apply(field.type->is_handed_out_as_copy ? py::return_value_policy::copy
                                                : py::return_value_policy::reference_internal);
    TableFunction set(set_field, table, &field);
    set.add_argument(*table->type);
    set.add_argument(*field.type);
    set.apply(py::is_setter());
    for (function_record* record : {get.finish(field.type->signature), set.finish("None")}) {
      py::detail::process_attribute<py::is_method>::init(py::is_method(cls), record);
    }
    def_property(cls, field, get, set);
  }
}

void def_read_only_properties(py::object& cls, const Table& table) {
  for (const BoundField& field : table->fields) {
    TableFunction get = getter(table, field);
    get.apply(py::is_method(cls));
    get.apply(py::return_value_policy::reference_internal);
    get.finish(field.type->signature);
    def_property(cls, field, get, py::none());
  }
}

void def_equality(py::object& cls, const Table& table) {
  TableFunction function(compare, table);
  function.add_argument(*table->type);
  function.add_argument(*table->type);
  function.make_method(cls, "__eq__");
  function.apply(py::is_operator());
  function.finish("bool");
  py::detail::add_class_method(cls, "__eq__", function);
  cls.attr("__hash__") = py::none();
}

void def_repr(py::object& cls, const Table& table) {
  const auto write = [table](const py::object& self) {
    std::string text = table->name + "(";
    const char* separator = "";
    for (const BoundField& field : table->fields) {
      text.append(separator).append(field.name).append("=");
      text.append(std::string(py::repr(self.attr(field.name))));
      separator = ", ";
    }
    return text + ")";
  };
  const py::object inherited = py::getattr(cls, "__repr__", py::none());
  py::detail::add_class_method(
      cls, "__repr__",
      py::cpp_function(write, py::name("__repr__"), py::is_method(cls), py::sibling(inherited)));
}

void def_pickle(py::object& cls, const Table& table) {
  TableFunction get(get_state, table);
  get.add_argument(*table->type);
  get.make_method(cls, "__getstate__");
  get.apply(py::pos_only());
  get.finish("dict");
  py::detail::add_class_method(cls, "__getstate__", get);
  TableFunction set(set_state, table);
  set.add_argument(typeid(py::detail::value_and_holder));
  set.add_argument("dict");
  set.make_method(cls, "__setstate__");
  set.apply(py::detail::is_new_style_constructor());
  set.finish("None");
  py::detail::add_class_method(cls, "__setstate__", set);
}

void list_fields(py::object& cls, const BoundStruct& table) {
  cls.attr("buffer_fields") = names_with(table, &BoundField::is_buffer);
  cls.attr("written_fields") = names_with(table, &BoundField::is_written);
}

void def_struct(py::object& cls, const std::shared_ptr<BoundStruct>& table, std::size_t num_required,
                std::size_t first_keyword) {
  for (std::size_t i = 0; i < num_required; ++i) table->fields[i].is_required = true;
  def_constructor(cls, table, first_keyword);
  def_properties(cls, table);
  if (table->equal != nullptr) def_equality(cls, table);
  def_repr(cls, table);
  def_pickle(cls, table);
}

}  // namespace adaptrt::bindings::detail
