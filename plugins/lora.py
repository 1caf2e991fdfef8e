"""Lora: a linear layer's output plus each token's own low-rank update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from .adapter_tables import (
    ADAPTER_SLOTS,
    MODULE_ATTRIBUTES,
    POINTERS,
    RANKS,
    SEQUENCE_OFFSETS,
    adapted_parts,
    array_at,
    check_modules,
)
from .definition import Array, Plugin, Tensor


def _evaluate(inputs: Sequence[Array], attributes: Mapping[str, Any]) -> tuple[Array, ...]:
    x, base, sequence_offsets, adapter_slots, ranks, pointers = inputs
    y = base.astype(np.float32)
    for tokens, columns, entry in adapted_parts(sequence_offsets, adapter_slots, attributes):
        rank = int(ranks[entry])
        if rank == 0:
            continue
        a_address, b_address, _ = (int(address) for address in pointers[entry])
        a = array_at(a_address, (rank, x.shape[1]), x.dtype).astype(np.float32)
        b = array_at(b_address, (columns.stop - columns.start, rank), x.dtype).astype(np.float32)
        shrunk = (x[tokens].astype(np.float32) @ a.T).astype(x.dtype).astype(np.float32)
        y[tokens, columns] += shrunk @ b.T
    return (y.astype(base.dtype),)


LORA: Final = Plugin(
    name="Lora",
    doc="y = base + (x A^T) B^T, A and B those of the token's adapter and of the part of the output. The result of "
    "the shrink x A^T is rounded to T, sums are float32.",
    inputs=(
        Tensor("x", "T", ("tokens", "in"), "Input of the linear layer."),
        Tensor("base", "T", ("tokens", "out"), "Output of the linear layer, without its bias."),
        SEQUENCE_OFFSETS,
        ADAPTER_SLOTS,
        RANKS,
        POINTERS,
    ),
    outputs=(Tensor("y", "T", ("tokens", "out"), "The adapted output."),),
    own_attributes=MODULE_ATTRIBUTES,
    check=check_modules,
    evaluate=_evaluate,
    aliases={},
)
