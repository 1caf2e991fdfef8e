#pragma once

#include <ucontext.h>

#include <csetjmp>
#include <cstddef>
#include <functional>
#include <memory>

namespace adaptrt::cuda::emulation {

/// A call stack that can be left and resumed on one OS thread.
class Fiber {
 public:
  /// `body` is called on the fiber's own stack when it is first resumed; it must never return.
  explicit Fiber(std::function<void()> body);
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  /// The one that stands for the OS thread's own stack.
  static std::unique_ptr<Fiber> of_this_thread();

  /// Leaves `from`, which must be the one that runs, and goes on with `to` where that was left.
  static void change(Fiber& from, Fiber& to);

 private:
  Fiber();
  static void enter(unsigned high, unsigned low);
  void arrive();

  std::function<void()> body_;
  void* mapping_ = nullptr;  ///< the stack and a page below it that nobody may touch
  bool started_ = false;
  [[maybe_unused]] std::jmp_buf place_{};  ///< where it was left
  ucontext_t start_{};

  // What AddressSanitizer has to know of a stack to follow the change.
  const void* bottom_ = nullptr;
  std::size_t bytes_ = 0;
  [[maybe_unused]] void* fake_stack_ = nullptr;
  [[maybe_unused]] void* detected_thread_ = nullptr;  ///< the race detector's
};

}  // namespace adaptrt::cuda::emulation
