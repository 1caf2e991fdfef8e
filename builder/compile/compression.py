"""Decides which bfloat16 matrices are worth compressing (cpp/include/adaptrt/core/compressed_panels.h)."""

from __future__ import annotations

from typing import Final

from ..._core import DType, can_be_compressed, max_outliers
from ...formats.checkpoint.rank_tensors import RankTensors
from .emitted import WeightRows
from .pack import panel_pieces

_INPUTS_PER_OUTLIER: Final = 2
"""Maximum number of outliers: one for two inputs of a panel's 64 outputs (0.8 % of its elements). Each outlier costs
bytes and time, so matrices with more stay uncompressed."""


def places_for_outliers(tensors: RankTensors, source: WeightRows, k: int) -> int | None:
    """Outlier slots that each compressed panel of rows of k inputs needs; None: compression is not worth it.

    Reads all of the rows.
    """
    if not can_be_compressed(len(source.rows), k):
        return None
    pieces = panel_pieces(tensors, k, source, DType.BFLOAT16)
    most = max(max_outliers(panels, count, k) for count, panels in pieces)
    return most if most * _INPUTS_PER_OUTLIER <= k else None
