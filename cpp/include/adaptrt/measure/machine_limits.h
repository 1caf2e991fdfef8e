#pragma once

#include "adaptrt/core/thread_pool.h"

namespace adaptrt {

/// Measured peak performance of this machine, as a reference for kernels.
struct MachineLimits {
  /// Bytes per second that all threads together read from memory.
  double read_bandwidth = 0.0;
  /// 8-bit integer operations per second on registers (AMX tiles if available). Each product of an unsigned
  /// and a signed 8-bit integer, summed in 32 bits, counts as two. 0 if the CPU has no instruction for it.
  double int8_ops = 0.0;
  /// bfloat16 operations per second on registers; each multiply-add counts as two.
  double bfloat16_flops = 0.0;
  /// The same two with AMX if each four tile products load four tiles from L2, like products of matrices
  /// larger than the registers; 0 without AMX.
  double int8_from_l2_ops = 0.0;
  double bfloat16_from_l2_flops = 0.0;
  /// float32 multiply-adds per second on registers, each counted as two.
  double float32_flops = 0.0;
};

/// Measures `rounds` rounds of about 0.1 s each and returns the best values. Uses 1 GiB of memory meanwhile.
[[nodiscard]] MachineLimits measure_machine_limits(ThreadPool* threads, int rounds);

}  // namespace adaptrt
