"""The decoder: one builder for every family, driven by the checkpoint's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from ..._core import lora_modules
from ..checkpoint.config import CheckpointConfig
from ..checkpoint.rotary import DynamicScaling
from ..checkpoint.tensor_names import EMBEDDING, LM_HEAD
from .attention import attention
from .graph import GraphBuilder, StoredTensor, Value
from .inputs import StepInputs, declare_inputs, kv_pool_out_name, kv_pool_shape
from .linear import Adaptation
from .mlp import gated_mlp
from .norm import rms_norm
from .rotary import rotary_table
from .weight_matrix import weight_matrix


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """What a network is built with beside the checkpoint."""

    tokens_per_block: int = 32
    max_lora_rank: int | None = None
    """The largest rank of adapters; None: the network takes none."""
    dora: bool = False
    """Whether adapters may have DoRA magnitudes."""


def build_network(
    config: CheckpointConfig, weights: Mapping[str, StoredTensor], options: NetworkOptions
) -> onnx.ModelProto:
    """The graph of one engine step. `weights` are the checkpoint's tensors by name.

    The residual stream, norms and logits are float32; what is multiplied with a weight is of the checkpoint's
    dtype. Outputs are logits float32[R, vocab_size] and the KV pools.
    """
    graph = GraphBuilder(weights, config.dtype, config.quantization)
    inputs = declare_inputs(
        graph,
        config,
        tokens_per_block=options.tokens_per_block,
        prompt_lengths=isinstance(config.rotary_scaling, DynamicScaling),
        lora=options.max_lora_rank is not None,
    )
    adaptation = _adaptation(inputs, options)
    with graph.scope("embedding"):
        embedded = graph.node("Gather", [graph.weight(EMBEDDING), inputs.input_ids], axis=0)
        hidden = graph.cast(embedded, TensorProto.FLOAT)
    with graph.scope("rotary"):
        table = rotary_table(graph, config, inputs)
    for layer in range(config.num_hidden_layers):
        prefix = f"transformer.layers.{layer}"
        with graph.scope(f"layers.{layer}"):
            with graph.scope("attention"):
                x = rms_norm(graph, hidden, f"{prefix}.input_layernorm.weight", config.norm_epsilon)
                attended, kv_pool = attention(graph, config, x, layer, inputs, table, adaptation)
                hidden = graph.node("Add", [hidden, graph.cast(attended, TensorProto.FLOAT)])
            with graph.scope("mlp"):
                x = rms_norm(graph, hidden, f"{prefix}.post_layernorm.weight", config.norm_epsilon)
                activated = gated_mlp(graph, config, x, layer, adaptation)
                hidden = graph.node("Add", [hidden, graph.cast(activated, TensorProto.FLOAT)])
        graph.output(kv_pool, kv_pool_out_name(layer), kv_pool_shape(config, options.tokens_per_block))
    with graph.scope("head"):
        logits = _head(graph, config, hidden, inputs)
    graph.output(logits, "logits", ("num_logit_rows", config.vocab_size))
    return graph.model(config.architecture)


def _head(graph: GraphBuilder, config: CheckpointConfig, hidden: Value, inputs: StepInputs) -> Value:
    rows = graph.node("Gather", [hidden, inputs.logit_rows], axis=0)
    x = rms_norm(graph, rows, "transformer.ln_f.weight", config.norm_epsilon)
    lm_head = EMBEDDING if config.lm_head_is_embedding else LM_HEAD
    weight = weight_matrix(graph, lm_head.removesuffix(".weight"))
    return graph.cast(graph.node("Gemm", [x, weight], transB=1), TensorProto.FLOAT)


def _adaptation(inputs: StepInputs, options: NetworkOptions) -> Adaptation | None:
    if inputs.lora is None or options.max_lora_rank is None:
        return None
    module_ids = {info.name: info.id for info in lora_modules()}
    return Adaptation(inputs.lora, inputs.sequence_offsets, options.max_lora_rank, options.dora, module_ids)
