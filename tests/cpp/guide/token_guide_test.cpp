// Masks are made on a different thread from the one that needs them.

#include "adaptrt/guide/token_guide.h"

#include <array>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "adaptrt/core/error.h"

namespace adaptrt::token_guide_test {
namespace {

constexpr std::int64_t kVocabSize = 70;
constexpr std::array<std::int32_t, 2> kStops = {0, 69};

/// After n tokens only token n is allowed; any other is refused.
class Counting final : public GrammarState {
 public:
  explicit Counting(int delay_us = 0, int broken_at = -1) : delay_us_(delay_us), broken_at_(broken_at) {}
  void fill_mask(std::span<std::uint32_t> mask) override {
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us_));
    if (next_ == broken_at_) throw StepError("no more");
    for (auto& word : mask) word = 0;
    mask[static_cast<std::size_t>(next_ / 32)] = 1U << next_ % 32;
  }
  void accept(std::int32_t token) override {
    if (token != next_++) throw StepError("another token");
  }

 private:
  int delay_us_;
  int broken_at_;
  std::int32_t next_ = 0;
};

bool allows_only(std::span<const std::uint32_t> mask, std::int32_t token) {
  bool right = mask.size() == 3U;
  for (std::int32_t i = 0; i < 96; ++i)
    right = right && (mask[static_cast<std::size_t>(i / 32)] >> i % 32 & 1U) == (i == token ? 1U : 0U);
  return right;
}

std::shared_ptr<TokenGuide> begin(MaskThread& thread, int delay_us = 0, int broken_at = -1) {
  return TokenGuide::begin(std::make_unique<Counting>(delay_us, broken_at), kVocabSize, kStops, thread);
}

BOOST_AUTO_TEST_SUITE(token_guide)

BOOST_AUTO_TEST_CASE(masks_follow_the_tokens_whoever_makes_them) {
  std::mt19937 random(1);
  MaskThread thread;
  std::vector<std::shared_ptr<TokenGuide>> guides;
  for (int i = 0; i < 8; ++i) guides.push_back(begin(thread, i * 10));
  for (std::int32_t token = 0; token < 60; ++token) {
    // Sometimes the mask thread is first, sometimes not.
    if (random() % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    for (const auto& guide : guides) {
      BOOST_TEST(allows_only(guide->mask(), token));
      BOOST_TEST(allows_only(guide->mask(), token));
      guide->accept(token);
    }
  }
}

BOOST_AUTO_TEST_CASE(errors_are_thrown_to_the_caller) {
  MaskThread thread;
  const auto guide = begin(thread, 0, 2);
  for (std::int32_t token = 0; token < 2; ++token) {
    static_cast<void>(guide->mask());
    guide->accept(token);
  }
  const auto says = [](const StepError& error) {
    return std::string(error.what()) == "guided decoding: no more";
  };
  BOOST_CHECK_EXCEPTION(static_cast<void>(guide->mask()), StepError, says);
  BOOST_CHECK_EXCEPTION(static_cast<void>(guide->mask()), StepError, says);
  const auto wrong = begin(thread);
  static_cast<void>(wrong->mask());
  wrong->accept(5);
  BOOST_CHECK_THROW(static_cast<void>(wrong->mask()), StepError);
}

BOOST_AUTO_TEST_CASE(guides_may_be_given_up_at_any_time) {
  std::mt19937 random(2);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::shared_ptr<TokenGuide>> guides;
    {
      MaskThread thread;
      for (int i = 0; i < 6; ++i) guides.push_back(begin(thread, static_cast<int>(random() % 50)));
      for (const auto& guide : guides) {
        if (random() % 2 == 0) continue;
        static_cast<void>(guide->mask());
        guide->accept(0);
      }
      guides.resize(3);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    }
    // Without the mask thread, the thread that needs a mask makes it.
    for (const auto& guide : guides) static_cast<void>(guide->mask());
  }
}

BOOST_AUTO_TEST_CASE(stop_tokens_are_the_compiler_s) {
  MaskThread thread;
  const auto guide = begin(thread);
  BOOST_TEST(guide->is_stop_token(0));
  BOOST_TEST(guide->is_stop_token(69));
  BOOST_TEST(!guide->is_stop_token(1));
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::token_guide_test
