#include "adaptrt/mpi/mpi_communicator.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "adaptrt/core/error.h"
#include "mpi_library.h"

namespace adaptrt {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

/// MPI counts bytes in an int.
constexpr std::size_t kMostBytesAtOnce = std::size_t{1} << 30;
/// Longest busy wait for a message of an exchange: longer than any message that arrives normally. After it
/// the thread yields the CPU now and then.
constexpr microseconds kBusyExchange{2000};
/// The same for a command. While there are requests, the next command follows at once.
constexpr microseconds kBusyWait{300};
constexpr microseconds kShortestSleep{50};
constexpr microseconds kLongestSleep{1000};
/// Messages of an exchange only progress while this rank polls MPI, so sleeps are shorter.
constexpr microseconds kLongestSleepOfExchange{200};
/// Time limit for cancelled receives to end. MPI ends them without the other ranks, unless a message is in
/// transit.
constexpr std::chrono::milliseconds kCancelLimit{1000};

/// Polls without sleeping at first, and then sleeps longer and longer.
class Patience {
 public:
  Patience(microseconds busy, microseconds longest_sleep)
      : busy_until_(Clock::now() + busy), longest_sleep_(longest_sleep) {}

  void pause() {
    if (Clock::now() < busy_until_) {
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(longest_sleep_, sleep_ + sleep_ / 4);
  }

 private:
  Clock::time_point busy_until_;
  microseconds longest_sleep_;
  microseconds sleep_ = kShortestSleep;
};

template <class Handle>
Handle handle_of(std::uint64_t value) {
  Handle handle;
  static_assert(sizeof(handle) <= sizeof(value));
  std::memcpy(&handle, &value, sizeof(handle));  // smaller numbers are in the lowest bytes (little-endian)
  return handle;
}

template <class Handle>
class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(const MpiHandles& handles, std::chrono::milliseconds time_limit)
      : library_(handles.library),
        mpi_(library_),
        communicator_(handle_of<Handle>(handles.communicator)),
        byte_(handle_of<Handle>(handles.byte_type)),
        time_limit_(time_limit) {
    if (mpi_.comm_rank(communicator_, &rank_) != kMpiSuccess ||
        mpi_.comm_size(communicator_, &size_) != kMpiSuccess) {
      throw ConfigError("MPI: the communicator has no rank or size");
    }
  }

  [[nodiscard]] std::int32_t rank() const override { return rank_; }
  [[nodiscard]] std::int32_t size() const override { return size_; }

  [[nodiscard]] bool is_lost() const override { return is_lost_.load(); }

  void exchange(std::span<const OutgoingMessage> sent, std::span<const IncomingMessage> received) override {
    end_exchange(begin_exchange(sent, received));
  }

  ExchangeNumber begin_exchange(std::span<const OutgoingMessage> sent,
                                std::span<const IncomingMessage> received) override {
    require_all_ranks();
    ++latest_;
    for (const IncomingMessage& message : received) begin_to_receive(message);
    for (const OutgoingMessage& message : sent) begin_to_send(message);
    return latest_;
  }

  [[nodiscard]] bool has_ended(ExchangeNumber exchange) override {
    require_all_ranks();
    return test_until(exchange);
  }

  void end_exchange(ExchangeNumber exchange) override {
    require_all_ranks();
    finish(exchange, Patience(kBusyExchange, kLongestSleepOfExchange), time_limit_);
  }

  void wait_for(const IncomingMessage& message) override {
    require_all_ranks();
    ++latest_;
    begin_to_receive(message);
    finish(latest_, Patience(kBusyWait, kLongestSleep), std::nullopt);
  }

 private:
  struct Pending {
    Handle request;
    std::int32_t peer;
    ExchangeNumber exchange;
    bool is_received;
  };

  void require_all_ranks() const {
    if (failure_) throw EngineError(*failure_);
  }

  void begin_to_receive(const IncomingMessage& message) {
    for (std::size_t first = 0; first < message.bytes.size(); first += kMostBytesAtOnce) {
      const auto size = static_cast<int>(std::min(kMostBytesAtOnce, message.bytes.size() - first));
      begin("MPI_Irecv", message.from, true, [&](Handle* request) {
        return mpi_.irecv(message.bytes.data() + first, size, byte_, message.from, kTag, communicator_,
                          request);
      });
    }
  }

  void begin_to_send(const OutgoingMessage& message) {
    for (std::size_t first = 0; first < message.bytes.size(); first += kMostBytesAtOnce) {
      const auto size = static_cast<int>(std::min(kMostBytesAtOnce, message.bytes.size() - first));
      begin("MPI_Isend", message.to, false, [&](Handle* request) {
        return mpi_.isend(message.bytes.data() + first, size, byte_, message.to, kTag, communicator_,
                          request);
      });
    }
  }

  /// Calls start(request) to start a message, which is then pending.
  template <class Start>
  void begin(const char* function, std::int32_t peer, bool is_received, Start start) {
    pending_.push_back({Handle{}, peer, latest_, is_received});  // before MPI knows of the buffer
    const int code = start(&pending_.back().request);
    if (code == kMpiSuccess) return;
    pending_.pop_back();
    fail(function, peer, code);
  }

  void finish(ExchangeNumber exchange, Patience patience, std::optional<std::chrono::milliseconds> limit) {
    const auto start = Clock::now();
    while (!test_until(exchange)) {
      if (limit && Clock::now() - start > *limit) give_up(exchange);
      patience.pause();
    }
  }

  /// Removes finished messages; returns true if all of this and earlier exchanges have finished.
  bool test_until(ExchangeNumber exchange) {
    std::optional<std::pair<std::int32_t, int>> failed;  // peer and code
    std::erase_if(pending_, [&](Pending& pending) {
      int done = 0;
      const int code = test(&pending, &done);
      if (code == kMpiSuccess) return done != 0;
      if (!failed) failed = {pending.peer, code};
      return true;
    });
    if (failed) fail("MPI_Test", failed->first, failed->second);
    return pending_.empty() || pending_.front().exchange > exchange;
  }

  /// Throws with the ranks that have not finished this or an earlier exchange. Later exchanges may still be
  /// waiting for their computation.
  [[noreturn]] void give_up(ExchangeNumber exchange) {
    std::set<std::int32_t> silent;
    for (const Pending& pending : pending_) {
      if (pending.exchange <= exchange) silent.insert(pending.peer);
    }
    std::string names;
    for (const std::int32_t rank : silent) names += (names.empty() ? "" : ", ") + std::to_string(rank);
    failure_ = (silent.size() == 1 ? "rank " : "ranks ") + names + " of " + std::to_string(size_) +
               (silent.size() == 1 ? " has" : " have") + " not answered for " +
               std::to_string(time_limit_.count()) + " ms";
    lose();
  }

  [[noreturn]] void lose() {
    is_lost_ = true;
    cancel_receives();
    throw EngineError(*failure_);
  }

  /// Returns when no receive can write to its buffer any more, or after a time limit. Sends cannot be
  /// cancelled: MPI 4.0 has deprecated that, and MPICH crashes if a part of a long message is in transit.
  void cancel_receives() {
    std::erase_if(pending_, [&](Pending& pending) {
      return !pending.is_received || mpi_.cancel(&pending.request) != kMpiSuccess;
    });
    const auto start = Clock::now();
    Patience patience(kBusyWait, kLongestSleep);
    while (!pending_.empty() && Clock::now() - start < kCancelLimit) {
      std::erase_if(pending_, [&](Pending& pending) {
        int done = 0;
        return test(&pending, &done) != kMpiSuccess || done != 0;
      });
      patience.pause();
    }
    pending_.clear();
  }

  [[nodiscard]] int test(Pending* pending, int* done) {
    alignas(std::max_align_t) std::array<std::byte, kStatusBytes> status;
    return mpi_.test(&pending->request, done, status.data());
  }

  [[noreturn]] void fail(const char* function, std::int32_t peer, int code) {
    failure_ = std::string(function) + " with rank " + std::to_string(peer) + " of " + std::to_string(size_) +
               " failed with MPI error " + std::to_string(code);
    lose();
  }

  static constexpr int kTag = 0;

  SharedLibrary library_;
  MpiFunctions<Handle> mpi_;
  Handle communicator_;
  Handle byte_;
  std::chrono::milliseconds time_limit_;
  int rank_ = 0;
  int size_ = 0;
  ExchangeNumber latest_ = 0;
  /// Ordered by exchange.
  std::vector<Pending> pending_;
  /// Reason why the ranks are unreachable.
  std::optional<std::string> failure_;
  /// Copy of failure_.has_value() for other threads.
  std::atomic<bool> is_lost_ = false;
};

}  // namespace

std::shared_ptr<Communicator> make_mpi_communicator(const MpiHandles& handles,
                                                    std::chrono::milliseconds time_limit) {
  if (handles.handle_bytes == sizeof(int)) {
    return std::make_shared<MpiCommunicator<int>>(handles, time_limit);
  }
  if (handles.handle_bytes == sizeof(void*)) {
    return std::make_shared<MpiCommunicator<void*>>(handles, time_limit);
  }
  throw ConfigError("MPI: handles of " + std::to_string(handles.handle_bytes) + " bytes are not known");
}

}  // namespace adaptrt
