#pragma once

#include <cstddef>
#include <cstdint>

namespace adaptrt {

// Products of two tiles. Each function restores the thread's tile configuration, but not the tiles' content.
// Call them only if amx_is_permitted().

/// Multiply-adds of one product: 16 rows by 16 columns, with 32 bfloat16 or 64 int8 pairs each.
constexpr int kAmxBfloat16MultiplyAdds = 16 * 16 * 32;
constexpr int kAmxInt8MultiplyAdds = 16 * 16 * 64;
/// Products of an iteration, each with its own sums.
constexpr int kAmxProducts = 4;

/// Products of tiles that stay in registers.
void multiply_amx_bfloat16(std::int64_t iterations);
void multiply_amx_int8(std::int64_t iterations);

/// Bytes that the functions below read in turn: more than L1 holds, and half of the L2 of every CPU with AMX.
constexpr std::int64_t kAmxBytes = std::int64_t{1} << 20;

/// Products of tiles that are loaded from `bytes`: four tiles for an iteration's four products.
void multiply_amx_bfloat16_from(const std::byte* bytes, std::int64_t iterations);
void multiply_amx_int8_from(const std::byte* bytes, std::int64_t iterations);

}  // namespace adaptrt
