#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace adaptrt {

// Finding out what a few rows need of a layer's weights.

/// Of every kernel table.
inline constexpr std::int64_t kMostSparseRows = 4;

/// Appends `number` to the first `count` of `numbers` if it is to be kept, without a branch.
inline void keep_if(bool kept, std::int32_t number, std::int32_t* numbers, std::size_t& count) {
  numbers[count] = number;
  count += kept ? 1 : 0;
}

/// Calls body(rows), of at most kMostSparseRows, with a constant: loops over outputs are many times as long
/// as those over rows within them.
template <class Body>
void with_rows(std::int64_t rows, const Body& body) {
  static_assert(kMostSparseRows == 4);
  if (rows == 1) return body(std::integral_constant<std::int64_t, 1>());
  if (rows == 2) return body(std::integral_constant<std::int64_t, 2>());
  if (rows == 3) return body(std::integral_constant<std::int64_t, 3>());
  body(std::integral_constant<std::int64_t, kMostSparseRows>());
}

}  // namespace adaptrt
