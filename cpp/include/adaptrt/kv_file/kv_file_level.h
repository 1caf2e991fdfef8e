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

/// The bytes of the pool's blocks, on the thread that calls the level.
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
  /// Blocks that are not written yet are lost; waits for the one that is being written.
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

  /// Ends the thread and lets others use the file; nothing but stats() and buffer_bytes() may be called
  /// afterwards.
  void close();
  /// Memory for blocks that wait to be written, and that are read.
  [[nodiscard]] std::size_t buffer_bytes() const;

 private:
  using Slot = std::int32_t;
  using Buffer = std::int32_t;
  static constexpr std::int32_t kNone = -1;

  /// A slot that has a block, or will when it is written.
  struct Entry {
    BlockKey key{};
    bool has_block = false;
    /// In free_slots_.
    bool is_free = false;
    /// The file is at least so long.
    bool is_in_file = false;
    /// Buffer of a block that is not written yet.
    Buffer write_buffer = kNone;
    /// Reads that were asked for and have not come, wanted or not.
    std::int32_t num_reads = 0;
    // By last use.
    Slot older = kNone;
    Slot newer = kNone;
    std::optional<std::uint64_t> event_hash;
  };
  struct WriteJob {
    Slot slot = kNone;
    Buffer buffer = kNone;
    KvFile::Result result = KvFile::Result::kDone;
  };
  /// The tokens are kept in the buffer's own array, because the caller's may go before the read is made.
  struct ReadJob {
    Slot slot = kNone;
    Buffer buffer = kNone;
    std::uint64_t number = 0;
    KvFile::Result result = KvFile::Result::kDone;
  };
  struct KeyHash {
    std::size_t operator()(const BlockKey& key) const {
      std::size_t hash = 0;  // any part of a SHA-256 is one
      std::memcpy(&hash, key.data(), sizeof(hash));
      return hash;
    }
  };

  [[nodiscard]] std::span<std::byte> write_image(Buffer buffer) const;
  [[nodiscard]] std::span<std::byte> read_image(Buffer buffer) const;
  [[nodiscard]] bool is_given_up() const { return !stats_.error.empty(); }
  /// Takes over what the thread has done.
  void collect();
  void take_over(const WriteJob& job);
  void take_over(const ReadJob& job);
  void give_up();
  /// kNone: none is available.
  [[nodiscard]] Slot take_slot();
  [[nodiscard]] Slot least_recently_used() const;
  void insert(Slot slot, const BlockKey& key);
  [[nodiscard]] Slot take_free_slot();
  /// The slot has no block any more.
  void erase(Slot slot);
  /// A slot without a block is free when nothing is read from it or written to it any more.
  void settle(Slot slot);
  void append(Slot slot);
  void unlink(Slot slot);
  void touch(Slot slot);
  /// Asks for reads as far as there are buffers.
  void submit_reads();
  [[nodiscard]] bool await_read(std::uint64_t number, Buffer& buffer);
  [[nodiscard]] std::chrono::nanoseconds wait_left() const { return options_.max_wait - waited_; }
  /// The thread.
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
  std::vector<Entry> entries_;  // of slots that were used so far
  std::unordered_map<BlockKey, Slot, KeyHash> by_key_;
  std::vector<Slot> free_slots_;
  Slot oldest_ = kNone;
  Slot newest_ = kNone;
  /// The file does not grow any more.
  bool is_full_ = false;
  std::uint64_t age_ = 0;
  /// Age of the next block, when no steps follow.
  std::optional<std::uint64_t> closing_age_;
  SecondLevelStats stats_;
  std::vector<std::uint64_t> lost_events_;

  // State of the reads that have started and not ended.
  struct Wanted {
    Slot slot = kNone;
    BlockKey key{};
    std::span<const std::int32_t> tokens;
    std::uint64_t number = 0;  // of its read; 0: not asked for
  };
  std::vector<Wanted> wanted_;
  std::size_t next_wanted_ = 0;
  std::size_t next_submitted_ = 0;
  std::uint64_t last_read_ = 0;
  std::chrono::nanoseconds waited_{0};  // of this step
  std::int32_t num_late_ = 0;           // reads that no step waits for any more

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
  /// The thread has ended for an error.
  bool has_died_ = false;
  // A read's key and tokens: written before it is asked for, read while it is made.
  std::vector<BlockKey> read_keys_;
  std::vector<std::int32_t> read_tokens_;  // [read buffers, tokens_per_block]

  std::thread thread_;  // the last member: everything it uses is there when it starts
};

}  // namespace adaptrt
