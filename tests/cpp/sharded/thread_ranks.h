#pragma once

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/engine/communicator.h"

namespace adaptrt::testing {

/// Passes messages between threads that act as ranks.
class MailRoom {
 public:
  /// If `until_taken`, a sender waits until its message is received, as long as a Communicator may; code that
  /// would deadlock that way then deadlocks here.
  explicit MailRoom(std::int32_t size, bool until_taken = false) : size_(size), until_taken_(until_taken) {}
  [[nodiscard]] std::int32_t size() const { return size_; }

  void put(std::int32_t from, std::int32_t to, std::span<const std::byte> bytes) {
    const std::lock_guard lock(mutex_);
    boxes_[{from, to}].emplace_back(bytes.begin(), bytes.end());
    arrived_.notify_all();
  }

  /// Returns false if not all messages of `from` are received in time.
  [[nodiscard]] bool wait_until_taken(std::int32_t from, std::int32_t to,
                                      std::chrono::milliseconds time_limit) {
    if (!until_taken_) return true;
    std::unique_lock lock(mutex_);
    auto& box = boxes_[{from, to}];
    return arrived_.wait_for(lock, time_limit, [&] { return box.empty(); });
  }

  /// Returns false if no message arrives in time.
  [[nodiscard]] bool take(std::int32_t from, std::int32_t to, std::span<std::byte> bytes,
                          std::chrono::milliseconds time_limit) {
    std::unique_lock lock(mutex_);
    auto& box = boxes_[{from, to}];
    if (!arrived_.wait_for(lock, time_limit, [&] { return !box.empty(); })) return false;
    const std::vector<std::byte> message = std::move(box.front());
    box.pop_front();
    arrived_.notify_all();
    if (message.size() != bytes.size()) return false;
    if (!message.empty()) std::memcpy(bytes.data(), message.data(), message.size());
    return true;
  }

 private:
  std::int32_t size_;
  bool until_taken_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<std::pair<std::int32_t, std::int32_t>, std::deque<std::vector<std::byte>>> boxes_;
};

/// One thread's end of a mail room. Messages of an exchange are received only when the thread asks for them.
class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<MailRoom> room, std::int32_t rank,
                     std::chrono::milliseconds time_limit = std::chrono::seconds(10))
      : room_(std::move(room)), rank_(rank), time_limit_(time_limit) {}

  [[nodiscard]] std::int32_t rank() const override { return rank_; }
  [[nodiscard]] std::int32_t size() const override { return room_->size(); }
  [[nodiscard]] bool is_lost() const override { return is_lost_; }

  void exchange(std::span<const OutgoingMessage> sent, std::span<const IncomingMessage> received) override {
    end_exchange(begin_exchange(sent, received));
    for (const OutgoingMessage& message : sent) {
      if (!room_->wait_until_taken(rank_, message.to, time_limit_)) lose(message.to);
    }
  }

  ExchangeNumber begin_exchange(std::span<const OutgoingMessage> sent,
                                std::span<const IncomingMessage> received) override {
    ++latest_;
    for (const OutgoingMessage& message : sent) room_->put(rank_, message.to, message.bytes);
    for (const IncomingMessage& message : received) expected_.push_back({latest_, message});
    return latest_;
  }

  [[nodiscard]] bool has_ended(ExchangeNumber exchange) override {
    while (!expected_.empty() && expected_.front().exchange <= exchange) {
      const IncomingMessage& message = expected_.front().message;
      if (!room_->take(message.from, rank_, message.bytes, std::chrono::milliseconds(0))) return false;
      expected_.pop_front();
    }
    return true;
  }

  void end_exchange(ExchangeNumber exchange) override {
    while (!expected_.empty() && expected_.front().exchange <= exchange) {
      take(expected_.front().message);
      expected_.pop_front();
    }
  }

  void wait_for(const IncomingMessage& message) override { take(message); }

 private:
  struct Expected {
    ExchangeNumber exchange;
    IncomingMessage message;
  };

  void take(const IncomingMessage& message) {
    if (room_->take(message.from, rank_, message.bytes, time_limit_)) return;
    lose(message.from);
  }

  [[noreturn]] void lose(std::int32_t rank) {
    is_lost_ = true;
    throw EngineError("rank " + std::to_string(rank) + " has not answered");
  }

  std::shared_ptr<MailRoom> room_;
  std::int32_t rank_;
  std::chrono::milliseconds time_limit_;
  std::deque<Expected> expected_;
  ExchangeNumber latest_ = 0;
  bool is_lost_ = false;
};

}  // namespace adaptrt::testing
