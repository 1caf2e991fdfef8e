"""What ops are given beside weights: values, activations, the shape of attention, the rules of routing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..._core import RouterScores, RowKind
from .weights import Tensor


@dataclass(frozen=True)
class Value:
    """What an op makes, a row a token or a row of logits."""

    name: str
    width: int
    rows: RowKind = RowKind.TOKENS


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines of a step's positions, half as wide as what is rotated."""

    cosine: Value
    sine: Value


class Activation(Enum):
    """Functions between the linear layers of an MLP."""

    SILU = "silu"
    GELU = "gelu"
    """x Phi(x)."""
    GELU_TANH = "gelu_tanh"
    """Its approximation by tanh."""
    RELU = "relu"
    RELU_BOTH = "relu_both"
    """Of gated layers: relu of the gate and of what it multiplies."""
    CLAMPED_SILU = "clamped_silu"
    """Of gated layers: g sigmoid(1.702 g) of the gate g up to 7, times one more than the other, which is kept from -7
    to 7."""

    @property
    def leaves_zeros(self) -> bool:
        """Whether it is zero for many inputs, not just for some."""
        return self in (Activation.RELU, Activation.RELU_BOTH)


@dataclass(frozen=True, kw_only=True)
class HeadNorm:
    """An RMS norm of each head of q or k before rotation, or of all heads together, by the weight's size."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class PositionBias:
    """Learned numbers that are added to scores, by the position of the key relative to the query's."""

    table: Tensor
    """[buckets, heads]."""
    buckets: tuple[int, ...]
    """Of the relative positions -r to r, an odd number of them; those beyond have the buckets of the ends."""
    heads: range
    """Those of the table that are here: all, or a rank's."""


@dataclass(frozen=True, kw_only=True)
class Sinks:
    """A learned score more for each head: it counts in the sum that probabilities are divided by, and has no value."""

    scores: Tensor
    """[heads] of the whole model."""
    heads: range
    """Those that are here."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The heads of one layer's attention."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int

    @property
    def query_size(self) -> int:
        """Width of q."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of k, and of v."""
        return self.num_key_value_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class GateScores:
    """What says of each gate of a row, before it is computed, whether it counts as closed: a score below `least`."""

    value: Value
    least: float


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a token's experts are chosen; adaptrt._core.Routing (cpp/include/adaptrt/engine/ops.h) has the rules."""

    scores: RouterScores
    top_k: int
    num_groups: int = 1
    groups_taken: int = 1
    normalised: bool
    scale: float = 1.0
    bias: Tensor | None = None
    """[experts], of the choice alone."""
