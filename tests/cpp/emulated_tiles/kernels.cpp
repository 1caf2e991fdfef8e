#include "kernels.h"

#include "simd_portable.h"
#include "tiles_emulated.h"
// The order matters: this header uses the functions above.
#include "make_tile_table.h"
#include "tables.h"

namespace adaptrt::testing {

const KernelTable& emulated_amx_kernels() {
  static const KernelTable table = make_tile_table("emulated_amx", portable_kernels());
  return table;
}

}  // namespace adaptrt::testing
