#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

namespace adaptrt::bindings {

/// Runs call() with the GIL released. Taking the GIL back ends a daemon thread when the interpreter is going
/// down, by unwinding its stack: nothing else may be unwound then, so it is done in no destructor.
template <class Call>
auto without_gil(Call call) {
  if constexpr (std::is_void_v<decltype(call())>) {
    static_cast<void>(without_gil([&] { return (call(), true); }));
  } else {
    std::exception_ptr error;
    std::optional<decltype(call())> result;
    PyThreadState* state = PyEval_SaveThread();
    try {
      result.emplace(call());
    } catch (...) {
      error = std::current_exception();
    }
    PyEval_RestoreThread(state);
    if (error) std::rethrow_exception(error);
    return std::move(*result);
  }
}

/// Waiting looks at Python's signals this often, so that Ctrl-C ends it.
inline constexpr std::chrono::milliseconds kSignalInterval{50};

/// Calls await(time, is_last) in short pieces with the GIL released, until it gives something; the last
/// piece, at whose end the time is over, must. nullopt: no piece is the last.
template <class Await>
auto await_interruptibly(std::optional<std::chrono::nanoseconds> timeout, Await await) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  while (true) {
    std::chrono::nanoseconds piece = kSignalInterval;
    if (timeout) piece = std::min(piece, *timeout - (Clock::now() - begin));
    const bool is_last = timeout && piece < kSignalInterval;
    auto result = without_gil([&] { return await(std::max(piece, std::chrono::nanoseconds{0}), is_last); });
    if (result) return std::move(*result);
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
  }
}

}  // namespace adaptrt::bindings
