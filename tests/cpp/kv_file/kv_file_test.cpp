#include "adaptrt/kv_file/kv_file.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "files.h"

namespace adaptrt::testing::kv_file_test {
namespace {

using Result = KvFile::Result;

struct Stored {
  explicit Stored(std::size_t num_slots = 4) : layout(layout_of(num_slots)) { open(); }

  void open() {
    file.reset();
    file = std::make_unique<KvFile>(directory.path().string(), layout);
    image.resize(file->slot_bytes());
  }
  Result write(std::int32_t slot, const TestBlock& block, std::uint64_t age = 1) {
    file->describe(image, block.keyed(), age);
    std::ranges::copy(block.bytes, file->block_of(image).begin());
    return file->write(slot, image);
  }
  /// Reads a block and compares the result.
  Result read(std::int32_t slot, const TestBlock& block) {
    std::ranges::fill(image, std::byte{});
    const Result result = file->read(slot, block.keyed(), image);
    if (result == Result::kDone) BOOST_TEST(std::ranges::equal(file->block_of(image), block.bytes));
    return result;
  }
  [[nodiscard]] std::vector<std::int32_t> slots() const {
    std::vector<std::int32_t> slots;
    for (const KvFile::Entry& entry : file->entries()) slots.push_back(entry.slot);
    return slots;
  }
  /// Returns why the file cannot be opened.
  std::string refusal() {
    file.reset();
    try {
      open();
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  }
  [[nodiscard]] std::filesystem::path path() const { return file_in(directory); }

  TemporaryDirectory directory;
  KvFileLayout layout;
  std::unique_ptr<KvFile> file;
  std::vector<std::byte> image;
};

/// Limits the size of files of this process.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(std::size_t bytes) : handler_(signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int);
};

BOOST_AUTO_TEST_SUITE(kv_file)

BOOST_AUTO_TEST_CASE(written_blocks_are_read_back) {
  Stored stored;
  BOOST_TEST(stored.file->num_slots() == 4);
  BOOST_TEST(stored.file->slot_bytes() == kSlotBytes);
  BOOST_TEST((stored.write(0, TestBlock(10)) == Result::kDone));
  BOOST_TEST((stored.write(3, TestBlock(20)) == Result::kDone));
  BOOST_TEST((stored.read(3, TestBlock(20)) == Result::kDone));
  BOOST_TEST((stored.read(0, TestBlock(10)) == Result::kDone));
  BOOST_TEST((stored.write(0, TestBlock(30)) == Result::kDone));
  BOOST_TEST((stored.read(0, TestBlock(30)) == Result::kDone));
}

BOOST_AUTO_TEST_CASE(another_block_is_not_taken_for_the_one_that_is_asked_for) {
  Stored stored;
  stored.write(1, TestBlock(10));
  BOOST_TEST((stored.read(1, TestBlock(11)) == Result::kDamaged));
  BOOST_TEST((stored.read(0, TestBlock(10)) == Result::kDamaged));
  BOOST_TEST((stored.read(2, TestBlock(10)) == Result::kDamaged));  // after the end of the file
  TestBlock same_key(12);
  same_key.key = TestBlock(10).key;
  BOOST_TEST((stored.read(1, same_key) == Result::kDamaged));
}

BOOST_AUTO_TEST_CASE(blocks_outlive_the_process_in_the_order_of_their_ages) {
  Stored stored;
  stored.write(0, TestBlock(10), 7);
  stored.write(1, TestBlock(20), 5);
  stored.write(2, TestBlock(30), 9);
  stored.open();
  BOOST_TEST(stored.slots() == std::vector<std::int32_t>({1, 0, 2}), boost::test_tools::per_element());
  BOOST_TEST((stored.file->entries()[0].key == TestBlock(20).key));
  BOOST_TEST(stored.file->entries()[0].age == 5U);
  BOOST_TEST((stored.read(2, TestBlock(30)) == Result::kDone));
}

BOOST_AUTO_TEST_CASE(the_newer_of_two_slots_with_one_block_counts) {
  Stored stored;
  stored.write(0, TestBlock(10), 2);
  stored.write(1, TestBlock(10), 3);
  BOOST_TEST(stored.slots() == std::vector<std::int32_t>{1}, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(an_erased_block_is_gone) {
  Stored stored;
  stored.write(0, TestBlock(10));
  BOOST_TEST((stored.file->erase(0) == Result::kDone));
  BOOST_TEST((stored.read(0, TestBlock(10)) == Result::kDamaged));
  BOOST_TEST(stored.slots().empty());
}

BOOST_AUTO_TEST_CASE(damage_of_any_byte_that_counts_is_seen) {
  Stored stored(1);
  // Magic, checksum, the block's checksum, age, key, sizes, tokens, zeros, block.
  for (const std::size_t offset :
       {0U, 8U, 16U, 24U, 32U, 63U, 64U, 72U, 80U, 95U, 100U, 128U, 3000U, 5127U}) {
    stored.write(0, TestBlock(10));
    BOOST_TEST((stored.read(0, TestBlock(10)) == Result::kDone));
    damage(stored.path(), kFirstSlot + offset);
    BOOST_TEST((stored.read(0, TestBlock(10)) == Result::kDamaged), "byte " << offset);
  }
}

BOOST_AUTO_TEST_CASE(a_damaged_header_of_a_slot_costs_its_block) {
  Stored stored;
  for (std::int32_t slot = 0; slot < 3; ++slot) stored.write(slot, TestBlock(10 * slot));
  damage(stored.path(), kFirstSlot + kSlotBytes + 40);
  stored.open();
  BOOST_TEST(stored.slots() == std::vector<std::int32_t>({2, 0}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_file_that_was_cut_keeps_what_is_left) {
  Stored stored;
  for (std::int32_t slot = 0; slot < 3; ++slot) stored.write(slot, TestBlock(10 * slot), slot + 1);
  std::filesystem::resize_file(stored.path(), kFirstSlot + 2 * kSlotBytes + 300);
  stored.open();
  // The third header is valid; the damage is found when the block is read.
  BOOST_TEST(stored.slots() == std::vector<std::int32_t>({0, 1, 2}), boost::test_tools::per_element());
  BOOST_TEST((stored.read(2, TestBlock(20)) == Result::kDamaged));
  std::filesystem::resize_file(stored.path(), kFirstSlot + kSlotBytes + 10);
  stored.open();
  BOOST_TEST(stored.slots() == std::vector<std::int32_t>{0}, boost::test_tools::per_element());
  BOOST_TEST((stored.read(0, TestBlock(0)) == Result::kDone));
}

BOOST_AUTO_TEST_CASE(a_damaged_header_of_the_file_or_another_version_begins_anew) {
  for (const std::size_t offset : {9U, 16U, 20U, 40U, 60U, 70U}) {
    Stored stored;
    stored.write(0, TestBlock(10));
    damage(stored.path(), offset);
    stored.open();
    BOOST_TEST(stored.slots().empty());
    BOOST_TEST((stored.write(0, TestBlock(20)) == Result::kDone));
    stored.open();
    BOOST_TEST(stored.slots().size() == 1U);
  }
}

BOOST_AUTO_TEST_CASE(the_file_of_another_engine_begins_anew) {
  Stored stored;
  stored.write(0, TestBlock(10));
  stored.layout = layout_of(4, 2);
  stored.open();
  BOOST_TEST(stored.slots().empty());
  BOOST_TEST(std::filesystem::file_size(stored.path()) < kFirstSlot);
  stored.layout = layout_of(4);
  stored.layout.block_bytes -= 64;
  stored.open();
  BOOST_TEST(stored.slots().empty());
}

BOOST_AUTO_TEST_CASE(another_size_keeps_what_fits) {
  Stored stored;
  for (std::int32_t slot = 0; slot < 4; ++slot) stored.write(slot, TestBlock(10 * slot), slot + 1);
  stored.layout = layout_of(2);
  stored.open();
  BOOST_TEST(stored.file->num_slots() == 2);
  BOOST_TEST(stored.slots() == std::vector<std::int32_t>({0, 1}), boost::test_tools::per_element());
  BOOST_TEST(std::filesystem::file_size(stored.path()) == kFirstSlot + 2 * kSlotBytes);
  stored.layout = layout_of(9);
  stored.open();
  BOOST_TEST(stored.file->num_slots() == 9);
  BOOST_TEST((stored.read(1, TestBlock(10)) == Result::kDone));
}

BOOST_AUTO_TEST_CASE(a_second_user_is_refused) {
  Stored stored;
  std::string refusal;
  try {
    const KvFile second(stored.directory.path().string(), stored.layout);
  } catch (const ConfigError& error) {
    refusal = error.what();
  }
  BOOST_TEST(refusal.find("is used by another executor") != std::string::npos);
  BOOST_TEST(refusal.find(stored.path().string()) != std::string::npos);
  BOOST_TEST((stored.write(0, TestBlock(10)) == Result::kDone));
  BOOST_TEST(stored.refusal() == "");
}

BOOST_AUTO_TEST_CASE(foreign_files_are_refused_and_left_unchanged) {
  Stored stored;
  stored.file.reset();
  for (const std::string& content : {std::string("somebody's letter"), std::string("?")}) {
    std::ofstream(stored.path(), std::ios::binary | std::ios::trunc) << content;
    BOOST_TEST(stored.refusal().find("is not a KV cache") != std::string::npos);
    BOOST_TEST(std::filesystem::file_size(stored.path()) == content.size());
  }
}

BOOST_AUTO_TEST_CASE(links_and_other_kinds_of_files_are_refused) {
  Stored stored;
  stored.file.reset();
  std::filesystem::remove(stored.path());
  const auto other = stored.directory.path() / "other";
  std::ofstream(other) << "";
  std::filesystem::create_symlink(other, stored.path());
  BOOST_TEST(stored.refusal().find("is a link") != std::string::npos);
  std::filesystem::remove(stored.path());
  std::filesystem::create_hard_link(other, stored.path());
  BOOST_TEST(stored.refusal().find("is not a file of this one name") != std::string::npos);
  std::filesystem::remove(stored.path());
  BOOST_TEST(mkfifo(stored.path().c_str(), S_IRUSR | S_IWUSR) == 0);
  BOOST_TEST(stored.refusal().find("is not a file of this one name") != std::string::npos);
  std::filesystem::remove(stored.path());
  std::filesystem::create_directory(stored.path());
  BOOST_TEST(stored.refusal().find("cannot be opened") != std::string::npos);
  BOOST_TEST(std::filesystem::file_size(other) == 0U);
}

BOOST_AUTO_TEST_CASE(a_directory_that_is_none_is_refused) {
  const TemporaryDirectory directory;
  const auto path = directory.path() / "file";
  BOOST_CHECK_THROW(KvFile(path.string(), layout_of(4)), ConfigError);
  std::ofstream(path) << "";
  BOOST_CHECK_THROW(KvFile(path.string(), layout_of(4)), ConfigError);
}

BOOST_AUTO_TEST_CASE(a_size_that_holds_no_block_is_refused) {
  const TemporaryDirectory directory;
  KvFileLayout layout = layout_of(1);
  --layout.max_bytes;
  BOOST_CHECK_THROW(KvFile(directory.path().string(), layout), ConfigError);
  layout.max_bytes = 1;
  BOOST_CHECK_THROW(KvFile(directory.path().string(), layout), ConfigError);
  BOOST_CHECK_THROW(check_file_size(layout), ConfigError);
  BOOST_TEST(std::filesystem::is_empty(directory.path()));
  check_file_size(layout_of(1));
}

BOOST_AUTO_TEST_CASE(snapshots_have_a_file_of_their_own) {
  const TemporaryDirectory directory;
  const KvFile blocks(directory.path().string(), layout_of(1));
  KvFileLayout layout = layout_of(1);
  layout.content = KvFileContent::kStates;
  const KvFile states(directory.path().string(), layout);
  BOOST_TEST(std::filesystem::exists(directory.path() / "states.adaptrt"));
  BOOST_TEST(least_file_size(layout) == layout.max_bytes);
}

BOOST_AUTO_TEST_CASE(a_full_disk_costs_the_block) {
  Stored stored;
  stored.write(0, TestBlock(10));
  {
    const FileSizeLimit limit(kFirstSlot + kSlotBytes + 100);
    BOOST_TEST((stored.write(1, TestBlock(20)) == Result::kNoSpace));
    BOOST_TEST(stored.file->error().find(stored.path().string()) != std::string::npos);
    BOOST_TEST((stored.read(1, TestBlock(20)) == Result::kDamaged));
    BOOST_TEST((stored.write(0, TestBlock(30)) == Result::kDone));
  }
  stored.open();
  BOOST_TEST(stored.slots() == std::vector<std::int32_t>{0}, boost::test_tools::per_element());
  BOOST_TEST((stored.write(1, TestBlock(20)) == Result::kDone));
}

BOOST_AUTO_TEST_CASE(other_errors_are_told) {
  Stored stored;
  stored.write(0, TestBlock(10));
  break_writes(stored.path());
  BOOST_TEST((stored.write(1, TestBlock(20)) == Result::kFailed));
  BOOST_TEST(stored.file->error().find("cannot be written") != std::string::npos);
  BOOST_TEST((stored.file->erase(0) == Result::kFailed));
  BOOST_TEST((stored.read(0, TestBlock(10)) == Result::kDone));
}

/// A file of arbitrary bytes: opening and reading it ends, and returns no block that was not written.
BOOST_AUTO_TEST_CASE(files_of_any_bytes_are_survived) {
  std::mt19937 random(7);
  const auto below = [&](std::size_t end) { return random() % end; };
  for (int round = 0; round < 300; ++round) {
    Stored stored;
    for (std::int32_t slot = 0; slot < 4; ++slot) {
      if (below(4) != 0) stored.write(slot, TestBlock(10 * slot), below(5));
    }
    stored.file.reset();
    std::size_t size = std::filesystem::file_size(stored.path());
    if (below(3) == 0) {
      size = below(size + 9000) + 1;
      std::filesystem::resize_file(stored.path(), size);
    }
    std::fstream file(stored.path(), std::ios::in | std::ios::out | std::ios::binary);
    for (std::size_t change = below(12); change > 0; --change) {
      // Change mostly headers, and mostly to extreme values.
      const std::size_t slot = below(5);
      const std::size_t start = slot == 0 ? below(96) : kFirstSlot + (slot - 1) * kSlotBytes + below(160);
      if (start >= size) continue;
      file.seekp(static_cast<std::streamoff>(start));
      const std::vector<char> values{'\0', '\1', '\x7f', '\x80', '\xff', static_cast<char>(random())};
      for (std::size_t i = below(9); i > 0; --i) file.put(values[below(values.size())]);
    }
    file.close();
    if (!stored.refusal().empty()) continue;
    for (const std::int32_t slot : stored.slots()) BOOST_TEST((slot >= 0 && slot < 4));
    for (std::int32_t slot = 0; slot < 4; ++slot) {
      static_cast<void>(stored.read(slot, TestBlock(10 * slot)));
      BOOST_TEST((stored.write(slot, TestBlock(10 * slot)) == Result::kDone));
      BOOST_TEST((stored.read(slot, TestBlock(10 * slot)) == Result::kDone));
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::kv_file_test
