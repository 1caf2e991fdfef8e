#pragma once

#include <cstdint>

#include "cuda/kernels/attention/int8_rows.h"
#include "cuda/kernels/element_type.h"

namespace adaptrt::cuda {

template <int kValue>
struct IntegerTag {
  static constexpr int value = kValue;
};

template <KvFormat kValue>
struct FormatTag {
  static constexpr KvFormat value = kValue;
};

/// Calls function(FormatTag) for the format of a pool.
template <typename Function>
void with_kv_format(bool is_int8, const Function& function) {
  if (is_int8) {
    function(FormatTag<KvFormat::kInt8>{});
  } else {
    function(FormatTag<KvFormat::kPlain>{});
  }
}

/// Calls function(IntegerTag<head_dim>) if the tensor core kernels are compiled for this head_dim. Returns
/// true if they are.
template <typename Function>
bool with_head_dim(std::int32_t head_dim, const Function& function) {
  if (head_dim == 128) {
    function(IntegerTag<128>{});
    return true;
  }
  if constexpr (!kHasFewKernels) {
    switch (head_dim) {
      case 64:
        function(IntegerTag<64>{});
        return true;
      case 80:
        function(IntegerTag<80>{});
        return true;
      case 96:
        function(IntegerTag<96>{});
        return true;
      case 256:
        function(IntegerTag<256>{});
        return true;
      default:
        break;
    }
  }
  return false;
}

}  // namespace adaptrt::cuda
