#include "adaptrt/sample/stop.h"

#include <boost/test/unit_test.hpp>
#include <vector>

namespace adaptrt::stop_test {
namespace {

FinishReason check(const StopCriteria& criteria, const std::vector<std::int32_t>& generated) {
  return criteria.check(generated);
}

BOOST_AUTO_TEST_SUITE(stop)

BOOST_AUTO_TEST_CASE(each_reason_is_told) {
  const StopCriteria criteria{.end_id = 2, .stop_words = {{5}, {6, 7, 8}}, .max_tokens = 4};
  BOOST_CHECK(check(criteria, {}) == FinishReason::kNotFinished);
  BOOST_CHECK(check(criteria, {1}) == FinishReason::kNotFinished);
  BOOST_CHECK(check(criteria, {1, 2}) == FinishReason::kEndId);
  BOOST_CHECK(check(criteria, {1, 5}) == FinishReason::kStopWords);
  BOOST_CHECK(check(criteria, {6, 7}) == FinishReason::kNotFinished);
  BOOST_CHECK(check(criteria, {6, 7, 8}) == FinishReason::kStopWords);
  BOOST_CHECK(check(criteria, {7, 8}) == FinishReason::kNotFinished);
  BOOST_CHECK(check(criteria, {1, 1, 1, 1}) == FinishReason::kLength);
}

BOOST_AUTO_TEST_CASE(the_end_comes_before_words_and_words_before_length) {
  const StopCriteria criteria{.end_id = 2, .stop_words = {{2}, {3}}, .max_tokens = 1};
  BOOST_CHECK(check(criteria, {2}) == FinishReason::kEndId);
  BOOST_CHECK(check(criteria, {3}) == FinishReason::kStopWords);
  BOOST_CHECK(check(criteria, {4}) == FinishReason::kLength);
}

BOOST_AUTO_TEST_CASE(only_the_newest_token_ends_a_word) {
  const StopCriteria criteria{.stop_words = {{5, 6}}, .max_tokens = 10};
  BOOST_CHECK(check(criteria, {5, 6}) == FinishReason::kStopWords);
  BOOST_CHECK(check(criteria, {5, 6, 1}) == FinishReason::kNotFinished);
  BOOST_CHECK(check(criteria, {6, 5}) == FinishReason::kNotFinished);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::stop_test
