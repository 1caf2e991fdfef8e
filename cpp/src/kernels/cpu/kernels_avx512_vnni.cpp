#include "simd_avx512.h"
// The order matters: what follows is written in terms of the instruction set above.
#include "int8_gemm.h"
#include "tables.h"

namespace adaptrt {
namespace {

/// Nothing but Simd::dot differs from avx512's kernels.
KernelTable make_vnni_table() {
  KernelTable table = avx512_kernels();
  table.name = "avx512_vnni";
  table.int8_gemm = &int8_gemm;
  return table;
}

}  // namespace

const KernelTable& avx512_vnni_kernels() {
  static const KernelTable table = make_vnni_table();
  return table;
}

}  // namespace adaptrt
