#pragma once

// How fields of requests, configurations and results appear in Python. To be included wherever such a struct
// is bound.

#include <datetime.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/exec/response.h"
#include "adaptrt/exec/unsupported.h"
#include "adaptrt/sample/log_softmax.h"
#include "bind_struct.h"
#include "post_processor.h"

namespace adaptrt::bindings {

template <>
struct detail::Accepted<PostProcessorFunction> {
  static std::string text() { return "function"; }
};
template <>
struct detail::Accepted<std::map<std::string, PostProcessorFunction>> {
  static std::string text() { return "dict of functions"; }
};
template <>
struct detail::Accepted<TokenBias> {
  static std::string text() { return "numbers [vocab_size]"; }
};

/// How long a call may wait; nullopt: for ever. None, datetime.timedelta, or seconds.
struct TimeoutArgument {
  std::optional<std::chrono::nanoseconds> value;
};

/// An id of a request. Integers that no request can have are unknown ids, not arguments of a wrong type; an
/// executor never gives 0.
struct RequestIdArgument {
  RequestId value = 0;
};

/// Seconds of a datetime.timedelta, an int or a float; nullopt for anything else. NaN is nothing else.
inline std::optional<double> seconds_of(pybind11::handle source) {
  if (PyDateTimeAPI == nullptr) PyDateTime_IMPORT;
  if (PyDelta_Check(source.ptr()) != 0) return source.attr("total_seconds")().cast<double>();
  if (PyBool_Check(source.ptr()) != 0) return std::nullopt;
  if (PyFloat_Check(source.ptr()) == 0 && PyLong_Check(source.ptr()) == 0) return std::nullopt;
  const double seconds = PyFloat_AsDouble(source.ptr());
  if (seconds == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  return std::isnan(seconds) ? std::nullopt : std::optional(seconds);
}

}  // namespace adaptrt::bindings

namespace pybind11::detail {

template <>
struct type_caster<adaptrt::Unsupported> {
  PYBIND11_TYPE_CASTER(adaptrt::Unsupported, const_name("object | None"));

  bool load(handle source, bool /*convert*/) {
    value.type_name.clear();
    if (source.is_none()) return true;
    value.type_name = isinstance<str>(source) ? source.cast<std::string>()
                                              : type::handle_of(source).attr("__name__").cast<std::string>();
    return true;
  }

  /// What was given is not kept: the name of its type stands for it.
  static handle cast(const adaptrt::Unsupported& field, return_value_policy /*policy*/, handle /*parent*/) {
    if (!field.is_set()) return none().release();
    return str(field.type_name).release();
  }
};

/// datetime.timedelta, or a number of milliseconds.
template <>
struct type_caster<std::chrono::milliseconds> {
  PYBIND11_TYPE_CASTER(std::chrono::milliseconds, const_name("datetime.timedelta | float"));

  bool load(handle source, bool /*convert*/) {
    const auto number = adaptrt::bindings::seconds_of(source);
    if (!number) return false;
    const double count = PyDelta_Check(source.ptr()) != 0 ? *number * 1000.0 : *number;
    // What is too long to count is as good as for ever; a hundred years keep clear of the clock's end.
    constexpr double kLongest = 1000.0 * 3600 * 24 * 365 * 100;
    value = std::chrono::milliseconds(
        static_cast<std::int64_t>(std::clamp(std::ceil(count), -kLongest, kLongest)));
    return true;
  }

  static handle cast(const std::chrono::milliseconds& time, return_value_policy /*policy*/,
                     handle /*parent*/) {
    const object timedelta = module_::import("datetime").attr("timedelta");
    return timedelta(arg("milliseconds") = time.count()).release();
  }
};

template <>
struct type_caster<adaptrt::bindings::TimeoutArgument> {
  PYBIND11_TYPE_CASTER(adaptrt::bindings::TimeoutArgument, const_name("datetime.timedelta | float | None"));

  bool load(handle source, bool /*convert*/) {
    value.value.reset();
    if (source.is_none()) return true;
    const auto seconds = adaptrt::bindings::seconds_of(source);
    if (!seconds) return false;
    constexpr double kLongest = 3600.0 * 24 * 365 * 100;
    if (*seconds < kLongest) {
      value.value = std::chrono::nanoseconds(static_cast<std::int64_t>(std::max(*seconds, 0.0) * 1e9));
    }
    return true;
  }

  static handle cast(const adaptrt::bindings::TimeoutArgument& timeout, return_value_policy /*policy*/,
                     handle /*parent*/) {
    if (!timeout.value) return none().release();
    return pybind11::float_(std::chrono::duration<double>(*timeout.value).count()).release();
  }
};

template <>
struct type_caster<adaptrt::bindings::RequestIdArgument> {
  PYBIND11_TYPE_CASTER(adaptrt::bindings::RequestIdArgument, make_caster<adaptrt::RequestId>::name);

  bool load(handle source, bool convert) {
    if (PyBool_Check(source.ptr()) != 0 || PyIndex_Check(source.ptr()) == 0) return false;
    make_caster<adaptrt::RequestId> id;
    if (!id.load(source, convert)) {
      throw adaptrt::RequestError("there is no request " + std::string(str(source)));
    }
    value.value = cast_op<adaptrt::RequestId>(id);
    return true;
  }
};

/// (token id, log prob)
template <>
struct type_caster<adaptrt::TokenLogProb> {
  PYBIND11_TYPE_CASTER(adaptrt::TokenLogProb, const_name("tuple[int, float]"));

  /// For pickles.
  bool load(handle source, bool convert) {
    make_caster<std::pair<std::int32_t, float>> pair;
    if (!pair.load(source, convert)) return false;
    const auto entry = cast_op<std::pair<std::int32_t, float>>(pair);
    value = {.token_id = entry.first, .log_prob = entry.second};
    return true;
  }

  static handle cast(const adaptrt::TokenLogProb& entry, return_value_policy /*policy*/, handle /*parent*/) {
    return make_tuple(entry.token_id, entry.log_prob).release();
  }
};

namespace adaptrt_casters {

/// A read-only float32 array that shares the values' memory.
inline handle array_of(const std::shared_ptr<const std::vector<float>>& values, std::vector<ssize_t> shape) {
  using Owner = std::shared_ptr<const std::vector<float>>;
  auto owned = std::make_unique<Owner>(values);
  const capsule owner(owned.release(),
                      [](void* pointer) { std::default_delete<Owner>{}(static_cast<Owner*>(pointer)); });
  array_t<float> result(std::move(shape), values->data(), owner);
  array_proxy(result.ptr())->flags &= ~npy_api::NPY_ARRAY_WRITEABLE_;
  return result.release();
}

}  // namespace adaptrt_casters

/// Any callable.
template <>
struct type_caster<adaptrt::PostProcessorFunction> {
  PYBIND11_TYPE_CASTER(adaptrt::PostProcessorFunction, const_name("collections.abc.Callable[..., object]"));

  bool load(handle source, bool /*convert*/) {
    if (PyCallable_Check(source.ptr()) == 0) return false;
    value = adaptrt::bindings::make_post_processor(reinterpret_borrow<object>(source));
    return true;
  }

  static handle cast(const adaptrt::PostProcessorFunction& processor, return_value_policy /*policy*/,
                     handle /*parent*/) {
    return adaptrt::bindings::function_of(processor).release();
  }
};

/// Anything that NumPy makes a row of float32 of, a torch tensor in CPU memory too.
template <>
struct type_caster<adaptrt::TokenBias> {
  PYBIND11_TYPE_CASTER(adaptrt::TokenBias,
                       io_name("numpy.typing.ArrayLike", "numpy.typing.NDArray[numpy.float32]"));

  bool load(handle source, bool /*convert*/) {
    const auto given = array_t<float, array::c_style | array::forcecast>::ensure(source);
    if (!given || given.ndim() != 1) return false;
    value = std::vector<float>(given.data(), given.data() + given.size());
    return true;
  }

  static handle cast(const adaptrt::TokenBias& bias, return_value_policy /*policy*/, handle /*parent*/) {
    return adaptrt_casters::array_of(bias.values, {static_cast<ssize_t>(bias.values->size())});
  }
};

template <>
struct type_caster<adaptrt::FloatTensor> {
  PYBIND11_TYPE_CASTER(adaptrt::FloatTensor, const_name("numpy.typing.NDArray[numpy.float32]"));

  /// Copies, for pickles.
  bool load(handle source, bool /*convert*/) {
    const auto given = array_t<float, array::c_style>::ensure(source);
    if (!given) return false;
    value.values = std::make_shared<const std::vector<float>>(given.data(), given.data() + given.size());
    value.shape.assign(given.shape(), given.shape() + given.ndim());
    return true;
  }

  static handle cast(const adaptrt::FloatTensor& tensor, return_value_policy /*policy*/, handle /*parent*/) {
    return adaptrt_casters::array_of(tensor.values,
                                     std::vector<ssize_t>(tensor.shape.begin(), tensor.shape.end()));
  }
};

}  // namespace pybind11::detail
