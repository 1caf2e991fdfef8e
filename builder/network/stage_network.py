"""The network of one pipeline stage: consecutive layers, and the values that it receives and sends.

A stage receives the values of earlier layers that it or a later stage reads, mainly the residual stream, and sends such
values to the next stage. Every stage computes the rotary tables that it needs.

If there is an encoder before the decoder, a stage has consecutive layers of both. Encoder inputs pass through all
stages first. The last stage broadcasts the encoder's output, from which each stage computes the keys and values for its
own decoder layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final

from ..._core import stage_layers
from ...formats.network.network import Network
from ...formats.network.operands import RotaryTable, Value
from ...formats.network.ops import (
    Attention,
    Broadcast,
    CausalConvolution,
    CrossAttention,
    CrossKeys,
    GatedConvolution,
    GatedDelta,
    LayerNorm,
    Op,
    Receive,
    Rotary,
    SelectiveScan,
    Send,
)
from ...formats.network.weights import LinearWeight, Tensor, TensorName

_WITH_LAYERS: Final = (
    Attention,
    CausalConvolution,
    CrossAttention,
    CrossKeys,
    GatedConvolution,
    GatedDelta,
    SelectiveScan,
)
"""Ops whose layers the engine counts: each has keys and values or a state there."""


def network_of_stage(network: Network, stage: int) -> Network:
    """Stage `stage` of the config's pp_size. Layers, their weights and their attention are numbered from 0 in each
    stage.

    Adapters, and the `layer` of linear layers, keep the whole network's numbers.
    """
    num_stages = network.config.mapping.pp_size
    if num_stages == 1:
        return network
    cut = Network(network.config, network.older_names, network.inner_names)
    first_op = 0
    if network.encoder_output is not None:
        cut.ops.extend(_encoder_of_stage(network, stage, network.encoder_output))
        cut.encoder_output = network.encoder_output
        first_op = network.cross_key_ops[-1].stop
    cut.ops.extend(_layers_of_stage(network, range(first_op, len(network.ops)), network.layer_ops, stage))
    if stage == 0:  # Requests are handled on stage 0.
        cut.pooler, cut.classes = network.pooler, network.classes
    else:
        cut.embedding_layers = ()
    if stage == num_stages - 1:
        cut.hidden, cut.logits = network.hidden, network.logits
    return cut


def _encoder_of_stage(network: Network, stage: int, output: Value) -> Iterator[Op]:
    """The stage's encoder layers, and the encoder output that its decoder layers need."""
    number, last = next((number, op) for number, op in enumerate(network.ops) if output in _written(op))
    yield from _layers_of_stage(network, range(number + 1), network.encoder_layer_ops, stage)
    yield Broadcast(
        scope=last.scope,
        value=output,
        is_stream=isinstance(last, LayerNorm) and last.is_stream,
        is_made_here=stage == network.config.mapping.pp_size - 1,
    )
    yield from network.ops[number + 1 : network.cross_key_ops[0].start]
    own = _share(network, network.cross_key_ops, stage)
    for layer in own:
        yield from (_counted_from(own.start, op) for op in _ops(network, network.cross_key_ops[layer]))


def _layers_of_stage(network: Network, of_all: range, layers: Sequence[range], stage: int) -> Iterator[Op]:
    """The stage's part of a range of ops with layers. The first stage also has the ops before the layers, the last
    stage the ops after them."""
    own = _share(network, layers, stage)
    begin = layers[own.start].start if own.start > 0 else of_all.start
    end = layers[own.stop].start if own.stop < len(layers) else of_all.stop
    before, here, behind = (
        _ops(network, part) for part in (range(of_all.start, begin), range(begin, end), range(end, of_all.stop))
    )
    scope = f"stages.{stage}"
    yield from (Receive(scope=scope, output=value) for value in _crossing(before, [*here, *behind]))
    yield from _tables_for(here, before)
    yield from (_counted_from(own.start, op) for op in here)
    yield from (Send(scope=scope, input=value) for value in _crossing([*before, *here], behind))


def _share(network: Network, layers: Sequence[range], stage: int) -> range:
    """Numbers of the stage's layers."""
    first, count = stage_layers(len(layers), network.config.mapping.pp_size, stage)
    return range(first, first + count)


def _ops(network: Network, numbers: range) -> list[Op]:
    return network.ops[numbers.start : numbers.stop]


def _crossing(before: Iterable[Op], behind: Iterable[Op]) -> list[Value]:
    """Values that `before` writes and `behind` reads, except rotary tables."""
    made = {value.name for op in before if not isinstance(op, Rotary) for value in _written(op)}
    read = {value.name: value for op in behind for value in _read(op)}
    return [value for name, value in read.items() if name in made]


def _tables_for(ops: Iterable[Op], before: Iterable[Op]) -> list[Op]:
    read = {value.name for op in ops for value in _read(op)}
    return [op for op in before if isinstance(op, Rotary) and op.output.cosine.name in read]


def _written(op: Op) -> Iterator[Value]:
    return _values(getattr(op, "output", None))


def _read(op: Op) -> Iterator[Value]:
    for field in fields(op):
        if field.name != "output":
            yield from _values(getattr(op, field.name))


def _values(item: object) -> Iterator[Value]:
    if isinstance(item, Value):
        yield item
    elif isinstance(item, RotaryTable):
        yield from (item.cosine, item.sine)


def _counted_from(first_layer: int, op: Op) -> Op:
    """The op with layers counted from the stage's first layer."""
    counted: Op = _renamed(op, first_layer)
    if isinstance(counted, LayerNorm):
        return replace(counted, number=None)  # A norm's number does not determine its stage.
    if isinstance(counted, Attention) and counted.shared_layer is not None:
        counted = replace(counted, shared_layer=counted.shared_layer - first_layer)
    if isinstance(counted, _WITH_LAYERS):
        return replace(counted, layer=counted.layer - first_layer)
    return counted


def _renamed(item: Any, first_layer: int) -> Any:
    """The item with weight names of the stage's checkpoint."""
    if isinstance(item, TensorName):
        return item if item.layer is None else replace(item, layer=item.layer - first_layer)
    if isinstance(item, (Tensor, LinearWeight)):
        return replace(item, name=_renamed(item.name, first_layer))
    if isinstance(item, tuple):
        return tuple(_renamed(one, first_layer) for one in item)
    if is_dataclass(item) and not isinstance(item, (type, Value, RotaryTable)):
        return replace(item, **{field.name: _renamed(getattr(item, field.name), first_layer) for field in fields(item)})
    return item
