#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "adaptrt/program/program_fields.h"
#include "bind_struct.h"
#include "bindings.h"

namespace py = pybind11;

namespace adaptrt::bindings {

void bind_ops(py::module_& module) {
  bind_record<Buffer>(module, "Buffer", "An activation in the arena.");
  bind_record<EmbeddingOp>(
      module, "EmbeddingOp",
      "output[T, hidden] = table[token_ids] * scale + types[token_types] + positions[positions].");
  bind_record<LayerNormOp>(module, "LayerNormOp", "output = (input - mean) / deviation * weight + bias.");
  bind_record<CastOp>(module, "CastOp", "output = input in the engine's activation type.");
  bind_record<RmsNormOp>(module, "RmsNormOp",
                         "output = input / rms(input) * weight; or the result is added to output.");
  bind_record<RopeTableOp>(module, "RopeTableOp",
                           "cosine and sine [T, rotary_dim / 2] of the step's positions.");
  bind_record<AttentionShape>(module, "AttentionShape", "The heads of one layer's attention.");
  bind_record<AttentionOp>(module, "AttentionOp",
                           "Head norms, RoPE, and attention over the keys that AttentionKind selects.");
  bind_record<KeepLogitRowsOp>(module, "KeepLogitRowsOp",
                               "From here on, the rows of the body are the step's logit rows.");
  bind_record<LinearPart>(module, "LinearPart", "One weight of a fused linear layer.");
  bind_record<LinearOp>(module, "LinearOp",
                        "y = (input W^T + B A input) * magnitude + shift + bias, part by part.");
  bind_record<Routing>(module, "Routing", "Choice and weights of a token's experts.");
  bind_record<ExpertsOp>(module, "ExpertsOp",
                         "output += the weighted sum of the results of a token's experts.");
  bind_record<CrossKeysOp>(module, "CrossKeysOp", "Keeps [k | v] of encoder inputs for cross attention.");
  bind_record<CrossAttentionOp>(module, "CrossAttentionOp", "Attention to a sequence's encoder input.");
  bind_record<AllReduceOp>(module, "AllReduceOp",
                           "output = the sum of all ranks' inputs; or the sum is added to output.");
  bind_record<AllHeadsNormOp>(
      module, "AllHeadsNormOp",
      "RMS norm over all heads of q together, and over all heads of k, which are split among ranks.");
  bind_record<GatherOp>(module, "GatherOp", "output = the columns of all ranks' inputs, on the first rank.");
  bind_record<ReceiveOp>(module, "ReceiveOp",
                         "output = the rows that the previous stage of the pipeline sent.");
  bind_record<SendOp>(module, "SendOp", "Sends the input to the next stage of a pipeline.");
  bind_record<BroadcastOp>(module, "BroadcastOp",
                           "Copies the buffer of the last stage's ranks to the ranks of all stages.");
  bind_record<SigmoidGateOp>(module, "SigmoidGateOp", "output *= sigmoid(gate).");
  bind_record<GatedColumnsOp>(module, "GatedColumnsOp",
                              "output = activation(gate) * some columns of values.");
  bind_record<GatedRmsNormOp>(module, "GatedRmsNormOp",
                              "output = input / rms(input) * weight * silu(gate), head by head.");
  bind_record<CausalConvolutionOp>(module, "CausalConvolutionOp",
                                   "Replaces columns by the silu of a weighted sum over the last tokens.");
  bind_record<ScanShape>(module, "ScanShape", "The heads of one layer's selective scan.");
  bind_record<SelectiveScanOp>(module, "SelectiveScanOp",
                               "Advances the states of Mamba 2's selective scan, and reads them by C.");
  bind_record<XieluOp>(module, "XieluOp", "The activation xIELU, which has learned parameters.");
  bind_record<GatedConvolutionOp>(module, "GatedConvolutionOp",
                                  "A weighted sum over the last tokens, between two gates.");
  bind_record<DeltaShape>(module, "DeltaShape", "The heads of one layer's gated delta rule.");
  bind_record<GatedDeltaOp>(module, "GatedDeltaOp",
                            "Advances the states of the gated delta rule, and reads them by q.");
  bind_record<LatentShape>(module, "LatentShape", "Sizes of one layer's latent attention.");
  bind_record<LatentQueriesOp>(module, "LatentQueriesOp",
                               "[q | k] of latent attention: products of queries, and compressed rows.");
  bind_record<LatentValuesOp>(module, "LatentValuesOp",
                              "Each head's values: products with the compressed rows that it attended to.");
  bind_record<GatedAddOp>(module, "GatedAddOp", "output += sigmoid(gate) * input.");
  bind_record<AddGivenColumnsOp>(module, "AddGivenColumnsOp",
                                 "output += some columns of the rows that are given in place of tokens.");
  bind_record<JoinNeighboursOp>(module, "JoinNeighboursOp", "output = the columns of neighbouring rows.");
  bind_record<JoinColumnsOp>(module, "JoinColumnsOp", "output = the columns of all inputs.");
}

}  // namespace adaptrt::bindings
