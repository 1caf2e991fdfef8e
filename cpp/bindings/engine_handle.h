#pragma once

#include <memory>
#include <utility>

#include "adaptrt/engine/engine.h"

namespace adaptrt::bindings {

/// An engine made by Python, whatever compiled it. The engine is shared: it may outlive this wrapper and be
/// dropped by any thread, with or without the GIL.
class EngineHandle {
 public:
  [[nodiscard]] const std::shared_ptr<Engine>& engine() const { return engine_; }

 protected:
  EngineHandle() = default;
  void hold(std::shared_ptr<Engine> engine) { engine_ = std::move(engine); }

 private:
  std::shared_ptr<Engine> engine_;
};

}  // namespace adaptrt::bindings
