// What is fetched, and how far ahead, is as on CPUs without AVX-512 BF16: what AMD's CPUs take is theirs
// alone.
#define ADAPTRT_WITH_TILES
#include "simd_avx512.h"
#include "tiles_amx.h"
// The order matters: what follows is written in terms of the instruction sets above.
#include "make_tile_table.h"
#include "tables.h"

namespace adaptrt {

const KernelTable& avx512_amx_kernels() {
  static const KernelTable table = make_tile_table("avx512_amx", avx512_bf16_kernels());
  return table;
}

}  // namespace adaptrt
