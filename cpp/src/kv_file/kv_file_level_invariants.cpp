#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "adaptrt/kv_file/kv_file_level.h"

namespace adaptrt {

std::vector<std::string> KvFileLevel::check_invariants() const {
  std::vector<std::string> violations;
  const auto expect = [&](bool holds, const char* what) {
    if (!holds) violations.push_back(std::string("KV file: ") + what);
  };
  const auto expect_of_slot = [&](Slot slot, bool holds, const char* what) {
    if (!holds) expect(false, ("slot " + std::to_string(slot) + " " + what).c_str());
  };
  expect(std::cmp_less_equal(entries_.size(), file_.num_slots()),
         "there are more slots than the file may have");
  expect(wanted_.empty(), "reads were begun and not ended");

  std::size_t num_blocks = 0;
  std::size_t num_free = 0;
  std::size_t num_written = 0;
  std::int32_t num_reads = 0;
  for (Slot slot = 0; std::cmp_less(slot, entries_.size()); ++slot) {
    const Entry& entry = entries_[slot];
    if (entry.has_block) {
      ++num_blocks;
      const auto found = by_key_.find(entry.key);
      expect_of_slot(slot, found != by_key_.end() && found->second == slot,
                     "is not found by its block's key");
      expect_of_slot(slot, entry.is_in_file || entry.write_buffer != kNone, "has a block that is nowhere");
    }
    expect_of_slot(slot, entry.has_block || !entry.event_hash, "has an event and no block");
    if (entry.is_free) {
      ++num_free;
      expect_of_slot(slot, !entry.has_block && entry.write_buffer == kNone && entry.num_reads == 0,
                     "is free and in use");
    } else {
      const bool is_idle = !entry.has_block && entry.write_buffer == kNone && entry.num_reads == 0;
      expect_of_slot(slot, !is_idle || !entry.is_in_file, "is neither free nor in use");
    }
    if (entry.write_buffer != kNone) ++num_written;
    num_reads += entry.num_reads;
  }
  expect(by_key_.size() == num_blocks, "keys are known that no slot has");
  expect(free_slots_.size() == num_free, "the free slots are not those that are marked as free");
  expect(num_reads == num_late_, "reads are miscounted");
  expect(free_write_buffers_.size() + num_written == static_cast<std::size_t>(options_.num_write_buffers),
         "buffers of writes are lost or too many");
  expect(free_read_buffers_.size() + static_cast<std::size_t>(num_late_) ==
             read_memory_.bytes() / file_.slot_bytes(),
         "buffers of reads are lost or too many");

  std::size_t num_listed = 0;
  Slot older = kNone;
  for (Slot slot = oldest_; slot != kNone && num_listed <= num_blocks; slot = entries_[slot].newer) {
    ++num_listed;
    expect_of_slot(slot, entries_[slot].has_block && entries_[slot].older == older,
                   "is at a wrong place of the list by use");
    older = slot;
  }
  expect(num_listed == num_blocks && older == newest_, "the list by use does not have the blocks once each");
  return violations;
}

}  // namespace adaptrt
