"""Emits linear layers, experts included, and chooses how the weights of sparse layers are stored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..._core import (
    DType,
    LinearEpilogue,
    RowKind,
    can_have_columns,
    can_have_neurons,
    can_have_rows,
)
from ...formats.checkpoint.activation import Activation
from ...formats.engine.plan import ExpertsOp, LinearOp, LinearPart, Matrix, NeuronTable, Routing
from ...formats.network.network import Network
from ...formats.network.operands import Value
from ...formats.network.ops import (
    CausalConvolution,
    Experts,
    GatedAdd,
    GatedConvolution,
    GatedDelta,
    GatedRmsNorm,
    Linear,
    Op,
    RmsNorm,
    Scale,
    SelectiveScan,
    SiluGate,
)
from ...formats.network.weights import LinearWeight
from .emitted import EmittedOp, Weights, as_float32, buffer_of
from .lora_sites import SiteNumbers
from .storage import Storage

GATED_EPILOGUES: Final = {
    Activation.SILU: LinearEpilogue.SILU_MUL,
    Activation.GELU: LinearEpilogue.GELU_MUL,
    Activation.GELU_TANH: LinearEpilogue.GELU_TANH_MUL,
    Activation.RELU: LinearEpilogue.RELU_MUL,
    Activation.RELU_BOTH: LinearEpilogue.RELU_MUL_RELU,
    Activation.CLAMPED_SILU: LinearEpilogue.CLAMPED_SILU_MUL,
}
"""Epilogues of gated layers and of experts."""
MOST_NEURONS: Final = 131072
"""Maximum number of neurons of an MLP whose kernels list the active ones, on backend cuda."""
# Epilogues of layers without a gate.
_ACTIVATED: Final = {
    Activation.GELU: LinearEpilogue.GELU,
    Activation.GELU_TANH: LinearEpilogue.GELU_TANH,
    Activation.RELU: LinearEpilogue.RELU,
    Activation.RELU_SQUARED: LinearEpilogue.RELU_SQUARED,
}


def exact_outputs(network: Network) -> set[str]:
    """Names of the values, besides logits, that linear layers store as float32 whatever the engine's type is: other
    experts would be chosen by rounded values, gates have one value per row, norms read streams unless they are added to
    one, and states add up what they are given.
    """
    stored = {op.output.name for op in network.ops if isinstance(op, Linear) and op.add_to is None}
    return stored & {value.name for op in network.ops for value in _exact_inputs(op)}


def _exact_inputs(op: Op) -> tuple[Value, ...]:
    match op:
        case Experts():
            return (op.router_logits,)
        case GatedAdd() | GatedRmsNorm():
            return (op.gate,)
        case RmsNorm():
            return (op.input,) if op.add_to is None else ()
        case Scale():
            return (op.input,)
        case SiluGate():
            return (op.input, op.gate)
        case CausalConvolution() | GatedConvolution():
            return (op.input,)
        case GatedDelta():
            return (op.qkv, op.gates)
        case SelectiveScan():
            return (op.values,)
    return ()


class LinearEmitter:
    """Emits ops for a network's linear layers, in execution order."""

    def __init__(
        self,
        network: Network,
        storage: Storage,
        weights: Weights,
        sites: SiteNumbers,
        logits: Value | None,
        *,
        sparse_mlp: bool,
        neurons: bool,
    ) -> None:
        """`logits` are the network's logits, with room for tokens beyond the vocabulary. See emit() for the rest."""
        self._weights = weights
        self._sites = sites
        self._logits = logits
        self._dtype = network.config.dtype
        self._activation = storage.activation_type(self._dtype)
        self._stored = storage.stored_type(self._dtype)
        self._exact = exact_outputs(network)
        self._sparse_mlp = sparse_mlp
        self._sparse_values: set[str] = set()
        self._neurons = _neuron_pairs(network) if neurons and sparse_mlp and storage.has_copies else {}
        self._stores_copies = storage.has_copies
        self._whole_pairs = sparse_pairs(network)
        # A layer that is streamed from the file is read whole; a copy in columns would only add to the bytes read.
        self._stores_columns = not neurons

    def linear(self, op: Linear) -> EmittedOp:
        """Emits a linear layer. The output of an lm_head is wider than its weight if adapters may add tokens."""
        first_site, sites = self._sites.of(op)
        can_be_sparse = self._sparse_mlp and all(map(self._weights.is_plain, op.weights))
        neurons = self._neuron_table(op)
        made = LinearOp(
            input=buffer_of(op.input),
            output=buffer_of(op.output),
            epilogue=_epilogue(op),
            parts=self._sparse_parts(op)
            if can_be_sparse and neurons is None and self._stores_copies
            else self.parts(op.weights, op.output.rows),
            lora_site=first_site,
            scale=as_float32(op.scale),
            softcap=as_float32(op.softcap or 0.0),
            threshold=as_float32(op.gate_threshold),
            has_sparse_input=can_be_sparse and self._has_sparse_input(op),
            scores=None if op.scores is None else buffer_of(op.scores.value),
            least_score=0.0 if op.scores is None else as_float32(op.scores.least),
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
            dtype=self._output_type(op, output),
            sites=sites,
            in_place=op.add_to,
        )

    def _has_sparse_input(self, op: Linear) -> bool:
        if not self._stores_copies:
            gated, down = self._whole_pairs.get(op.input.name, (None, None))
            return gated is not None and op is down and all(map(self._weights.is_plain, gated.weights))
        return op.input.name in self._sparse_values

    def _output_type(self, op: Linear, output: Value) -> DType:
        if op.activation is not None:
            return self._activation
        is_exact = op.add_to is not None or output == self._logits or output.name in self._exact
        return DType.FLOAT32 if is_exact else self._stored

    def experts(self, op: Experts) -> EmittedOp:
        """Emits a layer's experts and their routing."""
        first_site, sites = self._sites.of(op)
        routing = op.routing
        made = ExpertsOp(
            input=buffer_of(op.input),
            router_logits=buffer_of(op.router_logits),
            output=buffer_of(op.output),
            routing=Routing(
                scores=routing.scores,
                top_k=routing.top_k,
                num_groups=routing.num_groups,
                topk_groups=routing.topk_groups,
                norm_topk_prob=routing.norm_topk_prob,
                rates_groups_by_best=routing.rates_groups_by_best,
                scale=as_float32(routing.scale),
                bias=None if routing.bias is None else self._weights.norm(routing.bias),
                expert_scale=None if routing.expert_scale is None else self._weights.norm(routing.expert_scale),
                scales_inputs=routing.scales_inputs,
            ),
            activation=GATED_EPILOGUES[op.activation],
            gate_up=self.parts(
                (weight for pair in zip(op.gate, op.up, strict=True) for weight in pair), RowKind.TOKENS
            ),
            down=self.parts(op.down, RowKind.TOKENS),
            gate_up_site=first_site,
            down_site=-1 if first_site < 0 else first_site + len(op.gate),
            stores=op.add_to is None,
            first_expert=op.first_expert,
            num_remote_experts=op.num_remote_experts,
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

    def parts(self, weights: Iterable[LinearWeight], rows: RowKind) -> tuple[LinearPart, ...]:
        """Returns the parts of linear layers, one after another."""
        parts: list[LinearPart] = []
        for weight in weights:
            first = 0
            for number, part in enumerate(weight.parts):
                last = first + part.outputs
                bias = self._weights.vector(weight.bias_name, first, last, weight.outputs) if weight.bias else None
                parts.append(LinearPart(weight=self._weights.matrix(weight, number, first, last, rows), bias=bias))
                first = last
        return tuple(parts)

    def _neuron_table(self, op: Linear) -> NeuronTable | None:
        """The neuron table of the MLP that `op` is half of; None: it cannot have one."""
        gated, down = self._neurons.get(op.output.name, self._neurons.get(op.input.name, (None, None)))
        if gated is None or down is None or op not in (gated, down):
            return None
        weights = (*gated.weights, *down.weights)
        (count, size) = (gated.weights[1].outputs, gated.weights[1].inputs)
        if not all(map(self._weights.is_plain, weights)) or not can_have_neurons(self._dtype, count, size):
            return None
        return self._weights.neuron_table(gated.weights[1], down.weights[0])

    def _sparse_parts(self, op: Linear) -> tuple[LinearPart, ...]:
        """Parts as in parts(). ReLU-gated layers and layers with scores also get rows, and layers that read a ReLU's
        output get columns, if possible."""
        parts: tuple[LinearPart, ...] = ()
        for number, weight in enumerate(op.weights):
            matrix = self._matrix_stored_twice(op, number, weight)
            if matrix is None:
                parts += self.parts((weight,), op.output.rows)
                continue
            bias = self._weights.vector(weight.bias_name, 0, weight.outputs, weight.outputs) if weight.bias else None
            parts += (LinearPart(weight=matrix, bias=bias),)
        return parts

    def _matrix_stored_twice(self, op: Linear, number: int, weight: LinearWeight) -> Matrix | None:
        sizes = (self._dtype, weight.outputs, weight.inputs)
        is_gated = number > 0 and op.activation is not None and op.activation.leaves_zeros
        if (is_gated or op.scores is not None) and can_have_rows(*sizes):
            return self._weights.matrix_with_rows(weight)
        reads_zeros = op.input.name in self._sparse_values and op.activation is None
        is_one = len(op.weights) == len(weight.parts) == 1
        if self._stores_columns and reads_zeros and is_one and can_have_columns(*sizes):
            return self._weights.matrix_with_columns(weight)
        return None


def _neuron_pairs(network: Network) -> dict[str, tuple[Linear, Linear]]:
    """Decoder MLPs that are ReLU-gated without scores, as pairs of layers, by the value between them. Only pairs whose
    value has one reader."""
    linears = [op for op in network.ops if isinstance(op, Linear) and op.output.rows is RowKind.TOKENS]
    pairs = {}
    for gated in linears:
        is_gated = len(gated.weights) == 2 and gated.activation is not None and gated.activation.leaves_zeros
        readers = [op for op in linears if op.input.name == gated.output.name]
        if is_gated and gated.scores is None and len(readers) == 1 and len(readers[0].weights) == 1:
            pairs[gated.output.name] = (gated, readers[0])
    return pairs


def sparse_pairs(network: Network) -> dict[str, tuple[Linear, Linear]]:
    """ReLU-gated MLPs whose neurons backend cuda can read one by one, as pairs of neighbouring layers, by the value
    between them.
    """
    return {
        name: (gated, down)
        for name, (gated, down) in _neuron_pairs(network).items()
        if gated.scale == 1.0
        and gated.weights[1].outputs <= MOST_NEURONS
        and not gated.softcap
        and all(len(weight.parts) == 1 for weight in (*gated.weights, *down.weights))
        and network.ops.index(down) == network.ops.index(gated) + 1
    }


def _epilogue(op: Linear) -> LinearEpilogue:
    """Returns the op's epilogue. Raises ValueError if there is none for its activation."""
    if op.activation is None:
        return LinearEpilogue.STORE if op.add_to is None else LinearEpilogue.ADD
    kind, epilogues = ("a gate", GATED_EPILOGUES) if len(op.weights) == 2 else ("no gate", _ACTIVATED)
    if op.activation not in epilogues:
        accepted = ", ".join(activation.value for activation in epilogues)
        raise ValueError(
            f"{op.scope}: activation of a layer with {kind} is {op.activation.value}; expected one of {accepted}"
        )
    return epilogues[op.activation]
