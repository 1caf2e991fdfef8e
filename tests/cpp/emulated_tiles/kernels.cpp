#include "kernels.h"

#include "simd_portable.h"
#include "tiles_emulated.h"
// The order matters: what follows is written in terms of the functions above.
#include "make_tile_table.h"

namespace adaptrt::testing {

const KernelTable& emulated_amx_kernels() {
  static constexpr KernelTable kTable = make_tile_table("emulated_amx");
  return kTable;
}

}  // namespace adaptrt::testing
