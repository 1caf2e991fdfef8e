#include "adaptrt/cuda_program/device_limits.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <random>
#include <string>

#include "adaptrt/core/error.h"
#include "adaptrt/cuda/product_kernel.h"

namespace adaptrt {
namespace {

void check(const DeviceLimitSizes& sizes) {
  constexpr std::int64_t kMultiple = 8;
  Problems problems;
  const auto positive = [&problems](const char* name, std::int64_t value) {
    if (value < 1) problems.add(std::string(name) + " is " + std::to_string(value) + "; expected 1 or more");
  };
  positive("copy_bytes", static_cast<std::int64_t>(sizes.copy_bytes));
  if (sizes.product_size < kMultiple || sizes.product_size % kMultiple != 0) {
    problems.add("product_size is " + std::to_string(sizes.product_size) + "; expected a multiple of " +
                 std::to_string(kMultiple));
  }
  positive("repeats", sizes.repeats);
  positive("tries", sizes.tries);
  problems.throw_if_any<ConfigError>("limits of a device");
}

/// Seconds of one `work` in the fastest try. One more runs before, which may load code.
template <typename Work>
double least_seconds(const DeviceLimitSizes& sizes, Stream& stream, const Work& work) {
  using Clock = std::chrono::steady_clock;
  work();
  stream.synchronize();
  double least = std::numeric_limits<double>::infinity();
  for (std::int32_t i = 0; i < sizes.tries; ++i) {
    const auto begin = Clock::now();
    for (std::int32_t repeat = 0; repeat < sizes.repeats; ++repeat) work();
    stream.synchronize();
    least = std::min(least, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return least / sizes.repeats;
}

/// Fills memory with numbers from 0.5 to 1 and their negatives. A product of zeros would need less power, and
/// run at a higher clock.
void fill_random(const Allocation& pinned, DType dtype) {
  constexpr std::uint32_t kSign = 0x8000;
  const bool is_half = dtype == DType::kFloat16;
  const std::uint32_t mantissa = is_half ? 0x3ff : 0x7f;
  const std::uint32_t exponent = is_half ? 0x3800 : 0x3f00;
  std::mt19937 random(1);  // NOLINT(*-msc51-cpp): the same numbers in every measurement
  auto* const elements = reinterpret_cast<std::uint16_t*>(pinned.data());
  std::generate_n(elements, pinned.bytes() / sizeof(std::uint16_t),
                  [&] { return static_cast<std::uint16_t>((random() & (kSign | mantissa)) | exponent); });
}

}  // namespace

DeviceLimits measure_device_limits(Device& device, DType dtype, const DeviceLimitSizes& sizes) {
  check(sizes);
  const auto stream = device.make_stream();
  DeviceLimits limits;
  {
    const Allocation from = device.allocate(sizes.copy_bytes);
    const Allocation to = device.allocate(sizes.copy_bytes);
    stream->fill_zero(from.data(), sizes.copy_bytes);
    const double seconds = least_seconds(
        sizes, *stream, [&] { stream->copy_on_device(to.data(), from.data(), sizes.copy_bytes); });
    limits.copy_bandwidth = 2.0 * static_cast<double>(sizes.copy_bytes) / seconds;
  }
  const std::int64_t n = sizes.product_size;
  const std::size_t bytes = static_cast<std::size_t>(n * n) * size_of(dtype);
  const Allocation numbers = device.allocate_pinned(bytes);
  fill_random(numbers, dtype);
  const Allocation x = device.allocate(bytes);
  const Allocation weights = device.allocate(bytes);
  const Allocation y = device.allocate(bytes);
  stream->copy_to_device(x.data(), numbers.data(), bytes);
  stream->copy_to_device(weights.data(), numbers.data(), bytes);
  const auto size = static_cast<std::int32_t>(n);
  const cuda::ProductKernel product({.dtype = dtype, .in_size = size, .out_size = size});
  const double seconds = least_seconds(sizes, *stream, [&] {
    product.enqueue(n, {.x = x.data(), .weights = weights.data()}, y.data(), stream->handle());
  });
  limits.product_flops =
      2.0 * static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(n) / seconds;
  return limits;
}

}  // namespace adaptrt
