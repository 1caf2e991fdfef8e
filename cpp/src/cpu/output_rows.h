#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace adaptrt {

/// The rows of a step whose logits or hidden states are requested. Steps reuse the memory.
class OutputRows {
 public:
  /// Both must ascend and outlive the step.
  void set(std::span<const std::int32_t> logit_rows, std::span<const std::int32_t> hidden_rows);

  /// All requested rows, ascending, each once.
  [[nodiscard]] std::span<const std::int32_t> all() const { return all_; }
  /// Rows of the body's output that have the requested logits and hidden states. `rows_of_body`: the same for
  /// each row of all().
  [[nodiscard]] std::span<const std::int32_t> logit_rows(std::span<const std::int32_t> rows_of_body);
  [[nodiscard]] std::span<const std::int32_t> hidden_rows(std::span<const std::int32_t> rows_of_body);

 private:
  std::span<const std::int32_t> place(std::span<const std::int32_t> rows,
                                      std::span<const std::int32_t> rows_of_body);

  std::span<const std::int32_t> logit_rows_;
  std::span<const std::int32_t> hidden_rows_;
  std::span<const std::int32_t> all_;
  std::vector<std::int32_t> merged_;
  std::vector<std::int32_t> placed_;
};

}  // namespace adaptrt
