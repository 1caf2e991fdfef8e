"""Predictors of active neurons, as in PowerInfer: a low-rank layer pair before each ReLU MLP, gated or not.

They read the input of the MLP's norm, the residual stream: scores = fc2 relu(fc1 x). No adapter acts on them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...formats.checkpoint.activation import Activation
from ...formats.network.network import Network
from ...formats.network.operands import GateScores, Value
from ...formats.network.ops import Cast, LayerNorm, Linear, Op, RmsNorm
from ...formats.network.weights import LinearWeight, Split, TensorName, whole


@dataclass(frozen=True)
class GatedLayer:
    """An MLP's layer with a ReLU whose input is a norm of the residual stream."""

    layer: int
    op: Linear
    stream: Value
    """The norm's input."""


def gated_layers(network: Network) -> list[GatedLayer]:
    """Layers that can have predictors, in order."""
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
    """fc1 [rank, hidden_size] and fc2 [gates, rank], with their tensors' names in an engine."""
    gates = gated.op.weights[0].outputs
    return (
        _weight(gated.layer, "fc1", rank, gated.stream.width),
        _weight(gated.layer, "fc2", gates, rank),
    )


def with_predictors(network: Network, ranks: Sequence[int], least_score: float) -> Network:
    """The network with a predictor of the given rank before each of gated_layers().

    In every step and row, gates whose scores are below `least_score` are closed. A checkpoint has no tensors for
    predictors, so the result must be compiled with RankTensors that include them.
    """
    # If attention and MLP run in parallel, the residual stream after the norm is a different value.
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
    """The cast of the residual stream, the predictor's two layers, and the layer with its scores."""
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
