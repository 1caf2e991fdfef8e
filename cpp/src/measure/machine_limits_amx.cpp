#include "machine_limits_amx.h"

#include "tiles_amx.h"
// After the header that defines Tiles.
#include "tile_dots.h"

namespace adaptrt {
namespace {

constexpr std::int64_t kTileBytes = 1024;
constexpr std::int64_t kTileLine = 64;

/// The tiles' configuration for its lifetime; after it what the thread had before.
class ConfiguredTiles {
 public:
  ConfiguredTiles() {
    asm volatile("sttilecfg %0" : "=m"(before_));
    Tiles::configure();
  }
  ~ConfiguredTiles() { asm volatile("ldtilecfg %0" ::"m"(before_)); }
  ConfiguredTiles(const ConfiguredTiles&) = delete;
  ConfiguredTiles& operator=(const ConfiguredTiles&) = delete;

 private:
  TileConfiguration before_;
};

// Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 columns.

template <class Dot>
void multiply_four() {
  Dot::template add<0, 4, 6>();
  Dot::template add<1, 4, 7>();
  Dot::template add<2, 5, 6>();
  Dot::template add<3, 5, 7>();
}

void load_four(const std::byte* tiles) {
  Tiles::load<4>(tiles, kTileLine);
  Tiles::load<6>(tiles + kTileBytes, kTileLine);
  Tiles::load<7>(tiles + 2 * kTileBytes, kTileLine);
  Tiles::load<5>(tiles + 3 * kTileBytes, kTileLine);
}

template <class Dot>
void multiply(std::int64_t iterations) {
  const ConfiguredTiles configured;
  for (std::int64_t i = 0; i < iterations; ++i) multiply_four<Dot>();
}

template <class Dot>
void multiply_from(const std::byte* bytes, std::int64_t iterations) {
  const ConfiguredTiles configured;
  for (std::int64_t i = 0; i < iterations; ++i) {
    load_four(bytes + 4 * kTileBytes * i % kAmxBytes);
    multiply_four<Dot>();
  }
}

}  // namespace

void multiply_amx_bfloat16(std::int64_t iterations) {
  multiply<BFloat16Dot>(iterations);
}

void multiply_amx_int8(std::int64_t iterations) {
  multiply<Int8Dot>(iterations);
}

void multiply_amx_bfloat16_from(const std::byte* bytes, std::int64_t iterations) {
  multiply_from<BFloat16Dot>(bytes, iterations);
}

void multiply_amx_int8_from(const std::byte* bytes, std::int64_t iterations) {
  multiply_from<Int8Dot>(bytes, iterations);
}

}  // namespace adaptrt
