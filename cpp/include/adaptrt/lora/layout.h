#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/panels.h"
#include "adaptrt/core/stage_layers.h"
#include "adaptrt/lora/modules.h"

namespace adaptrt {

/// Layout of an adapter's A and B on the device.
enum class MatrixLayout : std::uint8_t {
  kPanels,  ///< core/panels.h, for the CPU kernels
  kRows,    ///< row-major A[rank, in] and B[out, rank], for the CUDA kernels
};

/// How the device level stores an adapter's matrices. Its names in configurations are kLoraStorageNames.
enum class LoraStorage : std::uint8_t {
  kExact,       ///< in the engine's type
  kCompressed,  ///< bfloat16 in twelve bits, exactly, if the values fit (core/compressed_matrix.h)
  kInt8,        ///< rounded to integers with one scale for each rank (core/int8_matrix.h)
};

inline constexpr std::array<std::string_view, 3> kLoraStorageNames = {"exact", "compressed", "int8"};

[[nodiscard]] constexpr std::string_view name_of(LoraStorage storage) {
  return kLoraStorageNames[static_cast<std::size_t>(storage)];
}

/// Maximum of LoraLayout::rotary_factors.
inline constexpr std::int32_t kMostRotaryFactor = 1024;

/// Maximum number of modules that share one input (q, k, v and the gate of attention).
inline constexpr std::size_t kMaxPartsPerSite = 4;

/// A range of a matrix's rows.
struct MatrixRows {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

/// Returns the rows of rank `share`, if `rows` rows are divided among `shares` ranks in multiples of `unit`.
/// The last ranks may have fewer rows, or none.
[[nodiscard]] constexpr MatrixRows rows_of_share(std::int64_t rows, std::int64_t unit, std::int64_t shares,
                                                 std::int64_t share) {
  const std::int64_t units = (rows + unit - 1) / unit;
  const std::int64_t most = (units + shares - 1) / shares * unit;
  const std::int64_t first = std::min(share * most, rows);
  return {first, std::min(most, rows - first)};
}

/// A module's part of a linear layer's output. If several ranks run an engine, it is one rank's part.
struct LoraPart {
  LoraModule module = LoraModule::kAttnQ;
  std::int64_t out_size = 0;
  /// First of these outputs in the module's outputs, and the number of outputs that only other ranks have.
  std::int64_t first_output = 0;
  std::int64_t num_remote_outputs = 0;
  /// For a part that consists of several ranges of the module's outputs: the first output and the number of
  /// outputs of each range. Empty: the part is one range, from first_output on.
  std::vector<std::int32_t> output_ranges = {};

  /// Returns the module's outputs that are the part's outputs `own`, as ranges in order. `own` is all of them
  /// if there are output_ranges.
  [[nodiscard]] std::vector<MatrixRows> module_rows(MatrixRows own) const {
    if (output_ranges.empty()) return {{first_output + own.first, own.count}};
    std::vector<MatrixRows> ranges;
    for (std::size_t i = 0; i + 1 < output_ranges.size(); i += 2) {
      ranges.push_back({output_ranges[i], output_ranges[i + 1]});
    }
    return ranges;
  }

  /// Number of outputs of the whole module, which is the number of rows of its B.
  [[nodiscard]] std::int64_t whole_out_size() const { return out_size + num_remote_outputs; }
};

/// A place in the network where adapters act: one linear layer whose parts share an input.
///
/// - The fused modules attn_qkv and mlp_gate_up are not parts: packing splits their B into the parts'.
/// - lm_head and the embedding have one site for each kVocabularySlice tokens, in order. lm_head is split by
///   outputs, the embedding by inputs.
/// - A norm with a bias is a site with one input, in engines of one pipeline stage.
/// - The last site holds the adapter's tokens beyond the vocabulary, if the engine has room for them.
struct LoraSite {
  /// Number of the layer, of the vocabulary slice, or of the norm.
  std::int32_t layer = 0;
  std::int64_t in_size = 0;
  std::vector<LoraPart> parts;
  /// Number of the expert among all of the layer: a linear layer of experts has a site for each local one.
  std::int32_t expert = 0;
  /// First of these inputs in the layer's inputs, and the number of inputs that other ranks have.
  std::int64_t first_input = 0;
  std::int64_t num_remote_inputs = 0;
  /// True if an adapter's shift is added here. If a layer's inputs are split among ranks, only the first rank
  /// adds it.
  bool adds_shifts = true;
  /// For experts: the number of experts in the layer for each local one. The others are only on other ranks.
  std::int32_t experts_for_each = 1;
  /// For fully sharded adapters: the number of ranks that the layer is split over, and the index of this one.
  /// If the outputs are split, the rows of A are divided too. If the inputs are split, the rows of B are
  /// divided too, in whole panels. 1: A and B are not divided further.
  std::int32_t num_shares = 1;
  std::int32_t share = 0;

  [[nodiscard]] bool shares_a() const { return num_shares > 1 && num_remote_inputs == 0; }
  [[nodiscard]] bool shares_b() const { return num_shares > 1 && num_remote_inputs > 0; }
  /// Returns the rows of A[total_rank, in_size] that rank `of_share` holds.
  [[nodiscard]] MatrixRows rows_of_a(std::int64_t total_rank, std::int32_t of_share) const {
    return shares_a() ? rows_of_share(total_rank, 1, num_shares, of_share) : MatrixRows{0, total_rank};
  }
  [[nodiscard]] MatrixRows rows_of_a(std::int64_t total_rank) const { return rows_of_a(total_rank, share); }
  /// Returns the rows of a part's B[out_size, rank] that rank `of_share` holds.
  [[nodiscard]] MatrixRows rows_of_b(std::int64_t out_size, std::int32_t of_share) const {
    return shares_b() ? rows_of_share(out_size, kPanelColumns, num_shares, of_share)
                      : MatrixRows{0, out_size};
  }
  [[nodiscard]] MatrixRows rows_of_b(std::int64_t out_size) const { return rows_of_b(out_size, share); }

  /// Number of inputs of the whole layer, which is the width of adapters' A.
  [[nodiscard]] std::int64_t whole_in_size() const { return in_size + num_remote_inputs; }

  [[nodiscard]] bool is_lm_head() const {
    return parts.size() == 1 && parts[0].module == LoraModule::kLmHead;
  }
  [[nodiscard]] bool is_embedding() const {
    return parts.size() == 1 && parts[0].module == LoraModule::kEmbedding;
  }
  [[nodiscard]] bool is_new_tokens() const {
    return parts.size() == 1 && parts[0].module == LoraModule::kNewTokens;
  }
  [[nodiscard]] bool is_norm() const { return parts.size() == 1 && adaptrt::is_norm(parts[0].module); }
  /// True if the site is a linear layer inside the network's layer number `layer`.
  [[nodiscard]] bool is_of_layer() const {
    return !is_norm() && !(parts.size() == 1 && is_of_tokens(parts[0].module));
  }
};

/// Vectors after A and B in an adapter's row, with one element per output: y = (W x + B A x) * magnitude +
/// shift, followed by the base model's bias.
struct RowVectors {
  bool magnitude = false;
  bool shift = false;

  [[nodiscard]] constexpr std::int64_t count() const { return (magnitude ? 1 : 0) + (shift ? 1 : 0); }
  /// Value in the last column of an adapter's config: 1 for a magnitude plus 2 for a shift.
  [[nodiscard]] constexpr std::int32_t flags() const { return (magnitude ? 1 : 0) + (shift ? 2 : 0); }
  /// Converts flags() back; `flags` is 0 to 3.
  [[nodiscard]] static constexpr RowVectors of(std::int32_t flags) {
    return {(flags & 1) != 0, (flags & 2) != 0};
  }
  friend bool operator==(const RowVectors&, const RowVectors&) = default;
};

/// The adapters that an engine accepts. It is part of the engine, and the LoRA cache is made from it.
struct LoraLayout {
  /// Storage type on the device, equal to the engine's.
  DType dtype = DType::kFloat32;
  std::int32_t num_layers = 0;
  std::int32_t max_rank = 0;
  bool dora_enabled = false;
  /// Modules that --lora_target_modules enabled; empty when the engine was built without LoRA.
  std::vector<LoraModule> target_modules;
  /// In the order of execution. LinearOp::lora_site indexes it.
  std::vector<LoraSite> sites;
  MatrixLayout matrix_layout = MatrixLayout::kPanels;
  /// True if adapters may have shifts (RowVectors), which the CUDA kernels do not add.
  bool shifts_enabled = true;
  /// Number of pipeline stages. stage_layers() assigns the layers, including encoder layers. `sites` has the
  /// sites of all stages.
  std::int32_t num_stages = 1;
  /// The stage whose sites are packed here.
  std::int32_t stage = 0;
  /// Maximum number of tokens beyond the engine's vocabulary that an adapter may add. Above 0 there is a site
  /// for them.
  std::int32_t max_extra_tokens = 0;
  /// Divisors that adapters may apply to rotary positions, ascending and above 1; empty if none may.
  std::vector<std::int32_t> rotary_factors = {};
  /// Maximum position of the base model; an adapter with a divisor multiplies it for its requests. 0 if there
  /// are no rotary_factors: then only the engine's max_seq_len applies.
  std::int32_t max_base_positions = 0;
  /// Number of encoder layers, which are the last ones of num_layers.
  std::int32_t num_encoder_layers = 0;

  /// True if this rank has every output and input of every layer, and all layers and experts.
  [[nodiscard]] bool is_whole() const {
    return num_stages == 1 && std::ranges::all_of(sites, [](const LoraSite& site) {
             return site.num_remote_inputs == 0 && site.experts_for_each == 1 && site.num_shares == 1 &&
                    site.adds_shifts && std::ranges::all_of(site.parts, [](const LoraPart& part) {
                      return part.num_remote_outputs == 0;
                    });
           });
  }
  /// Returns the pipeline stage of a site.
  [[nodiscard]] std::int32_t stage_of(const LoraSite& site) const {
    if (site.is_embedding()) return 0;
    if (site.is_lm_head()) return num_stages - 1;
    const std::int32_t before_encoder = num_layers - num_encoder_layers;
    const bool is_encoder = site.layer >= before_encoder;
    const std::int32_t layer = is_encoder ? site.layer - before_encoder : site.layer;
    const std::int32_t layers = is_encoder ? num_encoder_layers : before_encoder;
    std::int32_t stage_of_layer = 0;
    while (stage_of_layer < num_stages - 1 &&
           layer >= stage_layers(layers, num_stages, stage_of_layer + 1).first) {
      ++stage_of_layer;
    }
    return stage_of_layer;
  }

  /// Maximum rank in a module's row.
  [[nodiscard]] std::int32_t max_rank_of(LoraModule module) const {
    return module == LoraModule::kNewTokens ? max_extra_tokens : max_rank;
  }
};

/// Index of the site of new tokens; -1 if there is none.
[[nodiscard]] inline std::int32_t new_tokens_site(const LoraLayout& layout) {
  const bool is_there = !layout.sites.empty() && layout.sites.back().is_new_tokens();
  return is_there ? static_cast<std::int32_t>(layout.sites.size()) - 1 : -1;
}

/// Position of a site in the order in which loads copy them, which is that of execution: new tokens come
/// first, because the embedding reads them.
[[nodiscard]] inline std::int32_t load_position(const LoraLayout& layout, std::int32_t site) {
  return site == new_tokens_site(layout) ? 0 : site + 1;
}

/// One part of one adapter at one site, in the kernels' layout (LoraLayout::matrix_layout). Pointers are
/// device addresses in the cache's pages; the host reads them only if it is the device.
struct DevicePart {
  /// 0 if the adapter does not change this part.
  std::int32_t rank = 0;
  /// First of this part's output features in the site's A. With kRows, the part's A starts rank_offset rows
  /// of in_size elements after DeviceSite::a.
  std::int32_t rank_offset = 0;
  /// B[out_size, rank], as panels or rows, or only the rows in LoraSite::rows_of_b; the scale is included.
  const std::byte* b = nullptr;
  LoraStorage b_storage = LoraStorage::kExact;
  /// float32[out_size], the normalised DoRA magnitudes; nullptr for plain LoRA.
  const float* magnitude = nullptr;
  /// float32[out_size], the shift added after the magnitudes; nullptr for none.
  const float* shift = nullptr;
};

struct DeviceSite {
  /// Output features of A, summed over the modules of this site. 0 if the adapter has none here.
  std::int32_t total_rank = 0;
  /// A[total_rank, in_size], as panels or rows, or only the rows in LoraSite::rows_of_a.
  const std::byte* a = nullptr;
  LoraStorage a_storage = LoraStorage::kExact;
  /// float32[total_rank], by which x A^T is multiplied before the product with B: the scales of A's rows
  /// times those of B's columns, if both are int8. nullptr otherwise.
  const float* rank_scales = nullptr;
  std::array<DevicePart, kMaxPartsPerSite> parts;
};

/// An adapter for an engine step; its sites are those of the LoraLayout.
struct DeviceAdapter {
  std::uint64_t task_id = 0;
  /// Unique among all copies packed in this process: data derived from the addresses is valid while it is
  /// equal.
  std::uint64_t load_id = 0;
  std::vector<DeviceSite> sites;
  /// AdapterTerms::rotary_factor.
  std::int32_t rotary_factor = 1;
};

}  // namespace adaptrt
