#pragma once

// How fields of requests, configurations and results appear in Python. To be included wherever such a struct
// is bound.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/error.h"
#include "adaptrt/exec/perf_metrics.h"
#include "adaptrt/exec/prompt_tuning.h"
#include "adaptrt/exec/response.h"
#include "adaptrt/exec/unsupported.h"
#include "adaptrt/lora/peft_cache_config.h"
#include "adaptrt/sample/log_softmax.h"
#include "bind_struct.h"
#include "gil_safe_object.h"
#include "post_processor.h"
#include "tensor_view.h"
#include "time_value.h"

namespace adaptrt::bindings {

template <>
struct detail::Accepted<PostProcessorFunction> {
  static std::string text() { return "function"; }
};
template <>
struct detail::Accepted<std::map<std::string, std::optional<PostProcessorFunction>>> {
  static std::string text() { return "dict of names to functions or None"; }
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

/// Any object, for fields that are kept and not looked into.
class PythonValue final : public ForeignValue {
 public:
  explicit PythonValue(pybind11::object value) : kept_(std::move(value)) {}
  [[nodiscard]] std::string type_name() const override {
    const pybind11::gil_scoped_acquire gil;
    return pybind11::str(pybind11::type::handle_of(kept_.object).attr("__name__"));
  }
  [[nodiscard]] bool equals(const ForeignValue& other) const override {
    return kept_.object.equal(dynamic_cast<const PythonValue&>(other).kept_.object);
  }
  [[nodiscard]] pybind11::object object() const { return kept_.object; }

 private:
  GilSafeObject kept_;
};

namespace detail {

template <>
inline constexpr bool kNoneIsDefault<PeftCacheConfig> = true;
/// TensorRT-LLM's scripts change the metrics of a result in place.
template <>
inline constexpr bool kNoneIsDefault<RequestPerfMetrics> = true;

template <>
struct Accepted<SteadyTime> {
  static std::string text() { return "timedelta"; }
};

template <>
struct Accepted<FloatTensor> {
  static std::string text() { return "array or list of floats"; }
};
template <>
struct Accepted<EmbeddingTable> {
  static std::string text() { return "array or tensor of float32, float16 or bfloat16"; }
};

}  // namespace detail
}  // namespace adaptrt::bindings

namespace pybind11::detail {

template <>
struct type_caster<adaptrt::Unsupported> {
  PYBIND11_TYPE_CASTER(adaptrt::Unsupported, const_name("object | None"));

  bool load(handle source, bool /*convert*/) {
    value.value.reset();
    if (source.is_none()) return true;
    value.value = std::make_shared<const adaptrt::bindings::PythonValue>(reinterpret_borrow<object>(source));
    return true;
  }

  static handle cast(const adaptrt::Unsupported& field, return_value_policy /*policy*/, handle /*parent*/) {
    if (!field.is_set()) return none().release();
    return dynamic_cast<const adaptrt::bindings::PythonValue&>(*field.value).object().release();
  }
};

/// datetime.timedelta, or a number of milliseconds.
template <>
struct type_caster<std::chrono::milliseconds> {
  PYBIND11_TYPE_CASTER(std::chrono::milliseconds, const_name("datetime.timedelta | float"));

  bool load(handle source, bool /*convert*/) {
    const auto time = adaptrt::bindings::time_value_of(source);
    if (!time) return false;
    const double count = time->is_timedelta ? time->value * 1000.0 : time->value;
    // Longer times become a hundred years, which the clock can still represent.
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

/// datetime.timedelta since the clock's begin, which is that of time.monotonic().
template <>
struct type_caster<adaptrt::SteadyTime> {
  PYBIND11_TYPE_CASTER(adaptrt::SteadyTime, const_name("datetime.timedelta"));

  bool load(handle source, bool /*convert*/) {
    if (!isinstance(source, module_::import("datetime").attr("timedelta"))) return false;
    constexpr std::int64_t kSecondsOfDay = 86400;
    const std::int64_t seconds = source.attr("days").cast<std::int64_t>() * kSecondsOfDay +
                                 source.attr("seconds").cast<std::int64_t>();
    constexpr std::int64_t kMostSeconds = std::numeric_limits<std::int64_t>::max() / 1'000'000'000 - 1;
    if (seconds < -kMostSeconds || seconds > kMostSeconds) return false;
    value = adaptrt::SteadyTime(std::chrono::seconds(seconds) +
                                std::chrono::microseconds(source.attr("microseconds").cast<std::int64_t>()));
    return true;
  }

  static handle cast(const adaptrt::SteadyTime& time, return_value_policy /*policy*/, handle /*parent*/) {
    const auto since = std::chrono::floor<std::chrono::microseconds>(time.time_since_epoch());
    const object timedelta = module_::import("datetime").attr("timedelta");
    return timedelta(arg("microseconds") = since.count()).release();
  }
};

template <>
struct type_caster<adaptrt::bindings::TimeoutArgument> {
  PYBIND11_TYPE_CASTER(adaptrt::bindings::TimeoutArgument, const_name("datetime.timedelta | float | None"));

  bool load(handle source, bool /*convert*/) {
    value.value.reset();
    if (source.is_none()) return true;
    const auto seconds = adaptrt::bindings::time_value_of(source);
    if (!seconds) return false;
    constexpr double kLongest = 3600.0 * 24 * 365 * 100;
    if (seconds->value < kLongest) {
      value.value = std::chrono::nanoseconds(static_cast<std::int64_t>(std::max(seconds->value, 0.0) * 1e9));
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

/// A read-only float32 array that shares the tensor's memory.
template <>
struct type_caster<adaptrt::FloatTensor> {
  PYBIND11_TYPE_CASTER(adaptrt::FloatTensor,
                       io_name("numpy.typing.ArrayLike", "numpy.typing.NDArray[numpy.float32]"));

  /// Copies arrays of any library that NumPy can read, of real numbers, and lists of such numbers.
  bool load(handle source, bool /*convert*/) {
    const object shared = adaptrt::bindings::detail::array_from(source);
    const array plain = array::ensure(shared.is_none() ? source : handle(shared));
    if (!plain) return false;
    const std::string kind = str(plain.dtype().attr("kind"));
    const bool is_real = kind == "f" || kind == "i" || kind == "u";
    if (!is_real && str(plain.dtype()).cast<std::string>() != "bfloat16") return false;
    const auto given = array_t<float, array::c_style | array::forcecast>::ensure(plain);
    if (!given) return false;
    value.values = std::make_shared<const std::vector<float>>(given.data(), given.data() + given.size());
    value.shape.assign(given.shape(), given.shape() + given.ndim());
    return true;
  }

  static handle cast(const adaptrt::FloatTensor& tensor, return_value_policy /*policy*/, handle /*parent*/) {
    using Owner = std::shared_ptr<const std::vector<float>>;
    auto owned = std::make_unique<Owner>(tensor.values);
    const capsule owner(owned.release(),
                        [](void* pointer) { std::default_delete<Owner>{}(static_cast<Owner*>(pointer)); });
    array_t<float> result(std::vector<ssize_t>(tensor.shape.begin(), tensor.shape.end()),
                          tensor.values->data(), owner);
    array_proxy(result.ptr())->flags &= ~npy_api::NPY_ARRAY_WRITEABLE_;
    return result.release();
  }
};

/// A copy in float32 of an array or tensor of one of the engines' types; back, a read-only float32 array.
template <>
struct type_caster<adaptrt::EmbeddingTable> {
  PYBIND11_TYPE_CASTER(adaptrt::EmbeddingTable,
                       io_name("numpy.typing.ArrayLike", "numpy.typing.NDArray[numpy.float32]"));

  bool load(handle source, bool /*convert*/) {
    const auto given = adaptrt::bindings::tensor_view(reinterpret_borrow<object>(source), "embedding_table");
    if (!given) return false;
    const auto dtype = dtype_of(given->type);
    if (!dtype) return false;
    std::int64_t size = 1;
    for (const std::int64_t length : given->shape) size *= length;
    std::vector<float> values(static_cast<std::size_t>(size));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = adaptrt::load_as_float(given->data, *dtype, i);
    }
    value = {{std::make_shared<const std::vector<float>>(std::move(values)), given->shape}, *dtype};
    return true;
  }

  static handle cast(const adaptrt::EmbeddingTable& table, return_value_policy policy, handle parent) {
    return make_caster<adaptrt::FloatTensor>::cast(table.tensor(), policy, parent);
  }

 private:
  static std::optional<adaptrt::DType> dtype_of(adaptrt::TensorType type) {
    if (type == adaptrt::TensorType::kFloat32) return adaptrt::DType::kFloat32;
    if (type == adaptrt::TensorType::kFloat16) return adaptrt::DType::kFloat16;
    if (type == adaptrt::TensorType::kBFloat16) return adaptrt::DType::kBFloat16;
    return std::nullopt;
  }
};

}  // namespace pybind11::detail
