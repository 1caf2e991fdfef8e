#include "support/host_device.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <stdexcept>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt::testing {
namespace {

constexpr std::size_t kAlignment = 256;
/// Value of each byte of memory that was not written yet.
constexpr int kPoison = 0xA7;

std::shared_ptr<void> aligned_memory(std::size_t bytes) {
  void* memory = ::operator new(bytes, std::align_val_t{kAlignment});
  std::memset(memory, kPoison, bytes);
  return {memory, [](void* address) { ::operator delete(address, std::align_val_t{kAlignment}); }};
}

}  // namespace

/// Live allocations, call counts and planned failures.
class HostDevice::Ledger {
 public:
  enum class Kind : std::uint8_t { kDevice, kPinned };

  explicit Ledger(std::size_t total_bytes) : total_bytes_(total_bytes) {}

  [[nodiscard]] DeviceMemoryInfo memory() const {
    const std::lock_guard lock(mutex_);
    return {total_bytes_ - used_bytes_, total_bytes_};
  }

  /// Returns true if the call's work is to fail.
  bool enter(const std::string& call) {
    const std::lock_guard lock(mutex_);
    ++calls_[call];
    if (lost_) throw EngineError(*lost_);
    const auto found = failures_.find(call);
    if (found == failures_.end() || found->second.successes-- > 0) return false;
    const Failure failure = found->second.failure;
    failures_.erase(found);
    if (failure == Failure::kLate) return true;
    const std::string reason = call + ": an injected failure";
    if (failure == Failure::kOnce) throw StepError(reason);
    lost_ = reason + "; the device cannot be used any more";
    throw EngineError(*lost_);
  }

  void fail(const std::string& call, Failure failure, int successes) {
    const std::lock_guard lock(mutex_);
    failures_[call] = {failure, successes};
  }

  [[nodiscard]] std::int64_t calls(const std::string& call) const {
    const std::lock_guard lock(mutex_);
    const auto found = calls_.find(call);
    return found == calls_.end() ? 0 : found->second;
  }

  /// Throws ConfigError if the device has too little memory. Called before host memory is allocated and
  /// filled, which takes seconds for gigabytes.
  void require_room(std::size_t bytes) const {
    const std::lock_guard lock(mutex_);
    require_free(bytes);
  }

  void add(Kind kind, const void* address, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (kind == Kind::kDevice) {
      require_free(bytes);
      used_bytes_ += bytes;
    } else if (bytes > max_pinned_bytes_ - pinned_bytes_) {
      throw ConfigError("the system pins no " + std::to_string(bytes) + " bytes");
    } else {
      pinned_bytes_ += bytes;
    }
    ranges_[static_cast<const std::byte*>(address)] = {kind, bytes};
  }

  void remove(const void* address) {
    const std::lock_guard lock(mutex_);
    const auto found = ranges_.find(static_cast<const std::byte*>(address));
    (found->second.kind == Kind::kDevice ? used_bytes_ : pinned_bytes_) -= found->second.bytes;
    ranges_.erase(found);
  }

  void set_before_event_waits(std::function<void()> hook) {
    const std::lock_guard lock(mutex_);
    before_event_wait_ = std::move(hook);
  }
  void before_event_wait() const {
    std::function<void()> hook;
    {
      const std::lock_guard lock(mutex_);
      hook = before_event_wait_;
    }
    if (hook) hook();
  }

  void limit_pinned(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    max_pinned_bytes_ = std::max(bytes, pinned_bytes_);
  }

  [[nodiscard]] bool owns(Kind kind, const void* address, std::size_t bytes) const {
    const std::lock_guard lock(mutex_);
    const auto* first = static_cast<const std::byte*>(address);
    auto after = ranges_.upper_bound(first);
    if (after == ranges_.begin()) return false;
    const auto& [begin, range] = *--after;
    return range.kind == kind && first + bytes <= begin + range.bytes;
  }

  [[nodiscard]] std::size_t num_allocations() const {
    const std::lock_guard lock(mutex_);
    return ranges_.size();
  }

 private:
  struct Range {
    Kind kind;
    std::size_t bytes;
  };
  struct PlannedFailure {
    Failure failure;
    int successes;
  };

  /// Call it with the mutex held.
  void require_free(std::size_t bytes) const {
    if (bytes <= total_bytes_ - used_bytes_) return;
    throw ConfigError("the device gives no " + std::to_string(bytes) + " bytes; " +
                      std::to_string(total_bytes_ - used_bytes_) + " of " + std::to_string(total_bytes_) +
                      " bytes are free");
  }

  mutable std::mutex mutex_;
  std::size_t total_bytes_;
  std::size_t used_bytes_ = 0;
  std::size_t pinned_bytes_ = 0;
  std::size_t max_pinned_bytes_ = std::numeric_limits<std::size_t>::max();
  std::map<const std::byte*, Range> ranges_;
  std::map<std::string, std::int64_t> calls_;
  std::map<std::string, PlannedFailure> failures_;
  std::optional<std::string> lost_;
  std::function<void()> before_event_wait_;
};

namespace {

using Work = std::function<void()>;

struct HostGraph final : CapturedGraph {
  std::vector<Work> work;
};

}  // namespace

/// Runs work in order. Any thread may run it: a stream that waits for another one runs the other's work.
class HostStream final : public Stream {
 public:
  /// The enqueued work, and the part that is done.
  class Queue {
   public:
    void push(Work work) {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(std::move(work));
      ++num_pushed_;
    }
    [[nodiscard]] std::int64_t num_pushed() const {
      const std::lock_guard lock(mutex_);
      return num_pushed_;
    }
    /// Runs the work enqueued before a point in the stream.
    void run_to(std::int64_t end) {
      const std::lock_guard lock(mutex_);
      while (num_done_ < end) {
        const Work work = std::move(waiting_.front());
        waiting_.pop_front();
        ++num_done_;
        work();
      }
    }

    /// Called by work that fails.
    void fail() {
      const std::lock_guard lock(mutex_);
      failed_at_ = num_done_;
    }
    /// Throws if work before a point has failed.
    void throw_if_failed(std::int64_t end) const {
      const std::lock_guard lock(mutex_);
      if (failed_at_ && *failed_at_ <= end) throw StepError("a copy failed");
    }
    void forget_failure() {
      const std::lock_guard lock(mutex_);
      failed_at_.reset();
    }

   private:
    mutable std::recursive_mutex mutex_;
    std::optional<std::int64_t> failed_at_;
    std::deque<Work> waiting_;
    std::int64_t num_pushed_ = 0;
    std::int64_t num_done_ = 0;
  };

  HostStream(std::shared_ptr<HostDevice::Ledger> ledger, StreamTime time)
      : ledger_(std::move(ledger)), time_(time) {}
  ~HostStream() override {
    try {
      queue_->run_to(queue_->num_pushed());
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): no caller is left
    }
  }
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  [[nodiscard]] void* handle() const override { return const_cast<HostStream*>(this); }

  void copy_to_device(std::byte* device, const std::byte* host, std::size_t bytes) override {
    if (ledger_->enter("copy_to_device")) {
      submit([queue = queue_.get()] { queue->fail(); });
      return;
    }
    copy("copy_to_device", device, host, bytes, device, host);
  }
  void copy_to_host(std::byte* host, const std::byte* device, std::size_t bytes) override {
    ledger_->enter("copy_to_host");
    copy("copy_to_host", host, device, bytes, device, host);
  }
  void copy_on_device(std::byte* to, const std::byte* from, std::size_t bytes) override {
    ledger_->enter("copy_on_device");
    const auto check = [this, to, from, bytes] {
      require("copy_on_device", HostDevice::Ledger::Kind::kDevice, to, bytes);
      require("copy_on_device", HostDevice::Ledger::Kind::kDevice, from, bytes);
    };
    check();
    submit([=] {
      check();
      std::memcpy(to, from, bytes);
    });
  }
  void fill_zero(std::byte* device, std::size_t bytes) override {
    ledger_->enter("fill_zero");
    require("fill_zero", HostDevice::Ledger::Kind::kDevice, device, bytes);
    submit([=] { std::memset(device, 0, bytes); });
  }
  void record(Event& event) override;
  void wait(Event& event) override;
  void synchronize() override {
    ledger_->enter("synchronize");
    const std::int64_t end = queue_->num_pushed();
    queue_->run_to(end);
    try {
      queue_->throw_if_failed(end);
    } catch (...) {
      queue_->forget_failure();
      throw;
    }
  }

  [[nodiscard]] std::unique_ptr<CapturedGraph> capture(const std::function<void()>& work) override {
    ledger_->enter("capture");
    if (captured_ != nullptr) throw std::logic_error("capture: the stream captures already");
    auto graph = std::make_unique<HostGraph>();
    captured_ = graph.get();
    try {
      work();
    } catch (...) {
      captured_ = nullptr;
      throw;
    }
    captured_ = nullptr;
    return graph;
  }
  void launch(CapturedGraph& graph) override {
    ledger_->enter("launch");
    for (const auto& work : static_cast<HostGraph&>(graph).work) submit(work);
  }

  void submit(Work work) {
    if (captured_ != nullptr) {
      captured_->work.push_back(std::move(work));
      return;
    }
    queue_->push(std::move(work));
    if (time_ == StreamTime::kAtOnce) queue_->run_to(queue_->num_pushed());
  }
  [[nodiscard]] bool is_capturing() const { return captured_ != nullptr; }

 private:
  void copy(const char* call, std::byte* to, const std::byte* from, std::size_t bytes,
            const std::byte* device, const std::byte* host) {
    const auto check = [this, call, device, host, bytes] {
      require(call, HostDevice::Ledger::Kind::kDevice, device, bytes);
      require(call, HostDevice::Ledger::Kind::kPinned, host, bytes);
    };
    check();
    submit([=] {
      check();  // the memory must still exist when the copy is done
      std::memcpy(to, from, bytes);
    });
  }

  void require(const char* call, HostDevice::Ledger::Kind kind, const std::byte* address,
               std::size_t bytes) const {
    if (ledger_->owns(kind, address, bytes)) return;
    throw std::logic_error(std::string(call) + ": " + std::to_string(bytes) +
                           " bytes are not within one living " +
                           (kind == HostDevice::Ledger::Kind::kDevice ? "allocation of the device"
                                                                      : "allocation of pinned memory"));
  }

  std::shared_ptr<HostDevice::Ledger> ledger_;
  StreamTime time_;
  std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  HostGraph* captured_ = nullptr;
};

namespace {

class HostEvent final : public Event {
 public:
  explicit HostEvent(std::function<void()> before_wait) : before_wait_(std::move(before_wait)) {}

  void synchronize() override {
    before_wait_();
    const auto [queue, point] = place();
    if (!queue) return;
    queue->run_to(point);
    queue->throw_if_failed(point);
  }
  void set(std::shared_ptr<HostStream::Queue> queue, std::int64_t point) {
    const std::lock_guard lock(mutex_);
    queue_ = std::move(queue);
    point_ = point;
  }
  [[nodiscard]] std::pair<std::shared_ptr<HostStream::Queue>, std::int64_t> place() {
    const std::lock_guard lock(mutex_);
    return {queue_, point_};
  }

 private:
  std::function<void()> before_wait_;
  std::mutex mutex_;
  std::shared_ptr<HostStream::Queue> queue_;
  std::int64_t point_ = 0;
};

}  // namespace

void HostStream::record(Event& event) {
  ledger_->enter("record");
  static_cast<HostEvent&>(event).set(queue_, queue_->num_pushed());
}

void HostStream::wait(Event& event) {
  ledger_->enter("wait");
  const auto place = static_cast<HostEvent&>(event).place();
  submit([place] {
    if (place.first) place.first->run_to(place.second);
  });
}

HostDevice::HostDevice(std::size_t total_bytes, StreamTime time)
    : info_{"host memory", 8, 0}, time_(time), ledger_(std::make_shared<Ledger>(total_bytes)) {}
HostDevice::~HostDevice() = default;

DeviceMemoryInfo HostDevice::memory() const {
  return ledger_->memory();
}

Allocation HostDevice::allocate(std::size_t bytes) {
  ledger_->enter("allocate");
  if (bytes == 0) return {};
  ledger_->require_room(bytes);
  auto memory = aligned_memory(bytes);
  void* address = memory.get();
  ledger_->add(Ledger::Kind::kDevice, address, bytes);
  return {std::shared_ptr<void>(address, [memory = std::move(memory),
                                          ledger = ledger_](void* freed) { ledger->remove(freed); }),
          bytes};
}

Allocation HostDevice::allocate_pinned(std::size_t bytes) {
  ledger_->enter("allocate_pinned");
  if (bytes == 0) return {};
  auto memory = aligned_memory(bytes);
  void* address = memory.get();
  ledger_->add(Ledger::Kind::kPinned, address, bytes);
  return {std::shared_ptr<void>(address, [memory = std::move(memory),
                                          ledger = ledger_](void* freed) { ledger->remove(freed); }),
          bytes};
}

std::unique_ptr<Stream> HostDevice::make_stream() {
  ledger_->enter("make_stream");
  return std::make_unique<HostStream>(ledger_, time_);
}

std::unique_ptr<Event> HostDevice::make_event() {
  ledger_->enter("make_event");
  return std::make_unique<HostEvent>([ledger = ledger_] { ledger->before_event_wait(); });
}

void HostDevice::fail(const std::string& call, Failure failure, int successes) {
  ledger_->fail(call, failure, successes);
}

void HostDevice::before_event_waits(std::function<void()> hook) {
  ledger_->set_before_event_waits(std::move(hook));
}

void HostDevice::limit_pinned(std::size_t bytes) {
  ledger_->limit_pinned(bytes);
}

std::int64_t HostDevice::calls(const std::string& call) const {
  return ledger_->calls(call);
}

bool HostDevice::owns(const void* address, std::size_t bytes) const {
  return ledger_->owns(Ledger::Kind::kDevice, address, bytes);
}

std::size_t HostDevice::num_allocations() const {
  return ledger_->num_allocations();
}

HostStream& host_stream(void* handle) {
  return *static_cast<HostStream*>(handle);
}

void submit(HostStream& stream, std::function<void()> work) {
  stream.submit(std::move(work));
}

bool is_capturing(const HostStream& stream) {
  return stream.is_capturing();
}

}  // namespace adaptrt::testing
