#pragma once

namespace adaptrt {

/// Whether a test runs under a sanitizer, which takes ten times as long for it, and what it can only see
/// again is left out: CONTRIBUTING.md has the list.
#if defined(ADAPTRT_SANITIZE_PART)
inline constexpr bool kSanitizedPart = true;
#else
inline constexpr bool kSanitizedPart = false;
#endif

/// `part` under a sanitizer, `all` otherwise.
template <class T>
constexpr T sanitized(const T& part, const T& all) {
  return kSanitizedPart ? part : all;
}

}  // namespace adaptrt
