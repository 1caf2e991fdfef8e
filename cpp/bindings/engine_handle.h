#pragma once

#include <memory>
#include <mutex>
#include <utility>

#include "adaptrt/core/error.h"
#include "adaptrt/engine/engine.h"

namespace adaptrt::bindings {

/// An engine made by Python, whatever compiled it. The engine is shared: it may outlive this wrapper and be
/// dropped by any thread, with or without the GIL. One thread at a time runs it: an executor's, which claims
/// it for good, or Python's. Methods that wait for that are called without the GIL.
class EngineHandle {
 public:
  /// For facts that do not change, and for who has a claim.
  [[nodiscard]] const std::shared_ptr<Engine>& engine() const { return engine_; }

  /// Calls call(engine) when no other call runs. Throws StepError where the engine is claimed.
  template <class Call>
  void run(const Call& call) {
    const std::lock_guard lock(mutex_);
    if (is_claimed_) throw StepError("the engine has an executor; expected an engine without one");
    call(*engine_);
  }

  /// Keeps an engine from all others; given up by the destructor unless it is kept.
  class Claim {
   public:
    /// Throws ConfigError where the engine is claimed.
    explicit Claim(EngineHandle& handle) : handle_(handle) {
      const std::lock_guard lock(handle_.mutex_);
      if (handle_.is_claimed_) throw ConfigError("the engine has an executor; expected an engine of its own");
      handle_.is_claimed_ = true;
    }
    ~Claim() {
      if (is_kept_) return;
      const std::lock_guard lock(handle_.mutex_);
      handle_.is_claimed_ = false;
    }
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;
    void keep() { is_kept_ = true; }

   private:
    EngineHandle& handle_;
    bool is_kept_ = false;
  };

 protected:
  EngineHandle() = default;
  void hold(std::shared_ptr<Engine> engine) { engine_ = std::move(engine); }

 private:
  std::shared_ptr<Engine> engine_;
  std::mutex mutex_;
  bool is_claimed_ = false;
};

}  // namespace adaptrt::bindings
