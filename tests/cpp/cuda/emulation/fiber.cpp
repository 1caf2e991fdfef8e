// The fortified longjmp treats a jump to another stack as an error.
#undef _FORTIFY_SOURCE
#include "emulation/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>
#include <utility>

#include "emulation/race_detector.h"

#if defined(__SANITIZE_ADDRESS__)
#define ADAPTRT_ADDRESS_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ADAPTRT_ADDRESS_SANITIZER
#endif
#endif
#ifdef ADAPTRT_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace adaptrt::cuda::emulation {
namespace {

/// Kernels keep tiles in local arrays, which are largest without optimisation or with full instrumentation.
constexpr std::size_t kStackBytes = 256 * 1024;

/// The fiber that ran before the current one.
thread_local Fiber* previous = nullptr;

std::size_t guard_bytes() {
  return static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

void throw_errno() {
  throw std::system_error(errno, std::generic_category(), "stack of an emulated thread");
}

}  // namespace

Fiber::Fiber() = default;

Fiber::Fiber(std::function<void()> body) : body_(std::move(body)) {
  const std::size_t guard = guard_bytes();
  void* mapping = mmap(nullptr, guard + kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw_errno();
  mapping_ = mapping;
#ifdef ADAPTRT_RACE_DETECTOR
  detected_thread_ = race_detector::make_thread();
#endif
  if (mprotect(mapping, guard, PROT_NONE) != 0 || getcontext(&start_) != 0) throw_errno();
  start_.uc_stack.ss_sp = static_cast<std::byte*>(mapping) + guard;
  start_.uc_stack.ss_size = kStackBytes;
  start_.uc_link = nullptr;
  bottom_ = start_.uc_stack.ss_sp;
  bytes_ = kStackBytes;
  // makecontext passes 32-bit integers.
  const auto self = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(this));
  makecontext(&start_, reinterpret_cast<void (*)()>(&Fiber::enter), 2, static_cast<unsigned>(self >> 32),
              static_cast<unsigned>(self));
}

Fiber::~Fiber() {
  if (mapping_ == nullptr) return;
#ifdef ADAPTRT_RACE_DETECTOR
  race_detector::end_thread(detected_thread_);
#endif
#ifdef ADAPTRT_ADDRESS_SANITIZER
  ASAN_UNPOISON_MEMORY_REGION(bottom_, bytes_);
#endif
  munmap(mapping_, guard_bytes() + kStackBytes);
}

std::unique_ptr<Fiber> Fiber::of_this_thread() {
  std::unique_ptr<Fiber> fiber(new Fiber);
  fiber->started_ = true;
#ifdef ADAPTRT_RACE_DETECTOR
  fiber->detected_thread_ = race_detector::this_thread();
#endif
  return fiber;
}

void Fiber::change(Fiber& from, Fiber& to) {
  previous = &from;
#ifdef ADAPTRT_ADDRESS_SANITIZER
  __sanitizer_start_switch_fiber(&from.fake_stack_, to.bottom_, to.bytes_);
#endif
#ifdef ADAPTRT_RACE_DETECTOR
  // ThreadSanitizer would look for the longjmp's target on the old stack.
  race_detector::change_thread(to.detected_thread_);
  swapcontext(&from.start_, &to.start_);
#else
  if (_setjmp(from.place_) == 0) {
    if (to.started_) _longjmp(to.place_, 1);
    to.started_ = true;
    setcontext(&to.start_);
  }
#endif
  from.arrive();
}

void Fiber::enter(unsigned high, unsigned low) {
  auto* self = reinterpret_cast<Fiber*>(
      static_cast<std::uintptr_t>(static_cast<std::uint64_t>(high) << 32 | static_cast<std::uint64_t>(low)));
  self->arrive();
  self->body_();
}

void Fiber::arrive() {
#ifdef ADAPTRT_ADDRESS_SANITIZER
  // Returns the bounds of the old stack: the only way to get those of the OS thread's own stack.
  __sanitizer_finish_switch_fiber(fake_stack_, &previous->bottom_, &previous->bytes_);
#endif
}

}  // namespace adaptrt::cuda::emulation
