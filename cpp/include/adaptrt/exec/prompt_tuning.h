#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "adaptrt/core/dtype.h"
#include "adaptrt/core/error.h"
#include "adaptrt/core/fields.h"
#include "adaptrt/core/sha256.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/exec/float_tensor.h"
#include "adaptrt/kv/reuse_key.h"

namespace adaptrt {

/// Embeddings of virtual tokens, one a row. Copies share them; they never change.
class EmbeddingTable {
 public:
  /// Without rows.
  EmbeddingTable() = default;
  /// `dtype`: what `tensor`, which may have any shape, was converted from.
  EmbeddingTable(FloatTensor tensor, DType dtype);

  [[nodiscard]] const FloatTensor& tensor() const;
  [[nodiscard]] DType dtype() const;
  /// Everything that keeps an engine from taking its rows.
  [[nodiscard]] Problems validate(const EngineInfo& engine) const;

  // Of a table that an engine takes:
  [[nodiscard]] std::int64_t num_rows() const { return tensor().shape.empty() ? 0 : tensor().shape.front(); }
  /// float32 [EngineInfo::given_embedding_size]
  [[nodiscard]] const float* row(std::int64_t index) const;
  /// Of each row's bytes. They are worked out when they are first asked for, by any thread.
  [[nodiscard]] std::span<const Sha256Digest> digests() const;

  /// Whether shape and values are the same.
  bool operator==(const EmbeddingTable& other) const;

 private:
  struct Content;
  std::shared_ptr<const Content> content_;
};

/// TensorRT-LLM's PromptTuningConfig: virtual tokens of a prompt. Ids of the prompt that follow the request's
/// vocabulary are their rows in the table.
struct PromptTuningConfig {
  EmbeddingTable embedding_table;
  std::optional<std::vector<std::uint64_t>> input_token_extra_ids;

  [[nodiscard]] Problems validate(const EngineInfo& engine, std::int64_t prompt_length) const;
  /// Of the virtual tokens in `prompt`, whose ids begin with `first_id`, and of the extra ids. `this` is
  /// valid, and so are the tokens.
  [[nodiscard]] PrefixDigests digests_of(std::span<const std::int32_t> prompt, std::int64_t first_id) const;

  bool operator==(const PromptTuningConfig&) const = default;
};

constexpr auto fields_of(const PromptTuningConfig* /*type*/) {
  using C = PromptTuningConfig;
  return std::tuple{
      Field{
          "embedding_table", &C::embedding_table,
          "[virtual tokens, hidden_size] of float32 or the engine's type, in CPU memory; copied. What the "
          "first layer takes in place of an embedded and scaled token, but for learned positions, which are "
          "added. Read as a float32 array."},
      Field{"input_token_extra_ids", &C::input_token_extra_ids,
            "One for each token of the prompt. KV is shared only between tokens of equal extra ids; virtual "
            "tokens of different embeddings never share it, with or without them."}};
}

}  // namespace adaptrt
