"""Makes the native program's ops of a network's: each becomes one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ..._core import (
    DType,
    LinearEpilogue,
    RopeKind,
    RowKind,
    activation_dtype,
    can_have_columns,
    can_have_neurons,
    can_have_rows,
    lora_modules,
)
from ..checkpoint.rotary import DynamicScaling, LongRopeScaling
from ..network import ops
from ..network.adapter_sites import NEW_TOKENS, module_id, sites_of
from ..network.network import Network
from ..network.operands import Activation, HeadNorm, Value
from ..network.rotary_frequencies import inverse_frequencies, long_inverse_frequencies
from ..network.weights import LinearWeight
from .emitted import Compression, EmittedOp, Weights
from .logit_rows import with_logit_rows_alone
from .plan import (
    AllHeadsNormOp,
    AllReduceOp,
    AttentionOp,
    BroadcastOp,
    BufferName,
    CastOp,
    CrossAttentionOp,
    CrossKeysOp,
    EmbeddingOp,
    ExpertsOp,
    GatedAddOp,
    GatherOp,
    LayerNormOp,
    LinearOp,
    LinearPart,
    LoraPart,
    LoraSite,
    Matrix,
    NeuronTable,
    ReceiveOp,
    RmsNormOp,
    RopeTableOp,
    Routing,
    SendOp,
    Vector,
)

_NEW_TOKENS: Final = next(info.id for info in lora_modules() if info.name == NEW_TOKENS)

_GATED: Final = {
    Activation.SILU: LinearEpilogue.SILU_MUL,
    Activation.GELU: LinearEpilogue.GELU_MUL,
    Activation.GELU_TANH: LinearEpilogue.GELU_TANH_MUL,
    Activation.RELU: LinearEpilogue.RELU_MUL,
    Activation.RELU_BOTH: LinearEpilogue.RELU_MUL_RELU,
    Activation.CLAMPED_SILU: LinearEpilogue.CLAMPED_SILU_MUL,
}
_ACTIVATED: Final = {
    Activation.GELU: LinearEpilogue.GELU,
    Activation.GELU_TANH: LinearEpilogue.GELU_TANH,
    Activation.RELU: LinearEpilogue.RELU,
}


@dataclass(frozen=True)
class EmittedProgram:
    """Ops in the order of execution, buffers still being values of the network."""

    encoder: tuple[EmittedOp, ...]
    body: tuple[EmittedOp, ...]
    head: tuple[EmittedOp, ...]
    logits: Value | None
    hidden: Value | None
    """None in a stage of a pipeline with others behind it."""
    encoder_output: Value | None
    sites: tuple[LoraSite, ...]
    weights: Weights

    @property
    def ops(self) -> tuple[EmittedOp, ...]:
        """Those of all sections."""
        return (*self.encoder, *self.body, *self.head)


def emit(
    network: Network,
    *,
    lora: bool,
    fully_sharded: bool = False,
    first_site: int = 0,
    compression: Compression | None = None,
    sparse_mlp: bool = False,
    neurons: bool = False,
    max_extra_tokens: int = 0,
) -> EmittedProgram:
    """The program of a network; with `lora` adapters act on its linear layers and its embedding.

    fully_sharded: ranks share both matrices of adapters wherever they have a share of the layer.
    first_site: the number of the first place where they do.
    sparse_mlp: layers about a ReLU are stored so that what it closes need not be read.
    neurons: those with a gate so that what it closes need not be read from the file.
    max_extra_tokens: room for those beyond the vocabulary that adapters bring: logits are wider by it.
    """
    logits = network.logits
    if max_extra_tokens:
        assert logits is not None  # builder/build_problems.py says so
        logits = replace(logits, width=logits.width + max_extra_tokens)
    emitter = _Emitter(
        network, lora, first_site, compression, logits, sparse_mlp=sparse_mlp, neurons=neurons,
        fully_sharded=fully_sharded,
    )  # fmt: skip
    emitted = [emitter.emit(op) for op in network.ops]
    for layer in network.pooling_layers:
        for tensor in layer.tensors:
            emitter.weights.values(tensor)
    head = tuple(op for op in emitted if op.rows is RowKind.LOGITS)
    body = tuple(op for op in emitted if op.rows is RowKind.TOKENS)
    return EmittedProgram(
        encoder=tuple(op for op in emitted if op.rows is RowKind.ENCODER_TOKENS),
        encoder_output=network.encoder_output,
        body=with_logit_rows_alone(body, head) if head else body,
        head=head,
        logits=logits,
        hidden=network.hidden,
        sites=tuple(site for op in emitted for site in op.sites),
        weights=emitter.weights,
    )


class _Emitter:
    def __init__(
        self,
        network: Network,
        lora: bool,
        first_site: int,
        compression: Compression | None,
        logits: Value | None,
        *,
        sparse_mlp: bool,
        neurons: bool,
        fully_sharded: bool,
    ) -> None:
        self.weights: Final = Weights(network.config.quantization, compression)
        self._activation = activation_dtype(network.config.dtype)
        self._lora = lora
        self._fully_sharded = fully_sharded
        self._num_sites = first_site
        self._logits = logits
        self._dtype = network.config.dtype
        self._sparse_mlp = sparse_mlp
        self._sparse_values: set[str] = set()
        self._neurons = _neuron_pairs(network) if neurons and sparse_mlp else {}
        # What is read from the file whole has no columns, which would be read as well.
        self._stores_columns = not neurons

    def emit(self, op: ops.Op) -> EmittedOp:
        if isinstance(op, ops.Embedding):
            return self._embedding(op)
        if isinstance(op, ops.Rotary):
            return self._rotary(op)
        if isinstance(op, ops.RmsNorm):
            return self._rms_norm(op)
        if isinstance(op, ops.LayerNorm):
            return self._layer_norm(op)
        if isinstance(op, ops.Cast):
            return self._cast(op)
        if isinstance(op, ops.Attention):
            return self._attention(op)
        if isinstance(op, ops.Experts):
            return self._experts(op)
        if isinstance(op, ops.GatedAdd):
            return self._gated_add(op)
        if isinstance(op, ops.CrossKeys):
            return self._cross_keys(op)
        if isinstance(op, ops.CrossAttention):
            return self._cross_attention(op)
        if isinstance(op, ops.AllReduce):
            return self._all_reduce(op)
        if isinstance(op, ops.AllHeadsNorm):
            return self._all_heads_norm(op)
        if isinstance(op, ops.Gather):
            return self._gather(op)
        if isinstance(op, ops.Receive):
            made = ReceiveOp(output=_buffer(op.output))
            return EmittedOp(op=made, reads=(), writes=(op.output,), dtype=DType.FLOAT32)
        if isinstance(op, ops.Send):
            return EmittedOp(op=SendOp(input=_buffer(op.input)), reads=(op.input,), writes=(), dtype=DType.FLOAT32)
        if isinstance(op, ops.Broadcast):
            return self._broadcast(op)
        return self._linear(op)

    def _embedding(self, op: ops.Embedding) -> EmittedOp:
        first_site, sites = self._sites(op)
        made = EmbeddingOp(
            table=self.weights.table(op.table),
            output=_buffer(op.output),
            scale=_float32(op.scale),
            positions=None if op.positions is None else self.weights.table(op.positions),
            types=None if op.types is None else self.weights.table(op.types),
            lora_site=first_site,
        )
        return EmittedOp(op=made, reads=(), writes=(op.output,), dtype=DType.FLOAT32, sites=sites)

    def _rotary(self, op: ops.Rotary) -> EmittedOp:
        frequencies, attention_scaling = inverse_frequencies(op.size, op.base, op.scaling)
        kind, base, factor, original = RopeKind.STATIC, 1.0, 1.0, 0
        name, long_frequencies = "inverse_frequencies", None
        if name in self.weights.vectors:
            name = f"{op.scope}.{name}"
        if isinstance(op.scaling, LongRopeScaling):
            kind, original = RopeKind.LONG, op.scaling.original_max_position_embeddings
            frequencies_of_long = long_inverse_frequencies(op.size, op.base, op.scaling)
            long_frequencies = self.weights.constant(f"long_{name}", frequencies_of_long)
        if isinstance(op.scaling, DynamicScaling):
            kind, original = RopeKind.DYNAMIC, op.max_position_embeddings
            base, factor = _float32(op.base), _float32(op.scaling.factor)
        made = RopeTableOp(
            kind=kind,
            inverse_frequencies=self.weights.constant(name, frequencies),
            attention_scaling=_float32(attention_scaling),
            base=base,
            factor=factor,
            original_max_position=original,
            cosine=_buffer(op.output.cosine),
            sine=_buffer(op.output.sine),
            long_inverse_frequencies=long_frequencies,
        )
        return EmittedOp(op=made, reads=(), writes=(op.output.cosine, op.output.sine), dtype=DType.FLOAT32)

    def _rms_norm(self, op: ops.RmsNorm) -> EmittedOp:
        made = RmsNormOp(
            input=_buffer(op.input),
            output=_buffer(op.output),
            weight=self.weights.norm(op.weight),
            epsilon=_float32(op.epsilon),
            gather_logit_rows=op.gather_logit_rows,
            add=op.add_to is not None,
        )
        return EmittedOp(
            op=made,
            reads=(op.input,) if op.add_to is None else (op.input, op.add_to),
            writes=(op.output,),
            dtype=self._activation if op.add_to is None else DType.FLOAT32,
            in_place=op.add_to,
        )

    def _layer_norm(self, op: ops.LayerNorm) -> EmittedOp:
        first_site, sites = self._sites(op)
        made = LayerNormOp(
            input=_buffer(op.input),
            output=_buffer(op.output),
            weight=self.weights.norm(op.weight),
            bias=None if op.bias is None else self.weights.norm(op.bias),
            epsilon=_float32(op.epsilon),
            gather_logit_rows=op.gather_logit_rows,
            lora_site=first_site,
        )
        dtype = DType.FLOAT32 if op.is_stream else self._activation
        return EmittedOp(op=made, reads=(op.input,), writes=(op.output,), dtype=dtype, sites=sites)

    def _cast(self, op: ops.Cast) -> EmittedOp:
        made = CastOp(input=_buffer(op.input), output=_buffer(op.output))
        return EmittedOp(op=made, reads=(op.input,), writes=(op.output,), dtype=self._activation)

    def _attention(self, op: ops.Attention) -> EmittedOp:
        norms = [norm for norm in (op.query_norm, op.key_norm) if norm is not None]
        if len({norm.epsilon for norm in norms}) > 1:
            raise ValueError(f"the norms of q and k differ in epsilon: {norms[0].epsilon} and {norms[1].epsilon}")
        bias = op.position_bias
        made = AttentionOp(
            kind=op.kind,
            layer=op.layer,
            shape=op.shape,
            qkv=_buffer(op.qkv),
            cosine=_buffer(op.rotary.cosine),
            sine=_buffer(op.rotary.sine),
            output=_buffer(op.output),
            query_norm=self._head_norm(op.query_norm),
            key_norm=self._head_norm(op.key_norm),
            norm_epsilon=_float32(norms[0].epsilon) if norms else 0.0,
            scale=_float32(op.scale),
            sliding_window=op.window or 0,
            softcap=_float32(op.softcap or 0.0),
            interleaved=op.interleaved,
            position_bias=None if bias is None else self.weights.by_distance(bias.table, bias.buckets, bias.heads),
            sinks=None if op.sinks is None else self.weights.norm(op.sinks.scores, op.sinks.heads),
        )
        reads = (op.qkv, op.rotary.cosine, op.rotary.sine)
        return EmittedOp(op=made, reads=reads, writes=(op.output,), dtype=self._activation)

    def _cross_keys(self, op: ops.CrossKeys) -> EmittedOp:
        made = CrossKeysOp(layer=op.layer, shape=op.shape, kv=_buffer(op.kv))
        return EmittedOp(op=made, reads=(op.kv,), writes=(), dtype=DType.FLOAT32)

    def _cross_attention(self, op: ops.CrossAttention) -> EmittedOp:
        made = CrossAttentionOp(
            layer=op.layer,
            shape=op.shape,
            q=_buffer(op.q),
            output=_buffer(op.output),
            scale=_float32(op.scale),
        )
        return EmittedOp(op=made, reads=(op.q,), writes=(op.output,), dtype=self._activation)

    def _all_reduce(self, op: ops.AllReduce) -> EmittedOp:
        made = AllReduceOp(input=_buffer(op.input), output=_buffer(op.output), add=op.add_to is not None)
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
            qkv=_buffer(op.output),
            query_norm=self.weights.norm(op.query_norm.weight, op.queries),
            key_norm=self.weights.norm(op.key_norm.weight, op.keys),
            whole_query_size=op.query_norm.weight.shape[0],
            whole_key_size=op.key_norm.weight.shape[0],
            counts_keys=op.counts_keys,
            epsilon=_float32(epsilon),
        )
        return EmittedOp(op=made, reads=(op.input,), writes=(op.output,), dtype=DType.FLOAT32, in_place=op.input)

    def _gather(self, op: ops.Gather) -> EmittedOp:
        made = GatherOp(input=_buffer(op.input), output=_buffer(op.output))
        return EmittedOp(op=made, reads=(op.input,), writes=(op.output,), dtype=DType.FLOAT32)

    def _broadcast(self, op: ops.Broadcast) -> EmittedOp:
        made = BroadcastOp(buffer=_buffer(op.value))
        dtype = DType.FLOAT32 if op.is_stream else self._activation
        here, elsewhere = ((op.value,), ()) if op.is_made_here else ((), (op.value,))
        return EmittedOp(op=made, reads=here, writes=elsewhere, dtype=dtype)

    def _head_norm(self, norm: HeadNorm | None) -> Vector | None:
        return None if norm is None else self.weights.norm(norm.weight)

    def _linear(self, op: ops.Linear) -> EmittedOp:
        first_site, sites = self._sites(op)
        can_be_sparse = self._sparse_mlp and all(map(self.weights.is_plain, op.weights))
        neurons = self._neuron_table(op)
        made = LinearOp(
            input=_buffer(op.input),
            output=_buffer(op.output),
            epilogue=_epilogue(op),
            parts=self._sparse_parts(op)
            if can_be_sparse and neurons is None
            else self._parts(op.weights, op.output.rows),
            lora_site=first_site,
            scale=_float32(op.scale),
            softcap=_float32(op.softcap or 0.0),
            threshold=_float32(op.gate_threshold),
            has_sparse_input=can_be_sparse and op.input.name in self._sparse_values,
            scores=None if op.scores is None else _buffer(op.scores.value),
            least_score=0.0 if op.scores is None else _float32(op.scores.least),
            neurons=neurons,
        )
        if op.activation is not None and op.activation.leaves_zeros:
            self._sparse_values.add(op.output.name)
        output = op.output
        if self._logits is not None and output.name == self._logits.name:
            output = self._logits
        others = (op.add_to, None if op.scores is None else op.scores.value)
        return EmittedOp(
            op=made,
            reads=(op.input, *(value for value in others if value is not None)),
            writes=(output,),
            dtype=DType.FLOAT32 if op.activation is None else self._activation,
            sites=sites,
            in_place=op.add_to,
        )

    def _experts(self, op: ops.Experts) -> EmittedOp:
        first_site, sites = self._sites(op)
        routing = op.routing
        made = ExpertsOp(
            input=_buffer(op.input),
            router_logits=_buffer(op.router_logits),
            output=_buffer(op.output),
            routing=Routing(
                scores=routing.scores,
                top_k=routing.top_k,
                num_groups=routing.num_groups,
                groups_taken=routing.groups_taken,
                normalised=routing.normalised,
                scale=_float32(routing.scale),
                bias=None if routing.bias is None else self.weights.norm(routing.bias),
            ),
            activation=_GATED[op.activation],
            gate_up=self._parts(
                (weight for pair in zip(op.gate, op.up, strict=True) for weight in pair), RowKind.TOKENS
            ),
            down=self._parts(op.down, RowKind.TOKENS),
            gate_up_site=first_site,
            down_site=-1 if first_site < 0 else first_site + len(op.gate),
            stores=op.add_to is None,
            first_expert=op.first_expert,
            experts_elsewhere=op.experts_elsewhere,
        )
        inputs = (op.input, op.router_logits)
        return EmittedOp(
            op=made,
            reads=inputs if op.add_to is None else (*inputs, op.add_to),
            writes=(op.output,),
            dtype=DType.FLOAT32,
            sites=sites,
            in_place=op.add_to,
        )

    def _gated_add(self, op: ops.GatedAdd) -> EmittedOp:
        made = GatedAddOp(input=_buffer(op.input), gate=_buffer(op.gate), output=_buffer(op.output))
        reads = (op.input, op.gate, op.add_to)
        return EmittedOp(op=made, reads=reads, writes=(op.output,), dtype=DType.FLOAT32, in_place=op.add_to)

    def _parts(self, weights: Iterable[LinearWeight], rows: RowKind) -> tuple[LinearPart, ...]:
        parts: list[LinearPart] = []
        for weight in weights:
            first = 0
            for number, part in enumerate(weight.parts):
                last = first + part.outputs
                bias = self.weights.vector(weight.bias_name, first, last, weight.outputs) if weight.bias else None
                parts.append(LinearPart(weight=self.weights.matrix(weight, number, first, last, rows), bias=bias))
                first = last
        return tuple(parts)

    def _neuron_table(self, op: ops.Linear) -> NeuronTable | None:
        """That of an MLP which an op is half of, if it can have one."""
        gated, down = self._neurons.get(op.output.name, self._neurons.get(op.input.name, (None, None)))
        if gated is None or down is None or op not in (gated, down):
            return None
        weights = (*gated.weights, *down.weights)
        (count, size) = (gated.weights[1].outputs, gated.weights[1].inputs)
        if not all(map(self.weights.is_plain, weights)) or not can_have_neurons(self._dtype, count, size):
            return None
        return self.weights.neuron_table(gated.weights[1], down.weights[0])

    def _sparse_parts(self, op: ops.Linear) -> tuple[LinearPart, ...]:
        """Those of _parts; what a ReLU gates has rows as well, and what has scores, and what reads a ReLU has
        columns, where that is possible."""
        parts: tuple[LinearPart, ...] = ()
        for number, weight in enumerate(op.weights):
            matrix = self._matrix_stored_twice(op, number, weight)
            if matrix is None:
                parts += self._parts((weight,), op.output.rows)
                continue
            bias = self.weights.vector(weight.bias_name, 0, weight.outputs, weight.outputs) if weight.bias else None
            parts += (LinearPart(weight=matrix, bias=bias),)
        return parts

    def _matrix_stored_twice(self, op: ops.Linear, number: int, weight: LinearWeight) -> Matrix | None:
        sizes = (self._dtype, weight.outputs, weight.inputs)
        is_gated = number > 0 and op.activation is not None and op.activation.leaves_zeros
        if (is_gated or op.scores is not None) and can_have_rows(*sizes):
            return self.weights.matrix_with_rows(weight)
        reads_zeros = op.input.name in self._sparse_values and op.activation is None
        is_one = len(op.weights) == len(weight.parts) == 1
        if self._stores_columns and reads_zeros and is_one and can_have_columns(*sizes):
            return self.weights.matrix_with_columns(weight)
        return None

    def _sites(self, op: ops.Op) -> tuple[int, tuple[LoraSite, ...]]:
        """The sites of an op and the number of the first; -1 and none where adapters do not act."""
        sites = lora_sites(op, fully_sharded=self._fully_sharded) if self._lora else ()
        first = self._num_sites
        self._num_sites += len(sites)
        return (first, sites) if sites else (-1, ())


def _neuron_pairs(network: Network) -> dict[str, tuple[ops.Linear, ops.Linear]]:
    """By the value between them: decoder layers that a ReLU gates without scores, and the one layer that reads each."""
    linears = [op for op in network.ops if isinstance(op, ops.Linear) and op.output.rows is RowKind.TOKENS]
    pairs = {}
    for gated in linears:
        is_gated = len(gated.weights) == 2 and gated.activation is not None and gated.activation.leaves_zeros
        readers = [op for op in linears if op.input.name == gated.output.name]
        if is_gated and gated.scores is None and len(readers) == 1 and len(readers[0].weights) == 1:
            pairs[gated.output.name] = (gated, readers[0])
    return pairs


def lora_sites(op: ops.Op, *, fully_sharded: bool) -> tuple[LoraSite, ...]:
    """Where adapters act on an op; see emit()."""
    return tuple(
        LoraSite(
            layer=site.layer,
            in_size=site.in_size,
            parts=tuple(
                LoraPart(
                    module=module_id(part),
                    out_size=site.outputs_of(part),
                    first_output=part.first_output,
                    outputs_elsewhere=part.outputs_elsewhere,
                )
                for part in site.parts
            ),
            expert=site.expert,
            first_input=site.weights[0].first_input,
            inputs_elsewhere=site.weights[0].inputs_elsewhere,
            adds_shifts=site.weights[0].is_first_term,
            experts_for_each=site.experts_for_each,
            num_shares=site.weights[0].num_shares if fully_sharded else 1,
            share=site.weights[0].share if fully_sharded else 0,
        )
        for site in sites_of(op)
    )


def new_token_sites(network: Network, max_extra_tokens: int) -> tuple[LoraSite, ...]:
    """The site of what adapters have of tokens beyond the vocabulary: of lm_head, and of the embedding."""
    if max_extra_tokens == 0:
        return ()
    size = network.config.hidden_size
    part = LoraPart(module=_NEW_TOKENS, out_size=size, first_output=0, outputs_elsewhere=0)
    site = LoraSite(layer=0, in_size=size, parts=(part,), expert=0, first_input=0, inputs_elsewhere=0, adds_shifts=True)
    return (site,)


def _epilogue(op: ops.Linear) -> LinearEpilogue:
    if op.activation is not None:
        return (_GATED if len(op.weights) == 2 else _ACTIVATED)[op.activation]
    return LinearEpilogue.STORE if op.add_to is None else LinearEpilogue.ADD


def _buffer(value: Value) -> BufferName:
    """Every value is a buffer of the same name, until the values that take over others' places are renamed."""
    return BufferName(value.name)


def _float32(value: float) -> float:
    """As the engine keeps it."""
    return float(np.float32(value))
