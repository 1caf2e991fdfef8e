"""Drops rows from the last layer that do not lead to logits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ..._core import DType
from ...formats.engine.plan import (
    AddGivenColumnsOp,
    AttentionOp,
    BufferName,
    CausalConvolutionOp,
    CrossAttentionOp,
    GatedConvolutionOp,
    GatedDeltaOp,
    JoinNeighboursOp,
    KeepLogitRowsOp,
    SelectiveScanOp,
)
from ...formats.network.operands import Value
from .emitted import EmittedOp

_MIXES_ROWS = (
    AddGivenColumnsOp,
    AttentionOp,
    CausalConvolutionOp,
    CrossAttentionOp,
    GatedConvolutionOp,
    GatedDeltaOp,
    JoinNeighboursOp,
    SelectiveScanOp,
)
"""Ops whose output rows depend on other rows, or that need all rows of the step."""


def with_logit_rows_alone(body: Sequence[EmittedOp], head: Sequence[EmittedOp]) -> tuple[EmittedOp, ...]:
    """The program's body. After its last op that mixes rows it keeps only logit rows, of values that are still read."""
    attentions = [at for at, op in enumerate(body) if isinstance(op.op, _MIXES_ROWS)]
    if not attentions:
        return tuple(body)
    end = attentions[-1] + 1
    made: set[Value] = set()
    kept: dict[Value, None] = {}
    for op in chain(body[end:], head):
        kept.update(dict.fromkeys(value for value in op.reads if value not in made))
        made.update(op.writes)
    values = tuple(kept)
    keep = KeepLogitRowsOp(buffers=tuple(BufferName(value.name) for value in values))
    return (*body[:end], EmittedOp(op=keep, reads=values, writes=(), dtype=DType.FLOAT32), *body[end:])
