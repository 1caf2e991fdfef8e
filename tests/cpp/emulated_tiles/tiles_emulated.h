#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "adaptrt/core/dtype.h"

namespace adaptrt {
namespace {

/// Emulates the functions of cpp/src/cpu/kernels/tiles_amx.h with an array, with the same bits. Using tiles
/// without a configuration throws an exception; on a CPU it would end the process.
struct Tiles {
  static void configure() {
    State& state = of_thread();
    if (!state.is_configured) state.tiles = {};
    state.is_configured = true;
  }
  static void release() { of_thread().is_configured = false; }

  template <int kTile>
  static void zero() {
    tile<kTile>() = {};
  }
  template <int kTile>
  static void load(const void* from, std::int64_t stride) {
    Tile& to = tile<kTile>();
    for (std::size_t line = 0; line < kLines; ++line) {
      std::memcpy(to.data() + line * kLineBytes,
                  static_cast<const std::byte*>(from) + static_cast<std::int64_t>(line) * stride, kLineBytes);
    }
  }
  template <int kTile>
  static void load_once(const void* from, std::int64_t stride) {
    load<kTile>(from, stride);
  }
  template <int kTile>
  static void store(void* to, std::int64_t stride) {
    const Tile& from = tile<kTile>();
    for (std::size_t line = 0; line < kLines; ++line) {
      std::memcpy(static_cast<std::byte*>(to) + static_cast<std::int64_t>(line) * stride,
                  from.data() + line * kLineBytes, kLineBytes);
    }
  }
  template <int kSums, int kA, int kB>
  static void dot_bfloat16() {
    Floats sums = read<Floats>(tile<kSums>());
    Widened a;
    Widened b;
    widen(tile<kA>(), a);
    widen(tile<kB>(), b);
    for (std::size_t row = 0; row < kLines; ++row) {
      // Sums of even elements and of odd ones, for each column.
      float partial[kHalves] = {};
      for (std::size_t pair = 0; pair < kColumns; ++pair) add_products(&a[row][2 * pair], b[pair], partial);
      for (std::size_t column = 0; column < kColumns; ++column) {
        const float both = flushed(double{partial[2 * column]} + double{partial[2 * column + 1]});
        sums[row][column] = flushed(double{flushed(double{sums[row][column]})} + double{both});
      }
    }
    std::memcpy(tile<kSums>().data(), sums.data(), sizeof(sums));
  }
  template <int kSums, int kA, int kB>
  static void dot_int8() {
    add_integer_products<UnsignedBytes, kSums, kA, kB>();
  }
  template <int kSums, int kA, int kB>
  static void dot_signed_int8() {
    add_integer_products<SignedBytes, kSums, kA, kB>();
  }

 private:
  template <class Rows, int kSums, int kA, int kB>
  static void add_integer_products() {
    Integers sums = read<Integers>(tile<kSums>());
    const Rows a = read<Rows>(tile<kA>());
    const SignedBytes b = read<SignedBytes>(tile<kB>());
    for (std::size_t row = 0; row < kLines; ++row) {
      for (std::size_t four = 0; four < kColumns; ++four) {
        for (std::size_t column = 0; column < kColumns; ++column) {
          std::int32_t sum = 0;
          for (std::size_t i = 0; i < 4; ++i) sum += a[row][4 * four + i] * b[four][4 * column + i];
          // Sums wrap around.
          sums[row][column] += static_cast<std::uint32_t>(sum);
        }
      }
    }
    std::memcpy(tile<kSums>().data(), sums.data(), sizeof(sums));
  }

  static constexpr std::size_t kLines = 16;
  static constexpr std::size_t kLineBytes = 64;
  static constexpr std::size_t kColumns = 16;
  static constexpr std::size_t kHalves = 32;
  using Tile = std::array<std::byte, kLines * kLineBytes>;
  template <class Element, std::size_t kSize>
  using Matrix = std::array<std::array<Element, kSize>, kLines>;
  using Floats = Matrix<float, 16>;
  using Integers = Matrix<std::uint32_t, 16>;
  using Halves = Matrix<std::uint16_t, kHalves>;
  using UnsignedBytes = Matrix<std::uint8_t, 64>;
  using SignedBytes = Matrix<std::int8_t, 64>;

  struct State {
    bool is_configured = false;
    std::array<Tile, 8> tiles{};
  };

  static State& of_thread() {
    thread_local State state;
    return state;
  }

  template <int kTile>
  static Tile& tile() {
    State& state = of_thread();
    if (!state.is_configured) throw std::logic_error("a tile is used on a thread without a configuration");
    return std::get<kTile>(state.tiles);
  }

  template <class Elements>
  static Elements read(const Tile& from) {
    Elements elements;
    static_assert(sizeof(elements) == sizeof(from));
    std::memcpy(elements.data(), from.data(), sizeof(elements));
    return elements;
  }

  using Widened = double[kLines][kHalves];

  /// Adds the products of a pair of elements with the pairs of all columns.
  ///
  /// Tests spend most of their time here. So the loop has no branches (results that must be flushed are rare,
  /// and are computed again), and sanitizers do not check its three arrays, whose sizes are constant.
  [[gnu::no_sanitize("address"), gnu::no_sanitize("undefined"), gnu::no_sanitize("thread")]]
  static void add_products(const double* pair, const double* columns, float* sums) {
    double exact[kHalves];
    int num_tiny = 0;
    for (std::size_t i = 0; i < kHalves; ++i) {
      // The product of two bfloat16 is exact in double, and the sum is rounded to float32 once.
      exact[i] = pair[i % 2] * columns[i] + double{sums[i]};
      sums[i] = static_cast<float>(exact[i]);
      // Zero stays zero.
      num_tiny += static_cast<int>(exact[i] != 0) & static_cast<int>(std::abs(exact[i]) < kLeast);
    }
    if (num_tiny == 0) return;
    for (std::size_t i = 0; i < kHalves; ++i) sums[i] = flushed(exact[i]);
  }

  static void widen(const Tile& from, Widened& to) {
    const Halves halves = read<Halves>(from);
    for (std::size_t line = 0; line < kLines; ++line) {
      for (std::size_t i = 0; i < kHalves; ++i) to[line][i] = double{widened(halves[line][i])};
    }
  }

  /// Widens a bfloat16 as AMX multiplies it: subnormal numbers are zero.
  static float widened(std::uint16_t bits) {
    constexpr std::uint16_t kExponent = 0x7f80;
    return (bits & kExponent) == 0 ? 0.0F : bfloat16_to_float(bits);
  }

  static constexpr double kLeast = std::numeric_limits<float>::min();

  /// Rounds to float32; results that are still below the smallest normal number after rounding with unlimited
  /// exponent range become zero with the same sign.
  static float flushed(double value) {
    const auto rounded = static_cast<float>(value);
    if (std::abs(value) >= kLeast || std::isnan(value)) return rounded;
    constexpr double kUp = 0x1p64;
    const auto scaled = static_cast<float>(value * kUp);
    if (std::abs(double{scaled}) >= kLeast * kUp) return rounded;
    return std::copysign(0.0F, static_cast<float>(value));
  }
};

}  // namespace
}  // namespace adaptrt
