#include "adaptrt/gpu/device_pages.h"

#include <string>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {

/// Resources of one running load.
class DevicePages::Lane {
 public:
  explicit Lane(Device& device)
      : device_(device), stream_(device.make_stream()), copied_(device.make_event()) {}

  void load(std::span<const std::int64_t> pages, const DevicePages& owner, const Write& write) {
    const std::size_t page_bytes = owner.page_bytes();
    const std::size_t bytes = pages.size() * page_bytes;
    if (staging_.bytes() < bytes) {
      staging_ = {};  // free the old memory first: both may not fit
      staging_ = device_.allocate_pinned(bytes);
    }
    try {
      for (std::size_t i = 0; i < pages.size(); ++i) {
        std::byte* const staged = staging_.data() + i * page_bytes;
        const std::size_t written = write(i, staged);
        if (written > 0) stream_->copy_to_device(owner.address(pages[i]), staged, written);
      }
      stream_->record(*copied_);
      copied_->synchronize();
    } catch (...) {
      // Copies that already started still read the staging memory, which the next load writes.
      stream_->synchronize();
      throw;
    }
  }

  /// Enqueues copies, and records a point after each.
  void enqueue(std::span<const Copy> copies, const DevicePages& owner, AdapterArrival& arrival) {
    try {
      for (const Copy& copy : copies) {
        stream_->copy_to_device(owner.address(copy.page) + copy.offset, copy.from.data(), copy.from.size());
        arrival.add(copy.position, device_.make_event(), *stream_);
      }
    } catch (...) {
      stream_->synchronize();  // the caller frees the memory that copies still read
      throw;
    }
  }

  void synchronize() { stream_->synchronize(); }

 private:
  Device& device_;
  Allocation staging_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> copied_;
};

/// Holds a lane during a load.
class DevicePages::LaneLease {
 public:
  explicit LaneLease(DevicePages& pages) : pages_(pages) {
    std::unique_lock lock(pages_.mutex_);
    pages_.lane_is_free_.wait(lock, [&] { return !pages_.free_lanes_.empty(); });
    lane_ = pages_.free_lanes_.back();
    pages_.free_lanes_.pop_back();
  }
  ~LaneLease() {
    {
      const std::lock_guard lock(pages_.mutex_);
      pages_.free_lanes_.push_back(lane_);
    }
    pages_.lane_is_free_.notify_one();
  }
  LaneLease(const LaneLease&) = delete;
  LaneLease& operator=(const LaneLease&) = delete;
  [[nodiscard]] Lane& lane() const { return *lane_; }

 private:
  DevicePages& pages_;
  Lane* lane_;
};

/// Copies of one adapter. Their lane is free again when they are done.
class DevicePages::LaneCopies final : public Copies {
 public:
  LaneCopies(DevicePages& pages, std::uint64_t load_id, std::span<const Copy> copies)
      : arrivals_(pages.arrivals_), load_id_(load_id), lease_(pages) {
    auto arrival = std::make_shared<AdapterArrival>();
    lease_.lane().enqueue(copies, pages, *arrival);
    arrival_ = std::move(arrival);
    arrivals_->add(load_id, arrival_);
  }
  ~LaneCopies() override {
    // A failed arrival stays, because requests that lease the adapter may not have run a step yet.
    if (!arrival_->has_failed()) arrivals_->remove(load_id_);
    try {
      lease_.lane().synchronize();
    } catch (const AdaptrtError&) {  // NOLINT(bugprone-empty-catch): wait() has thrown it
    }
  }
  LaneCopies(const LaneCopies&) = delete;
  LaneCopies& operator=(const LaneCopies&) = delete;

  void wait() override { arrival_->synchronize(); }

 private:
  std::shared_ptr<AdapterArrivals> arrivals_;
  std::uint64_t load_id_;
  LaneLease lease_;
  std::shared_ptr<const AdapterArrival> arrival_;
};

DevicePages::DevicePages(std::shared_ptr<Device> device, std::size_t page_bytes, std::int64_t num_pages,
                         std::int32_t num_copy_streams, std::shared_ptr<AdapterArrivals> arrivals)
    : device_(std::move(device)),
      page_bytes_(page_bytes),
      num_pages_(num_pages),
      arrivals_(std::move(arrivals)),
      slabs_(std::make_shared<PinnedSlabs>(device_)) {
  if (num_copy_streams < 1) {
    throw ConfigError("num_copy_streams is " + std::to_string(num_copy_streams) + "; it must be at least 1");
  }
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(page_bytes, static_cast<std::size_t>(num_pages), &bytes)) {
    throw ConfigError("the LoRA cache's device level of " + std::to_string(num_pages) + " pages of " +
                      std::to_string(page_bytes) + " bytes is larger than the address space");
  }
  memory_ = device_->allocate(bytes);
  for (std::int32_t i = 0; i < num_copy_streams; ++i) {
    lanes_.push_back(std::make_unique<Lane>(*device_));
    free_lanes_.push_back(lanes_.back().get());
  }
}

DevicePages::~DevicePages() = default;

void DevicePages::load(std::span<const std::int64_t> pages, const Write& write) {
  const LaneLease lease(*this);
  lease.lane().load(pages, *this, write);
}

std::unique_ptr<AdapterPages::Copies> DevicePages::begin_copies(std::uint64_t load_id,
                                                                std::span<const Copy> copies) {
  return std::make_unique<LaneCopies>(*this, load_id, copies);
}

}  // namespace adaptrt
