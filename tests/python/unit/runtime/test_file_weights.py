"""Weights read from the engine's file equal those of its mapping."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from adaptrt import _core
from adaptrt._core import EngineError
from adaptrt.runtime.file_weights import FileWeights, MappedWeights

N, K = 70, 33
BEGIN = 256  # of the panels in the file; the vector follows them


@pytest.fixture
def weight() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((N, K)).astype(np.float32)


class Mapped:
    """An engine file with one matrix and one vector at the addresses of its mapping."""

    def __init__(self, path: Path, weight: np.ndarray) -> None:
        dtype = _core.DType.FLOAT32
        num_bytes = _core.panel_bytes(dtype, N, K)
        panels = np.zeros(num_bytes, np.uint8)
        _core.pack_panels(panels, dtype, N, K, 0, weight, dtype)
        path.write_bytes(bytes(BEGIN) + panels.tobytes() + weight[0].tobytes())
        with path.open("rb") as file:
            self.file_bytes = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
        content = self.file_bytes[BEGIN:]
        self.path = path
        self.matrix = _core.PanelMatrix(data=content[:num_bytes], dtype=dtype, n=N, k=K)
        self.vector = _core.VectorView(data=content[num_bytes:].view(np.float32))

    def weights(self) -> FileWeights:
        return FileWeights(cast(Any, SimpleNamespace(path=self.path, file_bytes=self.file_bytes)))


@pytest.fixture
def mapped(tmp_path: Path, weight: np.ndarray) -> Mapped:
    return Mapped(tmp_path / "rank0.engine", weight)


@pytest.mark.parametrize(("first", "last"), [(0, N), (0, 1), (17, 50), (N - 1, N), (9, 9)])
def test_rows_are_those_of_the_mapping(mapped: Mapped, weight: np.ndarray, first: int, last: int) -> None:
    read = mapped.weights().rows(mapped.matrix, first, last)
    assert read.shape == (last - first, K)
    np.testing.assert_array_equal(read, weight[first:last])
    np.testing.assert_array_equal(read, MappedWeights().rows(mapped.matrix, first, last))


def test_a_vector_is_the_mapping_s(mapped: Mapped, weight: np.ndarray) -> None:
    np.testing.assert_array_equal(mapped.weights().values(mapped.vector), weight[0])
    np.testing.assert_array_equal(MappedWeights().values(mapped.vector), weight[0])


def test_a_file_that_is_cut_short_is_an_error(mapped: Mapped) -> None:
    weights = mapped.weights()
    os.truncate(mapped.path, BEGIN + 100)
    with pytest.raises(EngineError, match=r"rank0\.engine: ends at byte 356; it was cut short while it is in use"):
        weights.rows(mapped.matrix, 0, N)


def test_another_file_of_the_same_name_is_not_read(mapped: Mapped, weight: np.ndarray) -> None:
    weights = mapped.weights()
    mapped.path.rename(mapped.path.with_name("old.engine"))
    mapped.path.write_bytes(b"\xff" * (1 << 16))
    np.testing.assert_array_equal(weights.rows(mapped.matrix, 0, N), weight)


def test_a_lost_file_is_an_error_at_construction(mapped: Mapped) -> None:
    mapped.path.unlink()
    with pytest.raises(EngineError, match=r"rank0\.engine: cannot be read: No such file"):
        mapped.weights()
