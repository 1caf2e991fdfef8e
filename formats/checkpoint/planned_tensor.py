"""Which slices of which Hugging Face tensors make a tensor of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slice:
    """Rows and columns of a Hugging Face tensor; columns None: all, and the only choice for one dimension."""

    source: str
    rows: range
    columns: range | None = None
    transposed: bool = False
    """The tensor is stored the other way round, [in, out]; rows and columns are those of [out, in]."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of a rank: its slices below one another, then `zero_rows` rows of zeros."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    zero_rows: int = 0
    float32: bool = False
    """It is not of the checkpoint's dtype, but of this."""
    quantized: bool = False
    """It is in checkpoints that are quantised."""
    parts: tuple[int, ...] = ()
    """Of the weight of a linear layer: the outputs of each of its parts."""
