#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "adaptrt/core/huge_array.h"
#include "adaptrt/kv/second_level.h"
#include "adaptrt/kv_file/kv_file.h"

namespace adaptrt {

/// Access to the bytes of the pool's blocks, on the thread that calls the level.
struct KvBlockAccess {
  std::function<void(BlockId, std::span<std::byte>)> read;
  std::function<void(BlockId, std::span<const std::byte>)> write;
};

struct KvFileLevelOptions {
  std::string directory;
  KvFileLayout layout;
  /// Maximum number of blocks that wait to be written, as copies in memory.
  std::int32_t num_write_buffers = 0;
  /// Maximum time that reads may delay one step.
  std::chrono::nanoseconds max_wait = std::chrono::seconds(5);
};

/// A second level in a file, which outlives the process. Least recently used blocks are replaced first.
///
/// The level's own thread reads and writes the file. Steps never wait for writes, and wait for reads at most
/// max_wait each. Blocks that have not arrived by then are computed, and no more reads start until the late
/// ones have arrived. A disk error switches the level off. A full disk does not: the file stops growing and
/// its blocks are replaced.
class KvFileLevel final : public SecondLevel {
 public:
  /// Throws the errors of KvFile's constructor.
  KvFileLevel(const KvFileLevelOptions& options, KvBlockAccess access);
  /// Waits for the block that is being written; blocks that are not written yet are lost.
  ~KvFileLevel() override;
  KvFileLevel(const KvFileLevel&) = delete;
  KvFileLevel& operator=(const KvFileLevel&) = delete;

  [[nodiscard]] const Sha256Digest& fingerprint() const override { return fingerprint_; }
  [[nodiscard]] SecondLevelStats stats() const override;
  void begin_step() override;
  [[nodiscard]] bool offload(BlockId block, const KeyedBlock& content,
                             std::optional<std::uint64_t> event_hash) override;
  void begin_closing(std::int64_t num_blocks) override;
  [[nodiscard]] bool await_room(Time deadline) override;
  void await_writes(Time deadline) override;
  [[nodiscard]] bool contains(const BlockKey& key) override;
  void begin_reads(std::span<const KeyedBlock> blocks) override;
  [[nodiscard]] bool read_next(BlockId block) override;
  void end_reads() override;
  [[nodiscard]] bool take_back_event(const BlockKey& key) override;
  [[nodiscard]] std::optional<std::uint64_t> take_lost_event() override;

  [[nodiscard]] std::vector<std::string> check_invariants() const override;

  /// Ends the thread and releases the file. Afterwards only stats() and buffer_bytes() may be called.
  void close();
  /// Bytes of memory for blocks that wait to be written, or were read.
  [[nodiscard]] std::size_t buffer_bytes() const;

 private:
  using Slot = std::int32_t;
  using Buffer = std::int32_t;
  static constexpr std::int32_t kNone = -1;

  /// A slot with a block, or with a block that is being written.
  struct Entry {
    BlockKey key{};
    bool has_block = false;
    /// True if it is in free_slots_.
    bool is_free = false;
    /// True if the file is long enough for this slot.
    bool is_in_file = false;
    /// Buffer of a block that is not written yet.
    Buffer write_buffer = kNone;
    /// Number of reads that were requested and have not arrived, wanted or not.
    std::int32_t num_reads = 0;
    // Neighbours in the list ordered by last use.
    Slot older = kNone;
    Slot newer = kNone;
    std::optional<std::uint64_t> event_hash;
  };
  struct WriteJob {
    Slot slot = kNone;
    Buffer buffer = kNone;
    KvFile::Result result = KvFile::Result::kDone;
  };
  /// The buffer keeps its own copy of the tokens, because the caller's may be freed before the read.
  struct ReadJob {
    Slot slot = kNone;
    Buffer buffer = kNone;
    std::uint64_t number = 0;
    KvFile::Result result = KvFile::Result::kDone;
  };
  struct KeyHash {
    std::size_t operator()(const BlockKey& key) const {
      std::size_t hash = 0;  // any part of a SHA-256 is a good hash
      std::memcpy(&hash, key.data(), sizeof(hash));
      return hash;
    }
  };

  [[nodiscard]] std::span<std::byte> write_image(Buffer buffer) const;
  [[nodiscard]] std::span<std::byte> read_image(Buffer buffer) const;
  [[nodiscard]] bool is_given_up() const { return !stats_.error.empty(); }
  /// Takes over the finished jobs of the thread.
  void collect();
  void take_over(const WriteJob& job);
  void take_over(const ReadJob& job);
  void give_up();
  /// Returns kNone if no slot is available.
  [[nodiscard]] Slot take_slot();
  [[nodiscard]] Slot least_recently_used() const;
  void insert(Slot slot, const BlockKey& key);
  [[nodiscard]] Slot take_free_slot();
  /// Marks the slot as empty.
  void erase(Slot slot);
  /// Frees a slot without a block when no read or write of it is pending.
  void settle(Slot slot);
  void append(Slot slot);
  void unlink(Slot slot);
  void touch(Slot slot);
  /// Requests reads as long as there are buffers.
  void submit_reads();
  [[nodiscard]] bool await_read(std::uint64_t number, Buffer& buffer);
  [[nodiscard]] std::chrono::nanoseconds wait_left() const { return options_.max_wait - waited_; }
  /// Main function of the thread.
  void work();
  void make_jobs();

  KvFileLevelOptions options_;
  KvBlockAccess access_;
  Sha256Digest fingerprint_;
  KvFile file_;
  HugeArray write_memory_;
  HugeArray read_memory_;
  std::vector<Buffer> free_write_buffers_;
  std::vector<Buffer> free_read_buffers_;
  std::vector<Entry> entries_;  // slots used so far
  std::unordered_map<BlockKey, Slot, KeyHash> by_key_;
  std::vector<Slot> free_slots_;
  Slot oldest_ = kNone;
  Slot newest_ = kNone;
  /// True if the file can no longer grow.
  bool is_full_ = false;
  std::uint64_t age_ = 0;
  /// Age of the next block after begin_closing().
  std::optional<std::uint64_t> closing_age_;
  SecondLevelStats stats_;
  std::vector<std::uint64_t> lost_events_;

  // State of the reads between begin_reads() and end_reads().
  struct Wanted {
    Slot slot = kNone;
    BlockKey key{};
    std::span<const std::int32_t> tokens;
    std::uint64_t number = 0;  // number of its read; 0 if it is not requested yet
  };
  std::vector<Wanted> wanted_;
  std::size_t next_wanted_ = 0;
  std::size_t next_submitted_ = 0;
  std::uint64_t last_read_ = 0;
  std::chrono::nanoseconds waited_{0};  // in this step
  std::int32_t num_late_ = 0;           // reads that no step waits for

  // Shared with the thread.
  mutable std::mutex mutex_;
  std::condition_variable has_work_;
  std::condition_variable has_done_;
  std::deque<WriteJob> writes_;
  std::deque<ReadJob> reads_;
  std::vector<WriteJob> written_;
  std::vector<ReadJob> read_;
  std::string error_;
  bool is_writing_ = false;
  bool is_stopped_ = false;
  /// True if the thread has ended because of an error.
  bool has_died_ = false;
  // Key and tokens of each read, written before the read is requested and read while it runs.
  std::vector<BlockKey> read_keys_;
  std::vector<std::int32_t> read_tokens_;  // [read buffers, tokens_per_block]

  std::thread thread_;  // last member: everything that it uses exists when it starts
};

}  // namespace adaptrt
