#include "adaptrt/weight_file/record_cache.h"

#include <algorithm>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {
namespace {

/// Number of parallel requests: with about this many small ones, a disk is fastest.
constexpr int kReaders = 24;

/// Maximum bytes of one read request, so that all readers get work.
constexpr std::size_t kMostBytes = std::size_t{256} << 10;
constexpr std::size_t kMostPlaces = 32;

/// Maximum gap between two records in one request: reading the gap is faster than another request.
constexpr std::size_t kPassedOverBytes = std::size_t{24} << 10;

}  // namespace

RecordCache::RecordCache(std::shared_ptr<WeightFile> file, std::vector<Table> tables, std::size_t num_slots)
    : tables_(std::move(tables)), slots_(num_slots), reader_(std::move(file), kReaders, kPassedOverBytes) {
  for (const Table& table : tables_) {
    slot_bytes_ = std::max(slot_bytes_, table.record_bytes);
    slot_of_.emplace_back(static_cast<std::size_t>(table.count), kNowhere);
    num_kept_ += table.kept.size();
  }
  memory_ = HugeArray((num_kept_ + num_slots) * slot_bytes_);
  std::int32_t slot = 0;
  for (std::size_t table = 0; table < tables_.size(); ++table) {
    for (const std::int32_t record : tables_[table].kept) {
      slot_of_[table][static_cast<std::size_t>(record)] = slot++;
    }
    plan_reads(table, tables_[table].kept);
    reader_.read(reads_, places_);
  }
}

void RecordCache::bring(std::size_t table, std::span<const std::int32_t> records) {
  ++calls_;
  missing_.clear();
  std::vector<std::int32_t>& slot_of = slot_of_[table];
  for (const std::int32_t record : records) {
    const std::int32_t slot = slot_of[static_cast<std::size_t>(record)];
    if (slot == kNowhere) {
      missing_.push_back(record);
    } else if (static_cast<std::size_t>(slot) >= num_kept_) {
      Slot& found = slots_[static_cast<std::size_t>(slot) - num_kept_];
      found.was_used = true;
      found.used_at = calls_;
    }
  }
  for (const std::int32_t record : missing_) {
    const std::int32_t slot = take_slot();
    slots_[static_cast<std::size_t>(slot) - num_kept_] = {static_cast<std::int32_t>(table), record, true,
                                                          calls_};
    slot_of[static_cast<std::size_t>(record)] = slot;
  }
  read_missing(table);
}

/// Clock algorithm: returns the first slot that was not used since the hand last passed, nor by this call.
std::int32_t RecordCache::take_slot() {
  while (true) {
    Slot& slot = slots_[hand_];
    const std::size_t at = hand_;
    hand_ = (hand_ + 1) % slots_.size();
    if (slot.used_at == calls_ && slot.table != kNowhere) continue;
    if (std::exchange(slot.was_used, false)) continue;
    if (slot.table != kNowhere) {
      slot_of_[static_cast<std::size_t>(slot.table)][static_cast<std::size_t>(slot.record)] = kNowhere;
    }
    return static_cast<std::int32_t>(num_kept_ + at);
  }
}

void RecordCache::read_missing(std::size_t table) {
  plan_reads(table, missing_);
  try {
    reader_.read(reads_, places_);
  } catch (const StepError&) {
    forget_missing(table);
    throw;
  }
}

void RecordCache::forget_missing(std::size_t table) {
  for (const std::int32_t record : missing_) {
    const std::int32_t slot = std::exchange(slot_of_[table][static_cast<std::size_t>(record)], kNowhere);
    slots_[static_cast<std::size_t>(slot) - num_kept_] = {};
  }
}

/// Plans the reads of records that have slots; close records share a request.
void RecordCache::plan_reads(std::size_t table, std::span<const std::int32_t> records) {
  const auto& [offset, record_bytes, count, kept] = tables_[table];
  reads_.clear();
  places_.clear();
  std::size_t bytes = 0;
  std::size_t end = 0;  // of the last request
  for (const std::int32_t record : records) {
    const std::size_t begin = offset + static_cast<std::size_t>(record) * record_bytes;
    const std::size_t between = begin - end;
    const bool goes_on = !reads_.empty() && between <= kPassedOverBytes &&
                         bytes + between + record_bytes <= kMostBytes &&
                         reads_.back().num_places + 2 <= kMostPlaces;
    if (!goes_on) {
      reads_.push_back({begin, places_.size(), 0});
      bytes = 0;
    } else if (between > 0) {
      places_.push_back({nullptr, between});  // records that were not requested
      ++reads_.back().num_places;
      bytes += between;
    }
    places_.push_back({place(slot_of_[table][static_cast<std::size_t>(record)]), record_bytes});
    ++reads_.back().num_places;
    bytes += record_bytes;
    end = begin + record_bytes;
  }
}

const std::byte* RecordCache::address_of(std::size_t table, std::int32_t record) const {
  return place(slot_of_[table][static_cast<std::size_t>(record)]);
}

}  // namespace adaptrt
