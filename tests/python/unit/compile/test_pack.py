"""Weights on their way into the engine: what is read in pieces is what is read at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from adaptrt._core import DType, QuantAlgo
from adaptrt.builder.compile import pack
from adaptrt.builder.compile.emitted import QuantizedRows, WeightRows, Weights
from adaptrt.builder.compile.plan import Matrix, Quantization
from adaptrt.builder.safetensors_stream import SafetensorsReader

ROWS, K = 300, 72
# Not all of the tensor, and not from its beginning.
FIRST, LAST = 20, 276
QUANTIZATIONS = {
    "plain": None,
    "compressed": None,
    "int8": Quantization(algo=QuantAlgo.W8A16, group_size=0, zero_points=False),
    "int4": Quantization(algo=QuantAlgo.W4A16, group_size=32, zero_points=True),
}


@pytest.fixture
def reader(tmp_path: Path) -> SafetensorsReader:
    rng = np.random.default_rng(7)
    tensors = {
        "plain": torch.from_numpy(rng.normal(0, 1, (ROWS, K))).to(torch.bfloat16),
        "int8": torch.from_numpy(rng.integers(-128, 128, (ROWS, K), np.int8)),
        "int8.scales": torch.from_numpy(rng.uniform(0.1, 1, (ROWS, 1)).astype(np.float32)),
        "int4": torch.from_numpy(rng.integers(0, 256, (ROWS, K // 2), np.uint8)),
        "int4.scales": torch.from_numpy(rng.uniform(0.1, 1, (ROWS, 3)).astype(np.float32)),
        "int4.zeros": torch.from_numpy(rng.integers(0, 16, (ROWS, 3), np.uint8)),
    }
    save_file(tensors, tmp_path / "weights.safetensors")
    return SafetensorsReader(tmp_path / "weights.safetensors")


def packed(reader: SafetensorsReader, name: str) -> list[bytes]:
    how = QUANTIZATIONS[name]
    exceptions = 64 if name == "compressed" else None
    matrix = Matrix(tensor="made", n=LAST - FIRST, k=K, quantization=how, exceptions=exceptions)
    rows: WeightRows | QuantizedRows = WeightRows("plain", FIRST, LAST)
    if how is not None:
        zeros = f"{name}.zeros" if how.zero_points else None
        rows = QuantizedRows(WeightRows(name, FIRST, LAST), f"{name}.scales", zeros)
    (tensor,) = pack.engine_tensors(Weights(matrices={"made": (matrix, rows)}), reader, DType.BFLOAT16)
    return [piece.tobytes() for piece in tensor.pieces()]


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_pieces_together_are_the_whole(reader: SafetensorsReader, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = packed(reader, name)
    monkeypatch.setattr(pack, "_PIECE_BYTES", 1)
    pieces = packed(reader, name)
    assert len(pieces) == 4
    assert b"".join(pieces) == whole
