#pragma once

#include "adaptrt/core/fields.h"
#include "adaptrt/lora/layout.h"

namespace adaptrt {

constexpr auto fields_of(const LoraPart* /*type*/) {
  using C = LoraPart;
  return FieldList{
      RequiredField{"module", &C::module, "Id of the module, see lora_modules()."},
      RequiredField{"out_size", &C::out_size, "Number of outputs on this rank."},
      WrittenField{"first_output", &C::first_output, "First of these outputs in the module's outputs."},
      WrittenField{"num_remote_outputs", &C::num_remote_outputs,
                   "Number of outputs that only other ranks have."},
      Field{"output_ranges", &C::output_ranges,
            "First output and number of outputs of each range that the part has; empty: one range from "
            "first_output on."}};
}
static_assert(lists_every_member<LoraPart>());

constexpr auto fields_of(const LoraSite* /*type*/) {
  using C = LoraSite;
  return FieldList{
      RequiredField{"layer", &C::layer, "Number of the layer, of the vocabulary slice, or of the norm."},
      RequiredField{"in_size", &C::in_size, "Number of inputs on this rank."},
      RequiredField{"parts", &C::parts, "Modules that share the input, in the order of their outputs."},
      WrittenField{"expert", &C::expert, "Expert of the site, counted from 0 on this rank."},
      WrittenField{"first_input", &C::first_input, "First of these inputs in the layer's inputs."},
      WrittenField{"num_remote_inputs", &C::num_remote_inputs, "Number of inputs that other ranks have."},
      WrittenField{
          "adds_shifts", &C::adds_shifts,
          "True if an adapter's shift is added here. If a layer's inputs are split among ranks, only the "
          "first rank adds it."},
      Field{"experts_for_each", &C::experts_for_each,
            "For experts: the number of experts in the layer for each one on this rank."},
      Field{"num_shares", &C::num_shares,
            "For fully sharded adapters: the number of ranks that share the rows of A if the layer's outputs "
            "are split, or the rows of B if its inputs are split."},
      Field{"share", &C::share, "Index of this rank among them."}};
}
static_assert(lists_every_member<LoraSite>());

constexpr auto fields_of(const LoraLayout* /*type*/) {
  using C = LoraLayout;
  return FieldList{
      RequiredField{"dtype", &C::dtype, "Storage type of adapters on the device, equal to the engine's."},
      RequiredField{"num_layers", &C::num_layers, "Number of layers, including those of an encoder."},
      RequiredField{"max_rank", &C::max_rank, "Largest rank of an adapter."},
      RequiredField{"dora_enabled", &C::dora_enabled, "True if adapters may have DoRA magnitudes."},
      RequiredField{"target_modules", &C::target_modules, "Ids of the modules that adapters may change."},
      ReadOnlyField{"matrix_layout", &C::matrix_layout, "Storage of A and B on the device."},
      ReadOnlyField{"shifts_enabled", &C::shifts_enabled,
                    "True if adapters may have shifts: values that are added to outputs."},
      WrittenField{"num_stages", &C::num_stages, "Stages of the pipeline."},
      WrittenField{"stage", &C::stage, "The stage whose sites are packed here."},
      RequiredField{"sites", &C::sites, "Places where adapters act, in the order of execution."},
      Field{"max_extra_tokens", &C::max_extra_tokens,
            "Tokens beyond the vocabulary that an adapter may bring."},
      Field{"rotary_factors", &C::rotary_factors,
            "Factors by which adapters may divide rotary positions, ascending; empty: no adapter may."},
      Field{"max_base_positions", &C::max_base_positions,
            "Positions of the base model if there are rotary_factors; otherwise 0."},
      Field{"num_encoder_layers", &C::num_encoder_layers,
            "Number of encoder layers, which are the last ones of num_layers."}};
}
static_assert(lists_every_member<LoraLayout>());

}  // namespace adaptrt
