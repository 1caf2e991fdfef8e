#pragma once

#include <cstdint>

namespace adaptrt {

/// Indices in the place of the largest logit's, for rows from which no token can be chosen.
inline constexpr std::int32_t kUnusableLogits = -1;       ///< a logit is NaN or +infinity
inline constexpr std::int32_t kEveryTokenForbidden = -2;  ///< all logits are -infinity

}  // namespace adaptrt
