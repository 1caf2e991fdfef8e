#include "adaptrt/sched/waiting_queue.h"

#include <algorithm>
#include <boost/test/data/monomorphic.hpp>
#include <boost/test/data/test_case.hpp>
#include <boost/test/unit_test.hpp>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <tuple>
#include <vector>

#include "support/sanitized.h"
#include "world.h"

namespace adaptrt::testing::waiting_queue_test {
namespace {

/// Reference of WaitingQueue that scans everything each time.
class Model {
 public:
  using Key = std::pair<float, std::uint64_t>;

  explicit Model(bool is_fair) : is_fair_(is_fair) {}

  void push(Sequence& sequence) {
    const Key key = key_of(sequence);
    const bool has_others = std::ranges::any_of(waiting_, [&](auto* other) { return key_of(*other) == key; });
    if (!has_others) served_[key] = std::max(served_[key], turn_[sequence.priority]);
    waiting_.push_back(&sequence);
    std::erase(running_, &sequence);
  }
  void start(Sequence& sequence) {
    auto& turn = turn_[sequence.priority];
    turn = std::max(turn, served_[key_of(sequence)]);
    std::erase(waiting_, &sequence);
    running_.push_back(&sequence);
  }
  void add_running(Sequence& sequence) { running_.push_back(&sequence); }
  void erase(Sequence& sequence) {
    std::erase(waiting_, &sequence);
    std::erase(running_, &sequence);
    const auto has_priority = [&](auto* other) { return other->priority == sequence.priority; };
    if (std::ranges::any_of(waiting_, has_priority) || std::ranges::any_of(running_, has_priority)) return;
    turn_.erase(sequence.priority);  // a priority without requests has no history
    std::erase_if(served_, [&](const auto& item) { return item.first.first == sequence.priority; });
  }
  void charge(const Sequence& sequence, std::uint64_t tokens) {
    if (is_fair_) served_[key_of(sequence)] += tokens;
  }
  [[nodiscard]] std::vector<Sequence*> order() const {
    auto served = served_;
    auto left = waiting_;
    std::vector<Sequence*> order;
    while (!left.empty()) {
      const auto next = std::ranges::min_element(left, {}, [&](const Sequence* sequence) {
        // Only an adapter's oldest request is considered, because it has the lowest arrival.
        return std::tuple(-sequence->priority, served.at(key_of(*sequence)), sequence->arrival,
                          sequence->index);
      });
      order.push_back(*next);
      served[key_of(**next)] += static_cast<std::uint64_t>((*next)->num_tokens());
      left.erase(next);
    }
    return order;
  }
  [[nodiscard]] const std::vector<Sequence*>& running() const { return running_; }
  [[nodiscard]] const std::vector<Sequence*>& waiting() const { return waiting_; }

 private:
  [[nodiscard]] Key key_of(const Sequence& sequence) const {
    return {sequence.priority, is_fair_ && sequence.adapter ? sequence.adapter->task_id() + 1 : 0};
  }
  bool is_fair_;
  std::map<Key, std::uint64_t> served_;
  std::map<float, std::uint64_t> turn_;
  std::vector<Sequence*> waiting_;
  std::vector<Sequence*> running_;
};

std::vector<Sequence*> walk_all(WaitingQueue& queue) {
  std::vector<Sequence*> order;
  WaitingQueue::Walk walk(queue);
  while (Sequence* next = walk.next()) order.push_back(next);
  return order;
}

BOOST_AUTO_TEST_SUITE(waiting_queue)

/// Requests arrive, start, fork, are charged, preempt and end at random; walks start some of those that they
/// visit.
BOOST_DATA_TEST_CASE(its_order_is_the_model_s_after_every_change,
                     boost::unit_test::data::xrange(sanitized(8, 40)), seed) {
  std::mt19937_64 random(static_cast<std::uint64_t>(seed));
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  World adapters({.device_pages = 8});
  const bool is_fair = seed % 4 != 0;
  WaitingQueue queue(is_fair);
  Model model(is_fair);
  std::vector<std::unique_ptr<Sequence>> all;
  std::uint64_t arrivals = 0;

  const auto start = [&](Sequence& sequence) {
    queue.start(sequence);
    model.start(sequence);
    sequence.state = SequenceState::kRunning;
  };
  const auto charge = [&](const Sequence& sequence, std::size_t tokens) {
    queue.charge(sequence, static_cast<std::int64_t>(tokens));
    model.charge(sequence, tokens);
  };
  const auto push = [&](Sequence& sequence) {
    queue.push(sequence);
    model.push(sequence);
    sequence.state = SequenceState::kWaiting;
  };
  for (int i = 0; i < 600; ++i) {
    switch (below(7)) {
      case 0:
      case 1: {
        Sequence& sequence = *all.emplace_back(std::make_unique<Sequence>());
        sequence.arrival = arrivals++;
        sequence.priority = static_cast<float>(below(3)) / 2.0F;
        if (const std::size_t task = below(5); task > 0) sequence.adapter = adapters.adapter(task);
        sequence.tokens.resize(1 + below(9));
        push(sequence);
        break;
      }
      case 2: {
        WaitingQueue::Walk walk(queue);
        for (std::size_t steps = below(8); steps > 0; --steps) {
          Sequence* next = walk.next();
          if (next == nullptr) break;
          if (below(2) == 0) continue;
          start(*next);
          charge(*next, below(12));
        }
        break;
      }
      case 3:
        if (!model.running().empty()) charge(*model.running()[below(model.running().size())], 1 + below(4));
        break;
      case 4:
        if (!model.running().empty() && below(3) == 0) push(*model.running()[below(model.running().size())]);
        break;
      case 5: {
        if (model.running().empty()) break;
        const Sequence& parent = *model.running()[below(model.running().size())];
        Sequence& sequence = *all.emplace_back(std::make_unique<Sequence>());
        sequence.arrival = parent.arrival;
        sequence.index = i + 1;
        sequence.priority = parent.priority;
        sequence.adapter = parent.adapter;
        sequence.tokens = parent.tokens;
        if (below(2) == 0) {
          push(sequence);
          break;
        }
        queue.add_running(sequence);
        model.add_running(sequence);
        sequence.state = SequenceState::kRunning;
        break;
      }
      default: {
        const auto& from = below(3) == 0 ? model.waiting() : model.running();
        if (from.empty()) break;
        Sequence& sequence = *from[below(from.size())];
        queue.erase(sequence);
        model.erase(sequence);
        sequence.state = SequenceState::kFinished;
      }
    }
    for (const auto& violation : queue.check_invariants(model.running())) BOOST_ERROR(violation);
    BOOST_TEST_REQUIRE((walk_all(queue) == model.order()));
    BOOST_TEST(queue.size() == model.waiting().size());
    BOOST_TEST(queue.empty() == model.waiting().empty());
  }
  for (const auto& sequence : all) {
    BOOST_TEST(queue.contains(*sequence) == (sequence->state == SequenceState::kWaiting));
  }
}

BOOST_AUTO_TEST_CASE(the_list_is_by_priority_and_arrival_whatever_the_turns) {
  World adapters({.device_pages = 8});
  WaitingQueue queue(true);
  std::vector<std::unique_ptr<Sequence>> all;
  for (std::uint64_t i = 0; i < 6; ++i) {
    Sequence& sequence = *all.emplace_back(std::make_unique<Sequence>());
    sequence.arrival = i;
    sequence.priority = i == 3 ? 1.0F : 0.5F;
    sequence.adapter = adapters.adapter(1 + i % 2);
    sequence.tokens.resize(1);
    queue.push(sequence);
    sequence.state = SequenceState::kWaiting;
  }
  std::vector<std::uint64_t> arrivals;
  for (const Sequence* sequence : queue.list()) arrivals.push_back(sequence->arrival);
  BOOST_TEST(arrivals == (std::vector<std::uint64_t>{3, 0, 1, 2, 4, 5}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace adaptrt::testing::waiting_queue_test
