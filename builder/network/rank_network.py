"""The network of one rank of several that run a model together: its share of every layer that tensor parallelism cuts,
of the layers of its stage of a pipeline.

A layer that is cut by its inputs gives each rank a term of a sum, which AllReduce makes whole on all of them; lm_head's
columns come together on the first rank of those that have a share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..._core import AttentionKind, ConfigError
from ..checkpoint.tensor_names import LM_HEAD
from .network import Network
from .ops import (
    AllReduce,
    Attention,
    AttentionShape,
    CrossAttention,
    Experts,
    Gather,
    Linear,
    Op,
    Value,
)
from .stage_network import network_of_stage
from .weights import LinearWeight, Split


def network_of_rank(network: Network, rank: int) -> Network:
    """What rank `rank` of the config's mapping computes of `network`, which is the whole model's.

    Raises ConfigError for a network with ops that cannot be cut.
    """
    mapping = network.config.mapping
    if mapping.world_size == 1:
        return network
    problems = _problems(network)
    if problems:
        raise ConfigError(f"{network.config.architecture} cannot be cut over ranks: " + "; ".join(problems))
    stage, tp_rank = divmod(rank, mapping.tp_size)
    staged = network_of_stage(network, stage)
    if mapping.tp_size == 1:
        return staged
    cut = Network(network.config, network.older_names, network.inner_names)
    cut.hidden, cut.pooler, cut.classes = staged.hidden, staged.pooler, staged.classes
    cutter = _Cutter(mapping.tp_size, tp_rank)
    for op in staged.ops:
        cut.ops.extend(cutter.cut(op))
    cut.logits = staged.logits
    return cut


def _problems(network: Network) -> list[str]:
    problems = []
    if network.config.mapping.pp_size > 1 and network.classes is not None:
        problems.append("it is a classifier, whose last layer would be on another rank than its requests")
    if network.encoder_output is not None:
        problems.append("it has an encoder")
    elif any(op.kind is not AttentionKind.CAUSAL for op in network.attentions):
        problems.append("its attention looks both ways")
    if network.config.mapping.tp_size > 1 and any(_norms_all_heads(op) for op in network.attentions):
        problems.append("its attention normalises all heads together")
    return problems


def _norms_all_heads(op: Attention) -> bool:
    norms = [norm for norm in (op.query_norm, op.key_norm) if norm is not None]
    return any(norm.weight.shape != (op.shape.head_dim,) for norm in norms)


class _Cutter:
    """Cuts the ops of a network in their order."""

    def __init__(self, tp_size: int, rank: int) -> None:
        self._tp_size: Final = tp_size
        self._rank: Final = rank
        self._cut: Final[dict[str, Value]] = {}
        """What this rank has of values that are cut, by the name of the whole."""

    def cut(self, op: Op) -> list[Op]:
        if isinstance(op, Linear):
            return self._linear(op)
        if isinstance(op, Attention):
            shape = self._shape(op.shape)
            output = self._value(op.output, shape.query_size)
            return [replace(op, qkv=self._own(op.qkv), shape=shape, output=output)]
        if isinstance(op, Experts):
            partial = _partial(op.output)
            cut = replace(
                op,
                output=partial,
                add_to=None,
                gate=tuple(self._weight(weight) for weight in op.gate),
                up=tuple(self._weight(weight) for weight in op.up),
                down=tuple(self._weight(weight) for weight in op.down),
            )
            return [cut, AllReduce(scope=op.scope, input=partial, output=op.output, add_to=op.add_to)]
        assert not isinstance(op, CrossAttention)
        return [op]

    def _linear(self, op: Linear) -> list[Op]:
        split = op.weights[0].split
        weights = tuple(self._weight(weight) for weight in op.weights)
        if split is Split.NONE:
            return [op]
        if split is Split.ROW:
            partial = _partial(op.output)
            cut = replace(op, input=self._own(op.input), output=partial, weights=weights, add_to=None)
            return [cut, AllReduce(scope=op.scope, input=partial, output=op.output, add_to=op.add_to)]
        width = weights[0].outputs if op.activation is not None else sum(weight.outputs for weight in weights)
        if op.layer is None:  # lm_head
            partial = replace(_partial(op.output), width=width)
            return [
                replace(op, output=partial, weights=weights),
                Gather(scope=op.scope, input=partial, output=op.output),
            ]
        return [replace(op, output=self._value(op.output, width), weights=weights)]

    def _weight(self, weight: LinearWeight) -> LinearWeight:
        if weight.split is Split.ROW:
            inputs = weight.inputs // self._tp_size
            return replace(
                weight,
                inputs=inputs,
                first_input=inputs * self._rank,
                inputs_elsewhere=weight.inputs - inputs,
                is_first_term=self._rank == 0,
                bias=weight.bias and self._rank == 0,
            )
        if weight.split is Split.NONE:
            return weight
        if f"{weight.name}.weight" == LM_HEAD:
            (part,) = weight.parts
            share = -(-part.outputs // self._tp_size)  # the last rank's is filled up with zeros
            return replace(weight, parts=(replace(part, outputs=share),))
        return replace(weight, parts=tuple(part.cut(self._tp_size, self._rank) for part in weight.parts))

    def _shape(self, shape: AttentionShape) -> AttentionShape:
        return replace(
            shape,
            num_attention_heads=shape.num_attention_heads // self._tp_size,
            num_key_value_heads=max(1, shape.num_key_value_heads // self._tp_size),
        )

    def _value(self, whole: Value, width: int) -> Value:
        self._cut[whole.name] = replace(whole, width=width)
        return self._cut[whole.name]

    def _own(self, value: Value) -> Value:
        """This rank's share of a value that is cut."""
        return self._cut[value.name]


def _partial(value: Value) -> Value:
    """A term of what `value` is the sum of, or columns of it."""
    return replace(value, name=f"{value.name}.of_rank")
