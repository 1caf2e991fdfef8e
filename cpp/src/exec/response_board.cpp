#include "response_board.h"

#include <iterator>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {
namespace {

/// Waits until ready() or until the time is over; no deadline is computed from "for ever".
template <class Ready>
void wait(std::condition_variable& condition, std::unique_lock<std::mutex>& lock,
          ResponseBoard::Timeout timeout, Ready ready) {
  if (timeout) {
    condition.wait_for(lock, *timeout, ready);
  } else {
    condition.wait(lock, ready);
  }
}

}  // namespace

void ResponseBoard::open(const std::vector<RequestId>& ids) {
  const std::lock_guard lock(mutex_);
  for (const RequestId id : ids) channels_.emplace(id, std::make_shared<Channel>());
}

void ResponseBoard::discard(const std::vector<RequestId>& ids) {
  const std::lock_guard lock(mutex_);
  for (const RequestId id : ids) channels_.erase(id);
}

void ResponseBoard::post(Response response) {
  {
    const std::lock_guard lock(mutex_);
    const RequestId id = response.request_id;
    Channel& channel = *channels_.at(id);
    channel.responses.push_back(std::move(response));
    ready_.insert(id);
    channel.changed.notify_all();
  }
  any_changed_.notify_all();
}

void ResponseBoard::close(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  closed_ = reason;
  for (auto& [id, channel] : channels_) channel->changed.notify_all();
  any_changed_.notify_all();
}

std::vector<Response> ResponseBoard::await_any(Timeout timeout) {
  std::unique_lock lock(mutex_);
  wait(any_changed_, lock, timeout, [&] { return !ready_.empty() || closed_; });
  std::vector<Response> responses;
  while (!ready_.empty()) {
    const RequestId id = *ready_.begin();
    take(id, *find(id), responses);
  }
  if (responses.empty() && closed_) throw ExecutorClosedError(*closed_);
  return responses;
}

std::vector<Response> ResponseBoard::await(RequestId id, Timeout timeout) {
  std::unique_lock lock(mutex_);
  const auto channel = find(id);
  wait(channel->changed, lock, timeout,
       [&] { return !channel->responses.empty() || channel->is_done || closed_; });
  std::vector<Response> responses;
  take(id, *channel, responses);
  if (responses.empty() && channel->is_done) {
    throw RequestError("the last response of request " + std::to_string(id) + " was taken by another thread");
  }
  if (responses.empty() && closed_) throw ExecutorClosedError(*closed_);
  return responses;
}

std::size_t ResponseBoard::num_ready(std::optional<RequestId> id) const {
  const std::lock_guard lock(mutex_);
  if (id) return find(*id)->responses.size();
  std::size_t count = 0;
  for (const RequestId ready : ready_) count += channels_.at(ready)->responses.size();
  return count;
}

std::shared_ptr<ResponseBoard::Channel> ResponseBoard::find(RequestId id) const {
  const auto found = channels_.find(id);
  if (found == channels_.end()) {
    throw RequestError("request " + std::to_string(id) +
                       " is unknown, or its last response was already taken");
  }
  return found->second;
}

void ResponseBoard::take(RequestId id, Channel& channel, std::vector<Response>& responses) {
  if (channel.responses.empty()) return;
  const bool is_last = channel.responses.back().is_final();
  responses.insert(responses.end(), std::make_move_iterator(channel.responses.begin()),
                   std::make_move_iterator(channel.responses.end()));
  channel.responses.clear();
  ready_.erase(id);
  if (!is_last) return;
  channel.is_done = true;
  channel.changed.notify_all();
  channels_.erase(id);
}

}  // namespace adaptrt
