"""Operands of ops other than weights: values, attention shapes, routing rules."""

from __future__ import annotations

from dataclasses import dataclass

from ..._core import RouterScores, RowKind
from .weights import Tensor


@dataclass(frozen=True)
class Value:
    """Output of an op, with a row per token or a row of logits."""

    name: str
    width: int
    rows: RowKind = RowKind.TOKENS


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines of a step's positions, half as wide as the rotated elements."""

    cosine: Value
    sine: Value


@dataclass(frozen=True, kw_only=True)
class HeadNorm:
    """An RMS norm of q or k: of each head or of all heads together, depending on the weight's size."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """Scores of a query at position p are multiplied by 1 + beta * ln(1 + floor((p + offset) / length))."""

    beta: float
    length: int
    offset: int = 0

    @property
    def first_position(self) -> int:
        """First position whose queries are scaled."""
        return self.length - self.offset


@dataclass(frozen=True, kw_only=True)
class PositionBias:
    """Learned numbers added to scores, by the position of the key relative to the query."""

    table: Tensor
    """[buckets, heads]."""
    buckets: tuple[int, ...]
    """Buckets of the relative positions -r to r, an odd number of them; farther positions use the first or last one."""
    heads: range
    """Heads of the table on this rank: all, or a rank's share."""


@dataclass(frozen=True, kw_only=True)
class Sinks:
    """A learned extra score per head: it counts in the softmax's sum, and has no value."""

    scores: Tensor
    """Scores [heads] of the whole model."""
    heads: range
    """Heads on this rank."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Heads of one layer's attention."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    values_are_keys: bool = False
    """True: the rotated keys of the only key-value head are also its values."""

    @property
    def query_size(self) -> int:
        """Width of q."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of k, and of v."""
        return self.num_key_value_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class DeltaShape:
    """Heads of one layer's gated delta rule. Consecutive value heads share a key head."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def key_size(self) -> int:
        """Width of q, and of k."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of v."""
        return self.num_value_heads * self.value_dim

    @property
    def sections(self) -> tuple[tuple[int, int], ...]:
        """Width and heads of q, of k and of v."""
        keys = (self.key_size, self.num_key_heads)
        return (keys, keys, (self.value_size, self.num_value_heads))


@dataclass(frozen=True, kw_only=True)
class ScanShape:
    """Heads of one layer's selective scan (Mamba 2). Consecutive heads share a group."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    """Elements of a row of B, and of C, in a group."""

    @property
    def value_size(self) -> int:
        """Width of x."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Width of B, and of C."""
        return self.num_groups * self.state_dim


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Sizes of one layer's latent attention. All heads share a token's key, a compressed row."""

    num_heads: int
    latent_dim: int
    """Elements of a compressed row."""
    rotary_dim: int
    """Elements of a key that are rotated."""
    plain_dim: int
    """Elements of a head's query that are not rotated."""
    value_dim: int
    """Elements of a head's value."""

    @property
    def key_dim(self) -> int:
        """Width of a key: its rotated elements, then the compressed row."""
        return self.rotary_dim + self.latent_dim

    @property
    def attention(self) -> AttentionShape:
        """Heads of the attention to compressed rows."""
        return AttentionShape(
            num_attention_heads=self.num_heads, num_key_value_heads=1, head_dim=self.key_dim, values_are_keys=True
        )


@dataclass(frozen=True, kw_only=True)
class GateScores:
    """Predicted scores of a row's gates, before they are computed: a score below `least` closes the gate."""

    value: Value
    least: float


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Rules that choose a token's experts; see adaptrt._core.Routing (cpp/include/adaptrt/program/ops.h)."""

    scores: RouterScores
    top_k: int
    num_groups: int = 1
    topk_groups: int = 1
    norm_topk_prob: bool
    rates_groups_by_best: bool = False
    """True: a group counts as much as its best expert. False: as its two best experts together."""
    scale: float = 1.0
    bias: Tensor | None = None
    """[experts], added to scores only for the choice."""
    expert_scale: Tensor | None = None
    """[experts], last factors of the weights."""
    scales_inputs: bool = False
    """True: weights multiply the inputs of experts instead of their outputs."""
