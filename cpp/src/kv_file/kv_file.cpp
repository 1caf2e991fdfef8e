#include "adaptrt/kv_file/kv_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <type_traits>
#include <unordered_set>

#include "adaptrt/core/checksum.h"
#include "adaptrt/core/error.h"

namespace adaptrt {
namespace {

/// Slots begin at multiples of kPage, after the file's header.
constexpr std::size_t kPage = 4096;
constexpr std::uint32_t kVersion = 1;
constexpr std::uint32_t kByteOrder = 0x01020304;
constexpr std::array<char, 8> kFileMagic{'A', 'R', 'T', 'K', 'V', 'F', 'L', '\n'};
constexpr std::array<char, 8> kSlotMagic{'A', 'R', 'T', 'K', 'V', 'B', 'L', '\n'};

struct FileHeader {
  std::array<char, 8> magic = kFileMagic;
  std::uint64_t checksum = 0;  // of the rest of the header
  std::uint32_t version = kVersion;
  std::uint32_t byte_order = kByteOrder;
  Sha256Digest fingerprint{};
  std::uint64_t block_bytes = 0;
  std::uint64_t slot_bytes = 0;
  std::uint64_t tokens_per_block = 0;

  bool operator==(const FileHeader&) const = default;
};

/// Followed by the tokens, zeros, and the block.
struct SlotHeader {
  std::array<char, 8> magic = kSlotMagic;
  std::uint64_t checksum = 0;  // of everything after it and before the block
  std::uint64_t block_checksum = 0;
  std::uint64_t age = 0;
  BlockKey key{};
  std::uint64_t block_bytes = 0;
  std::uint64_t num_tokens = 0;
};

static_assert(std::has_unique_object_representations_v<FileHeader> && sizeof(FileHeader) == 80);
static_assert(std::has_unique_object_representations_v<SlotHeader> && sizeof(SlotHeader) == 80);

constexpr std::size_t kChecksumEnd = offsetof(SlotHeader, block_checksum);
static_assert(kChecksumEnd == offsetof(FileHeader, version));

std::size_t round_up(std::size_t size, std::size_t unit) {
  return (size + unit - 1) / unit * unit;
}

std::string text_of(int number) {
  return std::strerror(number);  // NOLINT(concurrency-mt-unsafe): glibc's is safe
}

/// Reads all bytes, or fewer at the end of the file; returns their number. Returns -1 with errno on an error.
std::int64_t read_at(int file, std::span<std::byte> bytes, std::int64_t offset) {
  std::size_t done = 0;
  while (done < bytes.size()) {
    const auto part =
        pread(file, bytes.data() + done, bytes.size() - done, offset + static_cast<std::int64_t>(done));
    if (part < 0 && errno == EINTR) continue;
    if (part < 0) return -1;
    if (part == 0) break;
    done += static_cast<std::size_t>(part);
  }
  return static_cast<std::int64_t>(done);
}

/// Returns false with errno on an error.
bool write_at(int file, std::span<const std::byte> bytes, std::int64_t offset) {
  while (!bytes.empty()) {
    const auto part = pwrite(file, bytes.data(), bytes.size(), offset);
    if (part < 0 && errno == EINTR) continue;
    if (part < 0) return false;
    if (part == 0) {
      errno = ENOSPC;
      return false;
    }
    bytes = bytes.subspan(static_cast<std::size_t>(part));
    offset += part;
  }
  return true;
}

template <class Header>
Header header_in(std::span<const std::byte> bytes) {
  Header header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  return header;
}

/// Bytes of a slot before its block.
std::size_t header_bytes_of(const KvFileLayout& layout) {
  return round_up(
      sizeof(SlotHeader) + static_cast<std::size_t>(layout.tokens_per_block) * sizeof(std::int32_t), 64);
}

std::size_t slot_bytes_of(const KvFileLayout& layout) {
  return round_up(header_bytes_of(layout) + layout.block_bytes, kPage);
}

std::int32_t num_slots_of(const KvFileLayout& layout) {
  const std::size_t slots = (layout.max_bytes - std::min(layout.max_bytes, kPage)) / slot_bytes_of(layout);
  return static_cast<std::int32_t>(
      std::min(slots, static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())));
}

const KvFileLayout& checked(const KvFileLayout& layout) {
  check_file_size(layout);
  return layout;
}

const char* name_of(const KvFileLayout& layout) {
  return layout.content == KvFileContent::kStates ? KvFile::kStatesName : KvFile::kName;
}

/// Opens the file of this name in the directory, without following links.
int open_file(const std::string& directory, const char* name, const std::string& path) {
  const FileDescriptor folder(open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0) {
    throw ConfigError("host_cache_dir " + directory + ": " +
                      (errno == ENOTDIR ? "is not a directory" : "cannot be opened: " + text_of(errno)));
  }
  const int file =
      openat(folder.get(), name, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, S_IRUSR | S_IWUSR);
  if (file < 0) {
    throw ConfigError(
        path + ": " +
        (errno == ELOOP ? "is a link; accepted: a file" : "cannot be opened: " + text_of(errno)));
  }
  return file;
}

}  // namespace

std::size_t least_file_size(const KvFileLayout& layout) {
  return kPage + slot_bytes_of(layout);
}

void check_file_size(const KvFileLayout& layout) {
  if (num_slots_of(layout) >= 1) return;
  throw ConfigError("host_cache_size is " + std::to_string(layout.max_bytes) + "; one KV block takes " +
                    std::to_string(least_file_size(layout)) + " bytes in a file");
}

FileDescriptor::~FileDescriptor() {
  close();
}

void FileDescriptor::close() {
  if (descriptor_ < 0) return;
  flock(descriptor_, LOCK_UN);  // forked child processes may still have the descriptor
  ::close(descriptor_);
  descriptor_ = -1;
}

KvFile::KvFile(const std::string& directory, const KvFileLayout& layout)
    : layout_(checked(layout)),
      path_((directory.ends_with('/') ? directory : directory + "/") + name_of(layout)),
      header_bytes_(header_bytes_of(layout)),
      slot_bytes_(slot_bytes_of(layout)),
      num_slots_(num_slots_of(layout)),
      file_(open_file(directory, name_of(layout), path_)) {
  struct stat status{};
  if (fstat(file_.get(), &status) != 0) throw ConfigError(path_ + ": cannot be read: " + text_of(errno));
  if (!S_ISREG(status.st_mode) || status.st_nlink != 1) {
    throw ConfigError(path_ +
                      ": is not a file of this one name; accepted: a file that the executor made, or none");
  }
  if (flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
    throw ConfigError(path_ + ": " +
                      (errno == EWOULDBLOCK ? "is used by another executor; accepted: a directory for each"
                                            : "cannot be locked: " + text_of(errno)));
  }
  std::array<std::byte, sizeof(FileHeader)> bytes{};
  const std::int64_t there = read_at(file_.get(), bytes, 0);
  if (there < 0) throw ConfigError(path_ + ": cannot be read: " + text_of(errno));
  if (there == 0) {
    begin_anew();
    return;
  }
  const auto header = header_in<FileHeader>(bytes);
  if (there < static_cast<std::int64_t>(sizeof(kFileMagic)) || header.magic != kFileMagic) {
    throw ConfigError(path_ + ": is not a KV cache; accepted: a file that the executor made, or none");
  }
  FileHeader expected{.fingerprint = layout_.fingerprint,
                      .block_bytes = layout_.block_bytes,
                      .slot_bytes = slot_bytes_,
                      .tokens_per_block = static_cast<std::uint64_t>(layout_.tokens_per_block)};
  expected.checksum = checksum_of(std::as_bytes(std::span(&expected, 1)).subspan(kChecksumEnd));
  if (header != expected) {
    begin_anew();
  } else if (fstat(file_.get(), &status) == 0 && status.st_size > offset_of(num_slots_) &&
             ftruncate(file_.get(), offset_of(num_slots_)) != 0) {
    throw ConfigError(path_ + ": cannot be made smaller: " + text_of(errno));
  }
}

void KvFile::begin_anew() const {
  FileHeader header{.fingerprint = layout_.fingerprint,
                    .block_bytes = layout_.block_bytes,
                    .slot_bytes = slot_bytes_,
                    .tokens_per_block = static_cast<std::uint64_t>(layout_.tokens_per_block)};
  const auto bytes = std::as_bytes(std::span(&header, 1));
  header.checksum = checksum_of(bytes.subspan(kChecksumEnd));
  if (ftruncate(file_.get(), 0) != 0 || !write_at(file_.get(), bytes, 0)) {
    throw ConfigError(path_ + ": cannot be written: " + text_of(errno));
  }
}

std::int64_t KvFile::offset_of(std::int32_t slot) const {
  return static_cast<std::int64_t>(kPage + static_cast<std::size_t>(slot) * slot_bytes_);
}

std::vector<KvFile::Entry> KvFile::entries() const {
  std::vector<Entry> found;
  std::vector<std::byte> header(header_bytes_);
  for (std::int32_t slot = 0; slot < num_slots_; ++slot) {
    const std::int64_t bytes = read_at(file_.get(), header, offset_of(slot));
    if (bytes != static_cast<std::int64_t>(header_bytes_)) break;  // end of the file, or unreadable
    const auto start = header_in<SlotHeader>(header);
    if (start.magic != kSlotMagic || start.block_bytes != layout_.block_bytes ||
        start.num_tokens != static_cast<std::uint64_t>(layout_.tokens_per_block) ||
        start.checksum != checksum_of(std::span(header).subspan(kChecksumEnd))) {
      continue;
    }
    found.push_back({.key = start.key, .slot = slot, .age = start.age});
  }
  // A crash can leave two slots with the same key. The newer one stays.
  std::ranges::sort(found, std::greater{}, &Entry::age);
  std::unordered_set<std::string_view> keys;
  std::vector<Entry> entries;
  entries.reserve(found.size());
  for (const Entry& entry : found) {
    const std::string_view key(reinterpret_cast<const char*>(entry.key.data()), entry.key.size());
    if (keys.insert(key).second) entries.push_back(entry);
  }
  std::ranges::reverse(entries);
  return entries;
}

void KvFile::describe(std::span<std::byte> image, const KeyedBlock& content, std::uint64_t age) const {
  const SlotHeader header{.age = age,
                          .key = content.key,
                          .block_bytes = layout_.block_bytes,
                          .num_tokens = content.tokens.size()};
  std::ranges::fill(image.first(header_bytes_), std::byte{});
  std::memcpy(image.data(), &header, sizeof(header));
  std::ranges::copy(std::as_bytes(content.tokens), image.begin() + sizeof(header));
}

KvFile::Result KvFile::write(std::int32_t slot, std::span<std::byte> image) {
  auto header = header_in<SlotHeader>(image);
  header.block_checksum = checksum_of(block_of(image));
  std::memcpy(image.data(), &header, sizeof(header));
  header.checksum = checksum_of(image.first(header_bytes_).subspan(kChecksumEnd));
  std::memcpy(image.data(), &header, sizeof(header));
  if (write_at(file_.get(), image, offset_of(slot))) return Result::kDone;
  return failed("written", errno);
}

KvFile::Result KvFile::read(std::int32_t slot, const KeyedBlock& content, std::span<std::byte> image) {
  const std::int64_t bytes = read_at(file_.get(), image, offset_of(slot));
  if (bytes < 0) return failed("read", errno);
  if (bytes != static_cast<std::int64_t>(image.size())) return Result::kDamaged;
  const auto header = header_in<SlotHeader>(image);
  const auto tokens = std::as_bytes(content.tokens);
  const bool is_that_block =
      header.magic == kSlotMagic && header.key == content.key && header.block_bytes == layout_.block_bytes &&
      header.num_tokens == content.tokens.size() &&
      header.checksum == checksum_of(image.first(header_bytes_).subspan(kChecksumEnd)) &&
      std::ranges::equal(image.subspan(sizeof(header), tokens.size()), tokens) &&
      header.block_checksum == checksum_of(block_of(image));
  return is_that_block ? Result::kDone : Result::kDamaged;
}

KvFile::Result KvFile::erase(std::int32_t slot) {
  constexpr std::array<std::byte, sizeof(SlotHeader)> kNothing{};
  if (write_at(file_.get(), kNothing, offset_of(slot))) return Result::kDone;
  return failed("written", errno);
}

KvFile::Result KvFile::failed(const char* what, int number) {
  error_ = path_ + ": cannot be " + what + ": " + text_of(number);
  const bool is_full = number == ENOSPC || number == EDQUOT || number == EFBIG;
  return is_full ? Result::kNoSpace : Result::kFailed;
}

}  // namespace adaptrt
