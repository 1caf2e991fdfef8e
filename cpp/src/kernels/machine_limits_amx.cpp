#include "machine_limits_amx.h"

#include <immintrin.h>

namespace adaptrt {
namespace {

constexpr std::int64_t kTileBytes = 1024;
constexpr int kTileStride = 64;

/// What LDTILECFG reads.
struct alignas(64) TileConfig {
  std::uint8_t palette = 0;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t bytes_per_row[16] = {};
  std::uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

TileConfig eight_full_tiles() {
  TileConfig config{.palette = 1};
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes_per_row[tile] = kTileStride;
    config.rows[tile] = 16;
  }
  return config;
}

/// All of it is read and written here: GCC's intrinsics say of a configuration that they read its first
/// bytes.
void settle(TileConfig* config) {
  asm volatile("" : "+m"(*config));
}

/// Eight full tiles for its lifetime; after it what the thread had before.
class FullTiles {
 public:
  FullTiles() {
    settle(&before_);
    _tile_storeconfig(&before_);
    settle(&before_);
    settle(&full_);
    _tile_loadconfig(&full_);
  }
  ~FullTiles() {
    settle(&before_);
    _tile_loadconfig(&before_);
  }
  FullTiles(const FullTiles&) = delete;
  FullTiles& operator=(const FullTiles&) = delete;

 private:
  TileConfig before_;
  TileConfig full_ = eight_full_tiles();
};

}  // namespace

// Tiles 0 to 3 are sums, 4 to 7 operands. Their numbers have to be literals.

#define ADAPTRT_FOUR_PRODUCTS(product) \
  do {                                 \
    product(0, 4, 6);                  \
    product(1, 4, 7);                  \
    product(2, 5, 6);                  \
    product(3, 5, 7);                  \
  } while (false)

#define ADAPTRT_LOAD_FOUR_TILES(tiles)                     \
  do {                                                     \
    _tile_loadd(4, (tiles), kTileStride);                  \
    _tile_loadd(6, (tiles) + kTileBytes, kTileStride);     \
    _tile_loadd(7, (tiles) + 2 * kTileBytes, kTileStride); \
    _tile_loadd(5, (tiles) + 3 * kTileBytes, kTileStride); \
  } while (false)

void multiply_amx_bfloat16(std::int64_t iterations) {
  const FullTiles tiles;
  for (std::int64_t i = 0; i < iterations; ++i) ADAPTRT_FOUR_PRODUCTS(_tile_dpbf16ps);
}

void multiply_amx_int8(std::int64_t iterations) {
  const FullTiles tiles;
  for (std::int64_t i = 0; i < iterations; ++i) ADAPTRT_FOUR_PRODUCTS(_tile_dpbusd);
}

void multiply_amx_bfloat16_from(const std::byte* bytes, std::int64_t iterations) {
  const FullTiles tiles;
  for (std::int64_t i = 0; i < iterations; ++i) {
    ADAPTRT_LOAD_FOUR_TILES(bytes + 4 * kTileBytes * i % kAmxBytes);
    ADAPTRT_FOUR_PRODUCTS(_tile_dpbf16ps);
  }
}

void multiply_amx_int8_from(const std::byte* bytes, std::int64_t iterations) {
  const FullTiles tiles;
  for (std::int64_t i = 0; i < iterations; ++i) {
    ADAPTRT_LOAD_FOUR_TILES(bytes + 4 * kTileBytes * i % kAmxBytes);
    ADAPTRT_FOUR_PRODUCTS(_tile_dpbusd);
  }
}

#undef ADAPTRT_LOAD_FOUR_TILES
#undef ADAPTRT_FOUR_PRODUCTS

}  // namespace adaptrt
