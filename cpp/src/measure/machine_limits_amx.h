#pragma once

#include <cstddef>
#include <cstdint>

namespace adaptrt {

/// Products of two tiles; each function leaves the thread's tile configuration as it was, and what the tiles
/// held is lost. To be called where amx_is_permitted().

/// Of one product: 16 rows by 16 columns, 32 bfloat16 or 64 int8 pairs each.
constexpr int kAmxBfloat16MultiplyAdds = 16 * 16 * 32;
constexpr int kAmxInt8MultiplyAdds = 16 * 16 * 64;
/// That an iteration does, each on its own sums.
constexpr int kAmxProducts = 4;

/// Products of tiles that stay in registers.
void multiply_amx_bfloat16(std::int64_t iterations);
void multiply_amx_int8(std::int64_t iterations);

/// Reads in turn by the functions below, kAmxBytes of them: more than L1 has, and half of the L2 of every CPU
/// with AMX.
constexpr std::int64_t kAmxBytes = std::int64_t{1} << 20;

/// Products of tiles that are loaded from `bytes`, four for the four of an iteration.
void multiply_amx_bfloat16_from(const std::byte* bytes, std::int64_t iterations);
void multiply_amx_int8_from(const std::byte* bytes, std::int64_t iterations);

}  // namespace adaptrt
