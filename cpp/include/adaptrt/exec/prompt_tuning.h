#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/error.h"
#include "adaptrt/core/fields.h"
#include "adaptrt/core/sha256.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/exec/float_tensor.h"
#include "adaptrt/kv/reuse_key.h"
#include "adaptrt/sched/sequence.h"

namespace adaptrt {

/// Embeddings of virtual tokens, one per row. Copies share the values, which never change.
class EmbeddingTable {
 public:
  /// Makes a table without rows.
  EmbeddingTable() = default;
  /// `dtype`: the type that `tensor` was converted from. `tensor` may have any shape.
  EmbeddingTable(FloatTensor tensor, DType dtype);

  [[nodiscard]] const FloatTensor& tensor() const;
  [[nodiscard]] DType dtype() const;
  /// Lists the reasons why an engine cannot use its rows.
  [[nodiscard]] Problems validate(const EngineInfo& engine) const;

  // For tables that validate() accepts:
  [[nodiscard]] std::int64_t num_rows() const { return tensor().shape.empty() ? 0 : tensor().shape.front(); }
  /// float32 [EngineInfo::prompt_embedding_size]
  [[nodiscard]] const float* row(std::int64_t index) const;
  /// The last coordinate of a row: the rotary position of a text token that follows it; negative: there is
  /// none. The engine must have coordinates.
  [[nodiscard]] std::int32_t next_position(std::int64_t index) const;
  /// Returns the digest of each row's bytes. The first call computes them; any thread may call.
  [[nodiscard]] std::span<const Sha256Digest> digests() const;

  /// True if shape and values are equal.
  bool operator==(const EmbeddingTable& other) const;

 private:
  struct Content;
  std::shared_ptr<const Content> content_;
};

/// TensorRT-LLM's PromptTuningConfig: virtual tokens of a prompt. Prompt ids beyond the request's vocabulary
/// are row numbers in the table.
struct PromptTuningConfig {
  EmbeddingTable embedding_table;
  std::optional<std::vector<std::uint64_t>> input_token_extra_ids;

  [[nodiscard]] Problems validate(const EngineInfo& engine, std::int64_t prompt_length) const;
  /// Returns digests of the extra ids and of the virtual tokens in `prompt`, whose ids begin with `first_id`.
  /// Both this object and the tokens must be valid.
  [[nodiscard]] PrefixDigests digests_of(std::span<const std::int32_t> prompt, std::int64_t first_id) const;

  /// Returns the runs of virtual tokens in `prompt` whose rows have equal numbers from 0 on in a column of
  /// the table; `first_id` as in digests_of().
  [[nodiscard]] std::vector<JointTokens> joint_tokens(std::span<const std::int32_t> prompt,
                                                      std::int64_t first_id, std::int32_t column) const;

  bool operator==(const PromptTuningConfig&) const = default;
};

constexpr auto fields_of(const PromptTuningConfig* /*type*/) {
  using C = PromptTuningConfig;
  return FieldList{
      Field{"embedding_table", &C::embedding_table,
            "[virtual tokens, hidden_size], float32 or the engine's type, in CPU memory; copied. A row "
            "replaces the embedded and scaled token as input of the first layer; learned positions are still "
            "added. Reads as a float32 array."},
      Field{"input_token_extra_ids", &C::input_token_extra_ids,
            "One for each token of the prompt. KV is shared only between tokens of equal extra ids; virtual "
            "tokens of different embeddings never share it, with or without them."}};
}

}  // namespace adaptrt
