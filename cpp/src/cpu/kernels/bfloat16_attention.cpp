#include ADAPTRT_SIMD
// The order matters: what follows is written in terms of the instruction set above.
#include "attention.h"
#include "families.h"

namespace adaptrt {

/// Attention to keys and values of bfloat16, and the end of all attention, which may be rounded to it.
void ADAPTRT_KERNEL_SET::register_bfloat16_attention(KernelTable* table) {
  table->attend[static_cast<std::size_t>(DType::kBFloat16)] = &attend<BFloat16Weights>;
  table->finish_attention = &finish_attention;
}

}  // namespace adaptrt
