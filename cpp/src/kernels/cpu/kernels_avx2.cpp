#include "simd_avx2.h"
// The order matters: what follows is written in terms of the instruction set above.
#include "make_table.h"
#include "tables.h"

namespace adaptrt {

const KernelTable& avx2_kernels() {
  static constexpr KernelTable kTable = make_table("avx2");
  return kTable;
}

}  // namespace adaptrt
