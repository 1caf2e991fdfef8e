// Blocks of sequences and memory of a call.

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
      block_pool_(num_kv_blocks, engine.info().tokens_per_block, true),
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
        {.task = &task, .most = most, .num_to_compute = num_tokens - task.sequence->num_computed_});
  }
}

bool DraftEngine::prepare(const DraftTask& task, std::int32_t most) {
  DraftSequence& sequence = *task.sequence;
  if (sequence.is_given_up_) return false;
  if (sequence.holder_ != nullptr) {
    sequence.keep_right_drafts(task.text);
  } else if (!begin(task)) {
    return false;
  }
  sequence.turn_ = turn_;
  const std::int32_t num_tokens = static_cast<std::int32_t>(task.text.size()) + most - 1;
  return make_room(sequence, num_tokens) && block_pool_.try_grow(sequence.table_, num_tokens);
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
  sequence.table_.blocks.reserve(
      static_cast<std::size_t>(block_pool_.blocks_for(engine_.info().max_seq_len)));
  sequence.computed_drafts_.reserve(static_cast<std::size_t>(max_draft_len_));
  sequence.holder_ = this;
  sequences_.push_back(&sequence);
  sequence.num_computed_ = 0;
  if (task.prompt_length <= engine_.info().max_reusable_prompt_len) {
    sequence.num_computed_ = block_pool_.reuse_prefix(sequence.table_, sequence.reuse_key(), task.text);
  }
  return true;
}

bool DraftEngine::make_room(const DraftSequence& sequence, std::int32_t num_tokens) {
  const std::int64_t needed =
      std::int64_t{block_pool_.blocks_for(num_tokens)} - std::ssize(sequence.table_.blocks);
  // A shared block is counted once per sequence, so the loop may evict a sequence without gaining a block.
  std::int64_t obtainable = block_pool_.num_available();
  for (const DraftSequence* other : sequences_) {
    if (other->turn_ != turn_) obtainable += std::ssize(other->table_.blocks);
  }
  if (needed > obtainable) return false;
  while (needed > block_pool_.num_available()) {
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
  block_pool_.release(sequence.table_);
  sequence.lease_.reset();
  sequence.holder_ = nullptr;
  sequence.num_computed_ = 0;
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
  stats.max_num_blocks = block_pool_.num_blocks();
  stats.used_num_blocks = block_pool_.num_used();
  stats.num_sequences = std::ssize(sequences_);
  stats.mem_usage = static_cast<std::size_t>(block_pool_.num_blocks()) * engine_.info().kv_block_bytes;
  if (lora_cache_ != nullptr) {
    const LoraCacheStats lora = lora_cache_->stats();
    stats.mem_usage +=
        lora.host_bytes_used + static_cast<std::size_t>(lora.device_pages_total) * lora.page_bytes;
  }
  return stats;
}

std::vector<std::string> DraftEngine::check_invariants() const {
  std::vector<std::string> violations = block_pool_.check_invariants();
  const auto check = [&](bool holds, const char* violation) {
    if (!holds) violations.push_back(std::string("draft engine: ") + violation);
  };
  std::vector<std::int32_t> num_users(static_cast<std::size_t>(block_pool_.num_blocks()), 0);
  for (const DraftSequence* sequence : sequences_) {
    check(sequence->holder_ == this, "a sequence with blocks is not held");
    check((sequence->adapter_ != nullptr) == sequence->lease_.has_value(),
          "a sequence has an adapter and no lease, or the other way round");
    check(std::cmp_greater_equal(
              sequence->table_.blocks.size(),
              block_pool_.blocks_for(sequence->num_computed_ + std::ssize(sequence->computed_drafts_))),
          "a block table does not cover what was computed");
    check(std::cmp_less_equal(sequence->table_.num_indexed * block_pool_.tokens_per_block(),
                              sequence->num_computed_),
          "blocks are indexed that were not computed");
    for (const BlockId block : sequence->table_.blocks) ++num_users[static_cast<std::size_t>(block)];
  }
  for (std::int32_t block = 0; block < block_pool_.num_blocks(); ++block) {
    check(block_pool_.num_users(block) == num_users[static_cast<std::size_t>(block)],
          "a block has other users than the sequences");
  }
  return violations;
}

}  // namespace adaptrt
