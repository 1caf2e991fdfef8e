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

/// Waiting requests in the order in which they should start: by priority, then by arrival.
///
/// With fairness, the adapters of one priority take turns. The adapter with the fewest computed tokens comes
/// first, with its oldest request. An adapter without requests earns no credit: at its next request its count
/// is raised to at least that of the adapter whose turn it was last. This is the virtual token counter of
/// Sheng et al., "Fairness in Serving Large Language Models" (2024), in which every computed token has weight
/// 1. The base model counts as an adapter. Generations of one task count together.
///
/// Every operation takes O(log n) for n requests and adapters. Not thread-safe.
class WaitingQueue {
 public:
  explicit WaitingQueue(bool is_fair) : is_fair_(is_fair) {}

  /// Adds a sequence, for the first time or again. If it was running, it no longer counts as running.
  void push(Sequence& sequence);
  /// Moves a waiting sequence to the running ones.
  void start(Sequence& sequence);
  /// Adds a running sequence that never waited. Another one of its priority and adapter must be running.
  void add_running(const Sequence& sequence);
  /// Removes a waiting or running sequence.
  void erase(Sequence& sequence);
  /// Charges the adapter of a running sequence for tokens that were computed, or will be.
  void charge(const Sequence& sequence, std::int64_t num_tokens);

  [[nodiscard]] bool is_fair() const { return is_fair_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] bool empty() const { return size_ == 0; }
  [[nodiscard]] bool contains(const Sequence& sequence) const;
  /// Returns all waiting sequences, sorted by priority and arrival.
  [[nodiscard]] std::vector<Sequence*> list() const;

  class Walk;

  /// Lists every violated invariant, given the running sequences; empty if none. For tests.
  [[nodiscard]] std::vector<std::string> check_invariants(std::span<Sequence* const> running) const;

 private:
  /// A task id; nullopt for the base model and, without fairness, for every adapter.
  using Key = std::optional<std::uint64_t>;
  struct ByArrival {
    bool operator()(const Sequence* a, const Sequence* b) const {
      return a->arrival != b->arrival ? a->arrival < b->arrival : a->index < b->index;
    }
  };
  /// The requests of one priority and, with fairness, one adapter.
  struct Flow {
    Key key;
    /// Number of tokens; see charge().
    std::uint64_t served = 0;
    std::set<Sequence*, ByArrival> waiting;
    std::int64_t num_running = 0;
    /// Number of the newest walk that has met this flow.
    std::uint64_t walk = 0;

    [[nodiscard]] bool is_idle() const { return waiting.empty() && num_running == 0; }
  };
  /// Sorts the flow that starts next to the front.
  struct ByService {
    bool operator()(const Flow* a, const Flow* b) const;
  };
  struct ByServiceAndKey {
    bool operator()(const Flow* a, const Flow* b) const;
  };
  /// The flows of one priority.
  struct Level {
    std::unordered_map<Key, Flow> flows;
    std::set<Flow*, ByService> waiting;
    /// Flows without requests whose `served` is above `turn`. Other flows without requests are deleted.
    std::set<Flow*, ByServiceAndKey> idle;
    /// `served` of the flow whose turn it was last; it never decreases.
    std::uint64_t turn = 0;
    /// Number of sequences that wait or run.
    std::int64_t num_sequences = 0;
  };
  using Levels = std::map<float, Level, std::greater<>>;
  /// Position in a flow that a walk has met: its next sequence, and the walk's own count of served tokens.
  struct Cursor {
    std::uint64_t served = 0;
    Flow* flow = nullptr;
    std::set<Sequence*, ByArrival>::iterator next;
  };

  [[nodiscard]] Key flow_key(const Sequence& sequence) const;
  [[nodiscard]] Level& find_level(const Sequence& sequence) { return levels_.at(sequence.priority); }
  [[nodiscard]] Flow& find_flow(Level& level, const Sequence& sequence) const {
    return level.flows.at(flow_key(sequence));
  }
  /// Applies a change to a value that `Level::waiting` is sorted by.
  template <class Change>
  static void change(Level& level, Flow& flow, Change apply);
  static void forget_idle(Level& level);

  bool is_fair_;
  std::size_t size_ = 0;
  Levels levels_;
  std::uint64_t num_walks_ = 0;
  std::vector<Cursor> cursors_;  // of the current walk: a heap
};

/// Visits the sequences in the order in which they would start if each were charged for its tokens. A
/// sequence that next() returned may start; nothing else may change during the walk. Only one walk can be
/// active.
class WaitingQueue::Walk {
 public:
  explicit Walk(WaitingQueue& queue);
  /// Returns nullptr at the end.
  [[nodiscard]] Sequence* next();

 private:
  void enter_level();
  void skip_met();

  WaitingQueue& queue_;
  Levels::iterator level_;
  std::set<Flow*, ByService>::iterator fresh_;  // the first flow that the walk has not met
};

}  // namespace adaptrt
