#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "adaptrt/sched/sequence.h"

namespace adaptrt {

/// Requests that wait, in the order in which they should start: by priority, then by arrival.
///
/// With fairness, the adapters of one priority take turns: the adapter for which the least was computed comes
/// first, and its oldest request. An adapter without requests earns no credit: when one comes, it counts at
/// least as much as the adapter whose turn it was last. This is the virtual token counter of Sheng et al.,
/// "Fairness in Serving Large Language Models" (2024), with every computed token of weight 1. The base model
/// counts as an adapter; generations of one task do not count apart.
///
/// Every operation takes O(log n) for n requests and adapters. Not thread-safe.
class WaitingQueue {
 public:
  explicit WaitingQueue(bool is_fair) : is_fair_(is_fair) {}

  /// A sequence waits, for the first time or again; one that ran until now stops running.
  void push(Sequence& sequence);
  /// One that waits starts to run.
  void start(Sequence& sequence);
  /// One that never waited runs; another of its priority and adapter does.
  void add_running(const Sequence& sequence);
  /// One that waits or runs is over.
  void erase(Sequence& sequence);
  /// So many tokens were, or are going to be, computed for a sequence that runs.
  void charge(const Sequence& sequence, std::int64_t num_tokens);

  [[nodiscard]] bool is_fair() const { return is_fair_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] bool empty() const { return size_ == 0; }
  [[nodiscard]] bool contains(const Sequence& sequence) const;
  /// All that wait, by priority and arrival.
  [[nodiscard]] std::vector<Sequence*> list() const;

  class Walk;

  /// Everything that does not hold, given the sequences that run; empty when all is well. For tests.
  [[nodiscard]] std::vector<std::string> check_invariants(std::span<Sequence* const> running) const;

 private:
  /// A task id; nullopt: the base model and, without fairness, everything.
  using Key = std::optional<std::uint64_t>;
  struct ByArrival {
    bool operator()(const Sequence* a, const Sequence* b) const {
      return a->arrival != b->arrival ? a->arrival < b->arrival : a->index < b->index;
    }
  };
  /// The requests of one priority and, with fairness, one adapter.
  struct Flow {
    Key key;
    /// Tokens; see charge().
    std::uint64_t served = 0;
    std::set<Sequence*, ByArrival> waiting;
    std::int64_t num_running = 0;
    /// The newest walk that has met it.
    std::uint64_t walk = 0;

    [[nodiscard]] bool is_idle() const { return waiting.empty() && num_running == 0; }
  };
  /// The one to start next is first.
  struct ByService {
    bool operator()(const Flow* a, const Flow* b) const;
  };
  struct ByServiceAndKey {
    bool operator()(const Flow* a, const Flow* b) const;
  };
  /// Of one priority.
  struct Level {
    std::unordered_map<Key, Flow> flows;
    std::set<Flow*, ByService> waiting;
    /// Flows without requests that were served more than `turn`; others without requests are forgotten.
    std::set<Flow*, ByServiceAndKey> idle;
    /// `served` of the flow whose turn it was last; never less than before.
    std::uint64_t turn = 0;
    /// Sequences that wait or run.
    std::int64_t num_sequences = 0;
  };
  using Levels = std::map<float, Level, std::greater<>>;
  /// Of a flow that a walk has met: the next of its sequences, and what the walk has counted for it so far.
  struct Cursor {
    std::uint64_t served = 0;
    Flow* flow = nullptr;
    std::set<Sequence*, ByArrival>::iterator next;
  };

  [[nodiscard]] Key key_of(const Sequence& sequence) const;
  [[nodiscard]] Level& level_of(const Sequence& sequence) { return levels_.at(sequence.priority); }
  [[nodiscard]] Flow& flow_of(Level& level, const Sequence& sequence) const {
    return level.flows.at(key_of(sequence));
  }
  /// Changes what `Level::waiting` is sorted by.
  template <class Change>
  static void change(Level& level, Flow& flow, Change apply);
  static void forget_idle(Level& level);

  bool is_fair_;
  std::size_t size_ = 0;
  Levels levels_;
  std::uint64_t num_walks_ = 0;
  std::vector<Cursor> cursors_;  // of the walk that goes on: a heap
};

/// Goes through the sequences in the order in which they would start, if each were charged for its tokens.
/// What next() has returned may start; nothing else may change meanwhile. One walk at a time.
class WaitingQueue::Walk {
 public:
  explicit Walk(WaitingQueue& queue);
  /// nullptr at the end.
  [[nodiscard]] Sequence* next();

 private:
  void enter_level();
  void skip_met();

  WaitingQueue& queue_;
  Levels::iterator level_;
  std::set<Flow*, ByService>::iterator fresh_;  // the first flow that was not met yet
};

}  // namespace adaptrt
