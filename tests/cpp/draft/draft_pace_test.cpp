#include "adaptrt/draft/draft_pace.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <vector>

namespace adaptrt::draft_pace_test {
namespace {

/// Numbers of drafts of `num_steps` steps, with all drafts computed and `num_right` of them right.
std::vector<std::int32_t> lengths(DraftPace& pace, int num_steps, std::int32_t num_right) {
  std::vector<std::int32_t> all;
  for (int i = 0; i < num_steps; ++i) {
    all.push_back(pace.next());
    if (all.back() > 0) pace.record(all.back(), std::min(all.back(), num_right));
  }
  return all;
}

BOOST_AUTO_TEST_SUITE(draft_pace)

BOOST_AUTO_TEST_CASE(right_drafts_become_as_many_as_there_may_be) {
  DraftPace pace(11);
  BOOST_TEST(lengths(pace, 5, 11) == (std::vector<std::int32_t>{2, 4, 8, 11, 11}),
             boost::test_tools::per_element());
  DraftPace one(1);
  BOOST_TEST(lengths(one, 3, 1) == (std::vector<std::int32_t>{1, 1, 1}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(pauses_between_wrong_drafts_grow) {
  DraftPace pace(8);
  BOOST_TEST(
      lengths(pace, 16, 0) == (std::vector<std::int32_t>{2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0}),
      boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(text_without_a_right_draft_computes_few) {
  DraftPace pace(8);
  std::int32_t num_computed = 0;
  for (const std::int32_t length : lengths(pace, 256, 0)) num_computed += length;
  BOOST_TEST(num_computed == 6);
  num_computed = 0;
  for (const std::int32_t length : lengths(pace, 1280, 0)) num_computed += length;
  BOOST_TEST(num_computed == 10);  // one of every 128
}

BOOST_AUTO_TEST_CASE(one_wrong_guess_does_not_stop_what_goes_well) {
  DraftPace pace(8);
  static_cast<void>(lengths(pace, 5, 8));
  BOOST_TEST(lengths(pace, 1, 0) == std::vector<std::int32_t>{8}, boost::test_tools::per_element());
  BOOST_TEST(lengths(pace, 4, 8) == (std::vector<std::int32_t>{0, 4, 8, 8}),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(drafts_that_are_right_in_part_stay_as_many) {
  DraftPace pace(8);
  static_cast<void>(lengths(pace, 2, 8));
  BOOST_TEST(lengths(pace, 3, 3) == (std::vector<std::int32_t>{8, 8, 8}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(text_that_repeats_itself_again_gets_its_drafts_back) {
  DraftPace pace(8);
  static_cast<void>(lengths(pace, 43, 0));
  const auto count_pauses = [&] {
    std::int32_t num_pauses = 0;
    while (pace.next() == 0) ++num_pauses;
    return num_pauses;
  };
  BOOST_TEST(count_pauses() == 127);  // after four misses
  pace.record(1, 1);
  BOOST_TEST(pace.next() == 2);
  pace.record(2, 0);
  BOOST_TEST(count_pauses() == 31);  // after three
}

BOOST_AUTO_TEST_CASE(drafts_without_room_say_nothing_of_more) {
  DraftPace pace(8);
  BOOST_TEST(pace.next() == 2);
  pace.record(1, 1);
  BOOST_TEST(pace.next() == 2);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::draft_pace_test
