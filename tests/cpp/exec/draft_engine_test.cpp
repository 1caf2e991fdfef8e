// Drafts of the draft engine, and its use of blocks.

#include "adaptrt/draft_engine/draft_engine.h"

#include <boost/test/unit_test.hpp>
#include <deque>

#include "fake_engine.h"

namespace adaptrt::test::draft_engine_test {
namespace {

constexpr std::int32_t kMaxDraftLen = 4;

/// A draft engine and growing texts.
class Drafting {
 public:
  explicit Drafting(const FakeEngine::Options& options, std::int32_t num_blocks = 64,
                    FakeEngine::Hook hook = {})
      : fake_(options, std::move(hook)), engine_(fake_, nullptr, num_blocks, kMaxDraftLen) {
    fake_.allocate_kv_blocks(num_blocks);
  }
  ~Drafting() { check(); }
  Drafting(const Drafting&) = delete;
  Drafting& operator=(const Drafting&) = delete;

  struct Text {
    std::vector<TokenId> tokens;
    std::int32_t prompt_length = 0;
    DraftSequence sequence;
    std::vector<TokenId> drafts;
  };
  Text& add(std::vector<TokenId> tokens) {
    Text& text = texts_.emplace_back();
    text.tokens = std::move(tokens);
    text.prompt_length = static_cast<std::int32_t>(text.tokens.size());
    return text;
  }
  void draft(const std::vector<Text*>& texts, std::int32_t most = 3) {
    std::vector<DraftTask> tasks;
    for (Text* text : texts) {
      tasks.push_back({.sequence = &text->sequence,
                       .text = text->tokens,
                       .prompt_length = text->prompt_length,
                       .most = most,
                       .drafts = &text->drafts});
    }
    engine_.draft(tasks);
    check();
  }
  [[nodiscard]] DraftEngine& engine() { return engine_; }
  [[nodiscard]] std::int64_t take_num_tokens() {
    return fake_.num_tokens() - std::exchange(num_tokens_, fake_.num_tokens());
  }

 private:
  void check() const {
    const auto violations = engine_.check_invariants();
    BOOST_TEST(violations.empty());
    for (const auto& violation : violations) BOOST_TEST_MESSAGE(violation);
  }

  FakeEngine fake_;
  std::deque<Text> texts_;
  DraftEngine engine_;
  std::int64_t num_tokens_ = 0;
};

std::vector<TokenId> counting(TokenId first, std::int32_t count) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(count));
  for (auto& token : tokens) token = first++;
  return tokens;
}

void append(std::vector<TokenId>& tokens, const std::vector<TokenId>& more) {
  tokens.insert(tokens.end(), more.begin(), more.end());
}

BOOST_AUTO_TEST_SUITE(draft_engine)

BOOST_AUTO_TEST_CASE(drafts_are_its_greedy_tokens) {
  Drafting drafting({});
  auto& first = drafting.add(counting(1, 9));
  auto& second = drafting.add({7});
  drafting.draft({&first, &second});
  BOOST_TEST(first.drafts == expected_tokens(first.tokens, 3), boost::test_tools::per_element());
  BOOST_TEST(second.drafts == expected_tokens(second.tokens, 3), boost::test_tools::per_element());
  const DraftEngineStats stats = drafting.engine().stats();
  BOOST_TEST(stats.num_steps == 3);  // both sequences share all steps
  BOOST_TEST(stats.num_tokens == 10 + 2 * 2);
  BOOST_TEST(stats.num_sequences == 2);
  BOOST_TEST(stats.used_num_blocks == 3 + 1);
  BOOST_TEST(stats.max_num_blocks == 64);
  BOOST_TEST(stats.mem_usage == 64 * 4 * 16U);
  BOOST_TEST(stats.seconds > 0.0);
}

BOOST_AUTO_TEST_CASE(computed_tokens_are_not_computed_again) {
  Drafting drafting({});
  auto& text = drafting.add(counting(1, 9));
  drafting.draft({&text});
  static_cast<void>(drafting.take_num_tokens());
  // Two of three drafts are right, and the next token differs. The third is never computed.
  append(text.tokens, {text.drafts[0], text.drafts[1], (text.drafts[2] + 1) % 101});
  drafting.draft({&text});
  BOOST_TEST(drafting.take_num_tokens() == 1 + 2);
  BOOST_TEST(text.drafts == expected_tokens(text.tokens, 3), boost::test_tools::per_element());
  // No draft is right.
  append(text.tokens, {(text.drafts[0] + 1) % 101});
  drafting.draft({&text});
  BOOST_TEST(drafting.take_num_tokens() == 1 + 2);
  BOOST_TEST(text.drafts == expected_tokens(text.tokens, 3), boost::test_tools::per_element());
  // All drafts are right, and steps without a request have passed.
  append(text.tokens, expected_tokens(text.tokens, 8));
  drafting.draft({&text});
  BOOST_TEST(drafting.take_num_tokens() == 8 - 2 + 2);
  BOOST_TEST(text.drafts == expected_tokens(text.tokens, 3), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(all_drafts_may_be_the_text_s_end) {
  Drafting drafting({});
  auto& text = drafting.add(counting(1, 9));
  drafting.draft({&text});
  append(text.tokens, {text.drafts[0], text.drafts[1]});
  drafting.draft({&text}, 1);
  BOOST_TEST(text.drafts == expected_tokens(text.tokens, 1), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_long_text_takes_several_calls_and_keeps_nobody_waiting) {
  FakeEngine::Options options;
  options.max_num_tokens = 16;
  Drafting drafting(options);
  auto& long_text = drafting.add(counting(1, 40));
  auto& short_text = drafting.add({5, 6});
  for (int call = 0; call < 2; ++call) {
    drafting.draft({&long_text, &short_text});
    BOOST_TEST(long_text.drafts.empty());
    BOOST_TEST(short_text.drafts == expected_tokens(short_text.tokens, 3), boost::test_tools::per_element());
    short_text.tokens.push_back(3);
  }
  drafting.draft({&long_text, &short_text});
  BOOST_TEST(long_text.drafts == expected_tokens(long_text.tokens, 3), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(texts_end_at_its_max_seq_len) {
  FakeEngine::Options options;
  options.max_seq_len = 12;
  Drafting drafting(options);
  auto& text = drafting.add(counting(1, 11));
  drafting.draft({&text});
  BOOST_TEST(text.drafts == expected_tokens(text.tokens, 2), boost::test_tools::per_element());
  append(text.tokens, {1});
  drafting.draft({&text});
  BOOST_TEST(text.drafts == expected_tokens(text.tokens, 1), boost::test_tools::per_element());
  append(text.tokens, {1});
  drafting.draft({&text});
  BOOST_TEST(text.drafts.empty());
  BOOST_TEST(drafting.engine().stats().num_sequences == 0);
}

BOOST_AUTO_TEST_CASE(batches_are_its_own) {
  FakeEngine::Options options;
  options.max_batch_size = 2;
  Drafting drafting(options);
  std::vector<Drafting::Text*> texts;
  for (TokenId i = 0; i < 3; ++i) texts.push_back(&drafting.add({i, 2}));
  drafting.draft(texts);
  BOOST_TEST(texts[0]->drafts.size() == 3U);
  BOOST_TEST(texts[1]->drafts.size() == 3U);
  BOOST_TEST(texts[2]->drafts.empty());
}

BOOST_AUTO_TEST_CASE(the_latest_go_without_when_blocks_have_run_out) {
  Drafting drafting({}, 8);  // of 4 tokens each
  auto& first = drafting.add(counting(1, 14));
  auto& second = drafting.add(counting(30, 10));
  auto& third = drafting.add(counting(60, 10));
  drafting.draft({&first, &second, &third});
  BOOST_TEST(first.drafts.size() == 3U);
  BOOST_TEST(second.drafts.size() == 3U);
  BOOST_TEST(third.drafts.empty());
  // The first grows. The second, used equally recently, loses its blocks and finds no others.
  append(first.tokens, counting(1, 8));
  drafting.draft({&first, &second});
  BOOST_TEST(first.drafts == expected_tokens(first.tokens, 3), boost::test_tools::per_element());
  BOOST_TEST(second.drafts.empty());
  BOOST_TEST(drafting.engine().stats().num_sequences == 1);
  // When no task asks for the first any more, its blocks are evicted.
  drafting.draft({&second, &third});
  BOOST_TEST(second.drafts == expected_tokens(second.tokens, 3), boost::test_tools::per_element());
  BOOST_TEST(third.drafts == expected_tokens(third.tokens, 3), boost::test_tools::per_element());
  BOOST_TEST(drafting.engine().stats().num_sequences == 2);
  // A request for more blocks than exist takes none from others.
  append(first.tokens, counting(1, 20));
  drafting.draft({&first});
  BOOST_TEST(first.drafts.empty());
  BOOST_TEST(drafting.engine().stats().num_sequences == 2);
}

BOOST_AUTO_TEST_CASE(full_blocks_stay_for_those_that_begin_like_them) {
  Drafting drafting({});
  auto& first = drafting.add(counting(1, 13));
  drafting.draft({&first});
  drafting.engine().release(first.sequence);
  BOOST_TEST(drafting.engine().stats().used_num_blocks == 0);
  static_cast<void>(drafting.take_num_tokens());
  auto& second = drafting.add(counting(1, 14));
  drafting.draft({&second}, 1);
  BOOST_TEST(drafting.take_num_tokens() == 2);
  BOOST_TEST(second.drafts == expected_tokens(second.tokens, 1), boost::test_tools::per_element());
  auto& salted = drafting.add(counting(1, 14));
  salted.sequence.set(nullptr, 5);
  drafting.draft({&salted}, 1);
  BOOST_TEST(drafting.take_num_tokens() == 14);
}

BOOST_AUTO_TEST_CASE(sequences_that_go_give_their_blocks_back) {
  Drafting drafting({});
  {
    DraftSequence sequence;
    const std::vector<TokenId> tokens = {1, 2, 3};
    std::vector<TokenId> drafts;
    const DraftTask task{
        .sequence = &sequence, .text = tokens, .prompt_length = 3, .most = 2, .drafts = &drafts};
    drafting.engine().draft(std::span(&task, 1));
    BOOST_TEST(drafts.size() == 2U);
    BOOST_TEST(drafting.engine().stats().used_num_blocks == 1);
  }
  BOOST_TEST(drafting.engine().stats().used_num_blocks == 0);
}

BOOST_AUTO_TEST_CASE(an_engine_that_fails_is_given_up) {
  Drafting drafting({}, 64, [](std::int64_t step) {
    if (step == 4) throw StepError("out of order");
  });
  auto& text = drafting.add({1, 2, 3});
  drafting.draft({&text});
  BOOST_TEST(text.drafts.size() == 3U);
  append(text.tokens, {4});
  for (int call = 0; call < 2; ++call) {
    drafting.draft({&text});
    BOOST_TEST(text.drafts.empty());
  }
  const DraftEngineStats stats = drafting.engine().stats();
  BOOST_TEST(stats.error == "out of order");
  BOOST_TEST(stats.num_steps == 4);
  BOOST_TEST(stats.num_sequences == 0);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::test::draft_engine_test
