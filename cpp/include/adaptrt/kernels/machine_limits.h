#pragma once

#include "adaptrt/core/thread_pool.h"

namespace adaptrt {

/// What this machine can do at best, measured: what kernels are held against.
struct MachineLimits {
  /// Bytes per second that all threads together read from memory.
  double read_bandwidth = 0.0;
  /// Products of an unsigned and a signed 8-bit integer, added up in 32 bits, per second on registers (AMX's
  /// tiles where there are any), each counted as two; 0 where the CPU has no instruction for it.
  double int8_ops = 0.0;
  /// bfloat16 multiply-adds per second on registers, in the same way.
  double bfloat16_flops = 0.0;
  /// The same two with AMX where each four products of tiles load four from L2, as a product of matrices
  /// that are larger than registers has to; 0 without AMX.
  double int8_from_l2_ops = 0.0;
  double bfloat16_from_l2_flops = 0.0;
  /// float32 multiply-adds per second on registers, each counted as two.
  double float32_flops = 0.0;
};

/// The best of `rounds` rounds, each of about 0.1 s. Takes 1 GiB of memory for their duration.
[[nodiscard]] MachineLimits measure_machine_limits(ThreadPool* threads, int rounds);

}  // namespace adaptrt
