// Memory of sequences and of a call.

#include "adaptrt/draft_engine/draft_engine.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

namespace adaptrt {

DraftEngine::DraftEngine(Engine& engine, LoraCache* lora_cache, std::int32_t num_kv_blocks,
                         std::int32_t max_draft_len)
    : engine_(engine),
      lora_cache_(lora_cache),
      memory_({.num_blocks = num_kv_blocks, .tokens_per_block = engine.info().tokens_per_block}),
      max_draft_len_(max_draft_len) {
  const auto max_tokens = static_cast<std::size_t>(engine.info().max_num_tokens);
  entries_.reserve(static_cast<std::size_t>(engine.info().max_batch_size));
  step_.token_ids.reserve(max_tokens);
  step_.positions.reserve(max_tokens);
}

DraftEngine::~DraftEngine() {
  while (!sequences_.empty()) release(*sequences_.back());
}

void DraftEngine::draft(std::span<const DraftTask> tasks) {
  for (const DraftTask& task : tasks) task.drafts->clear();
  if (!stats_.error.empty()) return;
  const auto begin = std::chrono::steady_clock::now();
  ++turn_;
  try {
    plan(tasks);
    compute_texts();
    while (compute_drafts()) {
    }
  } catch (const std::exception& error) {
    give_up(tasks, error.what());
  }
  stats_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void DraftEngine::plan(std::span<const DraftTask> tasks) {
  const EngineInfo& info = engine_.info();
  const auto max_entries = static_cast<std::size_t>(std::min(info.max_batch_size, info.max_num_tokens));
  entries_.clear();
  for (const DraftTask& task : tasks) {
    if (entries_.size() == max_entries) break;
    const auto num_tokens = static_cast<std::int32_t>(task.text.size());
    // The last draft is never computed.
    const auto& adapter = task.sequence->adapter_;
    const std::int32_t longest = info.max_seq_len_of(adapter ? adapter->terms().rotary_factor : 1);
    const std::int32_t most = std::min({task.most, max_draft_len_, longest - num_tokens + 1});
    if (most < 1 || !prepare(task, most)) {
      release(*task.sequence);
      continue;
    }
    entries_.push_back(
        {.task = &task, .most = most, .num_to_compute = num_tokens - task.sequence->memory_.num_computed});
  }
}

bool DraftEngine::prepare(const DraftTask& task, std::int32_t most) {
  DraftSequence& sequence = *task.sequence;
  if (sequence.is_given_up_) return false;
  if (sequence.holder_ != nullptr) {
    memory_.keep(sequence.memory_, sequence.memory_.num_computed + sequence.num_right_drafts(task.text));
    sequence.computed_drafts_.clear();
  } else if (!begin(task)) {
    return false;
  }
  sequence.turn_ = turn_;
  const std::int32_t num_tokens = static_cast<std::int32_t>(task.text.size()) + most - 1;
  return make_room(sequence, num_tokens) && memory_.try_grow(sequence.memory_, num_tokens);
}

bool DraftEngine::begin(const DraftTask& task) {
  DraftSequence& sequence = *task.sequence;
  if (sequence.adapter_) {
    try {
      sequence.lease_ = lora_cache_->acquire(sequence.adapter_);
    } catch (const std::exception&) {
      sequence.is_given_up_ = true;
    }
    if (!sequence.lease_) return false;
  }
  memory_.reserve(sequence.memory_, engine_.info().max_seq_len);
  sequence.computed_drafts_.reserve(static_cast<std::size_t>(max_draft_len_));
  sequence.holder_ = this;
  sequences_.push_back(&sequence);
  if (task.prompt_length <= engine_.info().max_reusable_prompt_len) {
    // Without partial reuse there is nothing to copy.
    static_cast<void>(
        memory_.reuse_prefix(sequence.memory_, {.key = sequence.reuse_key(), .tokens = task.text}));
  }
  return true;
}

bool DraftEngine::make_room(const DraftSequence& sequence, std::int32_t num_tokens) {
  const std::int64_t needed = memory_.blocks_to_grow(sequence.memory_, num_tokens);
  // A shared block is counted once per sequence, so the loop may evict a sequence without gaining a block.
  std::int64_t obtainable = memory_.num_available();
  for (const DraftSequence* other : sequences_) {
    if (other->turn_ != turn_) obtainable += other->memory_.num_blocks();
  }
  if (needed > obtainable) return false;
  while (needed > memory_.num_available()) {
    DraftSequence* const other = next_to_lose_blocks();
    if (other == nullptr) return false;
    release(*other);
  }
  return true;
}

DraftSequence* DraftEngine::next_to_lose_blocks() const {
  DraftSequence* next = nullptr;
  for (DraftSequence* sequence : sequences_) {
    if (sequence->turn_ == turn_) continue;
    if (next == nullptr || sequence->turn_ <= next->turn_) next = sequence;
  }
  return next;
}

void DraftEngine::release(DraftSequence& sequence) {
  if (sequence.holder_ == nullptr) return;
  memory_.release(sequence.memory_);
  sequence.lease_.reset();
  sequence.holder_ = nullptr;
  sequence.computed_drafts_.clear();
  sequences_.erase(std::ranges::find(sequences_, &sequence));
}

void DraftEngine::give_up(std::span<const DraftTask> tasks, std::string reason) {
  stats_.error = std::move(reason);
  for (const DraftTask& task : tasks) task.drafts->clear();
  while (!sequences_.empty()) release(*sequences_.back());
}

DraftEngineStats DraftEngine::stats() const {
  DraftEngineStats stats = stats_;
  stats.max_num_blocks = memory_.num_blocks();
  stats.used_num_blocks = memory_.block_pool().num_used();
  stats.num_sequences = std::ssize(sequences_);
  stats.mem_usage = static_cast<std::size_t>(memory_.num_blocks()) * engine_.info().kv_block_bytes;
  if (lora_cache_ != nullptr) stats.mem_usage += lora_cache_->stats().memory_bytes;
  return stats;
}

std::vector<std::string> DraftEngine::check_invariants() const {
  std::vector<std::string> violations;
  const auto check = [&](bool holds, const char* violation) {
    if (!holds) violations.push_back(std::string("draft engine: ") + violation);
  };
  std::vector<const SequenceMemory*> held;
  for (const DraftSequence* sequence : sequences_) {
    check(sequence->holder_ == this, "a sequence with blocks is not held");
    check((sequence->adapter_ != nullptr) == sequence->lease_.has_value(),
          "a sequence has an adapter and no lease, or the other way round");
    const SequenceMemory& memory = sequence->memory_;
    check(memory_.blocks_to_grow(memory, memory.num_computed + std::ssize(sequence->computed_drafts_)) == 0,
          "a block table does not cover the computed drafts");
    for (const std::string& violation : memory_.check_invariants(memory)) {
      check(false, ("a sequence " + violation).c_str());
    }
    held.push_back(&memory);
  }
  for (const std::string& violation : memory_.check_invariants(held)) check(false, violation.c_str());
  return violations;
}

}  // namespace adaptrt
