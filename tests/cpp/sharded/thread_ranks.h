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

/// Where threads that stand for ranks leave messages for each other.
class MailRoom {
 public:
  /// If `until_taken`, who leaves a message waits until it is taken, as long as a Communicator may: what
  /// would wait for itself that way does so here.
  explicit MailRoom(std::int32_t size, bool until_taken = false) : size_(size), until_taken_(until_taken) {}
  [[nodiscard]] std::int32_t size() const { return size_; }

  void put(std::int32_t from, std::int32_t to, std::span<const std::byte> bytes) {
    const std::lock_guard lock(mutex_);
    boxes_[{from, to}].emplace_back(bytes.begin(), bytes.end());
    arrived_.notify_all();
  }

  /// Where it waits: false where not all that `from` has left is taken for ten seconds.
  [[nodiscard]] bool wait_until_taken(std::int32_t from, std::int32_t to) {
    if (!until_taken_) return true;
    std::unique_lock lock(mutex_);
    auto& box = boxes_[{from, to}];
    return arrived_.wait_for(lock, std::chrono::seconds(10), [&] { return box.empty(); });
  }

  /// False where nothing has come for ten seconds.
  [[nodiscard]] bool take(std::int32_t from, std::int32_t to, std::span<std::byte> bytes) {
    std::unique_lock lock(mutex_);
    auto& box = boxes_[{from, to}];
    if (!arrived_.wait_for(lock, std::chrono::seconds(10), [&] { return !box.empty(); })) return false;
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

/// One thread's end of a mail room.
class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<MailRoom> room, std::int32_t rank)
      : room_(std::move(room)), rank_(rank) {}

  [[nodiscard]] std::int32_t rank() const override { return rank_; }
  [[nodiscard]] std::int32_t size() const override { return room_->size(); }
  [[nodiscard]] bool is_lost() const override { return is_lost_; }

  void exchange(std::span<const OutgoingMessage> sent, std::span<const IncomingMessage> received) override {
    for (const OutgoingMessage& message : sent) room_->put(rank_, message.to, message.bytes);
    for (const IncomingMessage& message : received) wait_for(message);
    for (const OutgoingMessage& message : sent) {
      if (!room_->wait_until_taken(rank_, message.to)) lose(message.to);
    }
  }

  void wait_for(const IncomingMessage& message) override {
    if (!room_->take(message.from, rank_, message.bytes)) lose(message.from);
  }

 private:
  [[noreturn]] void lose(std::int32_t rank) {
    is_lost_ = true;
    throw EngineError("rank " + std::to_string(rank) + " has not answered");
  }

  std::shared_ptr<MailRoom> room_;
  std::int32_t rank_;
  bool is_lost_ = false;
};

}  // namespace adaptrt::testing
