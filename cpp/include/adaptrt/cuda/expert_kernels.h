#pragma once

#include <cstdint>

#include "adaptrt/core/dtype.h"
#include "adaptrt/cuda/slot_tile.h"
#include "adaptrt/program/ops.h"

namespace adaptrt::cuda {

// Kernels of mixtures of experts on an NVIDIA GPU, in the order in which a layer runs them. A slot is a pair
// of a token and one of its experts. The device chooses the experts; launches depend only on sizes that the
// host knows. No bit of a token's result depends on the other tokens. Each function enqueues one launch on
// `stream` (a cudaStream_t), and does nothing without tokens. It throws ConfigError for invalid sizes and
// types, and StepError if CUDA rejects the launch.

inline constexpr std::int32_t kMaxExperts = 1024;
inline constexpr std::int32_t kMaxTopK = 32;

/// Chooses each token's experts by Routing's rules.
struct RouteTokens {
  std::int64_t tokens = 0;
  std::int32_t experts = 0;  ///< 1 to kMaxExperts
  RouterScores scores = RouterScores::kSoftmax;
  std::int32_t top_k = 1;  ///< 1 to kMaxTopK
  std::int32_t num_groups = 1;
  std::int32_t topk_groups = 1;
  bool rates_groups_by_best = false;
  bool norm_topk_prob = false;
  float scale = 1.0F;
  const float* bias = nullptr;          ///< [experts] or nullptr
  const float* expert_scale = nullptr;  ///< [experts] or nullptr
  const float* logits = nullptr;        ///< [tokens, experts]
  std::int32_t* chosen = nullptr;       ///< [tokens, top_k], ascending
  float* weights = nullptr;             ///< [tokens, top_k]
};
void enqueue(const RouteTokens& work, void* stream);

/// Numbers the slots expert by expert; the slots of an expert are in the order of the tokens.
struct NumberSlots {
  std::int64_t slots = 0;
  std::int32_t experts = 0;
  const std::int32_t* chosen = nullptr;  ///< [slots]
  std::int32_t* offsets = nullptr;       ///< [experts + 1]: the first slot of each expert
  std::int32_t* entries = nullptr;       ///< [slots]: index in `chosen` of each slot
  std::int32_t* slots_of = nullptr;      ///< [slots]: slot of each index in `chosen`
  std::int32_t* expert_of = nullptr;     ///< [slots]: expert of each slot
};
void enqueue(const NumberSlots& work, void* stream);

/// Cuts the slots into tiles for LoraKernel. A tile begins at every multiple of tile_slots, and wherever the
/// expert or the adapter changes.
struct NumberTiles {
  std::int64_t slots = 0;
  std::int32_t top_k = 1;
  std::int32_t tile_slots = 1;                ///< LoraKernel::tile_tokens()
  std::int64_t max_tiles = 0;                 ///< see most_tiles()
  const std::int32_t* entries = nullptr;      ///< see NumberSlots
  const std::int32_t* expert_of = nullptr;    ///< see NumberSlots
  const std::int32_t* token_slots = nullptr;  ///< [slots / top_k]: each token's adapter; -1: the base model
  SlotTile* tiles = nullptr;  ///< [max_tiles + 1]: the tiles, and after them the end of the slots
};
void enqueue(const NumberTiles& work, void* stream);

/// Maximum number of tiles, if `ranges` ranges of tokens have one adapter each.
[[nodiscard]] std::int64_t most_tiles(std::int64_t slots, std::int64_t experts, std::int64_t ranges,
                                      std::int32_t tile_slots);

/// y[slot] = x[row of slot], bit for bit, or multiplied by the entry's weight and rounded. See ExpertProduct.
struct GatherSlots {
  DType dtype = DType::kBFloat16;
  std::int64_t slots = 0;
  std::int64_t width = 0;  ///< a multiple of 8
  const std::int32_t* entries = nullptr;
  std::int32_t entries_per_row = 1;
  const float* weights = nullptr;  ///< [rows, entries_per_row] or nullptr
  const void* x = nullptr;         ///< T [rows, width]
  void* y = nullptr;               ///< T [slots, width]
};
void enqueue(const GatherSlots& work, void* stream);

/// y[slot] = round(x[row of slot] W[expert of slot]^T), with the order of sums of ProductKernel, or of
/// QuantizedProductKernel.
struct ExpertProduct {
  DType dtype = DType::kBFloat16;
  std::int64_t slots = 0;
  std::int32_t experts = 0;
  std::int32_t in_size = 0;               ///< a multiple of 8
  std::int32_t out_size = 0;              ///< a multiple of 8
  const std::int32_t* offsets = nullptr;  ///< see NumberSlots
  /// With `entries`, the row of a slot is entries[slot] / entries_per_row, otherwise the slot.
  const std::int32_t* entries = nullptr;
  std::int32_t entries_per_row = 1;
  const void* x = nullptr;  ///< T [rows, in]
  /// T [experts, out, in], or integers as in QuantizedProductKernel::Inputs
  const void* weights = nullptr;
  std::int32_t bits = 0;                ///< of an integer: 8 or 4; 0: the weights are T
  std::int32_t group_size = 0;          ///< see QuantizedProductKernel::Config
  const float* scales = nullptr;        ///< [experts, out, groups], with integers
  const std::uint8_t* zeros = nullptr;  ///< [experts, out, groups] or nullptr
  void* y = nullptr;                    ///< T [slots, out]
};
void enqueue(const ExpertProduct& work, void* stream);

/// output[token] (+)= the sum over its experts of weight * (y[slot] + bias[expert]), in the order of the
/// experts.
struct SumSlots {
  DType dtype = DType::kBFloat16;
  std::int64_t tokens = 0;
  std::int32_t top_k = 1;
  std::int64_t width = 0;                  ///< a multiple of 8
  const std::int32_t* slots_of = nullptr;  ///< see NumberSlots
  const float* weights = nullptr;          ///< [tokens, top_k]; nullptr: all are 1
  const void* y = nullptr;                 ///< T [tokens * top_k, width]
  const float* bias = nullptr;             ///< [experts, width] or nullptr
  const std::int32_t* chosen = nullptr;    ///< see RouteTokens; read with a bias
  bool adds = true;                        ///< false: the sum replaces the output
  float* output = nullptr;                 ///< [tokens, width]
};
void enqueue(const SumSlots& work, void* stream);

}  // namespace adaptrt::cuda
