#include "cuda/kernels/attention/decode_launch.h"

namespace adaptrt::cuda {

void launch_int8_decode(const AttentionStep& step, const Splits& splits, std::int32_t row_tiles, bool rotates,
                        DType dtype, void* stream) {
  launch_decode_of<KvFormat::kInt8>(step, splits, row_tiles, rotates, dtype, stream);
}

}  // namespace adaptrt::cuda
