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

#include "adaptrt/core/best_token.h"
#include "adaptrt/core/highest_logits.h"
#include "adaptrt/core/thread_pool.h"
#include "adaptrt/engine/communicator.h"
#include "adaptrt/engine/step_profile.h"
#include "adaptrt/lora/adapter_pages.h"
#include "adaptrt/lora/layout.h"

namespace adaptrt {

/// Facts about an engine that an executor needs. They are the same for all kinds of engines.
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
  /// Maximum length of a prompt whose KV other requests may share (see RopeKind::kDynamic).
  std::int32_t max_reusable_prompt_len = 0;
  LoraLayout lora;
  /// Number of stages of the pipeline; see Program.
  std::int32_t num_stages = 1;
  /// Name of the CPU's kernel table; empty: the engine runs on a device.
  std::string kernels = {};
  /// Program::identity; empty if blocks of the KV pool cannot be read and written.
  std::string kv_identity = {};
  /// AttentionOp::sliding_window of each layer; empty if not known.
  std::vector<std::int32_t> attention_windows = {};
  /// True if the engine reads StepInput::adapter_start_positions.
  bool has_adapter_start_positions = false;
  /// Maximum number of tokens in an encoder input; 0: the engine has no encoder.
  std::int32_t max_encoder_input_len = 0;
  /// Width of the rows in EncoderInputs::outputs.
  std::int64_t encoder_hidden_size = 0;
  /// Bytes of one block of encoder inputs' keys and values (tokens_per_block tokens), over all layers.
  std::size_t cross_kv_block_bytes = 0;
  /// Width of the rows that HiddenSink gets; 0: the engine does not return hidden states.
  std::int64_t hidden_size = 0;
  /// Width of StepInput::prompt_embeddings; 0: the engine takes none.
  std::int64_t prompt_embedding_size = 0;
  /// Number of coordinates, the last elements of each of StepInput::prompt_embeddings (see EmbeddingOp).
  std::int32_t num_coordinates = 0;
  /// Column of StepInput::prompt_embeddings by which neighbours attend to each other
  /// (AttentionOp::joint_column); -1: tokens attend only to earlier ones.
  std::int32_t joint_column = -1;
  /// Number of token types of the model; StepInput::token_types are below it.
  std::int64_t num_token_types = 1;
  /// False: the model has no lm_head; it returns hidden states and no logits.
  bool has_logits = true;
  /// False: attention sees only rows of the same step, earlier and later ones. Each step then has whole
  /// sequences, and there are no KV blocks.
  bool has_kv_cache = true;
  /// Bytes of the states that one sequence keeps between steps, over all layers; 0: the network keeps none.
  /// An engine with states has has_kv_cache; kv_block_bytes is 0 if none of its layers has attention.
  std::size_t state_bytes = 0;
  /// True if the engine takes StepInput::best_token_rows.
  bool finds_best_tokens = false;
  /// True if the engine takes StepInput::highest.
  bool finds_highest_logits = false;

  /// Width of a row of logits: vocab_size, followed by room for the most new tokens of any adapter. Values
  /// after the new tokens of the row's adapter are undefined.
  [[nodiscard]] std::int64_t logits_width() const { return vocab_size + lora.max_extra_tokens; }

  /// Maximum number of tokens in a sequence whose adapter has this AdapterTerms::rotary_factor (1 without an
  /// adapter).
  [[nodiscard]] std::int32_t max_seq_len_of(std::int32_t rotary_factor) const {
    if (lora.rotary_factors.empty()) return max_seq_len;
    const std::int64_t positions = std::int64_t{lora.max_base_positions} * rotary_factor;
    return static_cast<std::int32_t>(std::min<std::int64_t>(positions, max_seq_len));
  }

  [[nodiscard]] bool has_encoder() const { return max_encoder_input_len > 0; }
  [[nodiscard]] bool has_states() const { return state_bytes > 0; }
};

/// Limit of StepInput::rotary_positions. All of them are exact in float32.
inline constexpr std::int32_t kMaxRotaryPosition = 1 << 24;

/// N whole encoder inputs with E tokens in total, one after the other. Their keys and values are stored in
/// separate blocks.
struct EncoderInputs {
  std::span<const std::int32_t> token_ids = {};         // [E]
  std::span<const std::int32_t> offsets = {};           // [N + 1], 0 .. E
  std::span<const std::int32_t> block_tables = {};      // [N, max_blocks]; unused entries are -1
  std::span<const DeviceAdapter* const> adapters = {};  // [N]; nullptr: the base model
  /// [N] destination of the encoder's output, float32 [tokens, encoder_hidden_size]; nullptr: not wanted.
  std::span<float* const> outputs = {};

  [[nodiscard]] bool empty() const { return token_ids.empty(); }
  [[nodiscard]] std::int64_t count() const { return static_cast<std::int64_t>(adapters.size()); }
};

/// Rows of which the host needs only the highest logits. The engine writes its results before step() or
/// await_step() returns.
struct HighestRows {
  std::span<const std::int32_t> rows = {};  // [B], ascending indices into the T tokens
  /// Logits to find of each row: 1 to kMaxHighestLogits, at most vocab_size.
  std::int32_t count = 0;
  std::span<RowSummary> summaries = {};  // [B]
  std::span<TokenLogit> logits = {};     // [B, count]

  [[nodiscard]] bool empty() const { return rows.empty(); }
};

/// T tokens of S sequences, one after the other; prefill chunks and decodes together. Spans are read only
/// during the call.
struct StepInput {
  std::span<const std::int32_t> token_ids;         // [T]
  std::span<const std::int32_t> positions;         // [T], consecutive within a sequence
  std::span<const std::int32_t> token_types = {};  // [T], below num_token_types; empty: all 0
  /// [T] positions by which tokens are rotated, from 0 to kMaxRotaryPosition; empty: `positions`.
  std::span<const std::int32_t> rotary_positions = {};
  std::span<const std::int32_t> sequence_offsets;  // [S + 1], 0 .. T
  std::span<const std::int32_t> prompt_lengths;    // [S], of the request as it was submitted
  /// [S, max_blocks_per_sequence]; unused entries are -1. Ignored without a KV cache.
  std::span<const std::int32_t> block_tables;
  std::int32_t max_blocks_per_sequence = 0;
  std::span<const DeviceAdapter* const> adapters;  // [S]; nullptr: the base model
  /// [S] first position at which each adapter acts; empty: 0 for all.
  std::span<const std::int32_t> adapter_start_positions = {};
  std::span<const std::int32_t> logit_rows;  // [R], ascending indices into the T tokens
  /// [C] KV blocks. Before the step writes anything, copies_from[i] is copied to copies_to[i], in this order.
  std::span<const std::int32_t> copies_from = {};
  std::span<const std::int32_t> copies_to = {};  // [C], each block once
  /// [H], ascending indices into the T tokens; a row may also be in logit_rows.
  std::span<const std::int32_t> hidden_rows = {};
  /// [G], ascending indices into the T tokens that have given embeddings. Their token_ids have no effect, but
  /// must be in the vocabulary.
  std::span<const std::int32_t> prompt_embedding_rows = {};
  /// [G] pointers to float32 [prompt_embedding_size], which replace rows of the model's table.
  std::span<const float* const> prompt_embeddings = {};
  // For engines that find best tokens (otherwise empty), which then copy 4 bytes of such a row to the host:
  /// [A], ascending indices into the T tokens; none of them is in logit_rows.
  std::span<const std::int32_t> best_token_rows = {};
  /// [A] Before step() or await_step() returns, the engine writes the index of the largest of each row's
  /// vocab_size logits, the smallest index of equal ones (-0 equals 0); or a value of core/best_token.h.
  std::span<std::int32_t> best_tokens = {};
  /// For engines that find highest logits (otherwise empty). None of the rows is in another list of rows.
  HighestRows highest = {};
  // For engines with states (otherwise empty). A step advances the state in a sequence's slot over all tokens
  // that the sequence has in the step. A sequence whose first position in the step is 0 starts with zeros,
  // whatever its slot holds.
  std::span<const std::int32_t> state_slots = {};  // [S], each slot once
  /// [D] slots. Before the step writes anything, state_copies_from[i] is copied to state_copies_to[i], in
  /// this order.
  std::span<const std::int32_t> state_copies_from = {};
  std::span<const std::int32_t> state_copies_to = {};  // [D], each slot once
  // For engines with an encoder:
  /// Computed before the step's tokens attend to them.
  EncoderInputs encoder = {};
  std::span<const std::int32_t> encoder_lengths = {};     // [S] length of each sequence's encoder input
  std::span<const std::int32_t> cross_block_tables = {};  // [S, max_cross_blocks]; unused entries are -1
  /// Entries in a row of cross_block_tables and of EncoderInputs::block_tables.
  std::int32_t max_cross_blocks = 0;
};

/// Receives logits [rows, logits_width()] of logit_rows[first_row, first_row + rows). They are valid only
/// during the call. Each call has at most max_batch_size rows, so that logits of whole prompts need little
/// memory.
using LogitsSink = std::function<void(std::int64_t first_row, std::int64_t rows, const float* logits)>;

/// Receives the hidden states after the final norm, float32 [rows, hidden_size], of
/// hidden_rows[first_row, first_row + rows). Called like LogitsSink, after all logits of the step.
using HiddenSink = std::function<void(std::int64_t first_row, std::int64_t rows, const float* hidden)>;

/// Memory and file reads of an engine that does not map its weights.
struct WeightPlacement {
  std::size_t resident_bytes = 0;  ///< weights that stay in memory
  std::size_t buffer_bytes = 0;    ///< memory for weights that are read when they are used
  std::size_t file_bytes = 0;      ///< size in the file of weights that are read when they are used
  bool is_locked = false;          ///< true if all of this memory is locked
  bool is_direct = false;          ///< true if reads bypass the system's page cache
  std::uint64_t bytes_read = 0;    ///< so far, including resident weights

  bool operator==(const WeightPlacement&) const = default;
};

/// A compiled network with its KV pool. Only one thread may use it at a time.
class Engine {
 public:
  virtual ~Engine() = default;
  [[nodiscard]] virtual const EngineInfo& info() const = 0;
  /// Allocates the KV pool. Call it once, before the first step. Throws ConfigError if the memory cannot be
  /// allocated, EngineError for an engine without a KV pool.
  virtual void allocate_kv_blocks(std::int32_t num_blocks) = 0;
  /// Allocates the blocks of encoder inputs. Throws EngineError for an engine without an encoder.
  virtual void allocate_cross_kv_blocks(std::int32_t num_blocks);
  /// Allocates slots for states, of state_bytes each. Call it once, before the first step. Throws ConfigError
  /// if the memory cannot be allocated, EngineError for an engine without states.
  virtual void allocate_states(std::int32_t num_slots);
  /// Runs one step. Throws StepError for inputs that break StepInput's rules; the KV pool is then unchanged.
  /// `hidden_sink` may be empty if `input` has no hidden_rows.
  virtual void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) = 0;
  void step(const StepInput& input, const LogitsSink& sink) { step(input, sink, {}); }
  /// Begins a step. `input` and its spans must not change until await_step() has returned or thrown. Throws
  /// like step(); await_step() must not be called then. An engine on a device works while the caller does
  /// other things; other engines do all work in await_step().
  virtual void begin_step(const StepInput& input) { begun_ = &input; }
  /// Waits for the step that begin_step() began, and passes its results to the sinks. Throws like step().
  virtual void await_step(const LogitsSink& sink, const HiddenSink& hidden_sink) {
    step(*begun_, sink, hidden_sink);
  }
  /// True if begin_ahead() works.
  [[nodiscard]] virtual bool can_look_ahead() const { return false; }
  /// Begins a step after another one that was begun and not awaited; await_step() then returns the older one
  /// first. Token i is the best token of row previous_rows[i] of the older step, so the host need not know
  /// it; `token_ids` have no effect. Both steps have one token per sequence and no logit_rows. Each row of
  /// previous_rows is in the older step's best_token_rows or highest.rows. The adapters are among those of
  /// the older step. After a row without a best token the token is 0. Only the spans of `input` must not
  /// change until the step was awaited.
  ///
  /// Throws like step(). The older step then goes on, and must be awaited. If await_step() throws for the
  /// older step, the younger one has no useful results, and must be awaited too. Throws EngineError if
  /// can_look_ahead() is false.
  virtual void begin_ahead(const StepInput& input, std::span<const std::int32_t> previous_rows);
  /// Copies a block of kv_block_bytes out of the KV pool or into it. Do not call them during a step. Bytes
  /// that are written must have been read from this pool, or from a pool of an engine with the same
  /// EngineInfo. Throws EngineError without a kv_identity.
  virtual void read_kv_block(std::int32_t block, std::span<std::byte> bytes) const;
  virtual void write_kv_block(std::int32_t block, std::span<const std::byte> bytes);
  /// The same for the state_bytes in a slot. Throws EngineError without states.
  virtual void read_states(std::int32_t slot, std::span<std::byte> bytes) const;
  virtual void write_states(std::int32_t slot, std::span<const std::byte> bytes);
  /// Frees resources that only steps need, such as threads; no step may follow. Blocks can still be read.
  virtual void end_steps() {}
  /// Bytes that are free now on the device that holds the KV pool and the adapters' pages; nullopt if these
  /// are in host memory.
  [[nodiscard]] virtual std::optional<std::size_t> free_device_memory() const { return std::nullopt; }
  /// Returns nullopt if all weights are mapped or on a device.
  [[nodiscard]] virtual std::optional<WeightPlacement> weight_placement() const { return std::nullopt; }
  /// Makes memory for adapters where step() reads them; the engine must outlive it. At most
  /// `num_copy_streams` adapters are copied to a device at a time. Throws ConfigError if the memory cannot be
  /// allocated.
  [[nodiscard]] virtual std::unique_ptr<AdapterPages> make_adapter_pages(std::size_t page_bytes,
                                                                         std::int64_t num_pages,
                                                                         std::int32_t num_copy_streams);

 private:
  const StepInput* begun_ = nullptr;
};

}  // namespace adaptrt
