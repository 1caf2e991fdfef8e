#pragma once

#include <pybind11/pybind11.h>

#include <utility>

namespace adaptrt::bindings {

/// A Python object that C++ may drop on any thread.
struct KeptObject {
  explicit KeptObject(pybind11::object kept) : object(std::move(kept)) {}
  ~KeptObject() {
    if (Py_IsInitialized() == 0) {  // after the interpreter's end there is nobody to give it back to
      static_cast<void>(object.release());
      return;
    }
    const pybind11::gil_scoped_acquire gil;
    object = pybind11::object();
  }
  KeptObject(const KeptObject&) = delete;
  KeptObject& operator=(const KeptObject&) = delete;
  pybind11::object object;
};

}  // namespace adaptrt::bindings
