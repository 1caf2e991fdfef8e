#pragma once

#include <pybind11/pybind11.h>

#include <utility>

namespace adaptrt::bindings {

/// Gives up a reference to a Python object on any thread, without ever waiting for the GIL: a thread that has
/// it does so at once; for the others it is done when Python's main thread runs, or the next GilSafeObject is
/// made. When the interpreter has ended, nothing is given up.
void drop_reference(PyObject* object) noexcept;

/// Gives up what threads without the GIL have dropped. Expects the GIL.
void drop_waiting_references();

/// Once, when the module is imported: at exit, other threads stop asking the interpreter to drop references.
void bind_gil_safe_objects();

/// A Python object that C++ may drop on any thread.
struct GilSafeObject {
  explicit GilSafeObject(pybind11::object kept) : object(std::move(kept)) { drop_waiting_references(); }
  ~GilSafeObject() { drop_reference(object.release().ptr()); }
  GilSafeObject(const GilSafeObject&) = delete;
  GilSafeObject& operator=(const GilSafeObject&) = delete;
  pybind11::object object;
};

}  // namespace adaptrt::bindings
