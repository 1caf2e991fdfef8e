#include "adaptrt/draft/drafter.h"

#include <boost/test/unit_test.hpp>

namespace adaptrt::drafter_test {
namespace {

using Tokens = std::vector<std::int32_t>;

class Draft {
 public:
  Draft(DraftSources sources, Tokens prompt, std::size_t max_tokens)
      : text_(std::move(prompt)), drafter_(sources, text_, text_.size() + max_tokens) {}
  /// Returns the drafts after these tokens were generated.
  Tokens after(const Tokens& generated, std::int32_t most = 100) {
    text_.insert(text_.end(), generated.begin(), generated.end());
    Tokens drafts = {99};
    drafter_.draft(text_, most, drafts);
    return drafts;
  }
  Drafter& drafter() { return drafter_; }

 private:
  Tokens text_;
  Drafter drafter_;
};

BOOST_AUTO_TEST_SUITE(drafter)

BOOST_AUTO_TEST_CASE(external_drafts_count_while_they_are_right) {
  Draft draft({.external = {5, 6, 7, 8}}, {1, 2}, 20);
  BOOST_TEST(draft.drafter().max_drafts() == 4U);
  BOOST_TEST(draft.after({}) == (Tokens{5, 6, 7, 8}), boost::test_tools::per_element());
  BOOST_TEST(draft.after({}, 2) == (Tokens{5, 6}), boost::test_tools::per_element());
  BOOST_TEST(draft.after({5, 6}) == (Tokens{7, 8}), boost::test_tools::per_element());
  BOOST_TEST(draft.after({7}, 0).empty());
  BOOST_TEST(draft.after({9}).empty());
  BOOST_TEST(draft.after({8}).empty());
}

BOOST_AUTO_TEST_CASE(external_drafts_end) {
  Draft draft({.external = {5, 6}}, {1, 2}, 20);
  BOOST_TEST(draft.after({5, 6}).empty());
  BOOST_TEST(draft.after({5}).empty());
}

BOOST_AUTO_TEST_CASE(the_text_takes_over_from_external_drafts) {
  Draft draft({.external = {3}, .lookahead = LookaheadDecodingConfig{4, 3, 2}}, {1, 2, 3, 4, 1, 2}, 20);
  BOOST_TEST(draft.after({}) == Tokens{3}, boost::test_tools::per_element());
  BOOST_TEST(draft.after({3}) == (Tokens{4, 1}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_draft_engine_is_asked_where_there_are_no_others) {
  Draft draft({.external = {3}, .lookahead = LookaheadDecodingConfig{4, 3, 2}, .max_draft_len = 6},
              {1, 2, 3, 4, 1, 2}, 20);
  Drafter& drafter = draft.drafter();
  BOOST_TEST(drafter.max_drafts() == 6U);
  static_cast<void>(draft.after({}));
  BOOST_TEST(drafter.num_wanted() == 0);
  BOOST_TEST(!draft.after({3}).empty());
  BOOST_TEST(drafter.num_wanted() == 0);
  BOOST_TEST(draft.after({9}).empty());
  BOOST_TEST(drafter.num_wanted() == 2);
  BOOST_TEST(draft.after({8}, 1).empty());
  BOOST_TEST(drafter.num_wanted() == 1);
}

BOOST_AUTO_TEST_CASE(wrong_drafts_of_an_engine_are_given_up_for_a_while) {
  Draft draft({.max_draft_len = 6}, {1, 2}, 40);
  Drafter& drafter = draft.drafter();
  static_cast<void>(draft.after({}));
  BOOST_TEST(drafter.num_wanted() == 0);  // the prompt is not computed yet
  std::vector<std::int32_t> wanted;
  for (std::int32_t token = 10; token < 20; ++token) {
    static_cast<void>(draft.after({token}));
    wanted.push_back(drafter.num_wanted());
    if (wanted.back() == 0) continue;
    drafter.take_drafts_of_engine();
    BOOST_TEST(drafter.num_wanted() == 0);
    drafter.record(wanted.back(), token == 10 ? 2 : 0);
  }
  BOOST_TEST(wanted == (std::vector<std::int32_t>{2, 4, 0, 2, 0, 0, 0, 0, 0, 0}),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(the_text_is_not_asked_what_follows_the_prompt) {
  Draft draft({.lookahead = LookaheadDecodingConfig{4, 3, 2}}, {1, 2, 3, 4, 1, 2}, 20);
  BOOST_TEST(draft.after({}).empty());
  BOOST_TEST(draft.after({3}) == (Tokens{4, 1}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(wrong_drafts_from_the_text_are_given_up_for_a_while) {
  Draft draft({.lookahead = LookaheadDecodingConfig{4, 3, 2}}, {1, 2, 3, 1, 2, 3}, 20);
  BOOST_TEST(draft.after({1}).size() == 2U);
  draft.drafter().record(2, 0);
  BOOST_TEST(draft.after({2}).empty());
  BOOST_TEST(draft.after({3}).size() == 1U);
}

BOOST_AUTO_TEST_CASE(drafts_that_were_not_computed_count_for_nothing) {
  Draft draft({.lookahead = LookaheadDecodingConfig{4, 3, 2}}, {1, 2, 3, 1, 2, 3}, 20);
  BOOST_TEST(draft.after({1}).size() == 2U);
  draft.drafter().record(0, 0);
  BOOST_TEST(draft.after({2}).size() == 2U);
}

BOOST_AUTO_TEST_CASE(there_are_no_more_drafts_than_tokens) {
  Draft draft({.external = Tokens(50, 1)}, {1, 2}, 8);
  BOOST_TEST(draft.drafter().max_drafts() == 8U);
}

BOOST_AUTO_TEST_CASE(legal_configurations_are_those_of_tensorrt_llm) {
  using Config = LookaheadDecodingConfig;
  for (const Config& legal : {Config{1, 1, 0}, Config{1, 2, 0}, Config{4, 3, 4}, Config{7, 7, 7}})
    BOOST_TEST(legal.validate().empty());
  for (const Config& wrong :
       {Config{0, 3, 4}, Config{4, 0, 4}, Config{4, 3, -1}, Config{2, 1, 0}, Config{1, 1, 1}})
    BOOST_TEST(wrong.validate().list().size() == 1U);
  BOOST_TEST((!Config{1, 1, 0}.drafts() && !Config{4, 3, 0}.drafts() && Config{1, 2, 1}.drafts()));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::drafter_test
