#include "adaptrt/weight_file/weight_slots.h"

#include <boost/test/unit_test.hpp>
#include <memory>
#include <vector>

#include "adaptrt/core/error.h"
#include "files.h"

namespace adaptrt::testing::weight_slots_test {
namespace {

constexpr std::size_t kUnits = 8;

struct Slots {
  explicit Slots(std::size_t num_slots)
      : file(kUnits * kFilePage), weights(std::make_shared<WeightFile>(file.path())) {
    std::vector<FilePages> pages;
    for (std::size_t unit = 0; unit < kUnits; ++unit) pages.emplace_back(std::vector<FileRange>{range(unit)});
    slots = std::make_unique<WeightSlots>(weights, std::move(pages), num_slots);
  }
  static FileRange range(std::size_t unit) { return {unit * kFilePage + 64, 2000}; }

  /// Returns the number of these units that were read.
  std::size_t bring(const std::vector<std::size_t>& units) {
    const std::uint64_t before = weights->bytes_read();
    slots->bring(units);
    for (const std::size_t unit : units) {
      for (std::size_t at = range(unit).offset; at < range(unit).end(); at += 17) {
        BOOST_REQUIRE(*slots->address_of(unit, at) == TestFile::byte_at(at));
      }
    }
    return static_cast<std::size_t>(weights->bytes_read() - before) / kFilePage;
  }

  TestFile file;
  std::shared_ptr<WeightFile> weights;
  std::unique_ptr<WeightSlots> slots;
};

}  // namespace

BOOST_AUTO_TEST_SUITE(weight_slots)

BOOST_AUTO_TEST_CASE(units_stay_until_others_need_their_slots) {
  Slots slots(3);
  BOOST_TEST(slots.bring({0, 1}) == 2U);
  BOOST_TEST(slots.bring({1}) == 0U);
  BOOST_TEST(slots.bring({2}) == 1U);
  BOOST_TEST(slots.bring({3}) == 1U);  // evicts 0, the least recently used
  BOOST_TEST(slots.bring({1, 2, 3}) == 0U);
  BOOST_TEST(slots.bring({0}) == 1U);
  BOOST_TEST(slots.bring({4, 5, 6}) == 3U);
}

BOOST_AUTO_TEST_CASE(units_requested_now_are_not_evicted_for_each_other) {
  Slots slots(2);
  BOOST_TEST(slots.bring({0, 1}) == 2U);
  BOOST_TEST(slots.bring({2, 0}) == 1U);
  BOOST_TEST(slots.bring({2, 0}) == 0U);
}

BOOST_AUTO_TEST_CASE(a_unit_that_cannot_be_read_leaves_the_others_where_they_are) {
  Slots slots(2);
  BOOST_TEST(slots.bring({0, 1}) == 2U);
  slots.file.cut(5 * kFilePage);
  BOOST_CHECK_THROW(slots.bring({1, 6}), StepError);
  BOOST_TEST(slots.bring({1}) == 0U);
  slots.file.restore(kUnits * kFilePage);
  BOOST_TEST(slots.bring({1, 6}) == 1U);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace adaptrt::testing::weight_slots_test
