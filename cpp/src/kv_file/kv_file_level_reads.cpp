// Reads of a chain of blocks, several of them ahead of the block that is taken.

#include <algorithm>

#include "adaptrt/kv_file/kv_file_level.h"

namespace adaptrt {

void KvFileLevel::begin_reads(std::span<const KeyedBlock> blocks) {
  collect();
  wanted_.clear();
  next_wanted_ = next_submitted_ = 0;
  for (const KeyedBlock& block : blocks) {
    const auto found = by_key_.find(block.key);
    if (found == by_key_.end()) break;
    wanted_.push_back({.slot = found->second, .key = block.key, .tokens = block.tokens});
    ++entries_[found->second].num_reads;
  }
  // From the end, so that the end of a chain is replaced before its beginning.
  for (auto wanted = wanted_.rbegin(); wanted != wanted_.rend(); ++wanted) touch(wanted->slot);
  submit_reads();
}

void KvFileLevel::submit_reads() {
  next_submitted_ = std::max(next_submitted_, next_wanted_);
  // A block that is not written yet is copied from memory when its turn comes, or read if it has been written
  // by then.
  for (; next_submitted_ < wanted_.size() && !free_read_buffers_.empty() &&
         entries_[wanted_[next_submitted_].slot].write_buffer == kNone;
       ++next_submitted_) {
    Wanted& wanted = wanted_[next_submitted_];
    const Buffer buffer = free_read_buffers_.back();
    free_read_buffers_.pop_back();
    read_keys_[static_cast<std::size_t>(buffer)] = wanted.key;
    std::ranges::copy(wanted.tokens, read_tokens_.begin() + static_cast<std::ptrdiff_t>(buffer) *
                                                                options_.layout.tokens_per_block);
    wanted.number = ++last_read_;
    {
      const std::lock_guard lock(mutex_);
      reads_.push_back({.slot = wanted.slot, .buffer = buffer, .number = wanted.number});
    }
    has_work_.notify_one();
  }
}

bool KvFileLevel::read_next(BlockId block) {
  collect();
  if (next_wanted_ == wanted_.size() || is_given_up()) return false;
  const Wanted& wanted = wanted_[next_wanted_];
  Entry& entry = entries_[wanted.slot];
  // It may not have been written, for lack of room.
  if (!entry.has_block || entry.key != wanted.key) return false;
  if (entry.write_buffer != kNone) {
    access_.write(block, file_.block_of(write_image(entry.write_buffer)));
  } else {
    submit_reads();
    Buffer buffer = kNone;
    if (!await_read(wanted.number, buffer)) return false;
    access_.write(block, file_.block_of(read_image(buffer)));
    free_read_buffers_.push_back(buffer);
  }
  --entry.num_reads;
  ++next_wanted_;
  ++stats_.read_blocks;
  return true;
}

bool KvFileLevel::await_read(std::uint64_t number, Buffer& buffer) {
  ReadJob job;
  {
    std::unique_lock lock(mutex_);
    const auto is_it = [&](const ReadJob& made) { return made.number == number; };
    const auto has_come = [&] { return std::ranges::any_of(read_, is_it); };
    if (!has_come()) {
      const auto begin = Time::clock::now();
      has_done_.wait_until(lock, begin + wait_left(), [&] { return has_come() || has_died_; });
      waited_ += Time::clock::now() - begin;
      if (!has_come()) return false;
    }
    const auto made = std::ranges::find_if(read_, is_it);
    if (made->result != KvFile::Result::kDone) return false;  // collect() takes it over
    job = *made;
    read_.erase(made);
  }
  buffer = job.buffer;
  return true;
}

void KvFileLevel::end_reads() {
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = next_wanted_; i < wanted_.size(); ++i) {
      const auto queued = std::ranges::find(reads_, wanted_[i].number, &ReadJob::number);
      if (wanted_[i].number != 0 && queued == reads_.end()) {
        ++num_late_;  // running or finished: collect() takes it over
        continue;
      }
      --entries_[wanted_[i].slot].num_reads;
      settle(wanted_[i].slot);
      if (queued == reads_.end()) continue;
      free_read_buffers_.push_back(queued->buffer);
      reads_.erase(queued);
    }
  }
  wanted_.clear();
  next_wanted_ = next_submitted_ = 0;
  collect();
}

void KvFileLevel::take_over(const ReadJob& job) {
  Entry& entry = entries_[job.slot];
  --num_late_;
  --entry.num_reads;
  free_read_buffers_.push_back(job.buffer);
  if (job.result != KvFile::Result::kDone) {
    ++stats_.failed_blocks;
    if (entry.has_block) erase(job.slot);
  }
  settle(job.slot);
}

}  // namespace adaptrt
