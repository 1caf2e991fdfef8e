"""The vocabulary in which families declare their networks: what each op reads, writes, and names of weights.

Everything that is known of a network follows from its ops: a checkpoint's tensors (checkpoint_tensors.py), where
adapters act (adapter_sites.py), the native program (builder/compile/emit.py) and the ONNX graph
(builder/network/onnx_graph.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..._core import AttentionKind, PoolingActivation
from ..checkpoint.rotary import RotaryScaling
from .operands import Activation, AttentionShape, GateScores, HeadNorm, PositionBias, RotaryTable, Routing, Sinks, Value
from .weights import LinearWeight, Tensor


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """output = table[token] * scale + types[type of token] + positions[position]."""

    scope: str
    output: Value
    table: Tensor
    scale: float
    inputs_embeds_scale: float
    """By which the Hugging Face model multiplies embeddings that it is given in place of tokens."""
    positions: Tensor | None
    """Of learned positions."""
    types: Tensor | None
    """Of kinds of tokens."""
    as_linear: LinearWeight | None
    """The table as the weight [hidden_size, vocab_size] of a linear layer, of which a token is one input; None where
    adapters do not act on it: where an encoder and a decoder have one."""


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """The angles position * inverse frequency of the pairs of a head's first `size` elements."""

    scope: str
    output: RotaryTable
    size: int
    base: float
    scaling: RotaryScaling | None
    max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class RmsNorm:
    """output = x / sqrt(mean(x^2) + epsilon) * weight; with `add_to` the result is added to that value."""

    scope: str
    input: Value
    output: Value
    weight: Tensor
    epsilon: float
    gather_logit_rows: bool
    """The output has a row for each row of logits, made of that row of the input."""
    add_to: Value | None


@dataclass(frozen=True, kw_only=True)
class LayerNorm:
    """output = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias."""

    scope: str
    input: Value
    output: Value
    weight: Tensor
    bias: Tensor | None
    epsilon: float
    gather_logit_rows: bool
    is_stream: bool
    """The output is a residual stream, in float32 whatever linear layers read."""
    number: int | None
    """Of the norms with biases that adapters can shift, in the order of execution; None where they do not act."""


@dataclass(frozen=True, kw_only=True)
class Cast:
    """output = x in the type that linear layers read."""

    scope: str
    input: Value
    output: Value


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention of one layer over [q | k | v], causal with the layer's KV pool or as its kind says."""

    scope: str
    kind: AttentionKind
    layer: int
    qkv: Value
    rotary: RotaryTable
    output: Value
    shape: AttentionShape
    scale: float
    window: int | None
    """A token sees itself and the window - 1 tokens before it, and as many behind it where it sees those; None: all of
    them."""
    query_norm: HeadNorm | None
    key_norm: HeadNorm | None
    softcap: float | None
    """Scores s become softcap * tanh(s / softcap)."""
    interleaved: bool
    """Elements 2 i and 2 i + 1 of a head turn together, not those of its two halves."""
    position_bias: PositionBias | None
    sinks: Sinks | None


@dataclass(frozen=True, kw_only=True)
class Linear:
    """y = (input W^T + bias) * scale, one weight's outputs after another's.

    With `softcap`, y becomes softcap * tanh(y / softcap). With `activation`, output = activation(y), and of two weights
    of one width activation(first) * second. With `add_to` y is added to that value, whose place the output takes.
    """

    scope: str
    input: Value
    output: Value
    weights: tuple[LinearWeight, ...]
    layer: int | None
    """None: lm_head's."""
    activation: Activation | None
    threshold: float
    """Of a gated layer's ReLU: what is not above it counts as 0."""
    add_to: Value | None
    scale: float
    softcap: float | None
    scores: GateScores | None = None
    """Of a gated layer's ReLU."""

    @property
    def gate_threshold(self) -> float:
        """The threshold. Raises ValueError for one of a layer without a ReLU's gate."""
        has_gate = len(self.weights) == 2 and self.activation is not None and self.activation.leaves_zeros
        if self.threshold != 0.0 and not has_gate:
            raise ValueError(f"threshold is {self.threshold} where no ReLU is a gate")
        return self.threshold


@dataclass(frozen=True, kw_only=True)
class Experts:
    """output = add_to + the sum over a token's experts of their weights times down(activation(gate(x)) * up(x)).

    `gate`, `up` and `down` have a weight for each expert that is here: all, or a rank's.
    """

    scope: str
    layer: int
    input: Value
    router_logits: Value
    output: Value
    add_to: Value | None
    """None: the output is the sum alone, a rank's term of one."""
    routing: Routing
    activation: Activation
    gate: tuple[LinearWeight, ...]
    up: tuple[LinearWeight, ...]
    down: tuple[LinearWeight, ...]
    first_expert: int = 0
    """The number of the first one that is here."""
    experts_elsewhere: int = 0
    """How many other ranks have."""


@dataclass(frozen=True, kw_only=True)
class GatedAdd:
    """output = add_to + sigmoid(gate) * input; `gate` is one number a row."""

    scope: str
    input: Value
    gate: Value
    output: Value
    add_to: Value


@dataclass(frozen=True, kw_only=True)
class CrossKeys:
    """Keeps [k | v] of whole encoder inputs for the cross attention of a decoder layer."""

    scope: str
    layer: int
    kv: Value
    shape: AttentionShape


@dataclass(frozen=True, kw_only=True)
class CrossAttention:
    """Attention of the decoder's rows to all of their sequence's encoder input, of which CrossKeys kept [k | v]."""

    scope: str
    layer: int
    q: Value
    output: Value
    shape: AttentionShape
    scale: float


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """output = add_to + the sum of the inputs that the ranks of a model have, in the order of the ranks."""

    scope: str
    input: Value
    output: Value
    add_to: Value | None


@dataclass(frozen=True, kw_only=True)
class AllHeadsNorm:
    """output = [q | k | v] with q and k normed by all of their heads together, of which each rank has some.

    It takes the input's place. Ranks exchange sums of squares.
    """

    scope: str
    input: Value
    output: Value
    query_norm: HeadNorm
    """Of all heads."""
    key_norm: HeadNorm
    queries: range
    """Which of the elements of all of q are here."""
    keys: range
    counts_keys: bool
    """False: a rank before this one has the same heads of k."""


@dataclass(frozen=True, kw_only=True)
class Gather:
    """output = the inputs that the ranks of a model have, side by side, on rank 0; what is beyond its width is left."""

    scope: str
    input: Value
    output: Value


@dataclass(frozen=True, kw_only=True)
class Receive:
    """output = what the stage of a pipeline before this one has sent."""

    scope: str
    output: Value


@dataclass(frozen=True, kw_only=True)
class Send:
    """The next stage of a pipeline receives the input."""

    scope: str
    input: Value


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """All stages of a pipeline get what the last one has of the value, which is the encoder's output."""

    scope: str
    value: Value
    is_stream: bool
    """It is a residual stream, in float32 whatever linear layers read."""
    is_made_here: bool
    """This is the last stage."""


Op = (
    Embedding
    | Rotary
    | RmsNorm
    | LayerNorm
    | Cast
    | Attention
    | Linear
    | Experts
    | GatedAdd
    | CrossKeys
    | CrossAttention
    | AllReduce
    | AllHeadsNorm
    | Gather
    | Receive
    | Send
    | Broadcast
)


@dataclass(frozen=True, kw_only=True)
class PoolingLayer:
    """What is done to pooled hidden states, in float32: activation(x weight^T + bias), then a layer norm."""

    weight: Tensor
    bias: Tensor | None = None
    activation: PoolingActivation = PoolingActivation.NONE
    norm: Tensor | None = None
    """Of a layer norm, last of all."""
    norm_bias: Tensor | None = None
    epsilon: float = 0.0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        found = (self.weight, self.bias, self.norm, self.norm_bias)
        return tuple(tensor for tensor in found if tensor is not None)
