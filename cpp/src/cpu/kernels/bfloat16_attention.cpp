#include ADAPTRT_SIMD
// The order matters: the headers below use the Simd of the header above.
#include "attention.h"
#include "families.h"

namespace adaptrt {

/// Attention to bfloat16 keys and values.
void ADAPTRT_KERNEL_SET::register_bfloat16_attention(KernelTable* table) {
  table->attend[static_cast<std::size_t>(DType::kBFloat16)] = &attend<BFloat16Weights>;
}

}  // namespace adaptrt
