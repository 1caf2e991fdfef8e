// Prefetches like the kernels for CPUs without AVX-512 BF16: the settings for AVX-512 BF16 are for AMD's
// CPUs.
#define ADAPTRT_WITH_TILES
#include "simd_avx512.h"
#include "tiles_amx.h"
// The order matters: the headers below use the Simd and Tiles of the headers above.
#include "make_tile_table.h"
#include "tables.h"

namespace adaptrt {

const KernelTable& avx512_amx_kernels() {
  static const KernelTable table = make_tile_table("avx512_amx", kernels_beside_tiles());
  return table;
}

}  // namespace adaptrt
