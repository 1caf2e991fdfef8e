"""Selection of bfloat16 matrices that are worth compressing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from adaptrt.builder.compile.compression import places_for_outliers
from adaptrt.builder.compile.emitted import WeightRows
from adaptrt.common.safetensors_stream import SafetensorsReader
from adaptrt.formats.checkpoint.rank_tensors import CheckpointFile

PANEL, K = 64, 8


@pytest.mark.parametrize(("outliers", "places"), [(0, 0), (3, 3), (4, 4), (5, None)])
def test_a_panel_may_have_one_outlier_for_two_inputs(outliers: int, places: int | None, tmp_path: Path) -> None:
    """Two panels with sixteen upper bytes each; some elements of the second have one more upper byte."""
    matrix = np.resize(4.0 ** np.arange(16), (2 * PANEL, K))
    matrix[PANEL, :outliers] = 2.0**-40
    save_file({"weight": torch.from_numpy(matrix).to(torch.bfloat16)}, tmp_path / "weights.safetensors")
    tensors = CheckpointFile(SafetensorsReader(tmp_path / "weights.safetensors"), None)
    assert places_for_outliers(tensors, WeightRows("weight", range(2 * PANEL)), K) == places
