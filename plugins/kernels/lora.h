#pragma once

#include <cstdint>
#include <vector>

#include "adaptrt/core/dtype.h"

namespace adaptrt::cuda {

/// The plugins Lora and Dora on an NVIDIA GPU: each token's own low-rank update of a linear layer's output,
/// and the factor of its own magnitudes after it.
///
///   shrunk[token, part] = round((x A^T)[token])                               A[rank, in]
///   y[token, part]      = round((base + shrunk B^T) * magnitude)              B[out, rank], magnitude[out]
///
/// Products are exact, sums float32, and round() is to the engine's type. A token whose sequence has no
/// adapter, or whose adapter does not change the part (rank 0), gets y = base, bit for bit.
///
/// Every sum is made in one order, which follows from `in_size` and the rank alone: a token's y does not
/// depend, in a single bit, on the other tokens, sequences and adapters of the step. See
/// plugins/kernels/README.md.
class LoraKernel {
 public:
  /// Where tiles of many tokens were faster on an H100, for ranks from 8 to 64 and widths of 4096 and 14336.
  /// In smaller steps there are too few of them to keep its multiprocessors loading.
  static constexpr std::int64_t kManyTokensFrom = 3072;

  struct Config {
    DType dtype = DType::kBFloat16;  ///< float16 or bfloat16
    std::int32_t layer = 0;
    std::vector<std::int32_t> module_ids = {};  ///< of each part of the output
    std::vector<std::int32_t> out_sizes = {};   ///< width of each part
    std::int32_t max_rank = 0;                  ///< no rank in the table is above it
    bool dora = false;                          ///< whether magnitudes are looked at
    /// From so many tokens on a step is cut into tiles of many tokens. No bit depends on it.
    std::int64_t many_tokens_from = kManyTokensFrom;
  };

  /// All addresses are of the device, and aligned as the elements are; aligned to 16 bytes is faster.
  struct Inputs {
    const void* x = nullptr;     ///< [tokens, in]
    const void* base = nullptr;  ///< [tokens, out]; may be y
    const std::int32_t* sequence_offsets =
        nullptr;                                  ///< [sequences + 1]; tokens behind the last have no adapter
    const std::int32_t* adapter_slots = nullptr;  ///< [sequences]; -1: the base model
    const std::int32_t* ranks = nullptr;          ///< [slots, layers, modules]
    const std::int64_t* pointers = nullptr;       ///< [slots, layers, modules, 3]: A, B, magnitude or 0
  };

  struct Sizes {
    std::int64_t tokens = 0;
    std::int64_t in = 0;
    std::int64_t sequences = 0;
    std::int64_t layers = 0;
  };

  /// Throws ConfigError that says everything that is wrong.
  explicit LoraKernel(Config config);

  /// Bytes that enqueue needs for up to `max_tokens` tokens.
  [[nodiscard]] std::int64_t workspace_bytes(std::int64_t max_tokens) const;

  /// Puts the work into `stream` (a cudaStream_t): two launches, whose shapes follow from `sizes` and the
  /// config alone, so that a graph captured of them holds for any content of the inputs. `workspace` is
  /// aligned to 16 bytes. Throws ConfigError for sizes that cannot be, and StepError when CUDA refuses a
  /// launch.
  void enqueue(const Sizes& sizes, const Inputs& inputs, void* y, void* workspace, void* stream) const;

 private:
  Config config_;
};

}  // namespace adaptrt::cuda
