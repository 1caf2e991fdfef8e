"""The network of one stage of a pipeline: a run of layers, and what passes into it and out of it.

A stage receives what the layers before it have made and it or a later one reads, which is the residual stream, and
sends the same of its end to the next one. Angles of positions are computed by every stage that turns by them.

With an encoder before the decoder, a stage has a run of the layers of both. Encoder inputs pass all stages first; what
the last one makes of them is broadcast, and each stage computes of it the keys and values that its own layers of the
decoder see.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ..._core import stage_layers
from ...formats.network.network import Network
from ...formats.network.operands import RotaryTable, Value
from ...formats.network.ops import Attention, Broadcast, CrossAttention, CrossKeys, LayerNorm, Op, Receive, Rotary, Send
from ...formats.network.weights import LinearWeight, Tensor, TensorName


def network_of_stage(network: Network, stage: int) -> Network:
    """Stage `stage` of the config's pp_size, in which layers, their weights' and their attention's, count from 0.

    Adapters and layers of linear weights keep the numbers of the whole network.
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
    if stage == 0:  # which is where requests are
        cut.pooler, cut.classes = network.pooler, network.classes
    if stage == num_stages - 1:
        cut.hidden, cut.logits = network.hidden, network.logits
    return cut


def _encoder_of_stage(network: Network, stage: int, output: Value) -> Iterator[Op]:
    """Its layers of the encoder, and what it keeps of the encoder's output."""
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
    """Of ops that are some layers, what a stage has: the first one with what is before them, the last with what is
    behind."""
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
    """The numbers of a stage's layers."""
    first, count = stage_layers(len(layers), network.config.mapping.pp_size, stage)
    return range(first, first + count)


def _ops(network: Network, numbers: range) -> list[Op]:
    return network.ops[numbers.start : numbers.stop]


def _crossing(before: Iterable[Op], behind: Iterable[Op]) -> list[Value]:
    """What the former have made and the latter read, but for tables of angles."""
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
    """The op of a stage that begins with this layer."""
    counted: Op = _renamed(op, first_layer)
    if isinstance(counted, LayerNorm):
        return replace(counted, number=None)  # which stage a norm belongs to, its number does not say
    if isinstance(counted, (Attention, CrossKeys, CrossAttention)):
        return replace(counted, layer=counted.layer - first_layer)
    return counted


def _renamed(item: Any, first_layer: int) -> Any:
    """The same with weights that have the names of the stage's checkpoint."""
    if isinstance(item, TensorName):
        return item if item.layer is None else replace(item, layer=item.layer - first_layer)
    if isinstance(item, (Tensor, LinearWeight)):
        return replace(item, name=_renamed(item.name, first_layer))
    if isinstance(item, tuple):
        return tuple(_renamed(one, first_layer) for one in item)
    if is_dataclass(item) and not isinstance(item, (type, Value, RotaryTable)):
        return replace(item, **{field.name: _renamed(getattr(item, field.name), first_layer) for field in fields(item)})
    return item
