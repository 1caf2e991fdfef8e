#include "response_board.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {
namespace {

/// Waits until ready() or the timeout. Without a timeout it computes no deadline, which could overflow.
template <class Ready>
void wait(std::condition_variable& condition, std::unique_lock<std::mutex>& lock,
          ResponseBoard::Timeout timeout, Ready ready) {
  if (timeout) {
    condition.wait_for(lock, *timeout, ready);
  } else {
    condition.wait(lock, ready);
  }
}

/// TensorRT-LLM's response for a request that has ended; its clients look for the text.
Response already_ended(RequestId id) {
  Response response;
  response.request_id = id;
  response.error_msg = "ReqId " + std::to_string(id) + " has already been processed and was terminated.";
  return response;
}

}  // namespace

void ResponseBoard::open(const std::vector<RequestId>& ids) {
  const std::lock_guard lock(mutex_);
  for (const RequestId id : ids) {
    channels_.emplace(id, std::make_shared<Channel>());
    last_id_ = std::max(last_id_, id);
  }
}

void ResponseBoard::discard(const std::vector<RequestId>& ids) {
  const std::lock_guard lock(mutex_);
  for (const RequestId id : ids) {
    channels_.erase(id);
    ready_.erase(id);
  }
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

void ResponseBoard::close(const std::string& reason, ExecutorEnd end) {
  const std::lock_guard lock(mutex_);
  closed_ = reason;
  end_ = end;
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
  if (responses.empty() && closed_ && end_ == ExecutorEnd::kDeath) throw ExecutorClosedError(*closed_);
  return responses;
}

std::vector<Response> ResponseBoard::await(RequestId id, Timeout timeout) {
  std::unique_lock lock(mutex_);
  const auto channel = find(id);
  if (!channel) return {already_ended(id)};
  wait(channel->changed, lock, timeout,
       [&] { return !channel->responses.empty() || channel->is_done || closed_; });
  std::vector<Response> responses;
  take(id, *channel, responses);
  if (responses.empty() && channel->is_done) return {already_ended(id)};
  if (responses.empty() && closed_) throw ExecutorClosedError(*closed_);
  return responses;
}

std::optional<std::vector<std::vector<Response>>> ResponseBoard::await_each(const std::vector<RequestId>& ids,
                                                                            Timeout timeout,
                                                                            AtTimeout at_timeout) {
  std::unique_lock lock(mutex_);
  std::vector<std::shared_ptr<Channel>> channels;
  for (const RequestId id : ids) channels.push_back(find(id));  // before any response is taken
  const auto has_news = [](const auto& channel) {
    return !channel || !channel->responses.empty() || channel->is_done;
  };
  const auto all_have_news = [&] { return std::ranges::all_of(channels, has_news); };
  wait(any_changed_, lock, timeout, [&] { return all_have_news() || closed_; });
  if (closed_ && std::ranges::none_of(channels, has_news) && !ids.empty()) {
    throw ExecutorClosedError(*closed_);
  }
  if (at_timeout == AtTimeout::kTakeNothing && !all_have_news() && !closed_) return std::nullopt;
  std::vector<std::vector<Response>> all(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (channels[i]) take(ids[i], *channels[i], all[i]);
    if (all[i].empty() && (!channels[i] || channels[i]->is_done)) all[i].push_back(already_ended(ids[i]));
  }
  return all;
}

std::size_t ResponseBoard::num_ready(std::optional<RequestId> id) const {
  const std::lock_guard lock(mutex_);
  if (id) {
    const auto channel = find(*id);
    return channel ? channel->responses.size() : 0;
  }
  std::size_t count = 0;
  for (const RequestId ready : ready_) count += channels_.at(ready)->responses.size();
  return count;
}

std::shared_ptr<ResponseBoard::Channel> ResponseBoard::find(RequestId id) const {
  const auto found = channels_.find(id);
  if (found != channels_.end()) return found->second;
  if (id == 0 || id > last_id_) throw RequestError("request " + std::to_string(id) + " is unknown");
  return nullptr;
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
  any_changed_.notify_all();
  channels_.erase(id);
}

}  // namespace adaptrt
