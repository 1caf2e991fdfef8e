"""Lora: a linear layer's output plus each token's own low-rank update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from .adapter_tables import (
    MODULE_ATTRIBUTES,
    TABLE_INPUTS,
    AdaptedPart,
    adapted_parts,
    array_at,
    check_modules,
    shrink_bytes,
)
from .definition import Array, Plugin, Tensor

LINEAR_INPUTS: Final = (
    Tensor("x", "T", ("tokens", "in"), "Input of the linear layer."),
    Tensor("base", "T", ("tokens", "out"), "Output of the linear layer, without its bias."),
    *TABLE_INPUTS,
)
LINEAR_OUTPUT: Final = Tensor("y", "T", ("tokens", "out"), "The adapted output, without the layer's bias.")


def evaluate_adapted(inputs: Sequence[Array], attributes: Mapping[str, Any], *, magnitudes: bool) -> tuple[Array, ...]:
    """base + (x A^T) B^T; with `magnitudes`, multiplied by the magnitudes of the token's adapter if it has any."""
    x, base, *tables = inputs
    y = base.astype(np.float32)
    for part in adapted_parts(tables, attributes):
        _add_update(y, x, part)
        if magnitudes and part.magnitude != 0:
            width = part.columns.stop - part.columns.start
            y[part.tokens, part.columns] *= array_at(part.magnitude, (width,), np.dtype(np.float32))
    return (y.astype(base.dtype),)


def _add_update(y: Array, x: Array, part: AdaptedPart) -> None:
    """Adds (x A^T) B^T to the part's tokens and columns of y, in float32; x A^T is rounded to x's type."""
    a = array_at(part.a, (part.rank, x.shape[1]), x.dtype).astype(np.float32)
    b = array_at(part.b, (part.columns.stop - part.columns.start, part.rank), x.dtype).astype(np.float32)
    shrunk = (x[part.tokens].astype(np.float32) @ a.T).astype(x.dtype).astype(np.float32)
    y[part.tokens, part.columns] += shrunk @ b.T


LORA: Final = Plugin(
    name="Lora",
    doc="y = base + (x A^T) B^T, where A and B are those of the token's adapter for the part of the output. The "
    "shrink's result x A^T is rounded to T. Sums are float32.",
    inputs=LINEAR_INPUTS,
    outputs=(LINEAR_OUTPUT,),
    own_attributes=MODULE_ATTRIBUTES,
    check=check_modules,
    evaluate=partial(evaluate_adapted, magnitudes=False),
    aliases={},
    workspace_bytes=shrink_bytes,
)
