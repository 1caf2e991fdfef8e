#pragma once

#include "adaptrt/core/fields.h"
#include "adaptrt/tensorrt/tensorrt_engine.h"

namespace adaptrt {

constexpr auto fields_of(const TensorRtWeight* /*type*/) {
  using C = TensorRtWeight;
  return FieldList{Field{"name", &C::name, "Name of the plan's input."},
                   Field{"shape", &C::shape, "Shape of the input."}};
}
/// All members except those that hold the bytes: data and owner.
static_assert(lists_every_member<TensorRtWeight, 2>());

constexpr auto fields_of(const TensorRtProgram* /*type*/) {
  using C = TensorRtProgram;
  return FieldList{RequiredField{"model", &C::model, "Sizes of the plan's model."},
                   RequiredField{"weights", &C::weights, "Weights that are inputs of the plan."}};
}
static_assert(lists_every_member<TensorRtProgram>());

}  // namespace adaptrt
