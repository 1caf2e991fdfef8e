"""The network of one stage of a pipeline: a run of layers, and what passes into it and out of it.

A stage receives what the layers before it have made and it or a later one reads, which is the residual stream, and
sends the same of its end to the next one. Angles of positions are computed by every stage that turns by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from .network import Network
from .ops import Attention, LayerNorm, Op, Receive, Rotary, RotaryTable, Send, Value
from .weights import LinearWeight, Tensor, TensorName


def network_of_stage(network: Network, stage: int) -> Network:
    """Stage `stage` of the config's pp_size, in which layers, their weights' and their attention's, count from 0.

    Adapters and layers of linear weights keep the numbers of the whole network.
    """
    num_stages = network.config.mapping.pp_size
    if num_stages == 1:
        return network
    layers = network.config.num_hidden_layers // num_stages
    is_last = stage == num_stages - 1
    begin = network.layer_ends[stage * layers - 1] if stage > 0 else 0
    end = len(network.ops) if is_last else network.layer_ends[(stage + 1) * layers - 1]
    cut = Network(network.config, network.older_names, network.inner_names)
    own = network.ops[begin:end]
    scope = f"stages.{stage}"
    cut.ops.extend(Receive(scope=scope, output=value) for value in _crossing(network, begin))
    cut.ops.extend(_tables_for(own, network.ops[:begin]))
    cut.ops.extend(_counted_from(stage * layers, op) for op in own)
    cut.ops.extend(Send(scope=scope, input=value) for value in _crossing(network, end))
    if stage == 0:  # which is where requests are
        cut.pooler, cut.classes = network.pooler, network.classes
    if is_last:
        cut.hidden, cut.logits = network.hidden, network.logits
    return cut


def _crossing(network: Network, at: int) -> list[Value]:
    """What ops before number `at` have made and ops from there on read, but for tables of angles."""
    made = {value.name for op in network.ops[:at] if not isinstance(op, Rotary) for value in _written(op)}
    read = {value.name: value for op in network.ops[at:] for value in _read(op)}
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
    return replace(counted, layer=counted.layer - first_layer) if isinstance(counted, Attention) else counted


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
