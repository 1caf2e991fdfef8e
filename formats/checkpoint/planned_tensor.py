"""Plan of a checkpoint tensor: the slices of Hugging Face tensors that form it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slice:
    """Rows and columns of a Hugging Face tensor. Columns None means all; tensors of one dimension need None."""

    source: str
    rows: range
    columns: range | None = None
    transposed: bool = False
    """True if the tensor is stored transposed, [in, out]; rows and columns refer to [out, in]."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of a rank: its slices stacked by rows, then `zero_rows` rows of zeros."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    zero_rows: int = 0
    float32: bool = False
    """True if the tensor is float32, whatever the checkpoint's dtype."""
    quantized: bool = False
    """True if quantised checkpoints quantise the tensor."""
    parts: tuple[int, ...] = ()
    """Number of outputs of each part, for the weight of a linear layer."""
