"""The ops in which families declare their networks: inputs, outputs, and names of weights.

A network's ops determine everything else: a checkpoint's tensors (checkpoint_tensors.py), adapter sites
(adapter_sites.py), the native program (builder/compile/emit.py) and the ONNX graph (builder/network/onnx_graph.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..._core import AttentionKind, PoolingActivation
from ..checkpoint.activation import Activation
from ..checkpoint.rotary import ProportionalScaling, RotaryScaling
from .operands import (
    AttentionShape,
    DeltaShape,
    GateScores,
    HeadNorm,
    LatentShape,
    PositionBias,
    QueryScaling,
    RotaryTable,
    Routing,
    ScanShape,
    Sinks,
    Value,
)
from .weights import LinearWeight, Tensor


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """output = table[token] * scale + types[type of token] + positions[position]."""

    scope: str
    output: Value
    table: Tensor
    scale: float
    inputs_embeds_scale: float
    """Factor by which the Hugging Face model multiplies embeddings that it gets in place of tokens."""
    positions: Tensor | None
    """Table of learned positions."""
    types: Tensor | None
    """Table of token types."""
    as_linear: LinearWeight | None
    """The table as the weight [hidden_size, vocab_size] of a linear layer, with one input per token.

    None if adapters do not act on it: an encoder and a decoder share it.
    """
    num_later_elements: int = 0
    """Rows that are given in place of tokens have so many elements after the first hidden_size: see AddGivenColumns."""
    num_coordinates: int = 0
    """These rows end with so many coordinates. The last one is the rotary position of a text token after the row."""


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Angles position * inverse frequency, for the pairs of a head's first `size` elements."""

    scope: str
    output: RotaryTable
    size: int
    base: float
    scaling: RotaryScaling | ProportionalScaling | None
    max_position_embeddings: int
    columns: tuple[int, ...] = ()
    """For rows that are given in place of tokens: the column with the position of each pair; (): the token's own."""
    is_twice: bool = False
    """True: the frequencies are those of size / 2 elements, twice."""
    is_in_turn: bool = False
    """True: the first half of the pairs has the frequencies of even pairs, the second half those of odd pairs."""


@dataclass(frozen=True, kw_only=True)
class RmsNorm:
    """output = x / sqrt(mean(x^2) + epsilon) * weight; with `add_to` the result is added to that value."""

    scope: str
    input: Value
    output: Value
    weight: Tensor
    """[width], or [elements of a group]: each group of the row then has its own mean and the same weight."""
    epsilon: float
    gather_logit_rows: bool
    """True if the output has a row for each row of logits, computed from that row of the input."""
    add_to: Value | None
    is_stream: bool = False
    """True if the output is a residual stream, in float32 whatever linear layers read."""
    sum_scale: Tensor | float | None = None
    """Factor of the sum, if the result is added; a tensor has one element."""


@dataclass(frozen=True, kw_only=True)
class LayerNorm:
    """output = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias."""

    scope: str
    input: Value
    output: Value
    weight: Tensor | None
    """None: ones."""
    bias: Tensor | None
    epsilon: float
    gather_logit_rows: bool
    is_stream: bool
    """True if the output is a residual stream, in float32 whatever linear layers read."""
    number: int | None
    """Number among the norms with biases that adapters can shift, in the order of execution; None for other norms."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """output = x times a factor for each column, in float32 if the output is a stream."""

    scope: str
    input: Value
    output: Value
    factors: tuple[tuple[int, float], ...]
    """Numbers of neighbouring columns, with their factor."""
    gather_logit_rows: bool
    """True if the output has a row for each row of logits."""
    is_stream: bool


@dataclass(frozen=True, kw_only=True)
class Cast:
    """output = x in the dtype that linear layers read."""

    scope: str
    input: Value
    output: Value


@dataclass(frozen=True, kw_only=True)
class AddGivenColumns:
    """output = add_to + columns of the rows that are given in place of tokens; other rows stay as they are."""

    scope: str
    output: Value
    add_to: Value
    first_column: int


@dataclass(frozen=True, kw_only=True)
class JoinNeighbours:
    """output = the columns of `count` neighbouring rows of a sequence; each of them gets the same output."""

    scope: str
    input: Value
    output: Value
    count: int
    is_stream: bool
    """True if the input is in float32, False if it has the dtype that linear layers read."""


@dataclass(frozen=True, kw_only=True)
class JoinColumns:
    """output = the columns of all inputs, in the dtype that linear layers read, for the rows of logits."""

    scope: str
    inputs: tuple[Value, ...]
    output: Value


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention of one layer over [q | k | v]: causal with the layer's KV pool, or as its kind says.

    These are the first columns of `qkv`.
    """

    scope: str
    kind: AttentionKind
    layer: int
    qkv: Value
    rotary: RotaryTable
    output: Value
    shape: AttentionShape
    scale: float
    window: int | None
    """A token attends to itself and the window - 1 tokens before it; None: no limit.

    Without a causal mask, also to as many tokens after it.
    """
    query_norm: HeadNorm | None
    key_norm: HeadNorm | None
    softcap: float | None
    """Scores s become softcap * tanh(s / softcap)."""
    interleaved: bool
    """True rotates elements 2 i and 2 i + 1 of a head together, False those of its two halves."""
    position_bias: PositionBias | None
    sinks: Sinks | None
    norms_after_rotation: bool = False
    """True if the norms of each head come after its rotation."""
    query_scaling: QueryScaling | None = None
    normalizes_values: bool = False
    """True if each head of v has an RMS norm without a weight, with the epsilon of the query's norm."""
    values_from_keys: bool = False
    """True if v is k before its norm and its rotation; `qkv` is [q | k]."""
    shared_layer: int | None = None
    """An earlier layer whose keys and values are used; `qkv` is q."""
    window_column: int | None = None
    """For rows that are given in place of tokens: the column with the number of the row's window.

    Rows attend only to their window, a run of neighbours with equal numbers. None: there are no windows.
    """
    joint_column: int | None = None
    """For rows that are given in place of tokens, and causal attention: the column with a number.

    Neighbours with equal numbers attend to each other in both directions. None: there are none.
    """
    chunk: int | None = None
    """Sequences consist of chunks of so many positions, and tokens attend only to their own. None: no chunks."""
    plain_norm_epsilon: float | None = None
    """Epsilon of an RMS norm of each head of q and k that has no weight; None: there is no such norm."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """y = (input W^T + bias) * scale, with the outputs of the weights concatenated.

    With `softcap`, y becomes softcap * tanh(y / softcap). With `activation`, output = activation(y); for two weights of
    the same width, output = activation(first) * second, and only the first is multiplied by `scale`. With `add_to`, y
    is added to that value in place.
    """

    scope: str
    input: Value
    output: Value
    weights: tuple[LinearWeight, ...]
    layer: int | None
    """None for lm_head."""
    activation: Activation | None
    threshold: float
    """For a gated layer's ReLU: gates up to this value count as 0."""
    add_to: Value | None
    scale: float
    softcap: float | None
    scores: GateScores | None = None
    """For a gated layer's ReLU."""

    @property
    def gate_threshold(self) -> float:
        """The threshold. Raises ValueError if there is one without a ReLU gate."""
        has_gate = len(self.weights) == 2 and self.activation is not None and self.activation.leaves_zeros
        if self.threshold != 0.0 and not has_gate:
            raise ValueError(f"threshold is {self.threshold}; expected 0 without a ReLU gate")
        return self.threshold


@dataclass(frozen=True, kw_only=True)
class Experts:
    """output = add_to + the sum over a token's experts of their weights times down(activation(gate(x)) * up(x)).

    `gate`, `up` and `down` have a weight for each expert on this rank: all, or a rank's share.
    """

    scope: str
    layer: int
    input: Value
    router_logits: Value
    output: Value
    add_to: Value | None
    """None: the output is only the sum, as one rank's term."""
    routing: Routing
    activation: Activation
    gate: tuple[LinearWeight, ...]
    up: tuple[LinearWeight, ...]
    down: tuple[LinearWeight, ...]
    first_expert: int = 0
    """Index of the first expert on this rank."""
    num_remote_experts: int = 0
    """Number of experts on other ranks."""


@dataclass(frozen=True, kw_only=True)
class GatedAdd:
    """output = add_to + sigmoid(gate) * input; `gate` has one number per row."""

    scope: str
    input: Value
    gate: Value
    output: Value
    add_to: Value


@dataclass(frozen=True, kw_only=True)
class GatedColumns:
    """output = activation(gate) * the columns of `values` from `first_column` on, as many as the gate has."""

    scope: str
    gate: Value
    values: Value
    first_column: int
    output: Value
    activation: Activation


@dataclass(frozen=True, kw_only=True)
class Xielu:
    """output = xIELU(x): the parameters [alpha_p, alpha_n, beta, epsilon] are those of transformers."""

    scope: str
    input: Value
    output: Value
    parameters: Tensor
    """[4]."""


@dataclass(frozen=True, kw_only=True)
class SigmoidGate:
    """output = sigmoid(gate) * input, which it overwrites; the last columns of `gate` count."""

    scope: str
    input: Value
    gate: Value
    output: Value


@dataclass(frozen=True, kw_only=True)
class SiluGate:
    """output = silu(gate) * input; the last columns of `gate` count."""

    scope: str
    input: Value
    gate: Value
    output: Value


@dataclass(frozen=True, kw_only=True)
class GatedRmsNorm:
    """output = x / sqrt(mean(x^2) + epsilon) * weight * silu(gate), with the mean over each group of a head.

    The last columns of `gate` count. With `gate_first`, x is multiplied by silu(gate) before its norm instead.
    """

    scope: str
    input: Value
    gate: Value
    output: Value
    weight: Tensor
    """[elements of a head]."""
    epsilon: float
    gate_first: bool = False
    num_groups: int = 1
    """Number of equal groups that a head consists of."""
    elements: range | None = None
    """Elements of the weight on this rank; None: all."""
    group_ranks: int = 1
    """Number of consecutive ranks that have equal shares of a group."""


@dataclass(frozen=True, kw_only=True)
class CausalConvolution:
    """output = silu(bias + the sum over taps i of weight[:, i] * the input of taps - 1 - i tokens before).

    The first columns of the input are replaced. A sequence's state has the inputs of its last taps - 1 tokens.
    """

    scope: str
    layer: int
    input: Value
    output: Value
    weight: Tensor
    """[columns, 1, taps]."""
    bias: Tensor | None = None
    """[columns]."""
    columns: tuple[range, ...] | None = None
    """Columns of the weight on this rank; None: all."""


@dataclass(frozen=True, kw_only=True)
class GatedConvolution:
    """output = c * (bias + the sum over taps i of weight[:, i] * (b * x) of taps - 1 - i tokens before).

    The input is [b | c | x]. A sequence's state has b * x of its last taps - 1 tokens.
    """

    scope: str
    layer: int
    input: Value
    output: Value
    weight: Tensor
    """[columns, 1, taps]."""
    bias: Tensor | None
    """[columns]."""
    columns: tuple[range, ...] | None = None
    """Columns of the weight on this rank; None: all."""


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """The gated delta rule, with a state [value heads, key_dim, value_dim] per sequence.

    For each token and value head, with q and k divided by their L2 norms, and q by sqrt(key_dim):
    state = decay * state + k^T ((v - decay * k state) * update_scale * sigmoid(b)), output = q state.
    The decay is exp(-exp(log_decay) * softplus(a + time_bias)).
    """

    scope: str
    layer: int
    qkv: Value
    """Its first columns are [q | k | v]; q and k are overwritten."""
    gates: Value
    """[b | a], which are overwritten."""
    output: Value
    shape: DeltaShape
    log_decay: Tensor
    """[value heads]."""
    time_bias: Tensor
    """[value heads]."""
    update_scale: float = 1.0
    heads: range | None = None
    """Value heads of the vectors on this rank; None: all."""


@dataclass(frozen=True, kw_only=True)
class SelectiveScan:
    """Mamba 2's selective scan, with a state [heads, state_dim, head_dim] per sequence.

    For each token and head, with t = softplus(dt + time_bias) within the time limits:
    state = exp(-exp(log_decay) t) * state + B^T (x t), output = C state + skip * x.
    """

    scope: str
    layer: int
    values: Value
    """Its first columns are [x | B | C | dt]; dt is overwritten."""
    output: Value
    shape: ScanShape
    log_decay: Tensor
    """[heads]."""
    time_bias: Tensor
    """[heads]."""
    skip: Tensor
    """[heads]."""
    time_min: float
    time_max: float
    heads: range | None = None
    """Heads of the vectors on this rank; None: all."""


@dataclass(frozen=True, kw_only=True)
class LatentQueries:
    """output = [q | k] for an attention whose values are its keys.

    A head of q is [the rotated elements of its query | keys times the others]. k is [the rotated elements of the
    compressed row | an RMS norm of the others].
    """

    scope: str
    layer: int
    queries: Value
    """[plain | rotated] of each head."""
    rows: Value
    """[compressed row | rotated]."""
    output: Value
    shape: LatentShape
    norm: Tensor
    epsilon: float
    keys: tuple[LinearWeight, ...]
    """[latent_dim, plain_dim] of each head on this rank: all, or a rank's share."""
    first_head: int = 0
    """Index of the first head on this rank."""
    num_remote_heads: int = 0
    """Number of heads on other ranks."""


@dataclass(frozen=True, kw_only=True)
class LatentValues:
    """output = each head's values times the compressed rows that it attended to, [rotated | latent] in the input."""

    scope: str
    layer: int
    input: Value
    output: Value
    shape: LatentShape
    values: tuple[LinearWeight, ...]
    """[value_dim, latent_dim] of each head on this rank."""
    first_head: int = 0
    num_remote_heads: int = 0


@dataclass(frozen=True, kw_only=True)
class CrossKeys:
    """Stores [k | v] of whole encoder inputs for the cross attention of a decoder layer."""

    scope: str
    layer: int
    kv: Value
    shape: AttentionShape


@dataclass(frozen=True, kw_only=True)
class CrossAttention:
    """Attention of the decoder's rows to all of their sequence's encoder input, with the [k | v] of CrossKeys."""

    scope: str
    layer: int
    q: Value
    output: Value
    shape: AttentionShape
    scale: float


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """output = add_to + the sum of all ranks' inputs, in the order of the ranks."""

    scope: str
    input: Value
    output: Value
    add_to: Value | None


@dataclass(frozen=True, kw_only=True)
class AllHeadsNorm:
    """output = [q | k | v], with q and k normalised over all heads together; each rank has some of the heads.

    The output overwrites the input. Ranks exchange sums of squares.
    """

    scope: str
    input: Value
    output: Value
    query_norm: HeadNorm
    """Norm of all heads."""
    key_norm: HeadNorm
    queries: range
    """Elements of the whole q that are on this rank."""
    keys: range
    counts_keys: bool
    """False if an earlier rank has the same heads of k."""


@dataclass(frozen=True, kw_only=True)
class Gather:
    """output = the inputs of all ranks, concatenated on rank 0 and cut to its width."""

    scope: str
    input: Value
    output: Value


@dataclass(frozen=True, kw_only=True)
class Receive:
    """output = the value that the previous pipeline stage sent."""

    scope: str
    output: Value


@dataclass(frozen=True, kw_only=True)
class Send:
    """Sends the input to the next pipeline stage."""

    scope: str
    input: Value


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """Sends the value, which is the encoder's output, from the last pipeline stage to all stages."""

    scope: str
    value: Value
    is_stream: bool
    """True if it is a residual stream, in float32 whatever linear layers read."""
    is_made_here: bool
    """True on the last stage."""


Op = (
    Embedding
    | Rotary
    | RmsNorm
    | LayerNorm
    | Scale
    | Cast
    | AddGivenColumns
    | JoinNeighbours
    | JoinColumns
    | Attention
    | Linear
    | Experts
    | GatedAdd
    | GatedColumns
    | SigmoidGate
    | SiluGate
    | GatedRmsNorm
    | CausalConvolution
    | GatedConvolution
    | GatedDelta
    | SelectiveScan
    | Xielu
    | LatentQueries
    | LatentValues
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
    """Layer on pooled hidden states, in float32: activation(x weight^T + bias), then a layer norm."""

    weight: Tensor
    bias: Tensor | None = None
    activation: PoolingActivation = PoolingActivation.NONE
    norm: Tensor | None = None
    """Weight of the layer norm after the activation."""
    norm_bias: Tensor | None = None
    epsilon: float = 0.0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the layer."""
        found = (self.weight, self.bias, self.norm, self.norm_bias)
        return tuple(tensor for tensor in found if tensor is not None)


@dataclass(frozen=True, kw_only=True)
class PatchEmbedding:
    """Makes the rows of an image's patches, in float32: pixels weight^T + bias + positions[position]."""

    weight: Tensor
    """[hidden_size, channels, patch_size, patch_size]."""
    bias: Tensor | None
    """[hidden_size]."""
    positions: Tensor | None
    """[positions of the trained size, hidden_size]."""
    first: Tensor | None = None
    """[hidden_size]: a row before those of the patches, which has the first position."""
    pooled_norm: Tensor | None = None
    """[hidden_size]: weight of an RMS norm after the tower, of the mean of neighbouring rows."""
    pooled_projection: Tensor | None = None
    """[hidden_size, hidden size of the language model]: the matrix after this norm."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the layer."""
        found = (
            self.weight,
            self.bias,
            self.positions,
            self.first,
            self.pooled_norm,
            self.pooled_projection,
        )
        return tuple(tensor for tensor in found if tensor is not None)
