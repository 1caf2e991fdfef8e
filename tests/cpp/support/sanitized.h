#pragma once

namespace adaptrt {

/// True if tests run under a sanitizer, which makes them about ten times slower. Cases that would exercise
/// the same code again are skipped then; CONTRIBUTING.md has the list.
#if defined(ADAPTRT_SANITIZE_PART)
inline constexpr bool kSanitizedPart = true;
#else
inline constexpr bool kSanitizedPart = false;
#endif

/// Returns `part` under a sanitizer, otherwise `all`.
template <class T>
constexpr T sanitized(const T& part, const T& all) {
  return kSanitizedPart ? part : all;
}

}  // namespace adaptrt
