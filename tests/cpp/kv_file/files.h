#pragma once

// Helpers that the tests of the KV file share.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <ios>
#include <stdexcept>
#include <string>
#include <vector>

#include "adaptrt/kv_file/kv_file.h"
#include "support/temporary_directory.h"

namespace adaptrt::testing {

inline constexpr std::size_t kBlockBytes = 5000;
/// Bytes of a slot in the layout below: one page for the file's header, two for each slot.
inline constexpr std::size_t kSlotBytes = 8192;
inline constexpr std::size_t kFirstSlot = 4096;

inline KvFileLayout layout_of(std::size_t num_slots, std::uint64_t engine = 1) {
  return {.fingerprint = Sha256().add_integer(engine).finish(),
          .tokens_per_block = 4,
          .block_bytes = kBlockBytes,
          .max_bytes = kFirstSlot + num_slots * kSlotBytes};
}

/// A block generated from a number.
struct TestBlock {
  explicit TestBlock(std::int32_t number)
      : tokens{number, number + 1, number + 2, number + 3}, bytes(kBlockBytes) {
    key = block_key({}, tokens);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::byte>(static_cast<std::size_t>(number) * 31 + i * 7);
    }
  }
  [[nodiscard]] KeyedBlock keyed() const { return {.key = key, .tokens = tokens}; }

  std::vector<std::int32_t> tokens;
  BlockKey key;
  std::vector<std::byte> bytes;
};

inline std::filesystem::path file_in(const TemporaryDirectory& directory) {
  return directory.path() / KvFile::kName;
}

/// Changes a byte of the file, if the file is long enough.
inline void damage(const std::filesystem::path& path, std::size_t offset) {
  if (std::filesystem::file_size(path) <= offset) return;
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(offset));
  const int byte = file.get();
  file.seekp(static_cast<std::streamoff>(offset));
  file.put(static_cast<char>(byte ^ 0x40));
  if (!file) throw std::runtime_error("the file could not be changed");
}

/// From now on, writes to the open file of this path fail like those to a broken disk.
inline void break_writes(const std::filesystem::path& path) {
  struct stat wanted{};
  if (stat(path.c_str(), &wanted) != 0) throw std::runtime_error("there is no such file");
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int number = std::stoi(entry.path().filename().string());
    struct stat found{};
    if (fstat(number, &found) != 0 || found.st_ino != wanted.st_ino || found.st_dev != wanted.st_dev)
      continue;
    const int readable = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    dup2(readable, number);
    close(readable);
    return;
  }
  throw std::runtime_error("the file is not open");
}

}  // namespace adaptrt::testing
