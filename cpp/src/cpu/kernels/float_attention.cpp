#include ADAPTRT_SIMD
// The order matters: the headers below use the Simd of the header above.
#include "attention.h"
#include "families.h"

namespace adaptrt {

/// Attention to keys and values of float32 and of float16.
void ADAPTRT_KERNEL_SET::register_float_attention(KernelTable* table) {
  table->attend[static_cast<std::size_t>(DType::kFloat32)] = &attend<Float32Weights>;
  table->attend[static_cast<std::size_t>(DType::kFloat16)] = &attend<Float16Weights>;
}

}  // namespace adaptrt
