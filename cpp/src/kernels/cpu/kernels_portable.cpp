#include "simd_portable.h"
// The order matters: what follows is written in terms of the instruction set above.
#include "make_table.h"
#include "tables.h"

namespace adaptrt {

const KernelTable& portable_kernels() {
  static constexpr KernelTable kTable = make_table("portable");
  return kTable;
}

}  // namespace adaptrt
