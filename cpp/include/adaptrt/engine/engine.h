#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/core/thread_pool.h"
#include "adaptrt/engine/communicator.h"
#include "adaptrt/engine/step_profile.h"
#include "adaptrt/lora/adapter_pages.h"
#include "adaptrt/lora/layout.h"

namespace adaptrt {

/// What an executor must know of an engine, whatever compiled it.
struct EngineInfo {
  DType dtype = DType::kFloat32;
  std::int64_t vocab_size = 0;
  std::int32_t num_layers = 0;
  std::int32_t max_batch_size = 0;
  std::int32_t max_num_tokens = 0;
  std::int32_t max_input_len = 0;
  std::int32_t max_seq_len = 0;
  std::int32_t max_beam_width = 1;
  std::int32_t tokens_per_block = 0;
  /// Bytes of one KV block over all layers.
  std::size_t kv_block_bytes = 0;
  /// The longest prompt whose KV may be shared with another request (see RopeKind::kDynamic).
  std::int32_t max_reusable_prompt_len = 0;
  LoraLayout lora;
  /// Of a pipeline; see Program.
  std::int32_t num_stages = 1;
  /// Name of the CPU kernels that it runs; empty: it runs on a device.
  std::string kernels = {};
  /// Program::identity, where blocks of the KV pool can be read and written; else empty.
  std::string kv_identity = {};
  /// AttentionOp::sliding_window of each layer; empty: not known.
  std::vector<std::int32_t> attention_windows = {};
  /// Whether it heeds StepInput::adapters_from.
  bool has_adapters_from = false;
  /// Tokens of an encoder input; 0: the engine has no encoder.
  std::int32_t max_encoder_input_len = 0;
  /// Of StepInput's encoder outputs.
  std::int64_t encoder_hidden_size = 0;
  /// Bytes of one block of encoder inputs' keys and values, of tokens_per_block tokens, over all layers.
  std::size_t cross_kv_block_bytes = 0;
  /// Width of the rows that HiddenSink gets; 0: the engine does not tell hidden states.
  std::int64_t hidden_size = 0;
  /// Width of StepInput::given_embeddings; 0: the engine takes none.
  std::int64_t given_embedding_size = 0;
  /// Kinds that the model's tables tell tokens apart by: StepInput::token_types are below it.
  std::int64_t num_token_types = 1;
  /// False: the model has no lm_head, so there are hidden states and no logits.
  bool has_logits = true;
  /// False: attention sees the rows of its own step alone, before and behind. Every sequence is whole in its
  /// step then, and there are no KV blocks.
  bool has_kv_cache = true;

  /// Of a row of logits: vocab_size, then as many of its adapter's new tokens as it brings, then what is not
  /// said.
  [[nodiscard]] std::int64_t logits_width() const { return vocab_size + lora.max_extra_tokens; }

  /// Tokens that a sequence may have under an adapter of this AdapterTerms::rotary_factor, or without one
  /// (1).
  [[nodiscard]] std::int32_t max_seq_len_of(std::int32_t rotary_factor) const {
    if (lora.rotary_factors.empty()) return max_seq_len;
    const std::int64_t positions = std::int64_t{lora.max_base_positions} * rotary_factor;
    return static_cast<std::int32_t>(std::min<std::int64_t>(positions, max_seq_len));
  }

  [[nodiscard]] bool has_encoder() const { return max_encoder_input_len > 0; }
};

/// E tokens of N encoder inputs back to back, each whole. The keys and values that their sequences see are
/// kept in blocks of their own.
struct EncoderInputs {
  std::span<const std::int32_t> token_ids = {};         // [E]
  std::span<const std::int32_t> offsets = {};           // [N + 1], 0 .. E
  std::span<const std::int32_t> block_tables = {};      // [N, max_blocks]; unused entries are -1
  std::span<const DeviceAdapter* const> adapters = {};  // [N]; nullptr: the base model
  /// [N] where the encoder's float32 [tokens, encoder_hidden_size] goes; nullptr: nowhere.
  std::span<float* const> outputs = {};

  [[nodiscard]] bool empty() const { return token_ids.empty(); }
  [[nodiscard]] std::int64_t count() const { return static_cast<std::int64_t>(adapters.size()); }
};

/// T tokens of S sequences back to back, prefill chunks and decodes together. Spans are read during the call
/// only.
struct StepInput {
  std::span<const std::int32_t> token_ids;         // [T]
  std::span<const std::int32_t> positions;         // [T], consecutive within a sequence
  std::span<const std::int32_t> token_types = {};  // [T], below num_token_types; empty: all 0
  std::span<const std::int32_t> sequence_offsets;  // [S + 1], 0 .. T
  std::span<const std::int32_t> prompt_lengths;    // [S], of the request as it was submitted
  /// [S, max_blocks_per_sequence]; unused entries are -1. Not read where there is no KV cache.
  std::span<const std::int32_t> block_tables;
  std::int32_t max_blocks_per_sequence = 0;
  std::span<const DeviceAdapter* const> adapters;  // [S]; nullptr: the base model
  /// [S] the positions from which on adapters act; empty: 0, all of them from the start.
  std::span<const std::int32_t> adapters_from = {};
  std::span<const std::int32_t> logit_rows;  // [R], ascending indices into the T tokens
  /// [C] KV blocks: the content of each is copied to the block at its place in copies_to, in this order and
  /// before the step writes anything.
  std::span<const std::int32_t> copies_from = {};
  std::span<const std::int32_t> copies_to = {};  // [C], none twice
  /// [H], ascending indices into the T tokens; a row may be among logit_rows as well.
  std::span<const std::int32_t> hidden_rows = {};
  /// [G], ascending indices into the T tokens: their embeddings are given. What their token_ids are, any of
  /// the vocabulary, changes nothing.
  std::span<const std::int32_t> given_rows = {};
  /// [G] float32 [given_embedding_size] each, in place of rows of the model's table.
  std::span<const float* const> given_embeddings = {};
  // Of engines with an encoder:
  /// Computed before the step's tokens see them.
  EncoderInputs encoder = {};
  std::span<const std::int32_t> encoder_lengths = {};     // [S] tokens of each sequence's encoder input
  std::span<const std::int32_t> cross_block_tables = {};  // [S, max_cross_blocks]; unused entries are -1
  /// Entries of a row of both tables of encoder inputs' blocks.
  std::int32_t max_cross_blocks = 0;
};

/// Receives logits[rows, logits_width()] of logit_rows[first_row, first_row + rows); valid during the call
/// only. At most max_batch_size rows come at a time, so logits of whole prompts need no room for all of them.
using LogitsSink = std::function<void(std::int64_t first_row, std::int64_t rows, const float* logits)>;

/// Receives float32 [rows, hidden_size] of hidden_rows[first_row, first_row + rows), the hidden states behind
/// the final norm, as LogitsSink does; after all logits of the step.
using HiddenSink = std::function<void(std::int64_t first_row, std::int64_t rows, const float* hidden)>;

/// Where an engine has the weights that it does not map.
struct WeightPlacement {
  std::size_t resident_bytes = 0;  ///< that stay in memory
  std::size_t buffer_bytes = 0;    ///< of memory for those that are read when they are used
  std::size_t file_bytes = 0;      ///< of those that are read when they are used, in the file
  bool is_locked = false;          ///< whether the system was told to keep all of the memory
  bool is_direct = false;          ///< whether reads go past the system's cache of files
  std::uint64_t bytes_read = 0;    ///< so far, the resident ones included

  bool operator==(const WeightPlacement&) const = default;
};

/// A compiled network with its KV pool. One thread at a time.
class Engine {
 public:
  virtual ~Engine() = default;
  [[nodiscard]] virtual const EngineInfo& info() const = 0;
  /// Allocates the KV pool. Called once, before the first step. Throws ConfigError when memory is refused,
  /// EngineError for an engine that has none.
  virtual void allocate_kv_blocks(std::int32_t num_blocks) = 0;
  /// The same of the blocks of encoder inputs. Throws EngineError for an engine without an encoder.
  virtual void allocate_cross_kv_blocks(std::int32_t num_blocks);
  /// Runs one step. Throws StepError for inputs that break StepInput's rules; the KV pool is unchanged then.
  /// `hidden_sink` may be empty where no hidden_rows are asked for.
  virtual void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) = 0;
  void step(const StepInput& input, const LogitsSink& sink) { step(input, sink, {}); }
  /// Begins a step. `input` and its spans stay as they are until await_step() has returned or thrown. Throws
  /// as step(); then there is nothing to wait for. An engine on a device does its work while the caller does
  /// other things; others do all of it in await_step().
  virtual void begin_step(const StepInput& input) { begun_ = &input; }
  /// Waits for the step that begin_step() has begun, and gives its results to the sinks. Throws as step().
  virtual void await_step(const LogitsSink& sink, const HiddenSink& hidden_sink) {
    step(*begun_, sink, hidden_sink);
  }
  /// Copies a block, kv_block_bytes long, out of the KV pool or into it; not during a step. What is written
  /// was read from the same or a larger pool of an engine with the same EngineInfo. Throws EngineError
  /// without a kv_identity.
  virtual void read_kv_block(std::int32_t block, std::span<std::byte> bytes) const;
  virtual void write_kv_block(std::int32_t block, std::span<const std::byte> bytes);
  /// No step follows: gives up what only steps need, such as threads. Blocks can still be read.
  virtual void end_steps() {}
  /// Bytes that are free now on a device with memory of its own, on which the KV pool and the adapters' pages
  /// are allocated; nullopt: they are in host memory.
  [[nodiscard]] virtual std::optional<std::size_t> free_device_memory() const { return std::nullopt; }
  /// nullopt: all weights are mapped, or on a device.
  [[nodiscard]] virtual std::optional<WeightPlacement> weight_placement() const { return std::nullopt; }
  /// Memory for adapters where step() reads them; the engine outlives it. `num_copy_streams` loads are copied
  /// to the device at a time; it is 1 in host memory. Throws ConfigError when memory is refused.
  [[nodiscard]] virtual std::unique_ptr<AdapterPages> make_adapter_pages(std::size_t page_bytes,
                                                                         std::int64_t num_pages,
                                                                         std::int32_t num_copy_streams);

 private:
  const StepInput* begun_ = nullptr;
};

}  // namespace adaptrt
