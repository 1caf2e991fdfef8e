#include "adaptrt/weight_file/weight_file.h"

#include <boost/test/unit_test.hpp>
#include <filesystem>
#include <iterator>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "files.h"
#include "support/allocations.h"

namespace adaptrt::testing::weight_file_test {
namespace {

constexpr std::size_t kFileBytes = 10 * kFilePage + 100;

void check_content(const FilePages& pages, const std::vector<FileRange>& ranges, const std::byte* memory) {
  for (const FileRange& range : ranges) {
    for (std::size_t at = range.offset; at < range.end(); ++at) {
      BOOST_REQUIRE(memory[pages.place_of(at)] == TestFile::byte_at(at));
    }
  }
}

}  // namespace

BOOST_AUTO_TEST_SUITE(weight_file)

BOOST_AUTO_TEST_CASE(ranges_that_share_a_page_are_one_piece) {
  const FilePages pages({{9000, 10}, {100, 50}, {4096, 1}, {30000, 0}, {20480, 4096}});
  const std::vector<FileRange> expected{{0, 3 * kFilePage}, {5 * kFilePage, kFilePage}};
  BOOST_TEST((pages.pieces() == expected));
  BOOST_TEST(pages.bytes() == 4 * kFilePage);
  BOOST_TEST(pages.place_of(100) == 100U);
  BOOST_TEST(pages.place_of(9000) == 9000U);
  BOOST_TEST(pages.place_of(20480) == 3 * kFilePage);
  BOOST_TEST(FilePages().bytes() == 0U);
}

BOOST_AUTO_TEST_CASE(ranges_are_read_whole_up_to_the_end_of_the_file) {
  const TestFile file(kFileBytes);
  WeightFile weights(file.path());
  const std::vector<FileRange> ranges{{64, 5000}, {5 * kFilePage + 1, 1}, {kFileBytes - 64, 64}};
  const FilePages pages(ranges);
  const HugeArray memory(pages.bytes());
  weights.read(pages, memory.data());
  check_content(pages, ranges, memory.data());
  BOOST_TEST(weights.bytes_read() == 3 * kFilePage + 100);
}

std::ptrdiff_t count_open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return std::distance(begin(files), end(files));
}

BOOST_AUTO_TEST_CASE(no_file_stays_open_where_memory_is_refused) {
  const TestFile file(kFileBytes);
  std::string path = file.path();
  const auto before = count_open_files();
  {
    const FailingAllocations failing(1);
    std::thread([&] {
      try {
        const WeightFile weights(std::move(path));
      } catch (const std::bad_alloc&) {
      }
    }).join();
  }
  BOOST_TEST(count_open_files() == before);
}

BOOST_AUTO_TEST_CASE(a_file_that_was_cut_short_is_an_error_that_names_it) {
  const TestFile file(kFileBytes);
  WeightFile weights(file.path());
  const std::vector<FileRange> ranges{{3 * kFilePage, kFilePage}};
  const FilePages pages(ranges);
  const HugeArray memory(pages.bytes());
  for (const std::size_t bytes : {3 * kFilePage + 7, 3 * kFilePage, std::size_t{0}}) {
    file.cut(bytes);
    BOOST_CHECK_EXCEPTION(weights.read(pages, memory.data()), StepError, [&](const StepError& error) {
      const std::string text = error.what();
      return text.starts_with(file.path() + ": ") && text.find("cut short") != std::string::npos &&
             text.find(std::to_string(4 * kFilePage)) != std::string::npos;
    });
  }
  file.restore(kFileBytes);
  weights.read(pages, memory.data());
  check_content(pages, ranges, memory.data());
}

BOOST_AUTO_TEST_CASE(a_file_that_cannot_be_opened_is_named) {
  BOOST_CHECK_EXCEPTION(WeightFile("/nowhere/rank0.engine"), EngineError, [](const EngineError& error) {
    return std::string(error.what()) == "/nowhere/rank0.engine: cannot be read: No such file or directory";
  });
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace adaptrt::testing::weight_file_test
