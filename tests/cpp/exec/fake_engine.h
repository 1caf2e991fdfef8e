#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/engine/check_step_input.h"
#include "adaptrt/engine/engine.h"
#include "adaptrt/exec/executor.h"

namespace adaptrt::test {

/// An engine whose logits depend on the whole history of a sequence, read back from "KV" in blocks. Any error
/// in planning, block tables, preemptions or shared prefixes changes the logits.
class FakeEngine : public Engine {
 public:
  struct Options {
    std::int32_t max_batch_size = 8;
    std::int32_t max_num_tokens = 64;
    std::int32_t max_input_len = 96;
    std::int32_t max_seq_len = 128;
    std::int32_t max_beam_width = 1;
    std::int32_t tokens_per_block = 4;
    std::int64_t vocab_size = 101;
    bool with_lora = true;
    /// See EngineInfo.
    std::int64_t hidden_size = 6;
    bool has_logits = true;
    /// Called by the loading thread before each adapter load; may throw or wait.
    std::function<void()> in_load = [] {};
    /// See EngineInfo; empty: KV blocks cannot be read.
    std::string kv_identity = {};
    /// Free memory of a separate device; nullopt: the engine uses host memory.
    std::optional<std::size_t> free_device_memory = std::nullopt;
    /// True for an engine that keeps states: its logits then depend on the state in a sequence's slot too.
    bool has_states = false;
    /// See EngineInfo.
    bool finds_best_tokens = false;
    bool finds_highest_logits = false;
    /// When a step that is begun ahead is computed, if it can be.
    enum class Ahead : std::uint8_t {
      kNever,
      kEarly,  ///< before the host gets the results of the step before
      kLate,   ///< when it is awaited
    };
    Ahead ahead = Ahead::kNever;
  };
  /// Called at the start of each step, on the executor's thread, with the number of earlier steps; may throw
  /// or wait.
  using Hook = std::function<void(std::int64_t step)>;

  explicit FakeEngine(Options options, Hook hook = {});
  FakeEngine() : FakeEngine(Options{}) {}

  [[nodiscard]] const EngineInfo& info() const override { return info_; }
  void allocate_kv_blocks(std::int32_t num_blocks) override;
  void allocate_states(std::int32_t num_slots) override;
  using Engine::step;
  void step(const StepInput& input, const LogitsSink& sink, const HiddenSink& hidden_sink) override;
  void begin_step(const StepInput& input) override;
  void await_step(const LogitsSink& sink, const HiddenSink& hidden_sink) override;
  [[nodiscard]] bool can_look_ahead() const override { return ahead_ != Options::Ahead::kNever; }
  void begin_ahead(const StepInput& input, std::span<const std::int32_t> previous_rows) override;
  void read_kv_block(std::int32_t block, std::span<std::byte> bytes) const override;
  void write_kv_block(std::int32_t block, std::span<const std::byte> bytes) override;
  void read_states(std::int32_t slot, std::span<std::byte> bytes) const override;
  void write_states(std::int32_t slot, std::span<const std::byte> bytes) override;
  [[nodiscard]] std::optional<std::size_t> free_device_memory() const override { return free_device_memory_; }
  [[nodiscard]] std::unique_ptr<AdapterPages> make_adapter_pages(std::size_t page_bytes,
                                                                 std::int64_t num_pages,
                                                                 std::int32_t num_copy_streams) override;

  /// Number of tokens that steps have computed.
  [[nodiscard]] std::int64_t num_tokens() const { return num_tokens_; }
  /// Number of states that steps have copied.
  [[nodiscard]] std::int64_t num_state_copies() const { return num_state_copies_; }
  /// Number of KV blocks that steps have copied.
  [[nodiscard]] std::int64_t num_copies() const { return num_copies_; }
  /// Number of rows of logits, and of best tokens, that steps have returned.
  [[nodiscard]] std::int64_t num_logit_rows() const { return num_logit_rows_; }
  [[nodiscard]] std::int64_t num_best_tokens() const { return num_best_tokens_; }
  [[nodiscard]] std::int64_t num_highest_rows() const { return num_highest_rows_; }
  /// Number of steps that were begun ahead.
  [[nodiscard]] std::int64_t num_ahead() const { return num_ahead_; }
  /// Number of steps that were begun and not awaited.
  [[nodiscard]] std::int32_t num_in_flight() const { return num_in_flight_; }
  /// The most logits that a step wanted of such a row.
  [[nodiscard]] std::int32_t max_highest() const { return max_highest_; }

  /// Returns the logits after `history`, computed directly from the tokens.
  [[nodiscard]] static std::vector<float> logits_after(const std::vector<TokenId>& history,
                                                       std::uint64_t task_id, std::int64_t vocab_size);
  /// Returns the hidden state of the last token of `history`.
  [[nodiscard]] static std::vector<float> hidden_after(const std::vector<TokenId>& history,
                                                       std::uint64_t task_id, std::int64_t hidden_size);

 private:
  struct Slot {
    std::uint64_t value = 0;
    std::uint64_t is_written = 0;
  };
  /// A step that was begun. If it was begun ahead and is computed early, its results wait here.
  struct Flight {
    StepInput input;
    std::vector<std::int32_t> previous_rows;
    std::vector<std::int32_t> token_ids;
    bool is_computed = false;
    std::exception_ptr error;
    std::vector<std::int32_t> best_tokens;
    std::vector<RowSummary> summaries;
    std::vector<TokenLogit> highest;
  };
  /// Returns the input of a step after `previous`, which is computed, with its tokens.
  static StepInput with_tokens(Flight& flight, const StepInput& previous);
  void compute_early(Flight& flight);
  /// Copies states, and advances those of the step's sequences.
  void advance_states(const StepInput& input);
  [[nodiscard]] Slot& slot(const StepInput& input, std::size_t sequence, std::int32_t position);
  /// Calls `write` for the history up to each of `rows`, and passes the results to the sink, a few rows at a
  /// time.
  template <class Write>
  void make_rows(const StepInput& input, std::span<const std::int32_t> rows, std::int64_t width,
                 std::vector<float>& memory,
                 const std::function<void(std::int64_t, std::int64_t, const float*)>& sink,
                 const Write& write);

  EngineInfo info_;
  Hook hook_;
  std::function<void()> in_load_;
  std::optional<std::size_t> free_device_memory_;
  Options::Ahead ahead_;
  std::array<Flight, 2> flights_;  // the oldest first
  std::vector<Slot> slots_;
  std::vector<std::uint64_t> states_;      // by slot: hash of all tokens so far
  std::vector<std::uint64_t> row_states_;  // state after each token of the step
  StepInputChecker checker_;
  std::vector<float> logits_;  // a member, so that steps allocate nothing
  std::vector<float> hidden_;
  std::int64_t num_steps_ = 0;
  std::atomic<std::int64_t> num_copies_ = 0;
  std::atomic<std::int64_t> num_state_copies_ = 0;
  std::atomic<std::int64_t> num_tokens_ = 0;
  std::atomic<std::int64_t> num_logit_rows_ = 0;
  std::atomic<std::int64_t> num_best_tokens_ = 0;
  std::atomic<std::int64_t> num_highest_rows_ = 0;
  std::atomic<std::int32_t> max_highest_ = 0;
  std::atomic<std::int64_t> num_ahead_ = 0;
  std::atomic<std::int32_t> num_in_flight_ = 0;
};

/// Greedy tokens of a request that runs alone.
[[nodiscard]] std::vector<TokenId> expected_tokens(std::vector<TokenId> prompt, std::int32_t count,
                                                   std::uint64_t task_id = 0, std::int64_t vocab_size = 101);

/// Makes an adapter of rank `rank` for FakeEngine's one site; equal seeds give equal weights. A higher rank
/// takes more device pages.
[[nodiscard]] LoraConfig fake_adapter(std::uint64_t task_id, std::int32_t rank = 4, float seed = 1.0F);
/// Makes a LoraConfig without weights.
[[nodiscard]] LoraConfig task_alone(std::uint64_t task_id);

[[nodiscard]] Request make_request(std::vector<TokenId> prompt, std::int32_t max_tokens);
/// Makes a value for fields that are refused; its type has this name.
[[nodiscard]] Unsupported given(const std::string& type_name);
/// Makes a one-dimensional Request::embedding_bias.
[[nodiscard]] FloatTensor bias_of(const std::vector<float>& values);

/// Enough for all KV blocks that the engine can use, and for several hundred adapters.
inline constexpr std::size_t kAvailableMemory = std::size_t{16} << 20;

/// Throws all problems of check_invariants(), which ends the executor and fails the test.
void check_every_step(const StepPlan* plan, const Scheduler& scheduler, const LoraCache* lora_cache,
                      const DraftEngine* draft_engine);

/// Makes an executor over a FakeEngine, with invariants checked after every step.
[[nodiscard]] std::unique_ptr<Executor> make_executor(const ExecutorConfig& config = {},
                                                      FakeEngine::Options options = {},
                                                      FakeEngine::Hook hook = {});

/// The same with a draft engine; `config` must have a draft_target_decoding_config.
[[nodiscard]] std::unique_ptr<Executor> make_drafting_executor(const ExecutorConfig& config,
                                                               const FakeEngine::Options& options,
                                                               std::shared_ptr<FakeEngine> draft_engine);

/// Waits for a request's end and returns its responses in order. Fails the test after a minute.
[[nodiscard]] std::vector<Response> collect(Executor& executor, RequestId id);
/// Returns the only result of a request without streaming. Fails the test on an error response.
[[nodiscard]] Result collect_result(Executor& executor, RequestId id);

/// A gate at which a hook waits.
class Gate {
 public:
  void open();
  void wait();
  /// Waits until a thread waits at the gate.
  void await_visitor();

 private:
  std::atomic<bool> is_open_ = false;
  std::atomic<bool> has_visitor_ = false;
};

}  // namespace adaptrt::test
