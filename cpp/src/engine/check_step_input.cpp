#include "adaptrt/engine/check_step_input.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"

namespace adaptrt {
namespace {

class StepChecker {
 public:
  StepChecker(const StepInput& input, const EngineInfo& info, std::int32_t num_blocks,
              std::int32_t num_state_slots)
      : input_(input), info_(info), num_blocks_(num_blocks), num_state_slots_(num_state_slots) {}

  /// `newest_writes` has an entry for each KV block, `newest_holders` for each state slot; `step` is greater
  /// than all entries.
  void run(std::uint64_t step, std::vector<std::uint64_t>& newest_writes,
           std::vector<std::uint64_t>& newest_holders) {
    // Each stage reads only data that the earlier stages have found valid.
    check_sizes();
    finish();
    check_offsets();
    finish();
    check_tokens();
    check_types();
    check_rotary_positions();
    check_rows("logit_rows", input_.logit_rows);
    check_rows("hidden_rows", input_.hidden_rows);
    check_rows("prompt_embedding_rows", input_.prompt_embedding_rows);
    check_rows("best_token_rows", input_.best_token_rows);
    check_best_token_rows();
    check_rows("highest.rows", input_.highest.rows);
    check_highest_rows();
    if (!info_.has_logits && !input_.logit_rows.empty())
      add("logit_rows are given; the model has no lm_head");
    if (info_.hidden_size == 0 && !input_.hidden_rows.empty()) {
      add("hidden_rows are given; the engine does not tell hidden states");
    }
    if (info_.prompt_embedding_size == 0 && !input_.prompt_embedding_rows.empty()) {
      add("prompt_embedding_rows are given; the engine takes no embeddings");
    }
    finish();
    for (std::int64_t sequence = 0; sequence < sequences_; ++sequence) check_sequence(sequence);
    finish();
    newest_writes.resize(static_cast<std::size_t>(num_blocks_));
    check_copies("block", "the pool", num_blocks_, input_.copies_from, input_.copies_to);
    if (info_.has_states()) {
      newest_holders.resize(static_cast<std::size_t>(num_state_slots_));
      check_state_slots(step, newest_holders);
      check_copies("state", "the engine", num_state_slots_, input_.state_copies_from, input_.state_copies_to);
    }
    finish();
    if (info_.has_kv_cache) check_shared_blocks(step, newest_writes);
    finish();
  }

 private:
  void finish() const { problems_.throw_if_any<StepError>("engine step"); }
  void add(std::string problem) { problems_.add(std::move(problem)); }
  void add_of(std::int64_t sequence, const std::string& problem) {
    add("sequence " + text(sequence) + ": " + problem);
  }

  template <class Span>
  void check_size(const char* name, const Span& span, std::int64_t size) {
    if (static_cast<std::int64_t>(span.size()) != size) {
      add(std::string(name) + " has " + std::to_string(span.size()) + " elements, not " + text(size));
    }
  }

  void check_sizes() {
    tokens_ = static_cast<std::int64_t>(input_.token_ids.size());
    sequences_ = static_cast<std::int64_t>(input_.prompt_lengths.size());
    if (info_.has_kv_cache && num_blocks_ == 0) add("the KV pool is not allocated");
    if (tokens_ < 1 || tokens_ > info_.max_num_tokens) {
      add(text(tokens_) + " tokens; a step takes 1 to max_num_tokens " + text(info_.max_num_tokens));
    }
    if (sequences_ < 1 || sequences_ > info_.max_batch_size) {
      add(text(sequences_) + " sequences; a step takes 1 to max_batch_size " + text(info_.max_batch_size));
    }
    if (info_.has_kv_cache && input_.max_blocks_per_sequence < 1) {
      add("max_blocks_per_sequence is less than 1");
    }
    check_size("positions", input_.positions, tokens_);
    if (!input_.token_types.empty()) check_size("token_types", input_.token_types, tokens_);
    if (!input_.rotary_positions.empty()) check_size("rotary_positions", input_.rotary_positions, tokens_);
    check_size("sequence_offsets", input_.sequence_offsets, sequences_ + 1);
    check_size("block_tables", input_.block_tables, sequences_ * input_.max_blocks_per_sequence);
    check_size("adapters", input_.adapters, sequences_);
    if (!input_.adapter_start_positions.empty())
      check_size("adapter_start_positions", input_.adapter_start_positions, sequences_);
    check_size("copies_to", input_.copies_to, static_cast<std::int64_t>(input_.copies_from.size()));
    if (info_.has_states() && num_state_slots_ == 0) add("the states are not allocated");
    if (!info_.has_states() && !(input_.state_slots.empty() && input_.state_copies_from.empty())) {
      add("state slots are given; the engine keeps no states");
    }
    check_size("state_slots", input_.state_slots, info_.has_states() ? sequences_ : 0);
    check_size("state_copies_to", input_.state_copies_to,
               static_cast<std::int64_t>(input_.state_copies_from.size()));
    check_size("prompt_embeddings", input_.prompt_embeddings,
               static_cast<std::int64_t>(input_.prompt_embedding_rows.size()));
    check_size("best_tokens", input_.best_tokens, static_cast<std::int64_t>(input_.best_token_rows.size()));
    const HighestRows& highest = input_.highest;
    check_size("highest.summaries", highest.summaries, std::ssize(highest.rows));
    check_size("highest.logits", highest.logits, std::ssize(highest.rows) * highest.count);
  }

  void check_offsets() {
    const auto& offsets = input_.sequence_offsets;
    if (offsets.front() != 0 || offsets.back() != tokens_)
      add("sequence_offsets do not run from 0 to the tokens");
    for (std::size_t i = 1; i < offsets.size(); ++i) {
      if (offsets[i] <= offsets[i - 1]) add("sequence " + std::to_string(i - 1) + " has no tokens");
    }
  }

  void check_tokens() {
    for (std::size_t t = 0; t < input_.token_ids.size(); ++t) {
      const std::int64_t id = input_.token_ids[t];
      // check_new_tokens() checks tokens beyond the vocabulary, which depend on the adapter.
      if (id < 0 || id >= info_.logits_width()) {
        add("token " + std::to_string(t) + " is " + text(id) + "; the vocabulary has " +
            text(info_.vocab_size));
      }
    }
  }

  void check_types() {
    for (std::size_t t = 0; t < input_.token_types.size(); ++t) {
      const std::int64_t type = input_.token_types[t];
      if (type < 0 || type >= info_.num_token_types) {
        add("token " + std::to_string(t) + " has type " + text(type) + "; the model has " +
            text(info_.num_token_types));
      }
    }
  }

  void check_rotary_positions() {
    for (std::size_t t = 0; t < input_.rotary_positions.size(); ++t) {
      const std::int64_t position = input_.rotary_positions[t];
      if (position < 0 || position > kMaxRotaryPosition) {
        add("token " + std::to_string(t) + " has rotary position " + text(position) + "; accepted: 0 to " +
            text(kMaxRotaryPosition));
      }
    }
  }

  void check_rows(const char* name, std::span<const std::int32_t> rows) {
    std::int64_t before = -1;
    for (const std::int64_t row : rows) {
      if (row <= before || row >= tokens_) add(std::string(name) + " do not ascend within the tokens");
      before = row;
    }
  }

  void check_best_token_rows() {
    const auto& rows = input_.best_token_rows;
    if (rows.empty()) return;
    if (!info_.finds_best_tokens) add("best_token_rows are given; the engine does not find best tokens");
    if (!info_.has_logits) add("best_token_rows are given; the model has no lm_head");
    check_disjoint("logit_rows", input_.logit_rows, "best_token_rows", rows);
  }

  void check_highest_rows() {
    const HighestRows& highest = input_.highest;
    if (highest.empty()) return;
    if (!info_.finds_highest_logits) add("highest.rows are given; the engine does not find highest logits");
    if (!info_.has_logits) add("highest.rows are given; the model has no lm_head");
    const std::int64_t most = std::min<std::int64_t>(kMaxHighestLogits, info_.vocab_size);
    if (highest.count < 1 || highest.count > most) {
      add("highest.count is " + text(highest.count) + "; expected 1 to " + text(most));
    }
    check_disjoint("logit_rows", input_.logit_rows, "highest.rows", highest.rows);
    check_disjoint("best_token_rows", input_.best_token_rows, "highest.rows", highest.rows);
  }

  /// Both lists ascend.
  void check_disjoint(const std::string& first_name, std::span<const std::int32_t> first,
                      const std::string& second_name, std::span<const std::int32_t> second) {
    auto at = first.begin();
    for (const std::int32_t row : second) {
      at = std::find_if(at, first.end(), [&](auto other) { return other >= row; });
      if (at != first.end() && *at == row) {
        add("row " + text(row) + " is in " + first_name + " and in " + second_name);
      }
    }
  }

  [[nodiscard]] std::int64_t begin_of(std::int64_t sequence) const {
    return input_.sequence_offsets[static_cast<std::size_t>(sequence)];
  }
  [[nodiscard]] const std::int32_t* table_of(std::int64_t sequence) const {
    return input_.block_tables.data() + sequence * input_.max_blocks_per_sequence;
  }
  [[nodiscard]] std::int64_t first_position(std::int64_t sequence) const {
    return input_.positions[static_cast<std::size_t>(begin_of(sequence))];
  }
  [[nodiscard]] std::int64_t last_position(std::int64_t sequence) const {
    return input_.positions[static_cast<std::size_t>(begin_of(sequence + 1) - 1)];
  }

  void check_sequence(std::int64_t sequence) {
    const std::int64_t first = first_position(sequence);
    const std::int64_t tokens = begin_of(sequence + 1) - begin_of(sequence);
    const DeviceAdapter* adapter = input_.adapters[static_cast<std::size_t>(sequence)];
    const std::int32_t factor = adapter == nullptr ? 1 : adapter->rotary_factor;
    if (!has_rotary_factor(factor)) {
      add_of(sequence,
             "its adapter divides positions by " + text(factor) + ", which the engine does not know");
      return;
    }
    if (first < 0 || first + tokens > info_.max_seq_len_of(factor)) {
      add_of(sequence, "positions lie outside [0, max_seq_len " + text(info_.max_seq_len_of(factor)) + ")");
      return;
    }
    for (std::int64_t i = 0; i < tokens; ++i) {
      if (input_.positions[static_cast<std::size_t>(begin_of(sequence) + i)] != first + i) {
        add_of(sequence, "positions are not consecutive");
        return;
      }
    }
    const std::int64_t prompt = input_.prompt_lengths[static_cast<std::size_t>(sequence)];
    if (prompt < 1 || prompt > info_.max_seq_len) {
      add_of(sequence,
             "prompt length " + text(prompt) + " is not in [1, max_seq_len " + text(info_.max_seq_len) + "]");
    }
    if (info_.has_kv_cache) {
      check_blocks(sequence, (first + tokens - 1) / info_.tokens_per_block + 1);
    } else if (first != 0 || tokens != prompt) {
      add_of(sequence, "has " + text(tokens) + " of " + text(prompt) + " tokens from position " +
                           text(first) +
                           " on; the engine keeps no keys and values and computes sequences whole");
    }
    check_adapter(sequence, adapter);
    check_adapter_from(sequence, factor);
    check_new_tokens(sequence, adapter);
  }

  [[nodiscard]] bool has_rotary_factor(std::int32_t factor) const {
    const auto& factors = info_.lora.rotary_factors;
    return factor == 1 || std::ranges::find(factors, factor) != factors.end();
  }

  /// Tokens beyond the vocabulary must belong to the sequence's adapter, and it must act from position 0 on.
  void check_new_tokens(std::int64_t sequence, const DeviceAdapter* adapter) {
    const std::int32_t site = new_tokens_site(info_.lora);
    if (site < 0 || !problems_.empty()) return;
    const std::int64_t brought =
        adapter == nullptr ? 0 : adapter->sites[static_cast<std::size_t>(site)].total_rank;
    const bool is_whole = input_.adapter_start_positions.empty() ||
                          input_.adapter_start_positions[static_cast<std::size_t>(sequence)] == 0;
    for (std::int64_t t = begin_of(sequence); t < begin_of(sequence + 1); ++t) {
      const std::int64_t id = input_.token_ids[static_cast<std::size_t>(t)];
      if (id < info_.vocab_size || (is_whole && id < info_.vocab_size + brought)) continue;
      add_of(sequence, "token " + text(t) + " is " + text(id) + "; the vocabulary has " +
                           text(info_.vocab_size) + ", and its adapter brings " + text(brought) + " more");
      return;
    }
  }

  void check_blocks(std::int64_t sequence, std::int64_t blocks) {
    if (blocks > input_.max_blocks_per_sequence) {
      add_of(sequence,
             "needs " + text(blocks) + " blocks; its table has " + text(input_.max_blocks_per_sequence));
      return;
    }
    for (std::int64_t i = 0; i < blocks; ++i) {
      const std::int32_t block = table_of(sequence)[i];
      if (block < 0 || block >= num_blocks_) {
        add_of(sequence, "entry " + text(i) + " of its block table is " + text(block) + "; the pool has " +
                             text(num_blocks_) + " blocks");
      }
    }
  }

  void check_adapter_from(std::int64_t sequence, std::int32_t rotary_factor) {
    if (input_.adapter_start_positions.empty()) return;
    const std::int64_t from = input_.adapter_start_positions[static_cast<std::size_t>(sequence)];
    if (from == 0 || (from > 0 && info_.has_adapter_start_positions && rotary_factor == 1)) return;
    add_of(sequence,
           "its adapter acts from position " + text(from) + " on; " +
               (from < 0                             ? "it must be 0 or more"
                : !info_.has_adapter_start_positions ? "the engine's act from 0 on"
                                                     : "those that divide positions act from 0 on"));
  }

  void check_adapter(std::int64_t sequence, const DeviceAdapter* adapter) {
    if (adapter == nullptr || adapter == last_sound_adapter_) return;
    const auto add_of_adapter = [&](const std::string& problem) {
      add_of(sequence, "adapter of task " + std::to_string(adapter->task_id) + problem);
    };
    const auto& sites = info_.lora.sites;
    if (adapter->sites.size() != sites.size()) {
      add_of_adapter(" has " + std::to_string(adapter->sites.size()) + " sites, the engine " +
                     std::to_string(sites.size()));
      return;
    }
    for (std::size_t i = 0; i < sites.size(); ++i) {
      if (!is_sound(adapter->sites[i], sites[i])) {
        add_of_adapter(": site " + std::to_string(i) + " is inconsistent");
        return;
      }
    }
    last_sound_adapter_ = adapter;
  }

  [[nodiscard]] bool is_sound(const DeviceSite& site, const LoraSite& place) const {
    const std::size_t parts = place.parts.size();
    const std::int64_t max_rank = info_.lora.max_rank_of(place.parts.front().module);
    if (site.total_rank < 0 || site.total_rank > max_rank * static_cast<std::int64_t>(parts)) return false;
    if (site.total_rank > 0 && site.a == nullptr) return false;
    for (std::size_t i = 0; i < site.parts.size(); ++i) {
      const DevicePart& part = site.parts[i];
      if (part.rank == 0) continue;
      if (i >= parts || part.rank < 0 || part.rank > max_rank || part.rank_offset < 0 || part.b == nullptr ||
          part.rank_offset > site.total_rank - part.rank) {
        return false;
      }
    }
    return true;
  }

  /// Checks copies of `what`, of which `owner` has `count`.
  void check_copies(const std::string& what, const std::string& owner, std::int32_t count,
                    std::span<const std::int32_t> copies_from, std::span<const std::int32_t> copies_to) {
    for (std::size_t i = 0; i < copies_to.size(); ++i) {
      const std::int32_t from = copies_from[i];
      const std::int32_t to = copies_to[i];
      const std::string copy = "copy " + std::to_string(i);
      for (const std::int32_t place : {from, to}) {
        if (place >= 0 && place < count) continue;
        add(copy + " is of " + what + " " + text(from) + " to " + what + " " + text(to) + "; " + owner +
            " has " + text(count) + " " + what + "s");
        break;
      }
      if (from == to) add(copy + " is of " + what + " " + text(from) + " to itself");
      if (std::ranges::find(copies_to.first(i), to) != copies_to.begin() + static_cast<std::ptrdiff_t>(i))
        add(copy + " is to " + what + " " + text(to) + ", as one before it");
    }
  }

  void check_state_slots(std::uint64_t step, std::vector<std::uint64_t>& newest_holders) {
    for (std::int64_t sequence = 0; sequence < sequences_; ++sequence) {
      const std::int32_t slot = input_.state_slots[static_cast<std::size_t>(sequence)];
      if (slot < 0 || slot >= num_state_slots_) {
        add_of(sequence,
               "its state slot is " + text(slot) + "; the engine has " + text(num_state_slots_) + " slots");
      } else if (std::exchange(newest_holders[static_cast<std::size_t>(slot)], step) == step) {
        add_of(sequence, "its state slot " + text(slot) + " is another sequence's too");
      }
    }
  }

  /// A block that a sequence writes in this step must not be in another sequence's table.
  void check_shared_blocks(std::uint64_t step, std::vector<std::uint64_t>& newest_writes) {
    for (std::int64_t sequence = 0; sequence < sequences_; ++sequence) {
      const std::int64_t last = last_position(sequence) / info_.tokens_per_block;
      for (std::int64_t i = first_position(sequence) / info_.tokens_per_block; i <= last; ++i) {
        const std::int32_t block = table_of(sequence)[i];
        if (std::exchange(newest_writes[static_cast<std::size_t>(block)], step) == step) {
          add("KV block " + text(block) + " is written at two places");
        }
      }
    }
    for (std::int64_t sequence = 0; sequence < sequences_; ++sequence) {
      const std::int64_t first_written = first_position(sequence) / info_.tokens_per_block;
      for (std::int64_t i = 0; i < first_written; ++i) {
        const std::int32_t block = table_of(sequence)[i];
        if (newest_writes[static_cast<std::size_t>(block)] == step) {
          add("KV block " + text(block) + " is written and read at two places");
        }
      }
    }
  }

  const StepInput& input_;
  const EngineInfo& info_;
  std::int32_t num_blocks_;
  std::int32_t num_state_slots_;
  std::int64_t tokens_ = 0;
  std::int64_t sequences_ = 0;
  const DeviceAdapter* last_sound_adapter_ = nullptr;
  Problems problems_;
};

}  // namespace

void StepInputChecker::check(const StepInput& input, const EngineInfo& info, std::int32_t num_blocks,
                             std::int32_t num_state_slots) {
  StepChecker(input, info, num_blocks, num_state_slots).run(++step_, newest_writes_, newest_holders_);
}

}  // namespace adaptrt
