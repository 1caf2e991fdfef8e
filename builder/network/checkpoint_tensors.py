"""The tensors of a network: in a Hugging Face model, and in each rank of a checkpoint (layout: docs/formats.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...formats.checkpoint.config import CheckpointConfig
from ...formats.checkpoint.planned_tensor import PlannedTensor, Slice
from ...formats.checkpoint.tensor_names import EMBEDDING, LM_HEAD
from ...formats.network.network import Network
from ...formats.network.ops import (
    Attention,
    CausalConvolution,
    Embedding,
    Experts,
    GatedConvolution,
    GatedDelta,
    GatedRmsNorm,
    LatentQueries,
    LatentValues,
    LayerNorm,
    Linear,
    RmsNorm,
    SelectiveScan,
    Xielu,
)
from ...formats.network.weights import LinearWeight, Part, Split, Tensor
from .stage_network import network_of_stage


@dataclass(frozen=True)
class TiedLmHead:
    """Names of a Hugging Face model's lm_head tensor, which may be missing, and of the embedding that replaces it."""

    lm_head: str
    embedding: str


def tied_lm_head(network: Network) -> TiedLmHead | None:
    """The tensor names of a model whose embedding is also its lm_head; None for other models."""
    for weight in _weights(network):
        if isinstance(weight, LinearWeight) and weight.tied_to is not None:
            return TiedLmHead(f"{weight.parts[0].source}.weight", weight.tied_to.source)
    return None


def lm_head_tensors(network: Network) -> list[str]:
    """Names of the lm_head's own tensors; empty if the embedding is used as lm_head."""
    for weight in _weights(network):
        if isinstance(weight, LinearWeight) and f"{weight.name}.weight" == LM_HEAD and weight.tied_to is None:
            source = weight.parts[0].source
            return [f"{source}.weight", *([f"{source}.bias"] if weight.bias else [])]
    return []


def hf_tensor_shapes(network: Network) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that the Hugging Face model must have."""
    shapes: dict[str, tuple[int, ...]] = {}
    for weight in _weights(network):
        if isinstance(weight, Tensor):
            shapes[weight.source] = weight.source_shape
            continue
        if weight.row_bias is not None:
            shapes[weight.row_bias] = (1, weight.outputs)
        if weight.tied_to is not None:
            continue
        for part in weight.parts:
            matrix = (part.source_outputs, weight.inputs)
            shapes[f"{part.source}.weight"] = matrix[::-1] if part.transposed else matrix
            if weight.bias and weight.row_bias is None:
                shapes[f"{part.source}.bias"] = (part.source_outputs,)
    return shapes


def plan_rank(network: Network, rank: int) -> list[PlannedTensor]:
    """The tensors of rank{N}.safetensors, in file order.

    Layers are numbered from 0 within each pipeline stage, as in TensorRT-LLM.
    """
    pp_rank, tp_rank = divmod(rank, network.config.mapping.tp_size)
    planned: dict[str, PlannedTensor] = {}
    for weight in _weights(network_of_stage(network, pp_rank)):
        for tensor in _plan(network, weight, str(weight.name), tp_rank):
            planned.setdefault(tensor.name, tensor)
    return list(planned.values())


def _weights(network: Network) -> Iterator[Tensor | LinearWeight]:
    for op in network.ops:
        if isinstance(op, Embedding):
            yield op.table
            for table in (op.positions, op.types):
                if table is not None:
                    yield table
        elif isinstance(op, (RmsNorm, GatedRmsNorm)):
            yield op.weight
            if isinstance(op, RmsNorm) and isinstance(op.sum_scale, Tensor):
                yield op.sum_scale
        elif isinstance(op, GatedDelta):
            yield op.log_decay
            yield op.time_bias
        elif isinstance(op, SelectiveScan):
            yield op.log_decay
            yield op.time_bias
            yield op.skip
        elif isinstance(op, Xielu):
            yield op.parameters
        elif isinstance(op, (LayerNorm, CausalConvolution, GatedConvolution)):
            if op.weight is not None:
                yield op.weight
            if op.bias is not None:
                yield op.bias
        elif isinstance(op, Attention):
            yield from (norm.weight for norm in (op.query_norm, op.key_norm) if norm is not None)
            if op.position_bias is not None:
                yield op.position_bias.table
            if op.sinks is not None:
                yield op.sinks.scores
        elif isinstance(op, Linear):
            yield from op.weights
        elif isinstance(op, LatentQueries):
            yield op.norm
            yield from op.keys
        elif isinstance(op, LatentValues):
            yield from op.values
        elif isinstance(op, Experts):
            yield from (vector for vector in (op.routing.bias, op.routing.expert_scale) if vector is not None)
            for expert in zip(op.gate, op.up, op.down, strict=True):
                yield from expert
    for layer in network.outside_layers:
        yield from layer.tensors


def _plan(network: Network, weight: Tensor | LinearWeight, name: str, tp_rank: int) -> Iterator[PlannedTensor]:
    if isinstance(weight, Tensor):
        rows = range(weight.rows_before, weight.source_shape[0])
        yield PlannedTensor(name, weight.shape, (Slice(weight.source, rows),), float32=weight.float32)
    elif f"{name}.weight" in (EMBEDDING, LM_HEAD):
        if f"{name}.weight" == LM_HEAD:  # Otherwise the embedding has its own tensor.
            yield _plan_lm_head(network, weight, tp_rank)
        if weight.bias:
            yield _plan_lm_head_bias(network, weight, tp_rank)
    elif weight.expert is not None:
        mapping = network.config.mapping
        if weight.expert in mapping.experts_of(tp_rank, network.config.num_experts):
            yield from _plan_linear(weight, name, mapping.moe_tp_size, mapping.moe_tp_rank(tp_rank))
    elif weight.head is None or weight.head in _heads_of(network.config, tp_rank):
        yield from _plan_linear(weight, name, network.config.mapping.tp_size, tp_rank)


def _heads_of(config: CheckpointConfig, tp_rank: int) -> range:
    """Heads of attention on a rank, if none is on several."""
    size = config.num_attention_heads // config.mapping.tp_size
    return range(size * tp_rank, size * (tp_rank + 1))


def _plan_linear(weight: LinearWeight, name: str, tp_size: int, tp_rank: int) -> Iterator[PlannedTensor]:
    inputs = None
    width = weight.inputs
    pieces = [(part, part.rows) for part in weight.parts]
    if weight.split is Split.ROW:
        width //= tp_size
        inputs = range(width * tp_rank, width * (tp_rank + 1))
    elif weight.split is Split.COLUMN:
        pieces = [(part, part.cut(tp_size, tp_rank).rows) for part in weight.parts]
    outputs = sum(len(rows) for _, pieces_of_part in pieces for rows in pieces_of_part)
    slices = tuple(_slices(pieces, "weight", inputs))
    parts = tuple(sum(map(len, rows)) for _, rows in pieces)
    yield PlannedTensor(f"{name}.weight", (outputs, width), slices, quantized=weight.quantized, parts=parts)
    if weight.bias:
        yield PlannedTensor(f"{name}.bias", (outputs,), tuple(_slices(pieces, "bias", None)))


def _slices(pieces: list[tuple[Part, tuple[range, ...]]], kind: str, columns: range | None) -> Iterator[Slice]:
    for part, ranges in pieces:
        for rows in ranges:
            yield Slice(f"{part.source}.{kind}", rows, columns, part.transposed and kind == "weight")


def _plan_lm_head(network: Network, weight: LinearWeight, tp_rank: int) -> PlannedTensor:
    source = f"{weight.parts[0].source}.weight" if weight.tied_to is None else weight.tied_to.source
    return replace(_plan_padded(network, LM_HEAD, source, (weight.inputs,), tp_rank), quantized=weight.quantized)


def _plan_lm_head_bias(network: Network, weight: LinearWeight, tp_rank: int) -> PlannedTensor:
    if weight.row_bias is None:
        return _plan_padded(network, weight.bias_name, f"{weight.parts[0].source}.bias", (), tp_rank)
    planned = _plan_padded(network, weight.bias_name, weight.row_bias, (), tp_rank)
    return replace(planned, slices=tuple(replace(piece, transposed=True) for piece in planned.slices))


def _plan_padded(network: Network, name: str, source: str, inner_shape: tuple[int, ...], tp_rank: int) -> PlannedTensor:
    """A tensor split by outputs, after padding the vocabulary with zero rows to a multiple of tp_size."""
    vocab_size, tp_size = network.config.vocab_size, network.config.mapping.tp_size
    rows = -(-vocab_size // tp_size)
    real = range(min(rows * tp_rank, vocab_size), min(rows * (tp_rank + 1), vocab_size))
    return PlannedTensor(name, (rows, *inner_shape), (Slice(source, real),), rows - len(real))
