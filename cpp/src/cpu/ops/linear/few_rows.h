#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace adaptrt {

// Finds the weights of a layer that a few rows need.

/// Maximum of KernelTable::sparse_rows over all kernel tables.
inline constexpr std::int64_t kMostSparseRows = 4;

/// Appends `number` to the first `count` of `numbers` if it is kept. Has no branch.
inline void keep_if(bool kept, std::int32_t number, std::int32_t* numbers, std::size_t& count) {
  numbers[count] = number;
  count += kept ? 1 : 0;
}

/// Calls body(rows) with a constant of at most kMostSparseRows, because loops over outputs are much longer
/// than the loops over rows inside them.
template <class Body>
void with_rows(std::int64_t rows, const Body& body) {
  static_assert(kMostSparseRows == 4);
  if (rows == 1) return body(std::integral_constant<std::int64_t, 1>());
  if (rows == 2) return body(std::integral_constant<std::int64_t, 2>());
  if (rows == 3) return body(std::integral_constant<std::int64_t, 3>());
  body(std::integral_constant<std::int64_t, kMostSparseRows>());
}

}  // namespace adaptrt
