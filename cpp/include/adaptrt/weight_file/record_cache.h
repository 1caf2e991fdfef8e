#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/weight_file/parallel_reader.h"
#include "adaptrt/weight_file/weight_file.h"

namespace adaptrt {

/// Small records of a file, of which each step uses only some. Some records stay in memory. The others are
/// read on use, many at a time, into slots, where they stay until the slots are needed. Belongs to one
/// thread.
class RecordCache {
 public:
  /// Consecutive records, each of whole pages.
  struct Table {
    std::size_t offset = 0;  ///< byte offset of the first record in the file, page-aligned
    std::size_t record_bytes = 0;
    std::int32_t count = 0;
    std::vector<std::int32_t> kept;  ///< records that stay in memory, ascending
  };

  /// Reads the records that stay. Throws StepError if a read fails, or std::bad_alloc.
  RecordCache(std::shared_ptr<WeightFile> file, std::vector<Table> tables, std::size_t num_slots);

  [[nodiscard]] const HugeArray& memory() const { return memory_; }
  [[nodiscard]] std::size_t slot_bytes() const { return slot_bytes_; }

  /// Brings records of a table into memory, where they stay until the next call. `records` is ascending and
  /// has at most as many as there are slots. Throws StepError if a read fails.
  void bring(std::size_t table, std::span<const std::int32_t> records);
  /// Address of a record of the last bring().
  [[nodiscard]] const std::byte* address_of(std::size_t table, std::int32_t record) const;

 private:
  static constexpr std::int32_t kNowhere = -1;

  struct Slot {
    std::int32_t table = kNowhere;  ///< kNowhere: the slot is empty
    std::int32_t record = 0;
    bool was_used = false;      ///< since the hand last passed
    std::uint64_t used_at = 0;  ///< number of the bring() call
  };

  [[nodiscard]] std::byte* place(std::int32_t slot) const {
    return memory_.data() + static_cast<std::size_t>(slot) * slot_bytes_;
  }
  std::int32_t take_slot();
  void plan_reads(std::size_t table, std::span<const std::int32_t> records);
  void read_missing(std::size_t table);
  void forget_missing(std::size_t table);

  std::vector<Table> tables_;
  std::size_t slot_bytes_ = 0;
  std::size_t num_kept_ = 0;                        ///< number of first slots, whose records stay
  std::vector<std::vector<std::int32_t>> slot_of_;  ///< indexed by table and record
  std::vector<Slot> slots_;                         ///< after the slots of kept records
  std::size_t hand_ = 0;                            ///< the next slot that the clock algorithm examines
  std::uint64_t calls_ = 0;
  HugeArray memory_;
  // Scratch of one call, kept so that steps allocate nothing.
  std::vector<std::int32_t> missing_;
  std::vector<ParallelReader::Read> reads_;
  std::vector<MemoryPiece> places_;
  ParallelReader reader_;
};

}  // namespace adaptrt
