#pragma once

// Helpers that the tests of BlockPool share.

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <numeric>
#include <vector>

#include "adaptrt/kv/block_pool.h"

namespace adaptrt::testing {

inline constexpr std::int32_t kTokensPerBlock = 4;

/// Returns first, first + 1, ...
inline std::vector<std::int32_t> counting(std::int32_t count, std::int32_t first = 0) {
  std::vector<std::int32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

inline void require_sound(const BlockPool& pool) {
  for (const auto& violation : pool.check_invariants()) BOOST_ERROR(violation);
}

}  // namespace adaptrt::testing
