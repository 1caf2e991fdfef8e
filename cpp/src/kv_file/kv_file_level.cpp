#include "adaptrt/kv_file/kv_file_level.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <new>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {
namespace {

/// Number of buffers: further blocks are read while the earlier ones are taken.
constexpr std::int32_t kReadBuffers = 4;

}  // namespace

KvFileLevel::KvFileLevel(const KvFileLevelOptions& options, KvBlockAccess access)
    : options_(options),
      access_(std::move(access)),
      fingerprint_(options.layout.fingerprint),
      file_(options.directory, options.layout),
      write_memory_(file_.slot_bytes() * static_cast<std::size_t>(options.num_write_buffers)),
      read_memory_(file_.slot_bytes() * static_cast<std::size_t>(kReadBuffers)),
      read_keys_(static_cast<std::size_t>(kReadBuffers)),
      read_tokens_(static_cast<std::size_t>(kReadBuffers) *
                   static_cast<std::size_t>(options.layout.tokens_per_block)) {
  for (Buffer buffer = options.num_write_buffers; buffer-- > 0;) free_write_buffers_.push_back(buffer);
  for (Buffer buffer = kReadBuffers; buffer-- > 0;) free_read_buffers_.push_back(buffer);
  stats_.max_num_blocks = file_.num_slots();
  const std::vector<KvFile::Entry> found = file_.entries();
  for (const KvFile::Entry& block : found) {
    entries_.resize(std::max(entries_.size(), static_cast<std::size_t>(block.slot) + 1));
  }
  for (const KvFile::Entry& block : found) {
    insert(block.slot, block.key);
    age_ = block.age;
  }
  for (Slot slot = 0; std::cmp_less(slot, entries_.size()); ++slot) {
    entries_[slot].is_in_file = true;
    settle(slot);
  }
  thread_ = std::thread([this] { work(); });
}

KvFileLevel::~KvFileLevel() {
  close();
}

void KvFileLevel::close() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    is_stopped_ = true;
  }
  has_work_.notify_one();
  thread_.join();
  file_.close();
}

SecondLevelStats KvFileLevel::stats() const {
  SecondLevelStats stats = stats_;
  stats.used_num_blocks = static_cast<std::int64_t>(by_key_.size());
  return stats;
}

std::size_t KvFileLevel::buffer_bytes() const {
  return write_memory_.bytes() + read_memory_.bytes();
}

void KvFileLevel::begin_step() {
  waited_ = {};
  collect();
}

bool KvFileLevel::offload(BlockId block, const KeyedBlock& content, std::optional<std::uint64_t> event_hash) {
  collect();
  if (is_given_up()) return false;
  if (const auto known = by_key_.find(content.key); known != by_key_.end()) {
    entries_[known->second].event_hash = event_hash;
    touch(known->second);
    return true;
  }
  const Slot slot = free_write_buffers_.empty() ? kNone : take_slot();
  if (slot == kNone) {
    ++stats_.dropped_blocks;
    return false;
  }
  const Buffer buffer = free_write_buffers_.back();
  const std::span<std::byte> image = write_image(buffer);
  file_.describe(image, content, closing_age_ ? (*closing_age_)-- : ++age_);
  access_.read(block, file_.block_of(image));
  free_write_buffers_.pop_back();
  insert(slot, content.key);
  entries_[slot].write_buffer = buffer;
  entries_[slot].event_hash = event_hash;
  {
    const std::lock_guard lock(mutex_);
    writes_.push_back({.slot = slot, .buffer = buffer});
  }
  has_work_.notify_one();
  return true;
}

void KvFileLevel::begin_closing(std::int64_t num_blocks) {
  closing_age_ = age_ + static_cast<std::uint64_t>(num_blocks);
}

bool KvFileLevel::await_room(Time deadline) {
  collect();
  while (!is_given_up() && free_write_buffers_.empty()) {
    {
      std::unique_lock lock(mutex_);
      if (!has_done_.wait_until(lock, deadline, [&] { return !written_.empty() || !error_.empty(); })) {
        return false;
      }
    }
    collect();
  }
  return !is_given_up() && Time::clock::now() < deadline;
}

void KvFileLevel::await_writes(Time deadline) {
  {
    std::unique_lock lock(mutex_);
    has_done_.wait_until(lock, deadline,
                         [&] { return (writes_.empty() && !is_writing_) || !error_.empty(); });
  }
  collect();
}

bool KvFileLevel::contains(const BlockKey& key) {
  // Otherwise a caller that waits for a late read would have to wait for another read too.
  return num_late_ == 0 && by_key_.contains(key);
}

void KvFileLevel::collect() {
  std::vector<WriteJob> written;
  std::vector<ReadJob> late;
  {
    const std::lock_guard lock(mutex_);
    written.swap(written_);
    const auto is_awaited = [&](const ReadJob& job) {
      return std::ranges::any_of(wanted_, [&](const Wanted& wanted) { return wanted.number == job.number; });
    };
    std::erase_if(read_, [&](const ReadJob& job) {
      if (is_awaited(job)) return false;
      late.push_back(job);
      return true;
    });
    if (!error_.empty() && !is_given_up()) stats_.error = error_;
  }
  for (const WriteJob& job : written) take_over(job);
  for (const ReadJob& job : late) take_over(job);
  if (is_given_up() && !by_key_.empty()) give_up();
}

void KvFileLevel::take_over(const WriteJob& job) {
  Entry& entry = entries_[job.slot];
  entry.write_buffer = kNone;
  free_write_buffers_.push_back(job.buffer);
  if (job.result == KvFile::Result::kDone) {
    entry.is_in_file = true;
    ++stats_.written_blocks;
    settle(job.slot);
    return;
  }
  ++stats_.failed_blocks;
  if (job.result == KvFile::Result::kNoSpace && !entry.is_in_file) is_full_ = true;
  if (entry.has_block) erase(job.slot);
  settle(job.slot);
}

void KvFileLevel::give_up() {
  while (oldest_ != kNone) erase(oldest_);
}

KvFileLevel::Slot KvFileLevel::take_slot() {
  if (!free_slots_.empty()) return take_free_slot();
  if (!is_full_ && std::cmp_less(entries_.size(), file_.num_slots())) {
    entries_.emplace_back();
    return static_cast<Slot>(entries_.size()) - 1;
  }
  const Slot slot = least_recently_used();
  if (slot == kNone) return kNone;
  erase(slot);
  return take_free_slot();
}

KvFileLevel::Slot KvFileLevel::take_free_slot() {
  const Slot slot = free_slots_.back();
  free_slots_.pop_back();
  entries_[slot].is_free = false;
  return slot;
}

void KvFileLevel::settle(Slot slot) {
  Entry& entry = entries_[slot];
  // A slot for which the disk had no room stays unused.
  if (entry.is_free || entry.has_block || entry.write_buffer != kNone || entry.num_reads > 0 ||
      !entry.is_in_file) {
    return;
  }
  entry.is_free = true;
  free_slots_.push_back(slot);
}

KvFileLevel::Slot KvFileLevel::least_recently_used() const {
  // Skip slots that are being read or written, which must not change.
  Slot slot = oldest_;
  while (slot != kNone && (entries_[slot].write_buffer != kNone || entries_[slot].num_reads > 0 ||
                           !entries_[slot].is_in_file)) {
    slot = entries_[slot].newer;
  }
  return slot;
}

void KvFileLevel::insert(Slot slot, const BlockKey& key) {
  Entry& entry = entries_[slot];
  entry.key = key;
  entry.has_block = true;
  by_key_.emplace(key, slot);
  append(slot);
}

void KvFileLevel::erase(Slot slot) {
  Entry& entry = entries_[slot];
  by_key_.erase(entry.key);
  unlink(slot);
  entry.has_block = false;
  if (entry.event_hash) lost_events_.push_back(*std::exchange(entry.event_hash, std::nullopt));
  settle(slot);
}

void KvFileLevel::append(Slot slot) {
  Entry& entry = entries_[slot];
  entry.older = newest_;
  entry.newer = kNone;
  (newest_ == kNone ? oldest_ : entries_[newest_].newer) = slot;
  newest_ = slot;
}

void KvFileLevel::unlink(Slot slot) {
  const Entry& entry = entries_[slot];
  (entry.older == kNone ? oldest_ : entries_[entry.older].newer) = entry.newer;
  (entry.newer == kNone ? newest_ : entries_[entry.newer].older) = entry.older;
}

void KvFileLevel::touch(Slot slot) {
  unlink(slot);
  append(slot);
}

bool KvFileLevel::take_back_event(const BlockKey& key) {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return false;
  return std::exchange(entries_[found->second].event_hash, std::nullopt).has_value();
}

std::optional<std::uint64_t> KvFileLevel::take_lost_event() {
  if (lost_events_.empty()) return std::nullopt;
  const std::uint64_t hash = lost_events_.back();
  lost_events_.pop_back();
  return hash;
}

std::span<std::byte> KvFileLevel::write_image(Buffer buffer) const {
  return {write_memory_.data() + static_cast<std::size_t>(buffer) * file_.slot_bytes(), file_.slot_bytes()};
}

std::span<std::byte> KvFileLevel::read_image(Buffer buffer) const {
  return {read_memory_.data() + static_cast<std::size_t>(buffer) * file_.slot_bytes(), file_.slot_bytes()};
}

void KvFileLevel::work() {
  // Block all signals in this thread, so that exceeding a file size limit is a write error.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  try {
    make_jobs();
  } catch (const std::exception& error) {
    {
      const std::lock_guard lock(mutex_);
      has_died_ = true;
      try {
        error_ = error.what();
      } catch (const std::bad_alloc&) {
        error_ = "no memory";  // short enough to need no allocation
      }
    }
    has_done_.notify_all();
  }
}

void KvFileLevel::make_jobs() {
  const auto tokens = static_cast<std::size_t>(options_.layout.tokens_per_block);
  std::unique_lock lock(mutex_);
  for (;;) {
    has_work_.wait(lock, [&] { return is_stopped_ || !reads_.empty() || !writes_.empty(); });
    if (is_stopped_) return;
    std::string error;
    // Reads come before writes because a step waits for them.
    if (!reads_.empty()) {
      ReadJob job = reads_.front();
      reads_.pop_front();
      const auto buffer = static_cast<std::size_t>(job.buffer);
      lock.unlock();
      job.result = file_.read(
          job.slot,
          {.key = read_keys_[buffer], .tokens = std::span(read_tokens_).subspan(buffer * tokens, tokens)},
          read_image(job.buffer));
      if (job.result == KvFile::Result::kDamaged) static_cast<void>(file_.erase(job.slot));
      if (job.result == KvFile::Result::kFailed) error = file_.error();
      lock.lock();
      read_.push_back(job);
    } else {
      WriteJob job = writes_.front();
      writes_.pop_front();
      is_writing_ = true;
      lock.unlock();
      job.result = file_.write(job.slot, write_image(job.buffer));
      if (job.result == KvFile::Result::kFailed) error = file_.error();
      lock.lock();
      is_writing_ = false;
      written_.push_back(job);
    }
    if (!error.empty() && error_.empty()) error_ = error;
    has_done_.notify_all();
  }
}

}  // namespace adaptrt
