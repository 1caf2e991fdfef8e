#include "adaptrt/draft/ngram_index.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <random>

namespace adaptrt::ngram_index_test {
namespace {

using Tokens = std::vector<std::int32_t>;

Tokens drafts_of(const LookaheadDecodingConfig& config, const Tokens& text, std::size_t count) {
  NgramIndex index(config, text.size());
  index.extend(text);
  Tokens drafts;
  index.find(text, 0, count, drafts);
  return drafts;
}

/// Reference of NgramIndex::find that compares every position.
Tokens expected_drafts(const LookaheadDecodingConfig& config, const Tokens& text, std::size_t count) {
  const std::size_t longest = static_cast<std::size_t>(config.max_ngram_size) - 1;
  const std::size_t shortest = std::min<std::size_t>(2, longest);
  std::size_t best = 0;
  std::size_t best_length = shortest - 1;
  std::int32_t num_places = 0;
  for (std::size_t end = text.size() - 1; end >= shortest && num_places < config.max_verification_set_size;
       --end) {
    std::size_t length = 0;
    while (length < std::min(longest, end) && text[end - 1 - length] == text[text.size() - 1 - length])
      ++length;
    if (length < shortest) continue;
    ++num_places;
    if (length <= best_length) continue;
    best = end;
    best_length = length;
  }
  Tokens drafts;
  for (std::size_t i = 0; best > 0 && i < count; ++i) {
    drafts.push_back(best + i < text.size() ? text[best + i] : drafts[best + i - text.size()]);
  }
  return drafts;
}

BOOST_AUTO_TEST_SUITE(ngram_index)

BOOST_AUTO_TEST_CASE(drafts_repeat_what_followed_the_newest_tokens) {
  BOOST_TEST(drafts_of({8, 4, 4}, {1, 2, 3, 4, 5, 9, 1, 2, 3}, 3) == (Tokens{4, 5, 9}),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_single_token_is_no_match) {
  BOOST_TEST(drafts_of({8, 4, 4}, {1, 2, 3, 9, 2}, 3).empty());
  BOOST_TEST(drafts_of({8, 2, 4}, {1, 2, 3, 9, 2}, 2) == (Tokens{3, 9}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(longer_matches_can_be_asked_for) {
  const Tokens text = {1, 2, 3, 4, 5, 6, 7, 2, 3, 4};
  const auto count = [&](std::int32_t max_ngram_size, std::size_t num_more) {
    NgramIndex index({8, max_ngram_size, 4}, text.size());
    index.extend(text);
    Tokens drafts;
    index.find(text, num_more, 1, drafts);
    return drafts.size();
  };
  BOOST_TEST(count(6, 1) == 1U);
  BOOST_TEST(count(6, 2) == 0U);
  BOOST_TEST(count(4, 9) == 1U);  // at most three are compared
}

BOOST_AUTO_TEST_CASE(the_longest_match_counts_and_of_equals_the_newest) {
  const Tokens text = {7, 1, 2, 3, /**/ 8, 1, 2, 4, /**/ 9, 1, 2, 5, /**/ 8, 1, 2};
  BOOST_TEST(drafts_of({1, 4, 4}, text, 1) == Tokens{4}, boost::test_tools::per_element());
  BOOST_TEST(drafts_of({1, 3, 4}, text, 1) == Tokens{5}, boost::test_tools::per_element());
  // The longest match is at the second newest position.
  BOOST_TEST(drafts_of({1, 4, 1}, text, 1) == Tokens{5}, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_loop_goes_on) {
  BOOST_TEST(drafts_of({8, 3, 4}, {5, 1, 2, 1, 2}, 5) == (Tokens{1, 2, 1, 2, 1}),
             boost::test_tools::per_element());
  BOOST_TEST(drafts_of({8, 3, 4}, {6, 6, 6}, 3) == (Tokens{6, 6, 6}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(short_texts_have_no_drafts) {
  for (const Tokens& text : {Tokens{}, Tokens{1}, Tokens{1, 1}})
    BOOST_TEST(drafts_of({8, 4, 4}, text, 3).empty());
}

BOOST_AUTO_TEST_CASE(it_finds_what_looking_everywhere_finds) {
  std::mt19937 random(1);
  const auto draw = [&](int low, int high) { return std::uniform_int_distribution(low, high)(random); };
  int num_found = 0;
  for (int round = 0; round < 300; ++round) {
    const LookaheadDecodingConfig config{draw(1, 9), draw(2, 6), draw(1, 5)};
    const int vocab = draw(2, 6);
    Tokens text;
    NgramIndex index(config, 60);
    while (text.size() < 60) {
      for (int more = draw(1, 3); more > 0 && text.size() < 60; --more) text.push_back(draw(0, vocab));
      index.extend(text);
      Tokens drafts;
      index.find(text, 0, 5, drafts);
      BOOST_TEST(drafts == expected_drafts(config, text, 5), boost::test_tools::per_element());
      num_found += drafts.empty() ? 0 : 1;
    }
  }
  BOOST_TEST(num_found > 1000);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::ngram_index_test
