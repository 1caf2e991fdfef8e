#include "pooler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <string>
#include <utility>

#include "adaptrt/core/error.h"

namespace adaptrt {
namespace {

/// PyTorch's minimum norm to divide by.
constexpr double kLeastLength = 1e-12;

/// Number of partial sums of a dot product: element i belongs to sum i % kNumSums, so that the compiler can
/// vectorise.
constexpr std::size_t kNumSums = 16;

float dot(const float* a, const float* b, std::size_t size) {
  std::array<float, kNumSums> sums{};
  const std::size_t whole = size - size % kNumSums;
  for (std::size_t i = 0; i < whole; i += kNumSums) {
    for (std::size_t lane = 0; lane < kNumSums; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (std::size_t i = whole; i < size; ++i) sums[i - whole] += a[i] * b[i];
  for (std::size_t half = kNumSums / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

float activated(PoolingActivation activation, float x) {
  constexpr double kSqrtHalf = std::numbers::sqrt2 / 2;
  const double value = x;
  switch (activation) {
    case PoolingActivation::kNone:
      return x;
    case PoolingActivation::kTanh:
      return static_cast<float>(std::tanh(value));
    case PoolingActivation::kRelu:
      return std::max(x, 0.0F);
    case PoolingActivation::kSilu:
      return static_cast<float>(value / (1.0 + std::exp(-value)));
    case PoolingActivation::kGelu:
      return static_cast<float>(0.5 * value * (1.0 + std::erf(value * kSqrtHalf)));
    case PoolingActivation::kGeluTanh: {
      const double factor = std::numbers::sqrt2 * std::numbers::inv_sqrtpi;  // sqrt(2 / pi)
      return static_cast<float>(0.5 * value *
                                (1.0 + std::tanh(factor * (value + 0.044715 * value * value * value))));
    }
  }
  return x;
}

void apply_layer_norm(const PoolingLayer& layer, std::span<float> row) {
  const auto size = static_cast<double>(row.size());
  double mean = 0.0;
  for (const float value : row) mean += value;
  mean /= size;
  double variance = 0.0;
  for (const float value : row) variance += (value - mean) * (value - mean);
  const double factor = 1.0 / std::sqrt(variance / size + layer.norm_epsilon);
  for (std::size_t i = 0; i < row.size(); ++i) {
    const double bias = layer.norm_bias ? (*layer.norm_bias->values)[i] : 0.0F;
    row[i] = static_cast<float>((row[i] - mean) * factor * (*layer.norm_weight->values)[i] + bias);
  }
}

void apply(const PoolingLayer& layer, std::span<const float> input, std::vector<float>& output) {
  output.resize(static_cast<std::size_t>(layer.num_outputs()));
  const float* weight = layer.weight.values->data();
  for (std::size_t i = 0; i < output.size(); ++i) {
    const float product = dot(weight + i * input.size(), input.data(), input.size());
    output[i] = activated(layer.activation, layer.bias ? product + (*layer.bias->values)[i] : product);
  }
  if (layer.norm_weight) apply_layer_norm(layer, output);
}

void divide_by_length(std::span<float> row) {
  double squares = 0.0;
  for (const float value : row) squares += static_cast<double>(value) * value;
  const double length = std::max(std::sqrt(squares), kLeastLength);
  for (float& value : row) value = static_cast<float>(value / length);
}

void check_vector(Problems& problems, const std::string& name, const std::optional<FloatTensor>& vector,
                  std::int64_t size) {
  if (!vector || vector->shape == std::vector<std::int64_t>{size}) return;
  problems.add(name + " has another shape than the layer's outputs, [" + text(size) + "]");
}

}  // namespace

Problems PoolingParams::validate(std::int64_t hidden_size) const {
  Problems problems;
  if (row_interval < 1) problems.add("row_interval is " + text(row_interval) + "; accepted: 1 or more");
  if (row_interval > 1 && pooling_type != PoolingType::kAll) {
    problems.add("row_interval is " + text(row_interval) + "; accepted without pooling_type ALL: 1");
  }
  std::int64_t inputs = hidden_size;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const PoolingLayer& layer = layers[i];
    const std::string where = "layers[" + std::to_string(i) + "].";
    const auto& shape = layer.weight.shape;
    if (shape.size() != 2 || shape[0] < 1 || shape[1] != inputs) {
      std::string given;
      for (const std::int64_t size : shape) given += (given.empty() ? "" : ", ") + text(size);
      problems.add(where + "weight is [" + given + "]; accepted: [outputs, " + text(inputs) + "]");
      return problems;
    }
    inputs = shape[0];
    check_vector(problems, where + "bias", layer.bias, inputs);
    check_vector(problems, where + "norm_weight", layer.norm_weight, inputs);
    check_vector(problems, where + "norm_bias", layer.norm_bias, inputs);
    if (layer.norm_bias && !layer.norm_weight) problems.add(where + "norm_bias is given without norm_weight");
    if (!std::isfinite(layer.norm_epsilon) || layer.norm_epsilon < 0.0F) {
      problems.add(where + "norm_epsilon is " + std::to_string(layer.norm_epsilon) +
                   "; accepted: finite, 0 or more");
    }
  }
  return problems;
}

Pooler::Pooler(PoolingParams params, std::int32_t prompt_length, std::int64_t hidden_size)
    : params_(std::move(params)),
      end_of_rows_(prompt_length),
      hidden_size_(hidden_size),
      output_(std::make_shared<std::vector<float>>()) {
  std::size_t num_rows = 1;
  if (params_.pooling_type == PoolingType::kLast) next_row_ = prompt_length - 1;
  if (params_.pooling_type == PoolingType::kCls) end_of_rows_ = 1;
  if (params_.pooling_type == PoolingType::kMean) sums_.resize(static_cast<std::size_t>(hidden_size));
  if (params_.pooling_type == PoolingType::kAll) {
    num_rows = static_cast<std::size_t>((prompt_length - 1) / params_.row_interval + 1);
  }
  output_->reserve(num_rows * static_cast<std::size_t>(params_.num_outputs(hidden_size)));
}

void Pooler::add(std::span<const float> hidden) {
  if (!std::ranges::all_of(hidden, [](float value) { return std::isfinite(value); })) {
    throw StepError("the hidden state of token " + text(next_row_) + " has NaN or infinity");
  }
  next_row_ += params_.row_interval;
  if (params_.pooling_type != PoolingType::kMean) {
    finish_row(hidden);
    return;
  }
  for (std::size_t i = 0; i < hidden.size(); ++i) sums_[i] += hidden[i];
  if (!is_complete()) return;
  std::vector<float> mean(sums_.size());
  std::ranges::transform(sums_, mean.begin(), [&](double sum) {
    return static_cast<float>(sum / static_cast<double>(end_of_rows_));
  });
  finish_row(mean);
}

void Pooler::finish_row(std::span<const float> row) {
  input_.assign(row.begin(), row.end());
  for (const PoolingLayer& layer : params_.layers) {
    apply(layer, input_, made_);
    std::swap(input_, made_);
  }
  if (params_.normalize) divide_by_length(input_);
  output_->insert(output_->end(), input_.begin(), input_.end());
}

FloatTensor Pooler::take_output() {
  const std::int64_t width = params_.num_outputs(hidden_size_);
  std::vector<std::int64_t> shape = {width};
  if (params_.pooling_type == PoolingType::kAll) {
    shape.insert(shape.begin(), (end_of_rows_ - 1) / params_.row_interval + 1);
  }
  return {.values = std::exchange(output_, nullptr), .shape = std::move(shape)};
}

}  // namespace adaptrt
