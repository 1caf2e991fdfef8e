"""The ONNX graph of a network: for TensorRT, for Netron, and for onnx.reference, which tests use as an oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

import onnx
from onnx import TensorProto

from ..._core import AttentionKind, ConfigError
from ...formats.checkpoint.rotary import depends_on_length
from ...formats.engine.build_config import BuildConfig
from ...formats.engine.tensorrt.plan_config import kv_pool_out_name
from ...formats.network.network import Network
from ...formats.network.ops import (
    Attention,
    Cast,
    CausalConvolution,
    CrossAttention,
    CrossKeys,
    Embedding,
    Experts,
    GatedAdd,
    GatedColumns,
    GatedConvolution,
    GatedDelta,
    GatedRmsNorm,
    LatentQueries,
    LatentValues,
    LayerNorm,
    Linear,
    Op,
    RmsNorm,
    Rotary,
    Scale,
    SelectiveScan,
    SigmoidGate,
    SiluGate,
    Xielu,
)
from .graph import GraphBuilder, StoredTensor
from .inputs import StepInputs, declare_inputs, kv_pool_shape, state_of, state_out_name
from .onnx_attention import attention, cross_attention, cross_keys
from .onnx_experts import experts, gated_add
from .onnx_gates import gated_columns, gated_rms_norm, sigmoid_gate, silu_gate, xielu
from .onnx_latent import latent_queries, latent_values
from .onnx_linear import Adaptation, linear
from .onnx_rotary import rotary_table
from .onnx_rows import embedding, layer_norm, rms_norm, scale
from .onnx_states import causal_convolution, gated_convolution, gated_delta, selective_scan
from .onnx_values import Values
from .without_nodes import FIELDS, OPS, names_of_fields, names_of_ops


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Options of a graph in addition to the network."""

    tokens_per_block: int = 32
    max_lora_rank: int | None = None
    """Maximum adapter rank; None: no adapters."""
    dora: bool = False
    """True if adapters may have DoRA magnitudes."""
    max_seq_len: int | None = None
    """Number of positions; None: any number."""


def network_options(config: BuildConfig) -> NetworkOptions:
    """Options of the graph of an engine with this config."""
    lora = config.accepted_adapters
    return NetworkOptions(
        tokens_per_block=config.tokens_per_block,
        max_lora_rank=None if lora is None else lora.max_lora_rank,
        dora=config.dora_enabled,
        max_seq_len=config.max_seq_len,
    )


def onnx_graph(network: Network, weights: Mapping[str, StoredTensor], options: NetworkOptions) -> onnx.ModelProto:
    """The graph of one engine step. `weights` are the checkpoint's tensors by name.

    The residual stream, norms, states and logits are float32. Inputs of matrix products have the checkpoint's dtype.
    Outputs are logits float32[R, vocab_size], the KV pools and the states. Raises ConfigError for what has no nodes:
    ops and fields for rows that are given in place of tokens, and adapters of experts and of newer modules.
    """
    config = network.config
    if missing := sorted(names_of_ops(network, OPS)):
        raise ConfigError(f"{config.architecture} has the ops {', '.join(missing)}, which cannot be written as ONNX")
    if unwritten := sorted(names_of_fields(network, FIELDS)):
        raise ConfigError(f"{config.architecture} has ops with {', '.join(unwritten)}, which cannot be written as ONNX")
    scaled_from = network.scales_queries_from
    if scaled_from is not None and (options.max_seq_len is None or options.max_seq_len > scaled_from):
        raise ConfigError(
            f"{config.architecture} scales queries by their position, which cannot be written as ONNX; expected "
            f"max_seq_len up to {scaled_from}"
        )
    graph = GraphBuilder(weights, config.dtype, config.quantization)
    has_encoder = network.encoder_output is not None
    # The decoder of an encoder-decoder model processes whole sequences here, like its encoder.
    paged = [] if has_encoder else [op for op in network.ops if _has_pool(op)]
    states = dict(found for op in network.ops if (found := state_of(op)) is not None)
    inputs = declare_inputs(
        graph,
        config,
        paged=paged,
        states=states,
        encoder=has_encoder,
        tokens_per_block=options.tokens_per_block,
        prompt_lengths=any(isinstance(op, Rotary) and depends_on_length(op.scaling) for op in network.ops),
        lora=options.max_lora_rank is not None,
    )
    adaptation = None
    if inputs.lora is not None and options.max_lora_rank is not None:
        adaptation = Adaptation(inputs.lora, inputs, options.max_lora_rank, options.dora)
    values: Values = {}
    for op in network.ops:
        with graph.scope(op.scope):
            _emit(graph, values, op, inputs, adaptation)
    for op in paged:
        name = kv_pool_out_name(op.layer)
        graph.output(values[name], name, kv_pool_shape(op.shape, options.tokens_per_block))
    for name, shape in states.items():
        graph.output(values[state_out_name(name)], state_out_name(name), shape)
    assert network.logits is not None  # build() rejects other networks.
    with graph.scope(network.ops[-1].scope):
        logits = graph.cast(values[network.logits.name], TensorProto.FLOAT)
    graph.output(logits, "logits", ("num_logit_rows", config.vocab_size))
    return graph.model(config.architecture)


def _has_pool(op: Op) -> TypeGuard[Attention]:
    return isinstance(op, Attention) and op.kind is AttentionKind.CAUSAL and op.shared_layer is None


def _emit(graph: GraphBuilder, values: Values, op: Op, inputs: StepInputs, adaptation: Adaptation | None) -> None:
    if isinstance(op, Embedding):
        embedding(graph, values, op, inputs)
    elif isinstance(op, Rotary):
        rotary_table(graph, values, op, inputs)
    elif isinstance(op, RmsNorm):
        rms_norm(graph, values, op, inputs)
    elif isinstance(op, LayerNorm):
        layer_norm(graph, values, op, inputs)
    elif isinstance(op, Cast):
        values[op.output.name] = graph.cast(values[op.input.name], graph.engine_type)
    elif isinstance(op, Attention):
        attention(graph, values, op, inputs)
    elif isinstance(op, CrossKeys):
        cross_keys(values, op)
    elif isinstance(op, CrossAttention):
        cross_attention(graph, values, op, inputs)
    elif isinstance(op, Experts):
        if adaptation is not None:
            raise ConfigError("adapters of experts cannot be written as ONNX; build with --lora_plugin disable")
        experts(graph, values, op)
    elif isinstance(op, GatedAdd):
        gated_add(graph, values, op)
    elif isinstance(op, Scale):
        scale(graph, values, op, inputs)
    elif isinstance(op, SigmoidGate):
        sigmoid_gate(graph, values, op)
    elif isinstance(op, SiluGate):
        silu_gate(graph, values, op)
    elif isinstance(op, GatedRmsNorm):
        gated_rms_norm(graph, values, op)
    elif isinstance(op, GatedColumns):
        gated_columns(graph, values, op)
    elif isinstance(op, Xielu):
        xielu(graph, values, op)
    elif isinstance(op, CausalConvolution):
        causal_convolution(graph, values, op, inputs)
    elif isinstance(op, GatedConvolution):
        gated_convolution(graph, values, op, inputs)
    elif isinstance(op, GatedDelta):
        gated_delta(graph, values, op, inputs)
    elif isinstance(op, SelectiveScan):
        selective_scan(graph, values, op, inputs)
    elif isinstance(op, LatentQueries):
        assert adaptation is None  # Those of the linear layer that makes compressed rows are refused before.
        latent_queries(graph, values, op)
    elif isinstance(op, LatentValues):
        latent_values(graph, values, op)
    else:
        assert isinstance(op, Linear)  # Graphs are of whole models, so there is no communication between ranks.
        linear(graph, values, op, adaptation)
