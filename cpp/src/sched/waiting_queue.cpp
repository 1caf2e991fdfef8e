#include "adaptrt/sched/waiting_queue.h"

#include <algorithm>
#include <utility>

namespace adaptrt {

bool WaitingQueue::ByService::operator()(const Flow* a, const Flow* b) const {
  if (a->served != b->served) return a->served < b->served;
  return (*a->waiting.begin())->arrival < (*b->waiting.begin())->arrival;
}

bool WaitingQueue::ByServiceAndKey::operator()(const Flow* a, const Flow* b) const {
  return std::pair(a->served, a->key) < std::pair(b->served, b->key);
}

WaitingQueue::Key WaitingQueue::flow_key(const Sequence& sequence) const {
  return is_fair_ && sequence.adapter ? Key(sequence.adapter->task_id()) : std::nullopt;
}

template <class Change>
void WaitingQueue::change(Level& level, Flow& flow, Change apply) {
  if (flow.waiting.empty()) {
    apply();
    if (!flow.waiting.empty()) level.waiting.insert(&flow);
    return;
  }
  auto node = level.waiting.extract(&flow);
  apply();
  if (!flow.waiting.empty()) level.waiting.insert(std::move(node));
}

void WaitingQueue::push(Sequence& sequence) {
  Level& level = levels_[sequence.priority];
  const auto [found, is_new] = level.flows.try_emplace(flow_key(sequence));
  Flow& flow = found->second;
  if (is_new) flow.key = found->first;
  if (flow.is_idle()) level.idle.erase(&flow);
  const bool ran = sequence.state == SequenceState::kRunning;
  change(level, flow, [&] {
    if (flow.waiting.empty()) flow.served = std::max(flow.served, level.turn);
    flow.waiting.insert(&sequence);
  });
  if (ran) {
    --flow.num_running;
  } else {
    ++level.num_sequences;
  }
  ++size_;
}

void WaitingQueue::start(Sequence& sequence) {
  Level& level = find_level(sequence);
  Flow& flow = find_flow(level, sequence);
  change(level, flow, [&] { flow.waiting.erase(&sequence); });
  ++flow.num_running;
  --size_;
  level.turn = std::max(level.turn, flow.served);
  forget_idle(level);
}

void WaitingQueue::add_running(const Sequence& sequence) {
  Level& level = find_level(sequence);
  ++find_flow(level, sequence).num_running;
  ++level.num_sequences;
}

void WaitingQueue::erase(Sequence& sequence) {
  const auto found = levels_.find(sequence.priority);
  Level& level = found->second;
  Flow& flow = find_flow(level, sequence);
  if (sequence.state == SequenceState::kWaiting) {
    change(level, flow, [&] { flow.waiting.erase(&sequence); });
    --size_;
  } else {
    --flow.num_running;
  }
  if (--level.num_sequences == 0) {
    levels_.erase(found);
    return;
  }
  if (!flow.is_idle()) return;
  if (flow.served > level.turn) {
    level.idle.insert(&flow);
  } else {
    level.flows.erase(flow.key);
  }
}

void WaitingQueue::forget_idle(Level& level) {
  while (!level.idle.empty() && (*level.idle.begin())->served <= level.turn) {
    const Key key = (*level.idle.begin())->key;
    level.idle.erase(level.idle.begin());
    level.flows.erase(key);
  }
}

void WaitingQueue::charge(const Sequence& sequence, std::int64_t num_tokens) {
  if (!is_fair_) return;
  Level& level = find_level(sequence);
  Flow& flow = find_flow(level, sequence);
  change(level, flow, [&] { flow.served += static_cast<std::uint64_t>(num_tokens); });
}

bool WaitingQueue::contains(const Sequence& sequence) const {
  const auto level = levels_.find(sequence.priority);
  if (level == levels_.end()) return false;
  const auto flow = level->second.flows.find(flow_key(sequence));
  if (flow == level->second.flows.end()) return false;
  const auto found = flow->second.waiting.find(const_cast<Sequence*>(&sequence));
  return found != flow->second.waiting.end() && *found == &sequence;
}

std::vector<Sequence*> WaitingQueue::list() const {
  std::vector<Sequence*> all;
  all.reserve(size_);
  for (const auto& [priority, level] : levels_) {
    const auto first = static_cast<std::ptrdiff_t>(all.size());
    for (const Flow* flow : level.waiting) all.insert(all.end(), flow->waiting.begin(), flow->waiting.end());
    std::sort(all.begin() + first, all.end(), ByArrival{});
  }
  return all;
}

namespace {

/// Orders heaps whose top is the cursor that comes first.
constexpr auto kComesLater = [](const auto& a, const auto& b) {
  if (a.served != b.served) return a.served > b.served;
  return (*a.next)->arrival > (*b.next)->arrival;
};

}  // namespace

WaitingQueue::Walk::Walk(WaitingQueue& queue) : queue_(queue), level_(queue.levels_.begin()) {
  enter_level();
}

void WaitingQueue::Walk::enter_level() {
  ++queue_.num_walks_;
  queue_.cursors_.clear();
  if (level_ != queue_.levels_.end()) fresh_ = level_->second.waiting.begin();
}

/// A flow that the walk has met may have moved after others since; flows that it has not met keep their
/// place.
void WaitingQueue::Walk::skip_met() {
  const auto end = level_->second.waiting.end();
  while (fresh_ != end && (*fresh_)->walk == queue_.num_walks_) ++fresh_;
}

Sequence* WaitingQueue::Walk::next() {
  auto& cursors = queue_.cursors_;
  for (;; ++level_, enter_level()) {
    if (level_ == queue_.levels_.end()) return nullptr;
    const bool has_fresh = fresh_ != level_->second.waiting.end();
    if (!has_fresh && cursors.empty()) continue;
    Cursor cursor;
    if (has_fresh) cursor = {(*fresh_)->served, *fresh_, (*fresh_)->waiting.begin()};
    if (!has_fresh || (!cursors.empty() && kComesLater(cursor, cursors.front()))) {
      std::ranges::pop_heap(cursors, kComesLater);
      cursor = cursors.back();
      cursors.pop_back();
    } else {
      cursor.flow->walk = queue_.num_walks_;
      skip_met();
    }
    Sequence* sequence = *cursor.next;
    cursor.served += static_cast<std::uint64_t>(sequence->num_tokens());
    if (++cursor.next != cursor.flow->waiting.end()) {
      cursors.push_back(cursor);
      std::ranges::push_heap(cursors, kComesLater);
    }
    return sequence;
  }
}

std::vector<std::string> WaitingQueue::check_invariants(std::span<Sequence* const> running) const {
  std::vector<std::string> violations;
  const auto check = [&](bool holds, const char* what) {
    if (!holds) violations.push_back(std::string("waiting queue: ") + what);
  };
  std::map<std::pair<float, Key>, std::int64_t> num_running;
  for (const Sequence* sequence : running) ++num_running[{sequence->priority, flow_key(*sequence)}];
  std::size_t num_waiting = 0;
  std::size_t num_flows_that_run = 0;
  for (const auto& [priority, level] : levels_) {
    std::int64_t num_sequences = 0;
    std::size_t num_flows_that_wait = 0;
    const Flow* before = nullptr;
    const std::set<const Flow*> in_turn(level.waiting.begin(), level.waiting.end());
    for (const Flow* flow : level.waiting) {
      check(before == nullptr || ByService{}(before, flow), "adapters are out of order");
      before = flow;
    }
    for (const auto& [key, flow] : level.flows) {
      const auto check_flow = [&, key = key](bool holds, const char* what) {
        if (holds) return;
        const std::string name = key ? "adapter " + std::to_string(*key) : "the base model";
        check(false, (name + what).c_str());
      };
      check_flow(flow.key == key, " has a wrong key");
      check_flow(is_fair_ || !key, " has a flow of its own without fairness");
      check_flow(in_turn.contains(&flow) == !flow.waiting.empty(),
                 " has requests that wait and is not in the order of turns, or the other way round");
      check_flow(level.idle.contains(const_cast<Flow*>(&flow)) == flow.is_idle(),
                 " is idle and not in the list of idle flows, or the other way round");
      check_flow(!flow.is_idle() || flow.served > level.turn,
                 " is kept although its service no longer counts");
      const auto expected = num_running.find({priority, key});
      check_flow(flow.num_running == (expected == num_running.end() ? 0 : expected->second),
                 " miscounts its running requests");
      if (flow.num_running > 0) ++num_flows_that_run;
      if (!flow.waiting.empty()) ++num_flows_that_wait;
      for (const Sequence* sequence : flow.waiting) {
        check_flow(sequence->priority == priority && flow_key(*sequence) == key,
                   " has a request of another adapter");
      }
      num_waiting += flow.waiting.size();
      num_sequences += static_cast<std::int64_t>(flow.waiting.size()) + flow.num_running;
    }
    check(num_flows_that_wait == level.waiting.size(), "unknown adapters are in the order of turns");
    check(num_sequences == level.num_sequences && num_sequences > 0, "a priority miscounts its requests");
  }
  check(num_waiting == size_, "the size is not the number of requests that wait");
  check(num_flows_that_run == num_running.size(), "running requests have no flow");
  return violations;
}

}  // namespace adaptrt
