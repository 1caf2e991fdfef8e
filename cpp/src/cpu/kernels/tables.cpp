#include "tables.h"

#include <initializer_list>
#include <string_view>

#include "families.h"

namespace adaptrt {
namespace {

using RegisterFamily = void (*)(KernelTable* table);

/// Returns `table` under another name, with kernels of these families instead of its own.
KernelTable with_families(KernelTable table, std::string_view name,
                          std::initializer_list<RegisterFamily> families) {
  table.name = name;
  for (const RegisterFamily family : families) family(&table);
  return table;
}

/// Returns a table with kernels of these families only.
KernelTable make_table(std::string_view name, std::initializer_list<RegisterFamily> families) {
  KernelTable table{};
  table.block_rows = kVectorBlockRows;
  return with_families(table, name, families);
}

}  // namespace

#ifdef ADAPTRT_TABLE_portable

const KernelTable& portable_kernels() {
  static const KernelTable table = make_table("portable", {
#define ADAPTRT_FAMILY(name, operands) &portable::register_##name,
#include "families.def"
                                                          });
  return table;
}

#endif
#ifdef ADAPTRT_TABLE_avx2

const KernelTable& avx2_kernels() {
  static const KernelTable table = make_table("avx2", {
#define ADAPTRT_FAMILY(name, operands) &avx2::register_##name,
#include "families.def"
                                                      });
  return table;
}

#endif
#ifdef ADAPTRT_TABLE_avx512_amx

const KernelTable& kernels_beside_tiles() {
  namespace float_set = avx512;
  namespace bfloat16_set = avx512_bf16;
  static const KernelTable table = make_table("avx512_bf16", {
#define ADAPTRT_TILED_FAMILY(name, operands)
#define ADAPTRT_FAMILY(name, operands) &operands##_set::register_##name,
#include "families.def"
                                                             });
  return table;
}

#endif
#ifdef ADAPTRT_TABLE_avx512_bf16

const KernelTable& avx512_bf16_kernels() {
  namespace float_set = avx512;
  namespace bfloat16_set = avx512_bf16;
  static const KernelTable table = make_table("avx512_bf16", {
#define ADAPTRT_FAMILY(name, operands) &operands##_set::register_##name,
#include "families.def"
                                                             });
  return table;
}

#endif
#ifdef ADAPTRT_TABLE_avx512

const KernelTable& avx512_kernels() {
  static const KernelTable table = make_table("avx512", {
#define ADAPTRT_FAMILY(name, operands) &avx512::register_##name,
#include "families.def"
                                                        });
  return table;
}

#endif
#ifdef ADAPTRT_TABLE_avx512_vnni

const KernelTable& avx512_vnni_kernels() {
  static const KernelTable table =
      with_families(avx512_kernels(), "avx512_vnni", {&avx512_vnni::register_int8});
  return table;
}

#endif
#ifdef ADAPTRT_TABLE_neon

const KernelTable& neon_kernels() {
  static const KernelTable table = make_table("neon", {
#define ADAPTRT_FAMILY(name, operands) &neon::register_##name,
#include "families.def"
                                                      });
  return table;
}

#endif
#ifdef ADAPTRT_TABLE_neon_dotprod

const KernelTable& neon_dotprod_kernels() {
  static const KernelTable table =
      with_families(neon_kernels(), "neon_dotprod", {&neon_dotprod::register_int8});
  return table;
}

#endif
#ifdef ADAPTRT_TABLE_neon_i8mm

const KernelTable& neon_i8mm_kernels() {
  static const KernelTable table = with_families(neon_kernels(), "neon_i8mm", {&neon_i8mm::register_int8});
  return table;
}

#endif
#ifdef ADAPTRT_TABLE_neon_bf16

const KernelTable& neon_bf16_kernels() {
  namespace float_set = neon;
  namespace bfloat16_set = neon_bf16;
  static const KernelTable table = make_table("neon_bf16", {
#define ADAPTRT_FAMILY(name, operands) &operands##_set::register_##name,
#include "families.def"
                                                           });
  return table;
}

#endif

}  // namespace adaptrt
