#include "simd_avx512.h"
// The order matters: what follows is written in terms of the instruction set above.
#include "make_table.h"
#include "tables.h"

namespace adaptrt {

const KernelTable& avx512_vnni_kernels() {
  static constexpr KernelTable kTable = make_table("avx512_vnni");
  return kTable;
}

}  // namespace adaptrt
