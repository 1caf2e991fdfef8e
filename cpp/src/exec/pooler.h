#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "adaptrt/exec/pooling_params.h"

namespace adaptrt {

/// Computes the pooled output of a request from the hidden states of its prompt. They arrive in token order,
/// any number per step.
class Pooler {
 public:
  /// `params` were validated.
  Pooler(PoolingParams params, std::int32_t prompt_length, std::int64_t hidden_size);

  /// True if hidden states of earlier positions are wanted, so that the whole prompt must be computed.
  [[nodiscard]] bool needs_whole_prompt() const { return params_.pooling_type != PoolingType::kLast; }
  /// Hidden states of every row_interval()-th of the positions [next_row(), end_of_rows()) are still wanted.
  [[nodiscard]] std::int32_t next_row() const { return next_row_; }
  [[nodiscard]] std::int32_t end_of_rows() const { return end_of_rows_; }
  [[nodiscard]] std::int32_t row_interval() const { return params_.row_interval; }
  [[nodiscard]] bool is_complete() const { return next_row_ >= end_of_rows_; }

  /// Adds the hidden state of next_row(). Throws StepError if it has NaN or infinity.
  void add(std::span<const float> hidden);
  /// Returns the complete output. Call it once.
  [[nodiscard]] FloatTensor take_output();

 private:
  /// Applies the layers to a row and appends the result.
  void finish_row(std::span<const float> row);

  PoolingParams params_;
  std::int32_t next_row_ = 0;
  std::int32_t end_of_rows_ = 0;
  std::int64_t hidden_size_;
  std::vector<double> sums_;  // kMean
  std::shared_ptr<std::vector<float>> output_;
  // Scratch of finish_row().
  std::vector<float> input_;
  std::vector<float> made_;
};

}  // namespace adaptrt
