#include "adaptrt/weight_file/record_cache.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "files.h"

namespace adaptrt::testing::record_cache_test {
namespace {

constexpr std::int32_t kRecords = 40;
constexpr std::size_t kRecordBytes = 2 * kFilePage;
constexpr std::size_t kOffsets[] = {kFilePage, 3 * kFilePage + kRecords * kRecordBytes};
constexpr std::size_t kFileBytes = kOffsets[1] + kRecords * kFilePage;

/// Two tables; the second one has smaller records.
struct Records {
  Records(std::size_t num_slots, const std::vector<std::int32_t>& kept)
      : file(kFileBytes), weights(std::make_shared<WeightFile>(file.path())) {
    cache = std::make_unique<RecordCache>(
        weights,
        std::vector<RecordCache::Table>{{kOffsets[0], kRecordBytes, kRecords, kept},
                                        {kOffsets[1], kFilePage, kRecords, {}}},
        num_slots);
  }

  static std::size_t record_bytes(std::size_t table) { return table == 0 ? kRecordBytes : kFilePage; }

  /// Returns the number of bytes read for these records.
  std::size_t bring(std::size_t table, const std::vector<std::int32_t>& records) {
    const std::uint64_t before = weights->bytes_read();
    cache->bring(table, records);
    for (const std::int32_t record : records) {
      const std::size_t offset = kOffsets[table] + static_cast<std::size_t>(record) * record_bytes(table);
      const std::byte* found = cache->address_of(table, record);
      for (std::size_t at = 0; at < record_bytes(table); at += 31) {
        BOOST_REQUIRE(found[at] == TestFile::byte_at(offset + at));
      }
    }
    return static_cast<std::size_t>(weights->bytes_read() - before);
  }

  TestFile file;
  std::shared_ptr<WeightFile> weights;
  std::unique_ptr<RecordCache> cache;
};

}  // namespace

BOOST_AUTO_TEST_SUITE(record_cache)

BOOST_AUTO_TEST_CASE(records_are_read_once_while_they_stay) {
  Records records(6, {});
  BOOST_TEST(records.bring(0, {3, 30}) == 2 * kRecordBytes);
  BOOST_TEST(records.bring(0, {3, 30}) == 0U);
  BOOST_TEST(records.bring(1, {3}) == kFilePage);
  BOOST_TEST(records.bring(0, {3, 20, 30}) == kRecordBytes);
  BOOST_TEST(records.bring(0, {}) == 0U);
  BOOST_TEST(records.bring(0, {0, 8, 16, 24, 32, 39}) == 6 * kRecordBytes);
  BOOST_TEST(records.bring(0, {3}) == kRecordBytes);
}

BOOST_AUTO_TEST_CASE(neighbours_are_read_with_what_lies_between) {
  Records records(8, {});
  // A gap of three records is 24 KiB; reading a gap of four takes longer than another request.
  BOOST_TEST(records.bring(0, {0, 1, 5}) == 6 * kRecordBytes);
  BOOST_TEST(records.bring(0, {10, 15}) == 2 * kRecordBytes);
}

BOOST_AUTO_TEST_CASE(records_that_are_kept_are_there_from_the_start) {
  Records records(2, {4, 5, 39});
  const std::uint64_t at_start = records.weights->bytes_read();
  BOOST_TEST(at_start >= 3 * kRecordBytes);
  BOOST_TEST(records.bring(0, {4, 5, 39}) == 0U);
  BOOST_TEST(records.bring(0, {0, 20}) == 2 * kRecordBytes);
  BOOST_TEST(records.bring(0, {4, 10, 30, 39}) == 2 * kRecordBytes);
  BOOST_TEST(records.bring(1, {4, 39}) == 2 * kFilePage);
  BOOST_TEST(records.bring(0, {4, 5, 39}) == 0U);
}

BOOST_AUTO_TEST_CASE(any_records_of_any_table_can_be_asked_for) {
  Records records(12, {1, 17});
  std::mt19937 random(7);
  for (int call = 0; call < 300; ++call) {
    std::vector<std::int32_t> wanted;
    for (std::int32_t record = 0; record < kRecords && wanted.size() < 12; ++record) {
      if (random() % 4 == 0) wanted.push_back(record);
    }
    records.bring(random() % 2, wanted);
  }
}

BOOST_AUTO_TEST_CASE(a_record_that_cannot_be_read_fails_the_call_and_no_other) {
  Records records(6, {2});
  BOOST_TEST(records.bring(0, {0, 2}) > 0U);
  records.file.cut(kOffsets[1] + 10 * kFilePage);
  for (int i = 0; i < 3; ++i) {
    BOOST_CHECK_EXCEPTION(records.bring(1, {0, 5, 20, 30}), StepError, [&](const StepError& error) {
      return std::string(error.what()).starts_with(records.file.path() + ": ends at byte ");
    });
    BOOST_TEST(records.bring(0, {0, 2}) <= kRecordBytes);
  }
  records.file.restore(kFileBytes);
  BOOST_TEST(records.bring(1, {0, 5, 20, 30}) > 0U);
}

BOOST_AUTO_TEST_CASE(records_that_cannot_be_kept_are_an_error) {
  const TestFile file(4 * kFilePage);
  const auto weights = std::make_shared<WeightFile>(file.path());
  file.cut(2 * kFilePage);
  BOOST_CHECK_THROW(RecordCache(weights, {{0, kFilePage, 4, {0, 3}}}, 1), StepError);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace adaptrt::testing::record_cache_test
