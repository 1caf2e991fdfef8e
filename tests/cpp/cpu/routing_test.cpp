#include "adaptrt/cpu/routing.h"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "cpu/random_storage.h"

namespace adaptrt::routing_test {
namespace {

using testing::Random;

struct Choice {
  std::vector<std::int32_t> experts;
  std::vector<float> weights;
};

ExpertsOp op_of(const Routing& routing, std::size_t num_experts) {
  ExpertsOp op{.routing = routing, .gate_up = {}, .down = {}};
  op.down.resize(num_experts);
  return op;
}

Choice route(const Routing& routing, const std::vector<float>& logits) {
  const ExpertsOp op = op_of(routing, logits.size());
  std::vector<float> scratch(static_cast<std::size_t>(routing_scratch_floats(op)));
  Choice choice{std::vector<std::int32_t>(static_cast<std::size_t>(routing.top_k)),
                std::vector<float>(static_cast<std::size_t>(routing.top_k))};
  route_token(op, find_kernels(""), logits.data(), scratch.data(), choice.experts.data(),
              choice.weights.data());
  return choice;
}

/// Reference: the rules of Routing in double, by sorting.
Choice expected(const Routing& routing, const std::vector<float>& logits) {
  const std::size_t experts = logits.size();
  std::vector<double> scores(logits.begin(), logits.end());
  const auto softmax = [](std::vector<double>* values) {
    double sum = 0.0;
    for (double& value : *values) sum += value = std::exp(value);
    for (double& value : *values) value /= sum;
  };
  if (routing.scores == RouterScores::kSoftmax) softmax(&scores);
  if (routing.scores == RouterScores::kSigmoid) {
    for (double& score : scores) score = 1.0 / (1.0 + std::exp(-score));
  }
  std::vector<double> choice = scores;
  for (std::size_t i = 0; i < experts && routing.bias.size > 0; ++i) choice[i] += routing.bias.data[i];
  const std::size_t size = experts / static_cast<std::size_t>(routing.num_groups);
  std::vector<std::pair<double, std::size_t>> groups;
  for (std::size_t group = 0; group * size < experts; ++group) {
    std::vector<double> best(choice.begin() + static_cast<std::ptrdiff_t>(group * size),
                             choice.begin() + static_cast<std::ptrdiff_t>((group + 1) * size));
    std::ranges::sort(best, std::greater<>{});
    groups.emplace_back(-(best[0] + (size > 1 ? best[1] : 0.0)), group);
  }
  std::ranges::sort(groups);
  std::vector<std::pair<double, std::int32_t>> ranked;
  for (std::int32_t i = 0; i < routing.topk_groups; ++i) {
    const std::size_t group = groups[static_cast<std::size_t>(i)].second;
    for (std::size_t e = group * size; e < (group + 1) * size; ++e) {
      ranked.emplace_back(-choice[e], static_cast<std::int32_t>(e));
    }
  }
  std::ranges::sort(ranked);
  Choice made;
  for (std::int32_t i = 0; i < routing.top_k; ++i) {
    made.experts.push_back(ranked[static_cast<std::size_t>(i)].second);
  }
  std::ranges::sort(made.experts);
  std::vector<double> weights;
  for (const std::int32_t expert : made.experts) weights.push_back(scores[static_cast<std::size_t>(expert)]);
  if (routing.scores == RouterScores::kSoftmaxOfChosen) softmax(&weights);
  const double sum = routing.norm_topk_prob ? std::accumulate(weights.begin(), weights.end(), 0.0) : 1.0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const auto expert = static_cast<std::size_t>(made.experts[i]);
    const double scale = routing.expert_scale.size == 0 ? 1.0 : routing.expert_scale.data[expert];
    made.weights.push_back(static_cast<float>(weights[i] / sum * routing.scale * scale));
  }
  return made;
}

BOOST_AUTO_TEST_SUITE(routing)

BOOST_AUTO_TEST_CASE(tokens_take_the_experts_that_the_rules_say) {
  Random random(3);
  for (int round = 0; round < 400; ++round) {
    const std::size_t size = 1 + static_cast<std::size_t>(random.below(5));
    const auto groups = static_cast<std::int32_t>(1 + random.below(6));
    const std::size_t experts = size * static_cast<std::size_t>(groups);
    std::vector<float> logits(experts);
    std::vector<float> bias(experts);
    for (float& value : logits) value = random.between(-4.0F, 4.0F);
    for (float& value : bias) value = random.between(-0.5F, 0.5F);
    Routing routing;
    routing.scores = static_cast<RouterScores>(random.below(3));
    routing.num_groups = groups;
    routing.topk_groups = static_cast<std::int32_t>(1 + random.below(groups));
    const auto most = static_cast<std::int64_t>(size) * routing.topk_groups;
    routing.top_k = static_cast<std::int32_t>(1 + random.below(most));
    routing.norm_topk_prob = random.below(2) == 0;
    routing.scale = random.between(0.5F, 2.0F);
    std::vector<float> factors(experts);
    for (float& value : factors) value = random.between(0.5F, 1.5F);
    if (random.below(2) == 0) routing.expert_scale = {factors.data(), static_cast<std::int64_t>(experts)};
    if (random.below(2) == 0) routing.bias = {bias.data(), static_cast<std::int64_t>(bias.size())};
    const Choice actual = route(routing, logits);
    const Choice wanted = expected(routing, logits);
    BOOST_TEST(actual.experts == wanted.experts, boost::test_tools::per_element());
    for (std::size_t i = 0; i < wanted.weights.size(); ++i) {
      // Covers a few float32 roundings, and the error of the kernels' exponential.
      BOOST_TEST(std::abs(actual.weights[i] - wanted.weights[i]) <= 3e-6F);
    }
  }
}

BOOST_AUTO_TEST_CASE(equal_experts_are_chosen_in_their_order) {
  const Choice choice = route({.top_k = 3, .norm_topk_prob = true}, std::vector<float>(7, 0.25F));
  BOOST_TEST(choice.experts == (std::vector<std::int32_t>{0, 1, 2}), boost::test_tools::per_element());
}

// Whatever an adapter does to a router's logits, only existing experts are chosen, so no other memory is
// accessed.
BOOST_AUTO_TEST_CASE(logits_that_are_no_numbers_choose_experts_that_exist) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const RouterScores scores :
       {RouterScores::kSoftmax, RouterScores::kSigmoid, RouterScores::kSoftmaxOfChosen}) {
    for (const float value : {kNan, kInfinity, -kInfinity}) {
      for (const std::size_t bad : {std::size_t{0}, std::size_t{5}, std::size_t{8}}) {
        std::vector<float> logits(8, bad == 8 ? value : 0.5F);
        if (bad < 8) logits[bad] = value;
        const Choice choice =
            route({.scores = scores, .top_k = 3, .num_groups = 4, .topk_groups = 2}, logits);
        for (const std::int32_t expert : choice.experts) BOOST_TEST((expert >= 0 && expert < 8));
      }
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::routing_test
