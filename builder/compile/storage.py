"""How an engine stores matrices and activations. It depends on the backend that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..._core import DType, MatrixLayout, activation_dtype


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Layout of matrices, types of activations, and the parts of a program that exist only for one backend."""

    layout: MatrixLayout
    has_copies: bool
    """True if matrices of sparse layers may also be stored in rows, columns or neurons."""
    keeps_logit_rows: bool
    """True if the body drops the rows that lead to no logits after its last attention."""
    float32_scales: bool
    """True if scales of quantised matrices are stored as float32, whatever their type is."""

    def activation_type(self, dtype: DType) -> DType:
        """Type of the activations that linear layers read, in an engine of `dtype`."""
        return dtype if self.layout is MatrixLayout.ROWS else activation_dtype(dtype)

    def stored_type(self, dtype: DType) -> DType:
        """Type of the outputs of linear layers without activation, except logits and residual streams."""
        return dtype if self.layout is MatrixLayout.ROWS else DType.FLOAT32


PANELS: Final = Storage(
    layout=MatrixLayout.PANELS,
    has_copies=True,
    keeps_logit_rows=True,
    float32_scales=False,
)
"""Storage of native engines."""
ROWS: Final = Storage(
    layout=MatrixLayout.ROWS,
    has_copies=False,
    keeps_logit_rows=False,
    float32_scales=True,
)
"""Storage of CUDA engines."""
