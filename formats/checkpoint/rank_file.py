"""The file of a rank's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...common.progress import Advance
from ...common.safetensors_stream import SafetensorsWriter, TensorSpec
from .casting import Array
from .planned_tensor import PlannedTensor
from .quantization import QuantConfig, quantized_specs
from .rank_tensors import RankTensors


def rank_file(rank: int) -> str:
    """Name of a rank's file in a checkpoint directory."""
    return f"rank{rank}.safetensors"


def rank_specs(plan: Iterable[PlannedTensor], dtype: np.dtype[Any], config: QuantConfig | None) -> list[TensorSpec]:
    """Specs of the tensors in a rank's file, in order."""
    return [spec for tensor in plan for spec in _specs_of(tensor, dtype, config)]


def _specs_of(tensor: PlannedTensor, dtype: np.dtype[Any], config: QuantConfig | None) -> list[TensorSpec]:
    if config is None or not tensor.quantized:
        return [TensorSpec(tensor.name, stored_dtype(tensor, dtype), tensor.shape)]
    outputs, inputs = tensor.shape
    return quantized_specs(tensor.name, (outputs, inputs), config.of_weight(tensor.name), len(tensor.parts))


def stored_dtype(tensor: PlannedTensor, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Dtype of a tensor that is not quantised, in a checkpoint of `dtype`."""
    return np.dtype(np.float32) if tensor.float32 else dtype


def write_rank(
    path: Path,
    plan: Sequence[PlannedTensor],
    dtype: np.dtype[Any],
    config: QuantConfig | None,
    tensors: RankTensors,
    advance: Advance,
) -> None:
    """Writes the file of the planned tensors. Calls `advance` with the number of bytes written."""
    with SafetensorsWriter(path, rank_specs(plan, dtype, config), metadata={"format": "pt"}) as writer:

        def write(name: str, piece: Array) -> None:
            writer.write(name, piece)
            advance(piece.nbytes)

        for tensor in plan:
            name, rows = tensor.name, range(tensor.shape[0])
            if config is None or not tensor.quantized:
                for piece in tensors.rows(name, rows):
                    write(name, piece)
                continue
            _, *others = _specs_of(tensor, dtype, config)
            order = others.pop() if config.of_weight(name).act_order else None
            parts: list[list[Array]] = [[] for _ in others]
            for quantized in tensors.quantized_rows(name, rows):
                write(name, quantized.weights)
                made = [part for part in (quantized.scales, quantized.zeros, quantized.minimums) if part is not None]
                for kept, part in zip(parts, made, strict=True):
                    kept.append(part)
            for spec, kept in zip(others, parts, strict=True):
                write(spec.name, np.concatenate(kept).reshape(spec.shape))
            if order is not None:
                write(order.name, tensors.permutations(name))
