#pragma once

#include <cstdint>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/cuda/slot_tile.h"

namespace adaptrt::cuda {

/// The plugins Lora and Dora on an NVIDIA GPU: each token's own low-rank update of a linear layer's output,
/// times its own magnitudes for DoRA, plus its own shift. The plugins have no shifts.
///
///   shrunk[token, part] = round((x A^T)[token])                               A[rank, in]
///   y[token, part]      = round((base + shrunk B^T) * magnitude + shift)      B[out, rank], magnitude[out],
///                                                                             shift[out]
///
/// Products are exact, sums are float32, and round() rounds to the engine's type. If a token's sequence has
/// no adapter, or its adapter does not change the part (rank 0), y equals base bit for bit.
///
/// The order of every sum depends only on `in_size` and the rank. So no bit of a token's y depends on the
/// step's other tokens, sequences and adapters. See
/// cpp/src/cuda/kernels/README.md.
class LoraKernel {
 public:
  /// Number of tokens from which tiles of many tokens were faster on an H100, for ranks 8 to 64 and widths
  /// 4096 and 14336. Smaller steps have too few such tiles to keep all multiprocessors loading.
  static constexpr std::int64_t kManyTokensFrom = 3072;

  /// Number of tokens up to which steps use the kernels for decode steps, which start loading the adapters'
  /// weights before the previous kernel has ended.
  static constexpr std::int64_t kDecodeTokens = 512;

  static constexpr std::int64_t kNoExperts = -1;

  struct Config {
    DType dtype = DType::kBFloat16;  ///< float16 or bfloat16
    std::int32_t layer = 0;
    std::vector<std::int32_t> module_ids = {};  ///< module of each part of the output
    std::vector<std::int32_t> out_sizes = {};   ///< width of each part
    std::int32_t max_rank = 0;                  ///< maximum rank in the table
    bool dora = false;                          ///< true: applies magnitudes
    /// Steps with at least this many tokens use tiles of many tokens. No bit of the result depends on it.
    std::int64_t many_tokens_from = kManyTokensFrom;
    /// Shorter steps, up to this many tokens, use the kernels for decode steps, also without effect on bits.
    std::int64_t decode_tokens = kDecodeTokens;
    /// Entry of each part among a slot's entries of the tables; `layer` and the values of module_ids are not
    /// used then. Empty: the entry of the module in the layer's row.
    std::vector<std::int64_t> entries = {};
    /// For a layer of experts, at least 0: the entry of the first expert's first part. The entries of its
    /// other parts follow, then those of the next expert. `layer`, `entries` and the values of module_ids are
    /// not used.
    std::int64_t expert_entry = kNoExperts;
    /// Above 0: y is float32 [tokens, logits_stride], base is y, and nothing is rounded.
    std::int32_t logits_stride = 0;
  };

  /// Device addresses, aligned to the element size; alignment to 16 bytes is faster. Except for x and base,
  /// no kernel in the stream may write them between the last copy to the device and this work: the launches
  /// may begin before the previous kernel has ended, and then wait only for x and base.
  struct Inputs {
    const void* x = nullptr;     ///< [tokens, in]
    const void* base = nullptr;  ///< [tokens, out]; may be y
    const std::int32_t* sequence_offsets =
        nullptr;  ///< [sequences + 1]; tokens after the last sequence have no adapter
    const std::int32_t* adapter_slots = nullptr;  ///< [sequences]; -1: the base model
    const std::int32_t* ranks = nullptr;          ///< [slots, layers, modules]
    const std::int64_t* pointers = nullptr;       ///< [slots, layers, modules, 3]: A, B, magnitude or 0
    /// [slots, layers, modules]: shift or 0; nullptr if no adapter has any
    const std::int64_t* shifts = nullptr;
    /// For experts [Sizes::tiles + 1], in place of sequence_offsets and adapter_slots; an earlier kernel may
    /// write them. See NumberTiles.
    const SlotTile* tiles = nullptr;
  };

  struct Sizes {
    std::int64_t tokens = 0;
    std::int64_t in = 0;
    std::int64_t sequences = 0;
    std::int64_t layers = 0;
    std::int64_t tiles = 0;  ///< for experts
  };

  /// Maximum number of tokens of a tile.
  [[nodiscard]] static std::int32_t tile_tokens(std::int64_t tokens, std::int64_t many_tokens_from);

  /// Throws ConfigError that lists all problems.
  explicit LoraKernel(Config config);

  /// Size of the workspace for up to `max_tokens` tokens.
  [[nodiscard]] std::int64_t workspace_bytes(std::int64_t max_tokens) const;

  /// Enqueues the work on `stream` (a cudaStream_t): two launches, whose shapes depend only on `sizes` and
  /// the config. So a captured graph stays valid for any content of the inputs. `workspace` is aligned to 16
  /// bytes. Throws ConfigError for invalid sizes, and StepError if CUDA rejects a launch.
  void enqueue(const Sizes& sizes, const Inputs& inputs, void* y, void* workspace, void* stream) const;

 private:
  /// Entry of a part, of the first expert if there are experts.
  [[nodiscard]] std::int64_t entry_of(std::size_t part) const;

  Config config_;
};

}  // namespace adaptrt::cuda
