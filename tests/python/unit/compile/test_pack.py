"""Packing of weights into the engine: reading in pieces gives the same as reading at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from adaptrt._core import DType, QuantAlgo
from adaptrt.builder.compile import pack
from adaptrt.builder.compile.emitted import WeightRows, Weights
from adaptrt.common.safetensors_stream import SafetensorsReader
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.checkpoint.rank_tensors import CheckpointFile
from adaptrt.formats.engine.plan import Matrix, Quantization

ROWS, K = 300, 72
# Only a part of the tensor, which starts after its beginning.
TAKEN = range(20, 276)
WEIGHT = "transformer.layers.0.mlp.fc.weight"
QUANTIZATIONS = {
    "plain": None,
    "compressed": None,
    "int8": QuantConfig(quant_algo=QuantAlgo.W8A16),
    "int4": QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=32, has_zero_point=True),
    "int4 of outputs": QuantConfig(quant_algo=QuantAlgo.W4A16),
    "int8 with zero points": QuantConfig(quant_algo=QuantAlgo.W8A16, has_zero_point=True),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Makes a file for each of QUANTIZATIONS."""
    rng = np.random.default_rng(7)
    plain = {WEIGHT: torch.from_numpy(rng.normal(0, 1, (ROWS, K))).to(torch.bfloat16)}
    int8 = torch.from_numpy(rng.integers(-128, 128, (ROWS, K), np.int8))
    int4 = torch.from_numpy(rng.integers(0, 256, (ROWS, K // 2), np.uint8))
    prefix = WEIGHT.removesuffix("weight")
    scales = torch.from_numpy(rng.uniform(0.1, 1, (ROWS, 3)).astype(np.float32))
    files = {
        "plain": plain,
        "compressed": plain,
        "int8": {WEIGHT: int8, f"{prefix}per_channel_scale": scales[:, 0].clone()},
        "int8 with zero points": {
            WEIGHT: int8,
            f"{prefix}per_channel_scale": scales[:, 0].clone(),
            f"{prefix}zero": torch.from_numpy(rng.integers(-128, 128, ROWS, np.int8)),
        },
        "int4": {
            WEIGHT: int4,
            f"{prefix}weights_scaling_factor": scales.to(torch.bfloat16),
            f"{prefix}zero": torch.from_numpy(rng.integers(0, 16, (ROWS, 3), np.uint8)),
        },
        "int4 of outputs": {WEIGHT: int4, f"{prefix}per_channel_scale": scales[:, 0].to(torch.bfloat16)},
    }
    for name, tensors in files.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    return tmp_path


def packed(directory: Path, name: str) -> list[bytes]:
    config = QUANTIZATIONS[name]
    how = None
    if config is not None:
        how = Quantization(algo=config.quant_algo, group_size=config.group_size or 0, zero_points=config.has_zero_point)
    outliers = 64 if name == "compressed" else None
    matrix = Matrix(tensor="made", n=len(TAKEN), k=K, quantization=how, outliers=outliers)
    weights = Weights(matrices={"made": (matrix, WeightRows(WEIGHT, TAKEN))})
    tensors = CheckpointFile(SafetensorsReader(directory / f"{name}.safetensors"), config)
    (tensor,) = pack.engine_tensors(weights, tensors, DType.BFLOAT16)
    return [piece.tobytes() for piece in tensor.pieces()]


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_pieces_together_are_the_whole(directory: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = packed(directory, name)
    monkeypatch.setattr(pack, "_PIECE_BYTES", 1)
    pieces = packed(directory, name)
    assert len(pieces) == 4
    assert b"".join(pieces) == whole
