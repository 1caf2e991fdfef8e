"""Predictors of open gates, as PowerInfer's: low-rank layers before each MLP that has a ReLU, of a gate or without one.

They read what the MLP's norm reads, which is the residual stream: scores = fc2 relu(fc1 x). No adapter acts on them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...formats.network.network import Network
from ...formats.network.operands import Activation, GateScores, Value
from ...formats.network.ops import Cast, LayerNorm, Linear, Op, RmsNorm
from ...formats.network.weights import LinearWeight, Split, TensorName, whole


@dataclass(frozen=True)
class GatedLayer:
    """An MLP's layer with a ReLU that reads a norm of the residual stream."""

    layer: int
    op: Linear
    stream: Value
    """What the norm reads."""


def gated_layers(network: Network) -> list[GatedLayer]:
    """Those that predictors can be put before, in order."""
    norms = {op.output.name: op.input for op in network.ops if isinstance(op, (RmsNorm, LayerNorm))}
    return [
        GatedLayer(op.layer, op, norms[op.input.name])
        for op in network.ops
        if isinstance(op, Linear)
        and op.layer is not None
        and op.activation is not None
        and op.activation.leaves_zeros
        and op.input.name in norms
    ]


def predictor_weights(gated: GatedLayer, rank: int) -> tuple[LinearWeight, LinearWeight]:
    """fc1 [rank, hidden_size] and fc2 [gates, rank], with the names that their tensors have in an engine."""
    gates = gated.op.weights[0].outputs
    return (
        _weight(gated.layer, "fc1", rank, gated.stream.width),
        _weight(gated.layer, "fc2", gates, rank),
    )


def with_predictors(network: Network, ranks: Sequence[int], least_score: float) -> Network:
    """The network with a predictor, of these ranks, before each of gated_layers().

    Gates are closed, in every step and row, where their scores are below `least_score`. The tensors of predictors are
    none of a checkpoint's: the result is to be compiled, with RankTensors that have them.
    """
    # Where attention and MLP are side by side, the stream is another one behind the norm.
    before_norms: dict[str, Op] = {}
    layers: dict[str, list[Op]] = {}
    for gated, rank in zip(gated_layers(network), ranks, strict=True):
        read, *layer = _predicted(gated, rank, least_score)
        before_norms[gated.op.input.name] = read
        layers[gated.op.output.name] = layer
    made = copy.copy(network)
    made.ops = []
    for op in network.ops:
        if isinstance(op, (RmsNorm, LayerNorm)) and op.output.name in before_norms:
            made.ops += [before_norms[op.output.name], op]
        else:
            made.ops += layers.get(op.output.name, [op]) if isinstance(op, Linear) else [op]
    return made


def _predicted(gated: GatedLayer, rank: int, least_score: float) -> list[Op]:
    """What reads the stream, the rest of the predictor, and the layer with its scores."""
    scope = f"{gated.op.output.name}.predictor"
    fc1, fc2 = predictor_weights(gated, rank)
    gate = gated.op.weights[0].outputs
    x, inner, scores = (
        Value(f"{scope}.{name}", width, gated.op.output.rows)
        for name, width in (("input", gated.stream.width), ("inner", rank), ("scores", gate))
    )
    return [
        Cast(scope=scope, input=gated.stream, output=x),
        _linear(scope, x, inner, fc1, Activation.RELU),
        _linear(scope, inner, scores, fc2, None),
        replace(gated.op, scores=GateScores(value=scores, least=least_score)),
    ]


def _linear(scope: str, x: Value, output: Value, weight: LinearWeight, activation: Activation | None) -> Linear:
    return Linear(
        scope=scope,
        input=x,
        output=output,
        weights=(weight,),
        layer=None,
        activation=activation,
        threshold=0.0,
        add_to=None,
        scale=1.0,
        softcap=None,
    )


def _weight(layer: int, name: str, outputs: int, inputs: int) -> LinearWeight:
    return LinearWeight(
        name=TensorName(f"mlp.predictor.{name}", layer),
        parts=(whole(name, None, outputs),),
        inputs=inputs,
        split=Split.NONE,
        bias=False,
        quantized=False,
    )
