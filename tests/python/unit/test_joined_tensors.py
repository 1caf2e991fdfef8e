"""Tensors of files that a model holds as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from adaptrt._core import CheckpointError
from adaptrt.formats.checkpoint.hf_weights import HfWeights
from adaptrt.formats.checkpoint.joined_tensors import with_joined

ENDS = {"conv.weight": ("q.weight", "k.weight", "v.weight")}
PARTS = {
    "a.q.weight": np.arange(6, dtype=np.float32).reshape(2, 1, 3),
    "a.k.weight": np.arange(6, 9, dtype=np.float32).reshape(1, 1, 3),
    "a.v.weight": np.arange(9, 18, dtype=np.float32).reshape(3, 1, 3),
    "b.weight": np.ones(2, np.float32),
}


def weights(directory: Path, **changes: np.ndarray | None) -> HfWeights:
    parts = {name: tensor for name, tensor in {**PARTS, **changes}.items() if tensor is not None}
    save_file(parts, directory / "model.safetensors")
    return with_joined(HfWeights(directory), ENDS)


@pytest.mark.parametrize("step", [1, 2, 4, 6])
def test_rows_follow_one_another(tmp_path: Path, step: int) -> None:
    joined = weights(tmp_path)
    assert sorted(joined.names) == ["a.conv.weight", "b.weight"]
    assert joined.spec("a.conv.weight").shape == (6, 1, 3)
    whole = np.arange(18, dtype=np.float32).reshape(6, 1, 3)
    for rows in (range(6), range(1, 4), range(3, 6), range(2, 2)):
        found = [row for piece in joined.rows("a.conv.weight", rows, step) for row in piece]
        np.testing.assert_array_equal(np.asarray(found).reshape(-1, 1, 3), whole[rows.start : rows.stop])


def test_scalars_are_rows(tmp_path: Path) -> None:
    parts = {"x.alpha": np.asarray([2.0], np.float32), "x.beta": np.asarray(0.5, np.float32)}
    save_file(parts, tmp_path / "model.safetensors")
    joined = with_joined(HfWeights(tmp_path), {"both": ("alpha", "beta")})
    np.testing.assert_array_equal(joined.joined_rows("x.both"), [2.0, 0.5])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"a.k.weight": None}, "tensor 'a.k.weight' is missing"),
        ({"a.k.weight": np.ones((1, 1, 2), np.float32)}, r"is float32 \[1, 1, 2\]; expected float32 \[rows, 1, 3\]"),
        ({"a.v.weight": np.ones((1, 1, 3), np.float16)}, r"is float16 \[1, 1, 3\]; expected float32"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, changes: dict[str, np.ndarray | None], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        weights(tmp_path, **changes)
