"""The network of one rank: its tensor-parallel share of every layer of its pipeline stage.

A layer that is split by inputs gives each rank a partial sum, which an AllReduce completes on all ranks. So do experts,
which are split or distributed over the ranks. The columns of lm_head are gathered on the stage's first rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from ...formats.checkpoint.config import ParallelMapping
from ...formats.checkpoint.tensor_names import LM_HEAD
from ...formats.network.network import Network
from ...formats.network.operands import AttentionShape, LatentShape, Value
from ...formats.network.ops import (
    AllHeadsNorm,
    AllReduce,
    Attention,
    CausalConvolution,
    CrossAttention,
    CrossKeys,
    Experts,
    GatedConvolution,
    GatedDelta,
    GatedRmsNorm,
    Gather,
    LatentQueries,
    LatentValues,
    Linear,
    Op,
    Scale,
    SelectiveScan,
    SigmoidGate,
    SiluGate,
    Xielu,
)
from ...formats.network.weights import LinearWeight, Split
from .stage_network import network_of_stage


def network_of_rank(network: Network, rank: int) -> Network:
    """The part of `network`, the whole model's, that rank `rank` of the config's mapping computes."""
    mapping = network.config.mapping
    stage, tp_rank = divmod(rank, mapping.tp_size)
    staged = network_of_stage(network, stage)
    if mapping.tp_size == 1:
        return staged
    cut = Network(network.config, network.older_names, network.inner_names)
    cut.hidden, cut.pooler, cut.classes = staged.hidden, staged.pooler, staged.classes
    cut.embedding_layers = staged.embedding_layers
    cutter = _Cutter(mapping, tp_rank, network.config.num_experts)
    cut.ops.extend(_with_late_sums([of_rank for op in staged.ops for of_rank in cutter.cut(op)]))
    cut.logits, cut.encoder_output = staged.logits, staged.encoder_output
    return cut


def _with_late_sums(ops: list[Op]) -> list[Op]:
    """Moves each all-reduce after the following layers that do not need its result, so that it overlaps with them.

    For example, if attention and MLP of a block read the same norm, attention's all-reduce comes after the MLP's first
    layers.
    """
    ordered: list[Op] = []
    late: AllReduce | None = None
    for op in ops:
        if late is not None and not _does_without(late, op):
            ordered.append(late)
            late = None
        if isinstance(op, AllReduce):
            late = op
        else:
            ordered.append(op)
    return ordered if late is None else [*ordered, late]


def _does_without(total: AllReduce, op: Op) -> bool:
    """True for a layer that is split by outputs and does not use the values of the all-reduce."""
    if not isinstance(op, Linear) or any(weight.split is not Split.COLUMN for weight in op.weights):
        return False
    summed = {value.name for value in (total.input, total.output, total.add_to) if value is not None}
    return summed.isdisjoint(value.name for value in (op.input, op.output, op.add_to) if value is not None)


def _norms_all_heads(op: Attention) -> bool:
    norms = [norm for norm in (op.query_norm, op.key_norm) if norm is not None]
    return any(norm.weight.shape != (op.shape.head_dim,) for norm in norms)


class _Cutter:
    """Splits the ops of a network, in order."""

    def __init__(self, mapping: ParallelMapping, rank: int, num_experts: int) -> None:
        self._mapping: Final = mapping
        self._tp_size: Final = mapping.tp_size
        self._rank: Final = rank
        self._num_experts: Final = num_experts
        self._cut: Final[dict[str, Value]] = {}
        """This rank's share of each split value, by the name of the whole value."""
        self._columns: Final[dict[str, tuple[range, ...]]] = {}
        """Columns of the whole value in these shares, for outputs of linear layers and what is computed in place."""

    def cut(self, op: Op) -> list[Op]:
        if isinstance(op, Linear):
            return self._linear(op)
        if isinstance(op, Attention):
            return self._attention(op)
        if isinstance(op, Experts):
            return self._experts(op)
        if isinstance(op, LatentQueries):
            return [self._latent_queries(op)]
        if isinstance(op, LatentValues):
            return [self._latent_values(op)]
        if isinstance(op, Xielu):
            own = self._own(op.input)
            return [replace(op, input=own, output=self._value(op.output, own.width))]
        if isinstance(op, CrossKeys):
            return [replace(op, kv=self._own(op.kv), shape=self._shape(op.shape))]
        if isinstance(op, CrossAttention):
            shape = self._shape(op.shape)
            output = self._value(op.output, shape.query_size)
            return [replace(op, q=self._own(op.q), shape=shape, output=output)]
        if isinstance(op, Scale) and op.input.name in self._cut:
            factors = tuple(_factors_of(op.factors, self._columns[op.input.name]))
            return [replace(op, input=self._own(op.input), output=self._like(op.output, op.input), factors=factors)]
        if isinstance(op, CausalConvolution):
            columns = tuple(part for part in self._columns[op.input.name] if part.stop <= op.weight.shape[0])
            return [replace(op, input=self._own(op.input), output=self._like(op.output, op.input), columns=columns)]
        if isinstance(op, GatedConvolution):
            share = _share(op.output.width // self._tp_size, self._rank)
            output = self._value(op.output, len(share))
            return [replace(op, input=self._own(op.input), output=output, columns=(share,))]
        if isinstance(op, SelectiveScan):
            return [self._selective_scan(op)]
        if isinstance(op, GatedDelta):
            return [self._gated_delta(op)]
        if isinstance(op, GatedRmsNorm):
            return [self._gated_rms_norm(op)]
        if isinstance(op, (SiluGate, SigmoidGate)):
            own = self._own(op.input)
            return [replace(op, input=own, gate=self._own(op.gate), output=self._value(op.output, own.width))]
        return [op]

    def _selective_scan(self, op: SelectiveScan) -> Op:
        """Ranks of a group have the same B and C."""
        shape = replace(
            op.shape,
            num_heads=op.shape.num_heads // self._tp_size,
            num_groups=max(1, op.shape.num_groups // self._tp_size),
        )
        return replace(
            op,
            values=self._own(op.values),
            output=self._value(op.output, shape.value_size),
            shape=shape,
            heads=_share(shape.num_heads, self._rank),
        )

    def _gated_delta(self, op: GatedDelta) -> Op:
        shape = replace(
            op.shape,
            num_key_heads=max(1, op.shape.num_key_heads // self._tp_size),
            num_value_heads=op.shape.num_value_heads // self._tp_size,
        )
        return replace(
            op,
            qkv=self._own(op.qkv),
            gates=self._own(op.gates),
            output=self._value(op.output, shape.value_size),
            shape=shape,
            heads=_share(shape.num_value_heads, self._rank),
        )

    def _gated_rms_norm(self, op: GatedRmsNorm) -> Op:
        own = self._own(op.input)
        cut = replace(op, input=own, gate=self._own(op.gate), output=self._value(op.output, own.width))
        if op.weight.shape[0] < op.input.width:  # All heads have this weight.
            return cut
        return replace(
            cut,
            elements=_share(own.width, self._rank),
            num_groups=max(1, op.num_groups // self._tp_size),
            group_ranks=max(1, self._tp_size // op.num_groups),
        )

    def _attention(self, op: Attention) -> list[Op]:
        shape = self._shape(op.shape)
        output = self._value(op.output, shape.query_size)
        qkv = self._own(op.qkv)
        heads = _share(shape.num_attention_heads, self._rank)
        bias = None if op.position_bias is None else replace(op.position_bias, heads=heads)
        sinks = None if op.sinks is None else replace(op.sinks, heads=heads)
        cut = replace(op, qkv=qkv, shape=shape, output=output, position_bias=bias, sinks=sinks)
        if not _norms_all_heads(op):
            return [cut]
        assert op.query_norm is not None  # Every family has both norms or none.
        assert op.key_norm is not None
        ranks_per_head = max(1, self._tp_size // op.shape.num_key_value_heads)
        norm = AllHeadsNorm(
            scope=op.scope,
            input=qkv,
            output=replace(qkv, name=f"{qkv.name}.normed"),
            query_norm=op.query_norm,
            key_norm=op.key_norm,
            queries=_share(shape.query_size, self._rank),
            keys=_share(shape.key_value_size, self._rank // ranks_per_head),
            counts_keys=self._rank % ranks_per_head == 0,
        )
        return [norm, replace(cut, qkv=norm.output, query_norm=None, key_norm=None)]

    def _experts(self, op: Experts) -> list[Op]:
        here = self._mapping.experts_of(self._rank, self._num_experts)
        size, rank = self._mapping.moe_tp_size, self._mapping.moe_tp_rank(self._rank)

        def weights(of_all: tuple[LinearWeight, ...]) -> tuple[LinearWeight, ...]:
            return tuple(_weight(of_all[expert], size, rank) for expert in here)

        partial = _partial(op.output)
        cut = replace(
            op,
            output=partial,
            add_to=None,
            gate=weights(op.gate),
            up=weights(op.up),
            down=weights(op.down),
            first_expert=here.start,
            num_remote_experts=len(op.down) - len(here),
        )
        return [cut, AllReduce(scope=op.scope, input=partial, output=op.output, add_to=op.add_to)]

    def _linear(self, op: Linear) -> list[Op]:
        split = op.weights[0].split
        weights = tuple(_weight(weight, self._tp_size, self._rank) for weight in op.weights)
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
        if op.activation is None:
            self._columns[op.output.name] = _columns_of(weights)
        return [replace(op, output=self._value(op.output, width), weights=weights)]

    def _latent_queries(self, op: LatentQueries) -> Op:
        """Every rank has the whole compressed row."""
        shape, heads = self._heads_of(op.shape)
        return replace(
            op,
            queries=self._own(op.queries),
            output=self._value(op.output, (shape.num_heads + 1) * shape.key_dim),
            shape=shape,
            keys=op.keys[heads.start : heads.stop],
            first_head=heads.start,
            num_remote_heads=len(op.keys) - len(heads),
        )

    def _latent_values(self, op: LatentValues) -> Op:
        shape, heads = self._heads_of(op.shape)
        return replace(
            op,
            input=self._own(op.input),
            output=self._value(op.output, shape.num_heads * shape.value_dim),
            shape=shape,
            values=op.values[heads.start : heads.stop],
            first_head=heads.start,
            num_remote_heads=len(op.values) - len(heads),
        )

    def _heads_of(self, shape: LatentShape) -> tuple[LatentShape, range]:
        """This rank's shape, and its heads among all."""
        own = replace(shape, num_heads=shape.num_heads // self._tp_size)
        return own, _share(own.num_heads, self._rank)

    def _shape(self, shape: AttentionShape) -> AttentionShape:
        return replace(
            shape,
            num_attention_heads=shape.num_attention_heads // self._tp_size,
            num_key_value_heads=max(1, shape.num_key_value_heads // self._tp_size),
        )

    def _value(self, whole: Value, width: int) -> Value:
        self._cut[whole.name] = replace(whole, width=width)
        return self._cut[whole.name]

    def _like(self, value: Value, other: Value) -> Value:
        """This rank's share of a value that has the columns of `other`."""
        self._columns[value.name] = self._columns[other.name]
        return self._value(value, self._own(other).width)

    def _own(self, value: Value) -> Value:
        """This rank's share of a split value."""
        return self._cut[value.name]


def _partial(value: Value) -> Value:
    """A partial sum of `value`, or some of its columns."""
    return replace(value, name=f"{value.name}.of_rank")


def _share(size: int, number: int) -> range:
    """Indices of share `number`, where each share has `size` elements."""
    return range(size * number, size * (number + 1))


def _columns_of(weights: Sequence[LinearWeight]) -> tuple[range, ...]:
    """Outputs of the whole layer that a rank's share of it has, in order."""
    columns: list[range] = []
    start = 0
    for part in (part for weight in weights for part in weight.parts):
        columns += [range(start + share.start, start + share.stop) for share in part.shares]
        start += part.outputs + part.num_remote_outputs
    return tuple(columns)


def _factors_of(factors: Sequence[tuple[int, float]], columns: Sequence[range]) -> Iterator[tuple[int, float]]:
    """Numbers of neighbouring columns among `columns`, with their factor."""
    for share in columns:
        start = 0
        for count, factor in factors:
            size = min(share.stop, start + count) - max(share.start, start)
            if size > 0:
                yield size, factor
            start += count


def _weight(weight: LinearWeight, num_ranks: int, rank: int) -> LinearWeight:
    """One rank's share of a weight."""
    if weight.split is Split.ROW:
        inputs = weight.inputs // num_ranks
        return replace(
            weight,
            inputs=inputs,
            first_input=inputs * rank,
            num_remote_inputs=weight.inputs - inputs,
            is_first_term=rank == 0,
            bias=weight.bias and rank == 0,
            num_shares=num_ranks,
            share=rank,
        )
    if weight.split is Split.NONE:
        return weight
    if f"{weight.name}.weight" == LM_HEAD:
        (part,) = weight.parts
        share = -(-part.outputs // num_ranks)  # The last rank's share is padded with zeros.
        return replace(weight, parts=(replace(part, outputs=share),))
    parts = tuple(part.cut(num_ranks, rank) for part in weight.parts)
    return replace(weight, parts=parts, num_shares=num_ranks, share=rank)
