#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace adaptrt {
namespace {

/// Operand of LDTILECFG: eight tiles with sixteen lines of 64 bytes.
struct alignas(64) TileConfiguration {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfiguration) == 64);
inline constexpr TileConfiguration kTileConfiguration{};

/// The eight tile registers of AMX. Each has kTileHeight lines of the size of a cache line.
/// tests/cpp/emulated_tiles/tiles_emulated.h has the same functions over an array.
struct Tiles {
  /// Loads the configuration that all functions below need, if this thread has another one. Other libraries
  /// that use tiles on the caller's thread may leave their own configuration or none.
  static void configure() {
    TileConfiguration current;
    asm volatile("sttilecfg %0" : "=m"(current));
    if (std::memcmp(&current, &kTileConfiguration, sizeof(current)) != 0) {
      asm volatile("ldtilecfg %0" ::"m"(kTileConfiguration));
    }
  }

  /// Releases the thread's tiles, which makes context switches cheaper.
  static void release() { asm volatile("tilerelease" ::: "memory"); }

  template <int kTile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  /// Loads lines that are `stride` bytes apart.
  template <int kTile>
  static void load(const void* from, std::int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(from), "r"(stride) : "memory");
  }
  /// The same for lines that are not read again soon. They do not evict others from the first-level cache.
  template <int kTile>
  static void load_once(const void* from, std::int64_t stride) {
    asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(from), "r"(stride) : "memory");
  }
  template <int kTile>
  static void store(void* to, std::int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(to), "r"(stride) : "memory");
  }
  /// sums [16][16] float32 += a [16][32] * b [16][16][2], both bfloat16. For each element, the products of
  /// even inputs are summed in order from zero, and so are those of odd inputs, with one rounding per
  /// product. The two sums are added, and the result is added to `sums`. Subnormal numbers count as zero, and
  /// become zero.
  template <int kSums, int kA, int kB>
  static void dot_bfloat16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kA), "i"(kB));
  }
  /// sums [16][16] int32 += a [16][64] uint8 * b [16][16][4] int8.
  template <int kSums, int kA, int kB>
  static void dot_int8() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kA), "i"(kB));
  }
  /// The same with int8 on both sides.
  template <int kSums, int kA, int kB>
  static void dot_signed_int8() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kA), "i"(kB));
  }
};

}  // namespace
}  // namespace adaptrt
