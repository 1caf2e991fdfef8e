#include "kernels.h"

#include "simd_portable.h"
#include "tiles_emulated.h"
// The order matters: this header uses the functions above.
#include "families.h"
#include "make_tile_table.h"

namespace adaptrt::testing {

const KernelTable& emulated_amx_kernels() {
  static const KernelTable table = [] {
    KernelTable vectors{};
    // Like kernels_beside_tiles(): kernels that tiles must replace are missing.
#define ADAPTRT_TILED_FAMILY(name, operands)
#define ADAPTRT_FAMILY(name, operands) portable::register_##name(&vectors);
#include "families.def"
    return make_tile_table("emulated_amx", vectors);
  }();
  return table;
}

}  // namespace adaptrt::testing
