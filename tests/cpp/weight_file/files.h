#pragma once

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "adaptrt/core/huge_array.h"
#include "support/temporary_directory.h"

namespace adaptrt::testing {

/// A file whose byte at `offset` is byte_at(offset).
class TestFile {
 public:
  explicit TestFile(std::size_t bytes) {
    std::ofstream file(path(), std::ios::binary);
    for (std::size_t i = 0; i < bytes; ++i) file.put(static_cast<char>(byte_at(i)));
  }
  static std::byte byte_at(std::size_t offset) {
    return static_cast<std::byte>((offset * 7 + offset / 251) % 256);
  }
  [[nodiscard]] std::string path() const { return (directory_.path() / "rank0.engine").string(); }
  void cut(std::size_t bytes) const { std::filesystem::resize_file(path(), bytes); }
  /// Restores the first `bytes` bytes of the file.
  void restore(std::size_t bytes) const {
    std::ofstream file(path(), std::ios::binary);
    for (std::size_t i = 0; i < bytes; ++i) file.put(static_cast<char>(byte_at(i)));
  }

 private:
  TemporaryDirectory directory_;
};

}  // namespace adaptrt::testing
