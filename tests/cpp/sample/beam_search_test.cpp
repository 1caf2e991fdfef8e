// Beam search over models that are tables of scores, compared with a search that keeps whole sequences and
// one that tries all sequences.

#include "adaptrt/sample/beam_search.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <map>
#include <random>
#include <utility>
#include <vector>

namespace adaptrt::beam_search_test {
namespace {

using Tokens = std::vector<std::int32_t>;
constexpr std::int32_t kEnd = 0;

/// A model: scores of all tokens after a sequence, generated on first use.
class Model {
 public:
  Model(std::int32_t vocab_size, std::uint32_t seed, std::int32_t num_levels = 0)
      : vocab_size_(vocab_size), seed_(seed), num_levels_(num_levels) {}

  [[nodiscard]] std::int32_t vocab_size() const { return vocab_size_; }
  /// Returns log probs. With `levels`, they have only that many different values, so that there are ties.
  const std::vector<float>& after(const Tokens& tokens) {
    const auto [found, is_new] = rows_.try_emplace(tokens);
    if (!is_new) return found->second;
    std::seed_seq seeds{seed_, static_cast<std::uint32_t>(rows_.size())};
    std::mt19937 random(seeds);
    std::uniform_real_distribution<float> logits(-2.0F, 2.0F);
    double sum = 0.0;
    for (std::int32_t i = 0; i < vocab_size_; ++i) {
      const float logit = num_levels_ == 0
                              ? logits(random)
                              : -static_cast<float>(random() % static_cast<unsigned>(num_levels_));
      found->second.push_back(logit);
      sum += std::exp(double{logit});
    }
    if (num_levels_ > 0) return found->second;
    for (float& logit : found->second) logit = static_cast<float>(double{logit} - std::log(sum));
    return found->second;
  }

 private:
  std::int32_t vocab_size_;
  std::uint32_t seed_;
  std::int32_t num_levels_;
  std::map<Tokens, std::vector<float>> rows_;
};

struct Found {
  Tokens tokens;
  double score = 0.0;
  FinishReason reason = FinishReason::kNotFinished;
};

std::vector<ScoredToken> best_of(const std::vector<float>& row, std::size_t count) {
  std::vector<ScoredToken> tokens;
  for (std::size_t i = 0; i < row.size(); ++i) {
    tokens.push_back({.token = static_cast<std::int32_t>(i), .score = row[i], .log_prob = row[i]});
  }
  std::ranges::stable_sort(tokens, std::ranges::greater(), &ScoredToken::score);
  tokens.resize(std::min(count, tokens.size()));
  return tokens;
}

FinishReason reason_of(const Tokens& tokens, std::int32_t max_tokens) {
  if (tokens.back() == kEnd) return FinishReason::kEndId;
  return std::cmp_equal(tokens.size(), max_tokens) ? FinishReason::kLength : FinishReason::kNotFinished;
}

/// Returns BeamSearch's result, with beams added in a different order each time.
std::vector<Found> search(Model& model, const BeamSearchParams& params, std::int32_t max_tokens,
                          std::uint32_t order = 0) {
  BeamSearch search(params, 1, max_tokens);
  std::vector<Tokens> beams(1);
  std::vector<Tokens> kept(static_cast<std::size_t>(params.beam_width));
  std::mt19937 random(order);
  while (!search.is_over()) {
    BOOST_TEST_REQUIRE(search.beams().size() == beams.size());
    std::vector<std::int32_t> numbers(beams.size());
    for (std::size_t i = 0; i < beams.size(); ++i) numbers[i] = static_cast<std::int32_t>(i);
    std::shuffle(numbers.begin(), numbers.end(), random);
    for (const std::int32_t beam : numbers) {
      search.add(beam, best_of(model.after(beams[static_cast<std::size_t>(beam)]), search.num_candidates()));
    }
    const auto with = [&](const BeamCandidate& candidate) {
      Tokens tokens = beams[static_cast<std::size_t>(candidate.beam)];
      tokens.push_back(candidate.next.token);
      return tokens;
    };
    search.select([&](const BeamCandidate& candidate) { return reason_of(with(candidate), max_tokens); },
                  [&](const BeamCandidate& candidate, const EndedBeam& ended) {
                    kept.at(static_cast<std::size_t>(ended.place)) = with(candidate);
                  });
    std::vector<Tokens> next;
    for (const BeamCandidate& candidate : search.beams()) next.push_back(with(candidate));
    beams = std::move(next);
  }
  std::vector<Found> found;
  for (const RankedBeam& beam : search.ranking()) {
    BOOST_TEST_REQUIRE(beam.has_ended);
    found.push_back({kept.at(static_cast<std::size_t>(beam.place)), beam.score, beam.reason});
  }
  return found;
}

double normalised(double score, std::size_t length, double length_penalty) {
  return score / std::pow(static_cast<double>(length), length_penalty);
}

/// Reference: searches with whole sequences and all candidates.
std::vector<Found> search_plainly(Model& model, const BeamSearchParams& params, std::int32_t max_tokens) {
  const auto width = static_cast<std::size_t>(params.beam_width);
  std::vector<Found> beams(1);
  std::vector<Found> ended;
  const auto value_of = [&](const Found& beam) {
    return normalised(beam.score, beam.tokens.size(), params.length_penalty);
  };
  for (;;) {
    struct Candidate {
      Found found;
      double value;
    };
    std::vector<Candidate> candidates;
    for (std::size_t i = 0; i < beams.size(); ++i) {
      const std::vector<float>& row = model.after(beams[i].tokens);
      for (std::int32_t token = 0; token < model.vocab_size(); ++token) {
        Found next = beams[i];
        next.tokens.push_back(token);
        next.score += double{row[static_cast<std::size_t>(token)]};
        next.reason = reason_of(next.tokens, max_tokens);
        candidates.push_back({next, next.score + params.diversity_rate * static_cast<double>(i)});
      }
    }
    std::ranges::stable_sort(candidates, std::ranges::greater(), &Candidate::value);
    candidates.resize(std::min(candidates.size(), 2 * width));
    beams.clear();
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      if (candidates[i].found.reason != FinishReason::kNotFinished) {
        if (i < width) ended.push_back(candidates[i].found);
      } else if (beams.size() < width) {
        beams.push_back(candidates[i].found);
      }
    }
    std::ranges::stable_sort(ended, std::ranges::greater(), value_of);
    if (ended.size() > width) ended.resize(width);
    if (beams.empty()) return ended;
    if (ended.size() < width) continue;
    if (params.early_stopping == EarlyStopping::kWhenEnoughHaveEnded) return ended;
    double best = beams.front().score;
    for (const Found& beam : beams) best = std::max(best, beam.score);
    std::size_t length = beams.front().tokens.size();
    if (params.early_stopping == EarlyStopping::kNever && params.length_penalty > 0.0)
      length = static_cast<std::size_t>(max_tokens);
    if (normalised(best, length, params.length_penalty) <= value_of(ended.back())) return ended;
  }
}

void require_same(const std::vector<Found>& actual, const std::vector<Found>& expected) {
  BOOST_TEST_REQUIRE(actual.size() == expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    BOOST_TEST(actual[i].tokens == expected[i].tokens, boost::test_tools::per_element());
    BOOST_TEST(actual[i].score == expected[i].score);
    BOOST_CHECK(actual[i].reason == expected[i].reason);
  }
}

/// One row for all steps.
std::vector<ScoredToken> tokens_of(const std::vector<std::pair<std::int32_t, float>>& scores) {
  std::vector<ScoredToken> tokens;
  for (const auto& [token, score] : scores) tokens.push_back({token, score, score});
  return tokens;
}

FinishReason ends_with_end(const BeamCandidate& candidate) {
  return candidate.next.token == kEnd ? FinishReason::kEndId : FinishReason::kNotFinished;
}

BOOST_AUTO_TEST_SUITE(beam_search)

BOOST_AUTO_TEST_CASE(a_search_by_hand) {
  BeamSearch search({.beam_width = 2}, 1, 10);
  BOOST_TEST(search.num_candidates() == 4U);
  BOOST_TEST(search.beams().size() == 1U);
  std::vector<EndedBeam> kept;
  const auto keep = [&](const BeamCandidate&, const EndedBeam& ended) { kept.push_back(ended); };

  search.add(0, tokens_of({{5, -0.5F}, {7, -1.0F}, {kEnd, -1.5F}, {6, -2.0F}}));
  search.select(ends_with_end, keep);
  // The end is third, and only the best two may end.
  BOOST_TEST(kept.empty());
  BOOST_TEST_REQUIRE(search.beams().size() == 2U);
  BOOST_TEST(search.beams()[0].next.token == 5);
  BOOST_TEST(search.beams()[1].next.token == 7);

  search.add(1, tokens_of({{kEnd, -0.25F}, {3, -3.0F}}));
  search.add(0, tokens_of({{4, -0.25F}, {3, -1.0F}, {kEnd, -8.0F}}));
  search.select(ends_with_end, keep);
  BOOST_TEST_REQUIRE(kept.size() == 1U);
  BOOST_TEST(kept[0].score == -1.25);
  BOOST_TEST(kept[0].place == 0);
  BOOST_TEST(!search.is_over());
  BOOST_TEST_REQUIRE(search.beams().size() == 2U);
  BOOST_CHECK((search.beams()[0] == BeamCandidate{.beam = 0, .next = {4, -0.25F, -0.25F}, .score = -0.75}));
  BOOST_CHECK((search.beams()[1] == BeamCandidate{.beam = 0, .next = {3, -1.0F, -1.0F}, .score = -1.5}));
  // The result is the same as if the search ended now: an ended beam between two active ones, of which the
  // best two are returned.
  const auto ranking = search.ranking();
  BOOST_TEST_REQUIRE(ranking.size() == 2U);
  BOOST_TEST(!ranking[0].has_ended);
  BOOST_TEST(ranking[0].score == -0.75);
  BOOST_TEST(ranking[1].has_ended);

  search.add(0, tokens_of({{kEnd, -0.25F}, {9, -0.5F}}));
  search.add(1, tokens_of({{8, -0.5F}}));
  search.select(ends_with_end, keep);
  BOOST_TEST(search.is_over());
  const auto found = search.ranking();
  BOOST_TEST_REQUIRE(found.size() == 2U);
  BOOST_TEST(found[0].score == -1.0);
  BOOST_TEST(found[0].place == 1);
  BOOST_TEST(found[1].score == -1.25);
  BOOST_TEST(search.num_steps() == 3);
}

BOOST_AUTO_TEST_CASE(equal_candidates_go_by_beam_and_token) {
  BeamSearch search({.beam_width = 3}, 1, 10);
  const auto keep = [](const BeamCandidate&, const EndedBeam&) {};
  search.add(0, tokens_of({{2, -1.0F}, {4, -1.0F}, {9, -1.0F}}));
  search.select(ends_with_end, keep);
  search.add(2, tokens_of({{1, -1.0F}, {3, -1.0F}}));
  search.add(0, tokens_of({{5, -1.0F}, {8, -1.0F}}));
  search.add(1, tokens_of({{1, -1.0F}, {2, -1.0F}}));
  search.select(ends_with_end, keep);
  std::vector<std::pair<std::int32_t, std::int32_t>> beams;
  for (const BeamCandidate& beam : search.beams()) beams.emplace_back(beam.beam, beam.next.token);
  BOOST_CHECK((beams == std::vector<std::pair<std::int32_t, std::int32_t>>{{0, 5}, {0, 8}, {1, 1}}));
}

BOOST_AUTO_TEST_CASE(diversity_compares_by_the_number_of_the_beam_and_leaves_scores) {
  for (const double rate : {0.0, 0.75}) {
    BeamSearch search({.beam_width = 2, .diversity_rate = rate}, 1, 10);
    const auto keep = [](const BeamCandidate&, const EndedBeam&) {};
    search.add(0, tokens_of({{2, -1.0F}, {4, -1.5F}}));
    search.select(ends_with_end, keep);
    search.add(0, tokens_of({{5, -0.5F}, {6, -0.5F}}));
    search.add(1, tokens_of({{5, -0.5F}, {6, -0.5F}}));
    search.select(ends_with_end, keep);
    BOOST_TEST(search.beams()[0].beam == (rate == 0.0 ? 0 : 1));
    BOOST_TEST(search.beams()[0].score == (rate == 0.0 ? -1.5 : -2.0));
  }
}

BOOST_AUTO_TEST_CASE(more_ends_need_more_candidates) {
  BOOST_TEST(BeamSearch({.beam_width = 3}, 0, 5).num_candidates() == 6U);
  BOOST_TEST(BeamSearch({.beam_width = 3}, 1, 5).num_candidates() == 6U);
  BOOST_TEST(BeamSearch({.beam_width = 3}, 4, 5).num_candidates() == 15U);
}

BOOST_AUTO_TEST_CASE(fewer_candidates_are_fewer_beams_until_there_are_more) {
  BeamSearch search({.beam_width = 4}, 1, 10);
  const auto keep = [](const BeamCandidate&, const EndedBeam&) {};
  search.add(0, tokens_of({{2, -1.0F}, {3, -2.0F}}));
  search.select(ends_with_end, keep);
  BOOST_TEST(search.beams().size() == 2U);
  BOOST_TEST(!search.is_over());
  for (const std::int32_t beam : {0, 1}) search.add(beam, tokens_of({{2, -1.0F}, {3, -2.0F}}));
  search.select(ends_with_end, keep);
  BOOST_TEST(search.beams().size() == 4U);
  search.select(ends_with_end, keep);
  BOOST_TEST(search.is_over());
  BOOST_TEST(search.ranking().empty());
}

BOOST_AUTO_TEST_CASE(extreme_length_penalties_order_without_nan) {
  for (const double length_penalty : {1e300, -1e300}) {
    BeamSearch search({.beam_width = 2, .length_penalty = length_penalty}, 1, 3);
    const auto keep = [](const BeamCandidate&, const EndedBeam&) {};
    for (int step = 0; !search.is_over(); ++step) {
      BOOST_TEST_REQUIRE(step < 4);
      for (std::size_t i = 0; i < search.beams().size(); ++i)
        search.add(static_cast<std::int32_t>(i), tokens_of({{1, 0.0F}, {kEnd, -1.0F}}));
      search.select(
          [&](const BeamCandidate& c) { return step == 2 ? FinishReason::kLength : ends_with_end(c); }, keep);
      for (const RankedBeam& beam : search.ranking()) BOOST_TEST(std::isfinite(beam.score));
    }
    BOOST_TEST(search.ranking().size() == 2U);
  }
}

BOOST_AUTO_TEST_CASE(it_finds_what_the_definition_does) {
  using enum EarlyStopping;
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    for (const EarlyStopping early : {kWhenEnoughHaveEnded, kByEstimate, kNever}) {
      for (const double length_penalty : {0.0, 1.0, 2.5, -0.5}) {
        // Sums of small integers are exact, and so are ties.
        Model model(9, seed, seed % 3 == 2 ? 3 : 0);
        const BeamSearchParams params{.beam_width = 1 + static_cast<std::int32_t>(seed % 5) + 1,
                                      .length_penalty = length_penalty,
                                      .early_stopping = early,
                                      .diversity_rate = seed % 4 == 3 ? 0.5 : 0.0};
        const std::int32_t max_tokens = 1 + static_cast<std::int32_t>(seed % 9);
        const auto expected = search_plainly(model, params, max_tokens);
        require_same(search(model, params, max_tokens), expected);
        require_same(search(model, params, max_tokens, seed + 1), expected);
      }
    }
  }
}

/// All sequences, best first.
std::vector<Found> all_sequences(Model& model, std::int32_t max_tokens, double length_penalty) {
  std::vector<Found> found;
  std::vector<Found> open(1);
  while (!open.empty()) {
    Found beam = open.back();
    open.pop_back();
    const std::vector<float> row = model.after(beam.tokens);
    for (std::int32_t token = 0; token < model.vocab_size(); ++token) {
      Found next = beam;
      next.tokens.push_back(token);
      next.score += double{row[static_cast<std::size_t>(token)]};
      next.reason = reason_of(next.tokens, max_tokens);
      (next.reason == FinishReason::kNotFinished ? open : found).push_back(next);
    }
  }
  std::ranges::sort(found, std::ranges::greater(), [&](const Found& beam) {
    return normalised(beam.score, beam.tokens.size(), length_penalty);
  });
  return found;
}

BOOST_AUTO_TEST_CASE(a_beam_for_each_sequence_finds_the_best_of_all) {
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    for (const double length_penalty : {0.0, 1.0}) {
      Model model(4, seed);
      auto expected = all_sequences(model, 4, length_penalty);
      const BeamSearchParams params{.beam_width = static_cast<std::int32_t>(expected.size()),
                                    .length_penalty = length_penalty,
                                    .early_stopping = EarlyStopping::kNever};
      require_same(search(model, params, 4), expected);
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::beam_search_test
