#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "adaptrt/program/ops.h"

namespace adaptrt {

/// Ranges of ops during which the buffers of a program hold values that are still needed. A value lives from
/// the op that writes it to the last op that reads it, both included. The head runs once for each slice of
/// logit rows, so values of the body that it reads live until its end.
class LiveRanges {
 public:
  explicit LiveRanges(std::size_t num_buffers) : values_(num_buffers) {}

  void next_op() { ++now_; }
  void begin_head() { head_ = now_ + 1; }
  [[nodiscard]] bool holds(BufferId id) const {
    return id >= 0 && static_cast<std::size_t>(id) < values_.size();
  }
  /// Starts a new value.
  void write(BufferId id);
  /// Returns false if nothing was written before.
  [[nodiscard]] bool read(BufferId id);
  /// Call it after the last op.
  void finish();
  /// Pairs of buffers whose values live at the same time, each pair once.
  [[nodiscard]] std::vector<std::pair<std::size_t, std::size_t>> simultaneous() const;

 private:
  struct Value {
    std::int64_t first;
    std::int64_t last;
  };
  std::vector<std::vector<Value>> values_;
  std::int64_t now_ = 0;
  std::int64_t head_ = 0;
};

}  // namespace adaptrt
