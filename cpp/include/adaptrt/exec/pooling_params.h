#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "adaptrt/core/error.h"
#include "adaptrt/core/fields.h"
#include "adaptrt/exec/float_tensor.h"

namespace adaptrt {

/// Hidden states of a prompt that are pooled, and how.
enum class PoolingType : std::uint8_t {
  kLast = 0,  ///< last token
  kCls = 1,   ///< first token
  kMean = 2,  ///< mean over all tokens
  kAll = 3,   ///< every token
};

/// Activation of a pooling layer's outputs.
enum class PoolingActivation : std::uint8_t { kNone = 0, kTanh, kRelu, kSilu, kGelu, kGeluTanh };

/// One layer on pooled hidden states: activation(x weight^T + bias), followed by a layer norm if norm_weight
/// is set.
struct PoolingLayer {
  FloatTensor weight;                              // [outputs, inputs]
  std::optional<FloatTensor> bias = std::nullopt;  // [outputs]
  PoolingActivation activation = PoolingActivation::kNone;
  std::optional<FloatTensor> norm_weight = std::nullopt;  // [outputs]; layer norm over the outputs
  std::optional<FloatTensor> norm_bias = std::nullopt;    // [outputs]
  float norm_epsilon = 1e-5F;

  [[nodiscard]] std::int64_t num_outputs() const { return weight.shape.front(); }
};

constexpr auto fields_of(const PoolingLayer* /*type*/) {
  using C = PoolingLayer;
  return FieldList{
      Field{"weight", &C::weight, "float32 [outputs, inputs]."},
      Field{"bias", &C::bias, "float32 [outputs], added to the product; None: no bias."},
      Field{"activation", &C::activation, "Activation of each output."},
      Field{
          "norm_weight", &C::norm_weight,
          "float32 [outputs]: weight of a layer norm over the outputs, after the activation; None: no norm."},
      Field{"norm_bias", &C::norm_bias, "float32 [outputs]: bias of the layer norm; None: no bias."},
      Field{"norm_epsilon", &C::norm_epsilon, "Epsilon of the layer norm."}};
}

/// Pooling of a request that returns rows of hidden states instead of tokens. Not in TensorRT-LLM's C++ API.
struct PoolingParams {
  PoolingType pooling_type = PoolingType::kLast;
  std::vector<PoolingLayer> layers = {};
  bool normalize = false;
  std::int32_t row_interval = 1;

  /// Lists all problems for hidden states of this width.
  [[nodiscard]] Problems validate(std::int64_t hidden_size) const;
  /// Returns the width of each returned row.
  [[nodiscard]] std::int64_t num_outputs(std::int64_t hidden_size) const {
    return layers.empty() ? hidden_size : layers.back().num_outputs();
  }
};

constexpr auto fields_of(const PoolingParams* /*type*/) {
  using C = PoolingParams;
  return FieldList{
      Field{"pooling_type", &C::pooling_type,
            "Hidden states after the final norm to return: of the LAST token, the first (CLS), the MEAN or "
            "ALL. MEAN sums in token order. CLS, MEAN and ALL compute the whole prompt, even if its KV is "
            "cached."},
      Field{"layers", &C::layers,
            "Layers applied to each pooled row in float32: a classifier's linear layer, and the layers "
            "before it."},
      Field{"normalize", &C::normalize, "Divide each row by its Euclidean length, last of all."},
      Field{
          "row_interval", &C::row_interval,
          "With ALL: return only the rows of the tokens 0, row_interval, 2 * row_interval, and so on. Layers "
          "after the last attention compute only these rows."}};
}

}  // namespace adaptrt
