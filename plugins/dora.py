"""Dora: a linear layer's adapted output times each token's own normalised magnitudes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from .adapter_tables import (
    ADAPTER_SLOTS,
    MODULE_ATTRIBUTES,
    POINTERS,
    SEQUENCE_OFFSETS,
    adapted_parts,
    array_at,
    check_modules,
)
from .definition import Array, Plugin, Tensor


def _evaluate(inputs: Sequence[Array], attributes: Mapping[str, Any]) -> tuple[Array, ...]:
    x, sequence_offsets, adapter_slots, pointers = inputs
    y = x.astype(np.float32)
    for tokens, columns, entry in adapted_parts(sequence_offsets, adapter_slots, attributes):
        address = int(pointers[entry][2])
        if address != 0:
            y[tokens, columns] *= array_at(address, (columns.stop - columns.start,), np.dtype(np.float32))
    return (y.astype(x.dtype),)


DORA: Final = Plugin(
    name="Dora",
    doc="y = x * magnitude, one factor an output feature, that of the token's adapter; 1 where it has none.",
    inputs=(
        Tensor("x", "T", ("tokens", "out"), "Output of Lora."),
        SEQUENCE_OFFSETS,
        ADAPTER_SLOTS,
        POINTERS,
    ),
    outputs=(Tensor("y", "T", ("tokens", "out"), "The scaled output, without the layer's bias."),),
    own_attributes=MODULE_ATTRIBUTES,
    check=check_modules,
    evaluate=_evaluate,
    aliases={},
)
