#pragma once

#include "adaptrt/core/thread_pool.h"

namespace adaptrt {

/// What this machine can do at best, measured: what kernels are held against.
struct MachineLimits {
  /// Bytes per second that all threads together read from memory.
  double read_bandwidth = 0.0;
  /// Products of an unsigned and a signed 8-bit integer, added up in 32 bits, per second on registers, each
  /// counted as two; 0 where the CPU has no instruction for it.
  double int8_ops = 0.0;
  /// bfloat16 multiply-adds per second on registers, each counted as two; 0 where the CPU has no instruction
  /// for it.
  double bfloat16_flops = 0.0;
  /// float32 multiply-adds per second on registers, each counted as two.
  double float32_flops = 0.0;
};

/// The best of `rounds` rounds, each of about 0.1 s. Takes 1 GiB of memory for their duration.
[[nodiscard]] MachineLimits measure_machine_limits(ThreadPool* threads, int rounds);

}  // namespace adaptrt
