#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "adaptrt/kv/second_level.h"

namespace adaptrt {

/// Content of a KV file's slots.
enum class KvFileContent : std::uint8_t {
  kBlocks,
  kStates,  ///< snapshots of states, under the keys of the blocks before them
};

/// Identity and size of a KV file. A file of another engine is overwritten.
struct KvFileLayout {
  KvFileContent content = KvFileContent::kBlocks;
  /// Digest of everything that determines KV, except ReuseKey and tokens.
  Sha256Digest fingerprint{};
  std::int32_t tokens_per_block = 0;
  /// Bytes of a block, or of a snapshot.
  std::size_t block_bytes = 0;
  /// Maximum size of the whole file.
  std::size_t max_bytes = 0;
};

/// Returns the bytes of a file with one block or snapshot.
[[nodiscard]] std::size_t least_file_size(const KvFileLayout& layout);
/// Throws ConfigError that says how many bytes one block takes if max_bytes hold none.
void check_file_size(const KvFileLayout& layout);

/// A file descriptor that its destructor closes.
class FileDescriptor {
 public:
  explicit FileDescriptor(int descriptor) : descriptor_(descriptor) {}
  ~FileDescriptor();
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  /// Negative if it is closed.
  [[nodiscard]] int get() const { return descriptor_; }
  void close();

 private:
  int descriptor_;
};

/// KV blocks in a file of slots, each with the block's key, tokens and checksums (docs/formats.md). The file
/// belongs to one KvFile at a time. Everything read from it is checked before use.
///
/// A slot's image is its content in the file: a header, and the block's bytes at block_of().
class KvFile {
 public:
  /// Name of the file in its directory.
  static constexpr const char* kName = "kv_cache.adaptrt";
  static constexpr const char* kStatesName = "states.adaptrt";

  enum class Result : std::uint8_t {
    kDone,
    kDamaged,  ///< the slot does not hold this block
    kNoSpace,  ///< no space on the disk, in a quota or in a process limit
    kFailed,   ///< see error()
  };
  struct Entry {
    BlockKey key;
    std::int32_t slot = 0;
    std::uint64_t age = 0;
  };

  /// Opens or creates the file. Throws ConfigError with the path and the reason: no such directory, no room
  /// for one slot, a link or another kind of file in its place, a file of another format, or another process
  /// that uses it.
  KvFile(const std::string& directory, const KvFileLayout& layout);

  /// Returns the blocks listed in the headers, each key once, in ascending order of age.
  [[nodiscard]] std::vector<Entry> entries() const;
  [[nodiscard]] std::int32_t num_slots() const { return num_slots_; }
  /// Bytes of an image, which is one slot.
  [[nodiscard]] std::size_t slot_bytes() const { return slot_bytes_; }
  [[nodiscard]] std::span<std::byte> block_of(std::span<std::byte> image) const {
    return image.subspan(header_bytes_, layout_.block_bytes);
  }
  /// Writes an image's header except for the checksums. Blocks of a higher age were written later.
  void describe(std::span<std::byte> image, const KeyedBlock& content, std::uint64_t age) const;

  // Only one thread may call the functions below.
  /// Adds the image's checksums and writes it.
  Result write(std::int32_t slot, std::span<std::byte> image);
  /// Reads a slot. Returns kDamaged unless it holds this block.
  Result read(std::int32_t slot, const KeyedBlock& content, std::span<std::byte> image);
  /// Removes the block from the slot.
  Result erase(std::int32_t slot);
  /// Releases the file to other processes. Nothing may be read or written afterwards.
  void close() { file_.close(); }
  /// Reason of the last failed call.
  [[nodiscard]] const std::string& error() const { return error_; }

 private:
  [[nodiscard]] std::int64_t offset_of(std::int32_t slot) const;
  void begin_anew() const;
  Result failed(const char* what, int number);

  KvFileLayout layout_;
  std::string path_;
  std::size_t header_bytes_;
  std::size_t slot_bytes_;
  std::int32_t num_slots_;
  FileDescriptor file_;
  std::string error_;
};

}  // namespace adaptrt
