#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "adaptrt/exec/pooling_params.h"

namespace adaptrt {

/// Makes what a request with PoolingParams returns of the hidden states of its prompt, which come in the
/// order of the tokens, however many of them a step computes.
class Pooler {
 public:
  /// `params` were validated.
  Pooler(PoolingParams params, std::int32_t prompt_length, std::int64_t hidden_size);

  /// Hidden states of positions before the first are wanted: all of the prompt must be computed.
  [[nodiscard]] bool needs_whole_prompt() const { return params_.pooling_type != PoolingType::kLast; }
  /// Positions whose hidden states are still wanted: from the first to before the second.
  [[nodiscard]] std::int32_t next_row() const { return next_row_; }
  [[nodiscard]] std::int32_t end_of_rows() const { return end_of_rows_; }
  [[nodiscard]] bool is_complete() const { return next_row_ == end_of_rows_; }

  /// The hidden state of next_row(). Throws StepError for one that has NaN or infinity.
  void add(std::span<const float> hidden);
  /// When it is complete, and once.
  [[nodiscard]] FloatTensor take_output();

 private:
  /// Appends what the layers make of a row.
  void finish_row(std::span<const float> row);

  PoolingParams params_;
  std::int32_t next_row_ = 0;
  std::int32_t end_of_rows_ = 0;
  std::int64_t hidden_size_;
  std::vector<double> sums_;  // kMean
  std::shared_ptr<std::vector<float>> output_;
  // Of finish_row.
  std::vector<float> input_;
  std::vector<float> made_;
};

}  // namespace adaptrt
