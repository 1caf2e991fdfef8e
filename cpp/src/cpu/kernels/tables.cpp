#include "tables.h"

#include <initializer_list>
#include <string_view>

#include "families.h"

namespace adaptrt {
namespace {

using PutFamily = void (*)(KernelTable* table);

/// `table` under another name, with these families for those that it had.
KernelTable with_families(KernelTable table, std::string_view name,
                          std::initializer_list<PutFamily> families) {
  table.name = name;
  for (const PutFamily put : families) put(&table);
  return table;
}

/// A table with all families.
KernelTable make_table(std::string_view name, std::initializer_list<PutFamily> families) {
  KernelTable table{};
  table.block_rows = kVectorBlockRows;
  return with_families(table, name, families);
}

}  // namespace

const KernelTable& portable_kernels() {
  using namespace portable;
  static const KernelTable table =
      make_table("portable", {put_float_gemm, put_bfloat16_gemm, put_float_quantized, put_bfloat16_quantized,
                              put_int8, put_float_attention, put_bfloat16_attention, put_rows});
  return table;
}

#ifdef ADAPTRT_X86_KERNELS

const KernelTable& avx2_kernels() {
  using namespace avx2;
  static const KernelTable table =
      make_table("avx2", {put_float_gemm, put_bfloat16_gemm, put_float_quantized, put_bfloat16_quantized,
                          put_int8, put_float_attention, put_bfloat16_attention, put_rows});
  return table;
}

const KernelTable& avx512_bf16_kernels() {
  using namespace avx512_bf16;
  static const KernelTable table =
      make_table("avx512_bf16", {avx512::put_float_gemm, put_bfloat16_gemm, avx512::put_float_quantized,
                                 put_bfloat16_quantized, put_int8, avx512::put_float_attention,
                                 put_bfloat16_attention, put_rows});
  return table;
}

#ifdef ADAPTRT_EVERY_X86_TABLE

const KernelTable& avx512_kernels() {
  using namespace avx512;
  static const KernelTable table =
      make_table("avx512", {put_float_gemm, put_bfloat16_gemm, put_float_quantized, put_bfloat16_quantized,
                            put_int8, put_float_attention, put_bfloat16_attention, put_rows});
  return table;
}

const KernelTable& avx512_vnni_kernels() {
  using namespace avx512_vnni;
  static const KernelTable table = with_families(avx512_kernels(), "avx512_vnni", {put_int8});
  return table;
}

#endif
#endif

}  // namespace adaptrt
