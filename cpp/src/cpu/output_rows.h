#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace adaptrt {

/// The rows of a step whose logits, hidden states, or both are requested. Memory is reused from step to step.
class OutputRows {
 public:
  /// Both ascend, and outlive the step.
  void set(std::span<const std::int32_t> logit_rows, std::span<const std::int32_t> hidden_rows);

  /// All of them, ascending and each once.
  [[nodiscard]] std::span<const std::int32_t> all() const { return all_; }
  /// Where the body has left the rows of logits and of hidden states; `rows_of_body` says so of all().
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
