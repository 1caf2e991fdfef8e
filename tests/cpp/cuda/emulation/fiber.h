#pragma once

#include <ucontext.h>

#include <csetjmp>
#include <cstddef>
#include <functional>
#include <memory>

namespace adaptrt::cuda::emulation {

/// A call stack that can be suspended and resumed on one OS thread.
class Fiber {
 public:
  /// The first resume calls `body` on the fiber's own stack; it must never return.
  explicit Fiber(std::function<void()> body);
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  /// Returns a fiber for the OS thread's own stack.
  static std::unique_ptr<Fiber> of_this_thread();

  /// Suspends `from`, which must be running, and resumes `to`.
  static void change(Fiber& from, Fiber& to);

 private:
  Fiber();
  static void enter(unsigned high, unsigned low);
  void arrive();

  std::function<void()> body_;
  void* mapping_ = nullptr;  ///< the stack, and a protected page below it
  bool started_ = false;
  [[maybe_unused]] std::jmp_buf place_{};  ///< where it was suspended
  ucontext_t start_{};

  // Stack data that AddressSanitizer needs to follow the change.
  const void* bottom_ = nullptr;
  std::size_t bytes_ = 0;
  [[maybe_unused]] void* fake_stack_ = nullptr;
  [[maybe_unused]] void* detected_thread_ = nullptr;  ///< the race detector's handle
};

}  // namespace adaptrt::cuda::emulation
