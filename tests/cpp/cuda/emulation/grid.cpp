#include "emulation/grid.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "emulation/fiber.h"
#include "emulation/hopper_machine.h"
#include "emulation/race_detector.h"

namespace adaptrt::cuda::emulation {
namespace {

constexpr std::uint32_t kMaxThreads = 1024;
constexpr auto kLanes = static_cast<std::uint32_t>(kWarpSize);
/// Bytes after the requested shared memory that no thread may write.
constexpr std::size_t kCanaryBytes = 256;
constexpr int kCanary = 0xa5;
/// NaN as float32, float16 and bfloat16; -1 as an integer.
constexpr int kPoison = 0xff;

enum class State : std::uint8_t { kReady, kAtBarrier, kInWarpCall, kWaiting, kEnded };

struct Copy {
  void* destination;
  const void* source;
  std::size_t bytes;
  bool valid;
  std::size_t group;
};

struct Thread {
  std::unique_ptr<Fiber> fiber;
  State state = State::kReady;
  Site site{};
  std::uint32_t mask = 0;
  void* arguments = nullptr;
  void (*operation)(const WarpArguments&) = nullptr;
  const std::function<bool()>* is_done = nullptr;
  std::vector<Copy> copies;
  std::size_t groups = 0;
  std::size_t warp_barriers = 0;
};

/// The race detector's two sync objects for a barrier. They are used in turn, because a thread can reach the
/// next barrier before others have left this one.
struct BarrierPlaces {
  char places[2];
  [[nodiscard]] char* of(std::size_t number) { return places + number % 2; }
};

/// The threads of the running block, and their order. Fibers are reused for later blocks.
class Block {
 public:
  Block() : caller_(Fiber::of_this_thread()) {}

  void run(Index index, std::uint32_t num_threads, const std::function<void()>& kernel);
  void set_shared_memory(unsigned char* data, std::size_t bytes) {
    shared_ = data;
    shared_bytes_ = bytes;
  }

  [[nodiscard]] unsigned char* shared_memory() const { return shared_; }
  [[nodiscard]] std::size_t shared_bytes() const { return shared_bytes_; }
  [[nodiscard]] Thread& running() { return *threads_[running_]; }

  void barrier(Site site);
  void warp_call(std::uint32_t mask, void* arguments, void (*operation)(const WarpArguments&), Site site);
  void warp_barrier(std::uint32_t mask, Site site);
  void wait_until(const std::function<bool()>& is_done, Site site);
  void may_yield_to_waiting();
  std::uint32_t random();

 private:
  void be_thread();
  void give_up_turn();
  [[nodiscard]] bool is_any_waiting() const;
  [[nodiscard]] std::vector<std::uint32_t> take_waiting_threads();
  void take_turns(std::uint32_t first, std::uint32_t count, std::uint32_t mask);
  [[nodiscard]] std::string where_threads_are() const;

  std::unique_ptr<Fiber> caller_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::uint32_t num_threads_ = 0;
  std::uint32_t running_ = 0;
  std::uint32_t at_barrier_ = 0;
  std::uint32_t ended_ = 0;
  std::uint32_t random_state_ = 1;
  std::vector<std::uint32_t> ready_;  ///< in the order of their turns, from next_ on
  std::size_t next_ = 0;
  const std::function<void()>* kernel_ = nullptr;
  std::exception_ptr error_;
  std::size_t barriers_ = 0;
  BarrierPlaces block_places_{};
  BarrierPlaces warp_places_[kMaxThreads / kLanes]{};
  char begin_place_ = 0;
  char end_place_ = 0;
  Index index_;
  unsigned char* shared_ = nullptr;
  std::size_t shared_bytes_ = 0;
};

/// One per host thread, so that several can launch at the same time.
thread_local std::unique_ptr<Block> block;

thread_local std::function<void(std::span<std::uint32_t>)> arrange_blocks;

std::vector<std::uint32_t> ordered_blocks(Index grid) {
  std::vector<std::uint32_t> blocks(std::size_t{grid.x} * grid.y * grid.z);
  std::iota(blocks.begin(), blocks.end(), 0);
  if (arrange_blocks) arrange_blocks(blocks);
  return blocks;
}

std::string text_of(Index index) {
  std::ostringstream text;
  text << "block (" << index.x << ", " << index.y << ", " << index.z << ")";
  return text.str();
}

std::string text_of(Site site) {
  return std::string(site.file) + ":" + std::to_string(site.line);
}

void Block::run(Index index, std::uint32_t num_threads, const std::function<void()>& kernel) {
  index_ = index;
  kernel_ = &kernel;
  num_threads_ = num_threads;
  at_barrier_ = 0;
  ended_ = 0;
  random_state_ = 0x9e3779b9U + index.x + 131 * index.y + 17161 * index.z;
  while (threads_.size() < num_threads) {
    auto thread = std::make_unique<Thread>();
    thread->fiber = std::make_unique<Fiber>([this] { be_thread(); });
    threads_.push_back(std::move(thread));
  }
  for (std::uint32_t i = 0; i < num_threads; ++i) {
    threads_[i]->state = State::kReady;
    threads_[i]->copies.clear();
    threads_[i]->groups = 0;
  }
  ready_.clear();
  next_ = 0;
  take_turns(0, num_threads, kAllLanes);
  running_ = ready_[next_++];
  coordinates.thread.x = running_;
  race_detector::release(&begin_place_);
  Fiber::change(*caller_, *threads_[running_]->fiber);
  race_detector::acquire(&end_place_);
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  if (ended_ != num_threads_) {
    throw EmulationError(text_of(index_) + " would hang or its results be undefined: " + where_threads_are());
  }
}

void Block::be_thread() {
  for (;;) {
    race_detector::acquire(&begin_place_);
    try {
      (*kernel_)();
    } catch (...) {
      error_ = std::current_exception();
    }
    race_detector::release(&end_place_);
    running().state = State::kEnded;
    ++ended_;
    give_up_turn();
  }
}

/// Runs the next ready thread; returns to the caller if there is none or one has failed.
void Block::give_up_turn() {
  Thread& from = running();
  if (!error_ && next_ == ready_.size()) {
    const race_detector::Pause pause;
    try {
      do {
        ready_ = take_waiting_threads();
      } while (ready_.empty() && is_any_waiting() && complete_oldest_copy());
      next_ = 0;
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  if (error_ || next_ == ready_.size()) {
    Fiber::change(*from.fiber, *caller_);
    return;
  }
  running_ = ready_[next_++];
  if (next_ == ready_.size()) {
    ready_.clear();
    next_ = 0;
  }
  coordinates.thread.x = running_;
  if (&running() != &from) Fiber::change(*from.fiber, *running().fiber);
}

bool Block::is_any_waiting() const {
  for (std::uint32_t i = 0; i < num_threads_; ++i) {
    if (threads_[i]->state == State::kWaiting) return true;
  }
  return false;
}

/// Makes the threads ready that wait for something that has happened, and returns them.
std::vector<std::uint32_t> Block::take_waiting_threads() {
  const race_detector::Pause pause;
  const std::uint32_t start = random() % num_threads_;
  std::vector<std::uint32_t> found;
  for (std::uint32_t i = 0; i < num_threads_; ++i) {
    const std::uint32_t index = (start + i) % num_threads_;
    Thread& thread = *threads_[index];
    if (thread.state != State::kWaiting || !(*thread.is_done)()) continue;
    thread.state = State::kReady;
    found.push_back(index);
  }
  return found;
}

void Block::may_yield_to_waiting() {
  if ((random() & 1U) == 0) return;
  {
    const race_detector::Pause pause;
    std::vector<std::uint32_t> first = take_waiting_threads();
    if (first.empty()) return;
    first.push_back(running_);
    ready_.insert(ready_.begin() + static_cast<std::ptrdiff_t>(next_), first.begin(), first.end());
  }
  give_up_turn();
}

void Block::wait_until(const std::function<bool()>& is_done, Site site) {
  Thread& thread = running();
  thread.state = State::kWaiting;
  thread.site = site;
  thread.is_done = &is_done;
  give_up_turn();
}

/// Makes threads ready: those of the `count` threads from `first` on whose lane is in `mask`. They start at
/// any of them and go up or down.
void Block::take_turns(std::uint32_t first, std::uint32_t count, std::uint32_t mask) {
  const race_detector::Pause pause;
  const std::uint32_t bits = random();
  const std::uint32_t start = (bits >> 1) % count;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t offset = (bits & 1U) != 0 ? (start + i) % count : (start + count - i) % count;
    const std::uint32_t thread = first + offset;
    if ((mask >> (thread % kLanes) & 1U) == 0) continue;
    threads_[thread]->state = State::kReady;
    ready_.push_back(thread);
  }
}

std::uint32_t Block::random() {
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 17;
  random_state_ ^= random_state_ << 5;
  return random_state_;
}

void Block::barrier(Site site) {
  Thread& thread = running();
  thread.state = State::kAtBarrier;
  thread.site = site;
  char* place = block_places_.of(barriers_);
  race_detector::release(place);
  if (++at_barrier_ == num_threads_) {
    for (std::uint32_t i = 0; i < num_threads_; ++i) {
      if (threads_[i]->site.line != site.line || std::strcmp(threads_[i]->site.file, site.file) != 0) {
        throw EmulationError(text_of(index_) + " meets at different barriers: " + where_threads_are());
      }
    }
    at_barrier_ = 0;
    ++barriers_;
    take_turns(0, num_threads_, kAllLanes);
  }
  give_up_turn();
  race_detector::acquire(place);
}

void Block::warp_barrier(std::uint32_t mask, Site site) {
  char* place = warp_places_[running_ / kLanes].of(running().warp_barriers++);
  race_detector::release(place);
  warp_call(mask, nullptr, [](const WarpArguments&) {}, site);
  race_detector::acquire(place);
}

void Block::warp_call(std::uint32_t mask, void* arguments, void (*operation)(const WarpArguments&),
                      Site site) {
  Thread& thread = running();
  const std::uint32_t first = running_ / kLanes * kLanes;
  if ((mask >> (running_ - first) & 1U) == 0) {
    throw EmulationError(text_of(site) + ": a thread is not of the mask that it calls with");
  }
  thread.state = State::kInWarpCall;
  thread.site = site;
  thread.mask = mask;
  thread.arguments = arguments;
  thread.operation = operation;
  WarpArguments all{};
  bool complete = true;
  for (std::uint32_t lane = 0; lane < kLanes && complete; ++lane) {
    if ((mask >> lane & 1U) == 0) continue;
    const Thread& other = *threads_[first + lane];
    complete = other.state == State::kInWarpCall && other.mask == mask && other.operation == operation &&
               other.site.line == site.line && std::strcmp(other.site.file, site.file) == 0;
    all.of_lane[lane] = other.arguments;
  }
  if (complete) {
    {
      const race_detector::Pause pause;
      operation(all);
    }
    const std::size_t others = ready_.size() - next_;
    take_turns(first, kLanes, mask);
    // A warp may be ahead of others for long.
    if ((random() & 1U) != 0) {
      const race_detector::Pause pause;
      const auto begin = ready_.begin() + static_cast<std::ptrdiff_t>(next_);
      std::rotate(begin, begin + static_cast<std::ptrdiff_t>(others), ready_.end());
    }
  }
  give_up_turn();
}

std::string Block::where_threads_are() const {
  std::map<std::string, std::uint32_t> counts;
  for (std::uint32_t i = 0; i < num_threads_; ++i) {
    const Thread& thread = *threads_[i];
    switch (thread.state) {
      case State::kReady:
        ++counts["have not come there"];
        break;
      case State::kAtBarrier:
        ++counts["wait at the barrier " + text_of(thread.site)];
        break;
      case State::kInWarpCall:
        ++counts["wait for lanes of their warp at " + text_of(thread.site)];
        break;
      case State::kWaiting:
        ++counts["wait at " + text_of(thread.site)];
        break;
      case State::kEnded:
        ++counts["have ended"];
        break;
    }
  }
  std::string text;
  for (const auto& [what, count] : counts) {
    text += (text.empty() ? "" : ", ") + std::to_string(count) + " threads " + what;
  }
  return text;
}

/// Shared memory of exactly the size of a launch, followed by the canary.
class SharedMemory {
 public:
  explicit SharedMemory(std::size_t bytes) : bytes_(bytes), memory_(kOffset + bytes + kCanaryBytes) {}

  // Aligned to exactly 16 bytes, as a GPU guarantees.
  [[nodiscard]] unsigned char* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    return memory_.data() + (kOffset / 2 - address % (kOffset / 2)) + kAlignment;
  }
  void poison() {
    std::memset(data(), kPoison, bytes_);
    std::memset(data() + bytes_, kCanary, kCanaryBytes / 2);
  }
  [[nodiscard]] bool canary_lives() {
    for (std::size_t i = 0; i < kCanaryBytes / 2; ++i) {
      if (data()[bytes_ + i] != kCanary) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kAlignment = 16;
  static constexpr std::size_t kOffset = 128;

  std::size_t bytes_;
  std::vector<unsigned char> memory_;
};

}  // namespace

BlockOrder::BlockOrder(std::function<void(std::span<std::uint32_t>)> arrange) {
  if (arrange_blocks) throw EmulationError("there is a BlockOrder already");
  arrange_blocks = std::move(arrange);
}

BlockOrder::~BlockOrder() {
  arrange_blocks = nullptr;
}

void run_grid(Index grid, std::uint32_t threads, std::size_t shared_bytes,
              const std::function<void()>& kernel) {
  if (threads == 0 || threads > kMaxThreads || threads % kLanes != 0) {
    throw EmulationError("a block of " + std::to_string(threads) +
                         " threads; expected a multiple of 32 up to 1024");
  }
  if (!block) block = std::make_unique<Block>();
  SharedMemory shared(shared_bytes);
  block->set_shared_memory(shared.data(), shared_bytes);
  coordinates.grid_size = grid;
  coordinates.block_size = {threads, 1, 1};
  try {
    for (const std::uint32_t number : ordered_blocks(grid)) {
      const Index index{number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
      coordinates.block = index;
      shared.poison();
      begin_hopper_block();
      block->run(index, threads, kernel);
      end_hopper_block();
      if (race_detector::take_reports() != 0) {
        throw EmulationError(text_of(index) + " has a race, which is reported above");
      }
      if (!shared.canary_lives()) {
        throw EmulationError(text_of(index) + " wrote behind its " + std::to_string(shared_bytes) +
                             " bytes of shared memory");
      }
    }
  } catch (...) {
    // Its threads were suspended in the middle of the kernel.
    block.reset();
    throw;
  }
}

unsigned char* shared_memory() {
  return block->shared_memory();
}

std::size_t shared_memory_bytes() {
  return block->shared_bytes();
}

void wait_until(const std::function<bool()>& is_done, Site site) {
  block->wait_until(is_done, site);
}

std::uint32_t random_bits() {
  return block->random();
}

void may_yield_to_waiting() {
  block->may_yield_to_waiting();
}

void check_shared(const void* address, std::size_t bytes, std::size_t alignment, const char* what) {
  check_aligned(address, alignment, what);
  const auto begin = reinterpret_cast<std::uintptr_t>(block->shared_memory());
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  if (at < begin || at + bytes > begin + block->shared_bytes()) {
    throw EmulationError(std::string(what) + " is not in the block's shared memory");
  }
}

void check_aligned(const void* address, std::size_t alignment, const char* what) {
  if (reinterpret_cast<std::uintptr_t>(address) % alignment != 0) {
    throw EmulationError(std::string(what) + " is not aligned to " + std::to_string(alignment) + " bytes");
  }
}

void block_barrier(Site site) {
  block->barrier(site);
}

void warp_collective(std::uint32_t mask, void* arguments, void (*operation)(const WarpArguments&),
                     Site site) {
  block->warp_call(mask, arguments, operation, site);
}

void warp_barrier(std::uint32_t mask, Site site) {
  block->warp_barrier(mask, site);
}

void begin_copy(void* destination, const void* source, std::size_t bytes, bool valid) {
  Thread& thread = block->running();
  note_thread_write(destination, bytes);
  race_detector::note_write(destination, bytes);
  if (valid) race_detector::note_read(source, bytes);
  std::memset(destination, kPoison, bytes);
  thread.copies.push_back({destination, source, bytes, valid, thread.groups});
}

void commit_copy_group() {
  ++block->running().groups;
}

void wait_for_copy_groups(std::size_t pending) {
  Thread& thread = block->running();
  std::size_t done = 0;
  for (; done < thread.copies.size() && thread.copies[done].group + pending < thread.groups; ++done) {
    const Copy& copy = thread.copies[done];
    race_detector::note_write(copy.destination, copy.bytes);
    if (copy.valid) {
      std::memcpy(copy.destination, copy.source, copy.bytes);
    } else {
      std::memset(copy.destination, 0, copy.bytes);
    }
  }
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + static_cast<std::ptrdiff_t>(done));
}

}  // namespace adaptrt::cuda::emulation
