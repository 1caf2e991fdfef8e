"""Emits one op of the native program for each op of a network."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np

from ..._core import DType, RopeKind, RowKind
from ...formats.checkpoint.rotary import DynamicScaling, LongRopeScaling
from ...formats.engine.plan import (
    AddGivenColumnsOp,
    AllHeadsNormOp,
    AllReduceOp,
    AttentionOp,
    BroadcastOp,
    CastOp,
    CausalConvolutionOp,
    CrossAttentionOp,
    CrossKeysOp,
    EmbeddingOp,
    GatedAddOp,
    GatedColumnsOp,
    GatedConvolutionOp,
    GatedDeltaOp,
    GatedRmsNormOp,
    GatherOp,
    JoinColumnsOp,
    JoinNeighboursOp,
    LatentQueriesOp,
    LatentValuesOp,
    LayerNormOp,
    LoraSite,
    Op,
    ReceiveOp,
    RmsNormOp,
    RopeTableOp,
    SelectiveScanOp,
    SendOp,
    SigmoidGateOp,
    Vector,
    XieluOp,
)
from ...formats.network import ops
from ...formats.network.network import Network
from ...formats.network.operands import HeadNorm, Value
from ...formats.network.weights import Tensor
from ..network.rotary_frequencies import inverse_frequencies, long_inverse_frequencies
from .emit_linear import GATED_EPILOGUES, LinearEmitter
from .emitted import Compression, EmittedOp, Weights, as_float32, buffer_of
from .logit_rows import with_logit_rows_alone
from .lora_sites import SiteNumbers
from .storage import PANELS, Storage

_SameFieldsOp = ops.Cast | ops.CrossAttention | ops.CrossKeys | ops.GatedAdd | ops.Gather | ops.Receive | ops.Send
_SAME_FIELDS: Final[dict[type[_SameFieldsOp], type[Op]]] = {
    ops.Cast: CastOp,
    ops.CrossAttention: CrossAttentionOp,
    ops.CrossKeys: CrossKeysOp,
    ops.GatedAdd: GatedAddOp,
    ops.Gather: GatherOp,
    ops.Receive: ReceiveOp,
    ops.Send: SendOp,
}
"""Ops whose fields in a program have the names and the meaning that they have in a network."""
_NO_NORM_EPSILON: Final = 2.0**60
_NO_NORM_WEIGHT: Final = 2.0**30
"""Epsilon and weight of an RMS norm that changes nothing: next to this epsilon the mean of squares is nothing, and the
weight takes back the division by its root."""


@dataclass(frozen=True)
class EmittedProgram:
    """Ops in execution order. Buffers are still named as the network's values."""

    encoder: tuple[EmittedOp, ...]
    body: tuple[EmittedOp, ...]
    head: tuple[EmittedOp, ...]
    logits: Value | None
    hidden: Value | None
    """None in every pipeline stage but the last."""
    encoder_output: Value | None
    sites: tuple[LoraSite, ...]
    weights: Weights

    @property
    def ops(self) -> tuple[EmittedOp, ...]:
        """Ops of all sections."""
        return (*self.encoder, *self.body, *self.head)


def emit(
    network: Network,
    storage: Storage = PANELS,
    *,
    lora: bool,
    fully_sharded: bool = False,
    first_site: int = 0,
    compression: Compression | None = None,
    sparse_mlp: bool = False,
    neurons: bool = False,
    max_extra_tokens: int = 0,
) -> EmittedProgram:
    """Emits the program of a network.

    storage: types of the activations, and how matrices are stored.
    lora: adapters act on linear layers and on the embedding.
    fully_sharded: tensor-parallel ranks split both adapter matrices of each layer that they split.
    first_site: number of the first adapter site.
    sparse_mlp: stores and marks ReLU-gated layers so that the weights of inactive neurons need not be read.
    neurons: stores gated MLPs so that the weights of inactive neurons need not be read from the file.
    max_extra_tokens: number of tokens beyond the vocabulary that adapters may add; logits are wider by it.
    """
    logits = network.logits
    if max_extra_tokens:
        assert logits is not None  # builder/engine/problems.py checks this.
        logits = replace(logits, width=logits.width + max_extra_tokens)
    weights = Weights(network.config.quantization, compression, storage.float32_scales)
    numbers = SiteNumbers(first_site, lora=lora, fully_sharded=fully_sharded)
    linears = LinearEmitter(network, storage, weights, numbers, logits, sparse_mlp=sparse_mlp, neurons=neurons)
    emitter = _Emitter(network, storage, weights, numbers, linears)
    emitted = [emitter.emit(op) for op in network.ops]
    for layer in network.outside_layers:
        for tensor in layer.tensors:
            weights.values(tensor)
    head = tuple(op for op in emitted if op.rows is RowKind.LOGITS)
    body = tuple(op for op in emitted if op.rows is RowKind.TOKENS)
    return EmittedProgram(
        encoder=tuple(op for op in emitted if op.rows is RowKind.ENCODER_TOKENS),
        encoder_output=network.encoder_output,
        body=with_logit_rows_alone(body, head) if head and storage.keeps_logit_rows else body,
        head=head,
        logits=logits,
        hidden=network.hidden,
        sites=tuple(site for op in emitted for site in op.sites),
        weights=weights,
    )


class _Emitter:
    def __init__(
        self, network: Network, storage: Storage, weights: Weights, sites: SiteNumbers, linears: LinearEmitter
    ) -> None:
        self._weights = weights
        self._sites = sites
        self._linears = linears
        self._activation = storage.activation_type(network.config.dtype)
        self._stored = storage.stored_type(network.config.dtype)

    def emit(self, op: ops.Op) -> EmittedOp:
        if isinstance(op, ops.Embedding):
            return self._embedding(op)
        if isinstance(op, ops.Rotary):
            return self._rotary(op)
        if isinstance(op, ops.RmsNorm):
            return self._rms_norm(op)
        if isinstance(op, ops.Scale):
            return self._scale(op)
        if isinstance(op, ops.LayerNorm):
            return self._layer_norm(op)
        if isinstance(op, ops.AddGivenColumns):
            return self._add_given_columns(op)
        if isinstance(op, ops.JoinNeighbours):
            return self._join_neighbours(op)
        if isinstance(op, ops.JoinColumns):
            return self._join_columns(op)
        if isinstance(op, ops.Attention):
            return self._attention(op)
        if isinstance(op, ops.Experts):
            return self._linears.experts(op)
        if isinstance(op, ops.AllReduce):
            return self._all_reduce(op)
        if isinstance(op, ops.AllHeadsNorm):
            return self._all_heads_norm(op)
        if isinstance(op, ops.Broadcast):
            return self._broadcast(op)
        if isinstance(op, ops.SigmoidGate):
            return self._sigmoid_gate(op)
        if isinstance(op, ops.SiluGate):
            return self._silu_gate(op)
        if isinstance(op, ops.GatedColumns):
            return self._gated_columns(op)
        if isinstance(op, ops.GatedRmsNorm):
            return self._gated_rms_norm(op)
        if isinstance(op, ops.CausalConvolution):
            return self._causal_convolution(op)
        if isinstance(op, ops.GatedConvolution):
            return self._gated_convolution(op)
        if isinstance(op, ops.GatedDelta):
            return self._gated_delta(op)
        if isinstance(op, ops.SelectiveScan):
            return self._selective_scan(op)
        if isinstance(op, ops.Xielu):
            return self._xielu(op)
        if isinstance(op, ops.LatentQueries):
            return self._latent_queries(op)
        if isinstance(op, ops.LatentValues):
            return self._latent_values(op)
        if isinstance(op, ops.Linear):
            return self._linears.linear(op)
        return self._with_same_fields(op)

    def _embedding(self, op: ops.Embedding) -> EmittedOp:
        first_site, sites = self._sites.of(op)
        made = EmbeddingOp(
            table=self._weights.table(op.table),
            output=buffer_of(op.output),
            scale=as_float32(op.scale),
            positions=None if op.positions is None else self._weights.table(op.positions),
            types=None if op.types is None else self._weights.table(op.types),
            lora_site=first_site,
            num_later_elements=op.num_later_elements,
            num_coordinates=op.num_coordinates,
        )
        return EmittedOp(op=made, reads=(), writes=(op.output,), dtype=DType.FLOAT32, sites=sites)

    def _add_given_columns(self, op: ops.AddGivenColumns) -> EmittedOp:
        made = AddGivenColumnsOp(output=buffer_of(op.output), first_column=op.first_column)
        return EmittedOp(op=made, reads=(op.add_to,), writes=(op.output,), dtype=DType.FLOAT32, in_place=op.add_to)

    def _join_neighbours(self, op: ops.JoinNeighbours) -> EmittedOp:
        made = JoinNeighboursOp(input=buffer_of(op.input), output=buffer_of(op.output), count=op.count)
        dtype = DType.FLOAT32 if op.is_stream else self._activation
        return EmittedOp(op=made, reads=(op.input,), writes=(op.output,), dtype=dtype)

    def _join_columns(self, op: ops.JoinColumns) -> EmittedOp:
        made = JoinColumnsOp(inputs=tuple(buffer_of(value) for value in op.inputs), output=buffer_of(op.output))
        return EmittedOp(op=made, reads=op.inputs, writes=(op.output,), dtype=self._activation)

    def _rotary(self, op: ops.Rotary) -> EmittedOp:
        halves = 2 if op.is_twice else 1
        frequencies, attention_scaling = inverse_frequencies(op.size // halves, op.base, op.scaling)
        frequencies = np.tile(frequencies, halves)
        if op.is_in_turn:
            frequencies = np.concatenate([frequencies[0::2], frequencies[1::2]])
        kind, base, factor, original = RopeKind.STATIC, 1.0, 1.0, 0
        name, long_frequencies = "inverse_frequencies", None
        if name in self._weights.vectors:
            name = f"{op.scope}.{name}"
        if isinstance(op.scaling, LongRopeScaling):
            kind, original = RopeKind.LONG, op.scaling.original_max_position_embeddings
            frequencies_of_long = long_inverse_frequencies(op.size, op.base, op.scaling)
            long_frequencies = self._weights.constant(f"long_{name}", frequencies_of_long)
        if isinstance(op.scaling, DynamicScaling):
            kind, original = RopeKind.DYNAMIC, op.max_position_embeddings
            base, factor = as_float32(op.base), as_float32(op.scaling.factor)
        made = RopeTableOp(
            kind=kind,
            inverse_frequencies=self._weights.constant(name, frequencies),
            attention_scaling=as_float32(attention_scaling),
            base=base,
            factor=factor,
            original_max_position=original,
            cosine=buffer_of(op.output.cosine),
            sine=buffer_of(op.output.sine),
            long_inverse_frequencies=long_frequencies,
            columns=op.columns,
        )
        return EmittedOp(op=made, reads=(), writes=(op.output.cosine, op.output.sine), dtype=DType.FLOAT32)

    def _rms_norm(self, op: ops.RmsNorm) -> EmittedOp:
        made = RmsNormOp(
            input=buffer_of(op.input),
            output=buffer_of(op.output),
            weight=self._weights.norm(op.weight),
            epsilon=as_float32(op.epsilon),
            gather_logit_rows=op.gather_logit_rows,
            add=op.add_to is not None,
            sum_scale=None if op.sum_scale is None else self._factor(op.sum_scale),
        )
        return EmittedOp(
            op=made,
            reads=(op.input,) if op.add_to is None else (op.input, op.add_to),
            writes=(op.output,),
            dtype=self._activation if op.add_to is None and not op.is_stream else DType.FLOAT32,
            in_place=op.add_to,
        )

    def _scale(self, op: ops.Scale) -> EmittedOp:
        """An RMS norm without effect, whose weight has the factors."""
        columns = "_".join(f"{count}x{as_float32(factor)!r}" for count, factor in op.factors)
        weight = np.concatenate([np.full(count, factor * _NO_NORM_WEIGHT) for count, factor in op.factors])
        made = RmsNormOp(
            input=buffer_of(op.input),
            output=buffer_of(op.output),
            weight=self._weights.constant(f"scale_{columns}", weight),
            epsilon=_NO_NORM_EPSILON,
            gather_logit_rows=op.gather_logit_rows,
            add=False,
        )
        dtype = DType.FLOAT32 if op.is_stream else self._activation
        return EmittedOp(op=made, reads=(op.input,), writes=(op.output,), dtype=dtype)

    def _factor(self, value: Tensor | float) -> Vector:
        """A vector of one element."""
        if isinstance(value, Tensor):
            return self._weights.norm(value)
        return self._weights.constant(f"factor_{as_float32(value)!r}", np.array([value]))

    def _layer_norm(self, op: ops.LayerNorm) -> EmittedOp:
        first_site, sites = self._sites.of(op)
        made = LayerNormOp(
            input=buffer_of(op.input),
            output=buffer_of(op.output),
            weight=self._ones(op.input.width) if op.weight is None else self._weights.norm(op.weight),
            bias=None if op.bias is None else self._weights.norm(op.bias),
            epsilon=as_float32(op.epsilon),
            gather_logit_rows=op.gather_logit_rows,
            lora_site=first_site,
        )
        dtype = DType.FLOAT32 if op.is_stream else self._activation
        return EmittedOp(op=made, reads=(op.input,), writes=(op.output,), dtype=dtype, sites=sites)

    def _attention(self, op: ops.Attention) -> EmittedOp:
        norms = [norm for norm in (op.query_norm, op.key_norm) if norm is not None]
        if len({norm.epsilon for norm in norms}) > 1:
            raise ValueError(f"the norms of q and k differ in epsilon: {norms[0].epsilon} and {norms[1].epsilon}")
        bias, scaling = op.position_bias, op.query_scaling
        epsilon = norms[0].epsilon if norms else op.plain_norm_epsilon
        plain_norm = None if op.plain_norm_epsilon is None else self._ones(op.shape.head_dim)
        made = AttentionOp(
            kind=op.kind,
            layer=op.layer,
            shape=op.shape,
            qkv=buffer_of(op.qkv),
            cosine=buffer_of(op.rotary.cosine),
            sine=buffer_of(op.rotary.sine),
            output=buffer_of(op.output),
            query_norm=plain_norm or self._head_norm(op.query_norm),
            key_norm=plain_norm or self._head_norm(op.key_norm),
            norm_epsilon=as_float32(epsilon or 0.0),
            scale=as_float32(op.scale),
            sliding_window=op.window or 0,
            softcap=as_float32(op.softcap or 0.0),
            interleaved=op.interleaved,
            position_bias=None if bias is None else self._weights.by_distance(bias.table, bias.buckets, bias.heads),
            sinks=None if op.sinks is None else self._weights.norm(op.sinks.scores, op.sinks.heads),
            norms_after_rotation=op.norms_after_rotation,
            query_scaling_beta=0.0 if scaling is None else as_float32(scaling.beta),
            query_scaling_length=1 if scaling is None else scaling.length,
            query_scaling_offset=0 if scaling is None else scaling.offset,
            value_norm=self._ones(op.shape.head_dim) if op.normalizes_values else None,
            values_from_keys=op.values_from_keys,
            shared_layer=-1 if op.shared_layer is None else op.shared_layer,
            joint_column=-1 if op.joint_column is None else op.joint_column,
            window_column=-1 if op.window_column is None else op.window_column,
            chunk=op.chunk or 0,
        )
        reads = (op.qkv, op.rotary.cosine, op.rotary.sine)
        return EmittedOp(op=made, reads=reads, writes=(op.output,), dtype=self._activation)

    def _ones(self, size: int) -> Vector:
        return self._weights.constant(f"ones_{size}", np.ones(size))

    def _gated_columns(self, op: ops.GatedColumns) -> EmittedOp:
        made = GatedColumnsOp(
            gate=buffer_of(op.gate),
            values=buffer_of(op.values),
            output=buffer_of(op.output),
            first_column=op.first_column,
            activation=GATED_EPILOGUES[op.activation],
        )
        return EmittedOp(op=made, reads=(op.gate, op.values), writes=(op.output,), dtype=self._activation)

    def _sigmoid_gate(self, op: ops.SigmoidGate) -> EmittedOp:
        made = SigmoidGateOp(gate=buffer_of(op.gate), output=buffer_of(op.output))
        return EmittedOp(
            op=made, reads=(op.gate, op.input), writes=(op.output,), dtype=self._activation, in_place=op.input
        )

    def _silu_gate(self, op: ops.SiluGate) -> EmittedOp:
        """A gated RMS norm without effect before its gate."""
        width = op.input.width
        made = GatedRmsNormOp(
            input=buffer_of(op.input),
            gate=buffer_of(op.gate),
            output=buffer_of(op.output),
            weight=self._weights.constant(f"scale_{width}x1.0", np.full(width, _NO_NORM_WEIGHT)),
            epsilon=_NO_NORM_EPSILON,
        )
        return EmittedOp(op=made, reads=(op.input, op.gate), writes=(op.output,), dtype=self._activation)

    def _gated_rms_norm(self, op: ops.GatedRmsNorm) -> EmittedOp:
        made = GatedRmsNormOp(
            input=buffer_of(op.input),
            gate=buffer_of(op.gate),
            output=buffer_of(op.output),
            weight=self._weights.norm(op.weight, op.elements),
            epsilon=as_float32(op.epsilon),
            gate_first=op.gate_first,
            num_groups=op.num_groups,
            group_ranks=op.group_ranks,
        )
        return EmittedOp(op=made, reads=(op.input, op.gate), writes=(op.output,), dtype=self._activation)

    def _causal_convolution(self, op: ops.CausalConvolution) -> EmittedOp:
        taps = op.weight.shape[-1]
        made = CausalConvolutionOp(
            layer=op.layer,
            values=buffer_of(op.output),
            weight=self._weights.columns(op.weight, op.columns),
            taps=taps,
            bias=None if op.bias is None else self._weights.elements(op.bias, op.columns),
        )
        return EmittedOp(op=made, reads=(op.input,), writes=(op.output,), dtype=DType.FLOAT32, in_place=op.input)

    def _gated_convolution(self, op: ops.GatedConvolution) -> EmittedOp:
        made = GatedConvolutionOp(
            layer=op.layer,
            input=buffer_of(op.input),
            output=buffer_of(op.output),
            weight=self._weights.columns(op.weight, op.columns),
            bias=None if op.bias is None else self._weights.elements(op.bias, op.columns),
            taps=op.weight.shape[-1],
        )
        return EmittedOp(op=made, reads=(op.input,), writes=(op.output,), dtype=self._activation)

    def _gated_delta(self, op: ops.GatedDelta) -> EmittedOp:
        made = GatedDeltaOp(
            layer=op.layer,
            shape=op.shape,
            qkv=buffer_of(op.qkv),
            gates=buffer_of(op.gates),
            output=buffer_of(op.output),
            log_decay=self._weights.norm(op.log_decay, op.heads),
            time_bias=self._weights.norm(op.time_bias, op.heads),
            update_scale=as_float32(op.update_scale),
        )
        return EmittedOp(op=made, reads=(op.qkv, op.gates), writes=(op.output,), dtype=DType.FLOAT32)

    def _selective_scan(self, op: ops.SelectiveScan) -> EmittedOp:
        made = SelectiveScanOp(
            layer=op.layer,
            shape=op.shape,
            values=buffer_of(op.values),
            output=buffer_of(op.output),
            log_decay=self._weights.norm(op.log_decay, op.heads),
            time_bias=self._weights.norm(op.time_bias, op.heads),
            skip=self._weights.norm(op.skip, op.heads),
            time_min=as_float32(op.time_min),
            time_max=as_float32(op.time_max),
        )
        return EmittedOp(op=made, reads=(op.values,), writes=(op.output,), dtype=DType.FLOAT32)

    def _xielu(self, op: ops.Xielu) -> EmittedOp:
        parameters = self._weights.norm(op.parameters)
        made = XieluOp(input=buffer_of(op.input), output=buffer_of(op.output), parameters=parameters)
        return EmittedOp(op=made, reads=(op.input,), writes=(op.output,), dtype=self._activation)

    def _latent_queries(self, op: ops.LatentQueries) -> EmittedOp:
        first_site, sites = self._sites.of(op)
        made = LatentQueriesOp(
            shape=op.shape,
            queries=buffer_of(op.queries),
            rows=buffer_of(op.rows),
            output=buffer_of(op.output),
            norm=self._weights.norm(op.norm),
            epsilon=as_float32(op.epsilon),
            keys=self._linears.parts(op.keys, op.output.rows),
            lora_site=first_site,
        )
        return EmittedOp(op=made, reads=(op.queries, op.rows), writes=(op.output,), dtype=self._stored, sites=sites)

    def _latent_values(self, op: ops.LatentValues) -> EmittedOp:
        first_site, sites = self._sites.of(op)
        made = LatentValuesOp(
            shape=op.shape,
            input=buffer_of(op.input),
            output=buffer_of(op.output),
            values=self._linears.parts(op.values, op.output.rows),
            lora_site=first_site,
        )
        return EmittedOp(op=made, reads=(op.input,), writes=(op.output,), dtype=self._activation, sites=sites)

    def _all_reduce(self, op: ops.AllReduce) -> EmittedOp:
        made = AllReduceOp(input=buffer_of(op.input), output=buffer_of(op.output), add=op.add_to is not None)
        return EmittedOp(
            op=made,
            reads=(op.input,) if op.add_to is None else (op.input, op.add_to),
            writes=(op.output,),
            dtype=DType.FLOAT32,
            in_place=op.add_to,
        )

    def _all_heads_norm(self, op: ops.AllHeadsNorm) -> EmittedOp:
        (epsilon,) = {op.query_norm.epsilon, op.key_norm.epsilon}
        made = AllHeadsNormOp(
            qkv=buffer_of(op.output),
            query_norm=self._weights.norm(op.query_norm.weight, op.queries),
            key_norm=self._weights.norm(op.key_norm.weight, op.keys),
            whole_query_size=op.query_norm.weight.shape[0],
            whole_key_size=op.key_norm.weight.shape[0],
            counts_keys=op.counts_keys,
            epsilon=as_float32(epsilon),
        )
        return EmittedOp(op=made, reads=(op.input,), writes=(op.output,), dtype=DType.FLOAT32, in_place=op.input)

    def _broadcast(self, op: ops.Broadcast) -> EmittedOp:
        made = BroadcastOp(buffer=buffer_of(op.value))
        dtype = DType.FLOAT32 if op.is_stream else self._activation
        here, elsewhere = ((op.value,), ()) if op.is_made_here else ((), (op.value,))
        return EmittedOp(op=made, reads=here, writes=elsewhere, dtype=dtype)

    def _head_norm(self, norm: HeadNorm | None) -> Vector | None:
        return None if norm is None else self._weights.norm(norm.weight)

    def _with_same_fields(self, op: _SameFieldsOp) -> EmittedOp:
        kind = _SAME_FIELDS[type(op)]
        made = kind(**{field.name: _in_program(getattr(op, field.name)) for field in fields(kind)})
        values = {field.name: getattr(op, field.name) for field in fields(op)}
        return EmittedOp(
            op=made,
            reads=tuple(value for name, value in values.items() if name != "output" and isinstance(value, Value)),
            writes=(values["output"],) if "output" in values else (),
            dtype=self._activation if isinstance(op, (ops.Cast, ops.CrossAttention)) else DType.FLOAT32,
            in_place=values.get("add_to"),
        )


def _in_program(operand: Any) -> Any:
    """An operand of a network's op as the field of the program's op."""
    if isinstance(operand, Value):
        return buffer_of(operand)
    return as_float32(operand) if isinstance(operand, float) else operand
