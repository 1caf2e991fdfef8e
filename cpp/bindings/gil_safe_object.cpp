#include "gil_safe_object.h"

#include <mutex>
#include <new>
#include <vector>

namespace py = pybind11;

namespace adaptrt::bindings {
namespace {

/// References that threads without the GIL have dropped. Waiting for the GIL instead would end the thread
/// when the interpreter ends, by unwinding its stack, which a destructor does not allow.
struct WaitingReferences {
  std::mutex mutex;
  std::vector<PyObject*> objects;
  /// The main thread was asked to drop them.
  bool is_asked = false;
  /// The interpreter is about to end.
  bool is_over = false;
};

/// Never destroyed, since threads may drop references until the process ends.
WaitingReferences& waiting_references() {
  static auto* references = new WaitingReferences;
  return *references;
}

int drop_in_main_thread(void* /*nothing*/) {
  drop_waiting_references();
  return 0;
}

}  // namespace

void drop_reference(PyObject* object) noexcept {
  if (object == nullptr) return;
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
    Py_DECREF(object);
    return;
  }
  WaitingReferences& waiting = waiting_references();
  try {
    const std::lock_guard lock(waiting.mutex);
    waiting.objects.push_back(object);
    if (!waiting.is_over && !waiting.is_asked) {
      waiting.is_asked = Py_AddPendingCall(&drop_in_main_thread, nullptr) == 0;
    }
  } catch (const std::bad_alloc&) {  // the object stays
  }
}

void drop_waiting_references() {
  WaitingReferences& waiting = waiting_references();
  std::vector<PyObject*> objects;
  {
    const std::lock_guard lock(waiting.mutex);
    objects.swap(waiting.objects);
    waiting.is_asked = false;
  }
  for (PyObject* object : objects) Py_DECREF(object);
}

void bind_gil_safe_objects() {
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    {
      WaitingReferences& waiting = waiting_references();
      const std::lock_guard lock(waiting.mutex);
      waiting.is_over = true;
    }
    drop_waiting_references();
  }));
}

}  // namespace adaptrt::bindings
