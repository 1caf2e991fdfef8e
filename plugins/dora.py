"""Dora: Lora, and each token's own normalised magnitudes as the factor of its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from .adapter_tables import MODULE_ATTRIBUTES, adapted_parts, array_at, check_modules, shrink_bytes
from .definition import Array, Plugin
from .lora import LINEAR_INPUTS, LINEAR_OUTPUT, add_update


def _evaluate(inputs: Sequence[Array], attributes: Mapping[str, Any]) -> tuple[Array, ...]:
    x, base, *tables = inputs
    y = base.astype(np.float32)
    for part in adapted_parts(tables, attributes):
        add_update(y, x, part)
        if part.magnitude != 0:
            width = part.columns.stop - part.columns.start
            y[part.tokens, part.columns] *= array_at(part.magnitude, (width,), np.dtype(np.float32))
    return (y.astype(base.dtype),)


DORA: Final = Plugin(
    name="Dora",
    doc="y = (base + (x A^T) B^T) * magnitude, one factor an output feature, all those of the token's adapter and of "
    "the part of the output; the factor is 1 where the adapter has none. The result of the shrink x A^T is rounded "
    "to T; sums and the product are float32, rounded once.",
    inputs=LINEAR_INPUTS,
    outputs=(LINEAR_OUTPUT,),
    own_attributes=MODULE_ATTRIBUTES,
    check=check_modules,
    evaluate=_evaluate,
    aliases={},
    workspace_bytes=shrink_bytes,
)
