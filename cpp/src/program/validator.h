#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "adaptrt/program/program.h"
#include "live_ranges.h"
#include "program_sizes.h"

namespace adaptrt {

/// One run of Program::validate.
class Validator {
 public:
  explicit Validator(const Program& program);

  Problems run();

 private:
  void add(std::string problem);
  void check_buffers();
  [[nodiscard]] std::optional<std::size_t> bytes_of(const Buffer& buffer) const;
  /// Checks an operand. Returns the buffer; nullptr if no buffer has that id.
  const Buffer* operand(std::string_view name, BufferId id, DType dtype, RowKind rows);
  void check_width(std::string_view name, const Buffer* buffer, std::int64_t width);
  void read(BufferId id);
  void write(BufferId id);
  void check_vector(std::string_view name, const VectorView& vector, std::int64_t size);
  void check_optional_vector(std::string_view name, const VectorView& vector, std::int64_t size);
  /// Parts of a matrix that an op may read: all, some outputs, or some inputs.
  enum class MatrixAccess : std::uint8_t { kAll, kSomeOutputs, kSomeInputs };
  void check_matrix(std::string_view name, const PanelMatrix& matrix, std::int64_t n, std::int64_t k,
                    MatrixAccess access = MatrixAccess::kAll);
  void check_finite(std::string_view name, float value, float low);
  /// Records the buffers that an op reads and writes.
  void use_buffers(const Op& op);
  void check_ops(const std::vector<Op>& ops, RowKind rows, std::string_view section);
  void all_tokens_only();
  void check(const EmbeddingOp& op);
  void check(const RopeTableOp& op);
  void check(const AddGivenColumnsOp& op);
  void check(const JoinColumnsOp& op);
  void check(const JoinNeighboursOp& op);
  /// Checks a column of rows that are given in place of tokens.
  void check_coordinate(std::string_view name, std::int64_t column);
  void check(const RmsNormOp& op);
  void check(const AttentionOp& op);
  void check(const LinearOp& op);
  void check(const LayerNormOp& op);
  /// Returns the dtype that a layer norm's output must have: the activation type, or float32 for a residual
  /// stream.
  [[nodiscard]] DType norm_type(BufferId output) const;
  void check(const CastOp& op);
  void check(const KeepLogitRowsOp& op);
  void check_scores(const LinearOp& op);
  /// True for the float32 logits of a router where other layers store outputs of the program's type.
  [[nodiscard]] bool keeps_float32(BufferId output) const;
  void check_neurons(const LinearOp& op);
  /// Checks the site of a linear layer with these parts; -1: adapters do not apply.
  void check_site(std::int32_t site, std::span<const LinearPart> parts);
  void check_norm_site(std::int32_t site, std::int64_t width);
  /// Returns the site that an op names as its own; nullptr for -1, and if it does not exist.
  const LoraSite* used_site(std::int32_t index);
  void check_keys_as_values(const AttentionOp& op);
  /// Checks the layer whose keys and values the op reads, or records the op's own.
  void check_shared_layer(const AttentionOp& op);
  void check(const CrossKeysOp& op);
  void check(const CrossAttentionOp& op);
  /// Counts a user of a layer of the decoder.
  void use_layer(std::int32_t layer, std::vector<std::int32_t>* users);
  void check_kinds_of_attention();
  void check_encoder_output();
  void check_results();
  /// Checks the slices of a vocabulary, from site `index` on; `sizes` are those of the whole layer.
  void check_slices(std::int32_t index, LoraModule module, ModuleSizes sizes);
  /// Checks that the site of new tokens, if there is one, has rows as long as those of a layer.
  void check_new_tokens(std::int64_t hidden_size);
  void check_users();
  void add_kv_bytes(const AttentionShape& shape);
  void check_kv_block();
  void check_overlaps();
  void check(const ExpertsOp& op);
  void check(const GatedAddOp& op);
  void check(const SigmoidGateOp& op);
  void check(const GatedColumnsOp& op);
  void check(const GatedRmsNormOp& op);
  void check(const CausalConvolutionOp& op);
  void check(const GatedDeltaOp& op);
  void check(const GatedConvolutionOp& op);
  void check(const XieluOp& op);
  void check(const SelectiveScanOp& op);
  /// Checks the taps and the state of a convolution; returns the number of its columns, or 0 if it is
  /// unknown.
  std::int64_t check_taps(const VectorView& weight, std::int64_t num_taps);
  void check(const LatentQueriesOp& op);
  void check(const LatentValuesOp& op);
  /// Returns true if all sizes can be those of a layer.
  bool check_latent_shape(const LatentShape& shape);
  /// Checks the weights of an op of latent attention, one for each head, and their sites.
  void check_head_parts(std::string_view name, const std::vector<LinearPart>& parts, std::int64_t num_heads,
                        ModuleSizes sizes, std::int32_t first_site);
  /// Checks that an op may keep a state of so many bytes.
  void check_state(std::optional<std::size_t> num_bytes);
  /// Checks that a buffer has at least `width` columns.
  void check_at_least(std::string_view name, const Buffer* buffer, std::int64_t width);
  void check(const AllReduceOp& op);
  void check(const AllHeadsNormOp& op);
  void check(const GatherOp& op);
  void check(const ReceiveOp& op);
  void check(const SendOp& op);
  void check(const BroadcastOp& op);
  void check_ranks();
  void check_routing(const Routing& routing, std::int64_t num_experts);
  void check_expert_parts(std::string_view name, const std::vector<LinearPart>& parts, ModuleSizes sizes);

  const Program& program_;
  LiveRanges live_;
  /// By buffer: true if it holds values of tokens that are no longer rows, or only of some of the rows.
  std::vector<bool> lost_;
  /// By buffer: true if a sum over ranks has consumed its values.
  std::vector<bool> used_up_;
  bool has_logit_rows_ = false;
  std::int32_t num_broadcasts_ = 0;
  // Tokens that the body's attention attends to: earlier ones, later ones.
  bool sees_before_ = false;
  bool sees_behind_ = false;
  std::int32_t num_embeddings_ = 0;
  /// Width of the rows that are given in place of tokens, and their columns that later ops read.
  std::int64_t given_size_ = 0;
  std::int64_t first_coordinate_ = 0;
  std::int64_t num_later_elements_ = 0;
  Problems problems_;
  const RangeCheck check_range_{&problems_};
  /// Maximum over all layers; nullopt if it does not fit in 64 bits.
  std::optional<std::size_t> kv_block_bytes_ = 0;
  /// Sum over all layers; nullopt if it does not fit in 64 bits.
  std::optional<std::size_t> state_bytes_ = 0;
  RowKind rows_ = RowKind::kTokens;
  std::string where_;
  std::vector<std::int32_t> site_users_;
  std::vector<std::int32_t> layer_users_;
  std::vector<AttentionShape> kv_shapes_;  // by layer; without heads if the layer has stored no keys so far
  std::vector<std::int32_t> convolution_users_;
  std::vector<std::int32_t> scan_users_;
  std::vector<std::int32_t> encoder_layer_users_;
  std::vector<std::int32_t> cross_keys_users_;
  std::vector<std::int32_t> cross_attention_users_;
  std::vector<AttentionShape> cross_shapes_;  // by layer of the decoder
};

}  // namespace adaptrt
