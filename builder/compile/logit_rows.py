"""Leaves out of the last layer what no logits are made of."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ..._core import DType, RowKind
from .lowered import LoweredOp, buffer_name
from .plan import AttentionOp, KeepLogitRowsOp


def with_logit_rows_alone(body: Sequence[LoweredOp], head: Sequence[LoweredOp]) -> tuple[LoweredOp, ...]:
    """The body, which keeps nothing but the logit rows of what is still read after its last attention."""
    attentions = [at for at, op in enumerate(body) if isinstance(op.op, AttentionOp)]
    if not attentions:
        return tuple(body)
    end = attentions[-1] + 1
    made: set[str] = set()
    kept: dict[str, None] = {}
    for op in chain(body[end:], head):
        kept.update(dict.fromkeys(value for value in op.reads if value not in made))
        made.update(op.writes)
    values = tuple(kept)
    keep = LoweredOp(
        op=KeepLogitRowsOp(buffers=tuple(map(buffer_name, values))),
        nodes=body[end - 1].nodes,
        reads=values,
        writes=(),
        dtype=DType.FLOAT32,
        rows=RowKind.TOKENS,
    )
    return (*body[:end], keep, *body[end:])
