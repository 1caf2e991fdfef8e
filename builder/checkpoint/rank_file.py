"""Writes a rank's tensors, quantising those that the checkpoint's config says so of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..progress import Advance
from ..safetensors_stream import SafetensorsWriter, TensorSpec
from .casting import Array, to_float32
from .planned_tensor import PlannedTensor
from .quantization import QuantConfig, tensor_specs
from .quantizer import QuantizationError, dequantize_rows, quantize_rows

Pieces = Callable[[PlannedTensor], Iterator[Array]]
"""The whole rows of a tensor, in the checkpoint's dtype."""


def rank_file(rank: int) -> str:
    """The name of a rank's file in a checkpoint directory."""
    return f"rank{rank}.safetensors"


def rank_specs(plan: Iterable[PlannedTensor], dtype: np.dtype[Any], config: QuantConfig | None) -> list[TensorSpec]:
    """What the file of a rank holds, in order."""
    return [spec for tensor in plan for spec in tensor_specs(tensor.name, tensor.shape, dtype, config)]


def write_rank(
    path: Path,
    plan: Iterable[PlannedTensor],
    dtype: np.dtype[Any],
    config: QuantConfig | None,
    pieces: Pieces,
    advance: Advance,
) -> list[QuantizationError]:
    """Writes the file; the errors of the tensors that were quantised. `advance` hears of the bytes written."""
    errors = []
    plan = list(plan)
    with SafetensorsWriter(path, rank_specs(plan, dtype, config), metadata={"format": "pt"}) as writer:

        def write(name: str, piece: Array) -> None:
            writer.write(name, piece)
            advance(piece.nbytes)

        for tensor in plan:
            how = config.of_tensor(tensor.name) if config is not None else None
            if how is None:
                for piece in pieces(tensor):
                    write(tensor.name, piece)
                continue
            error = QuantizationError(tensor.name)
            _, *others = tensor_specs(tensor.name, tensor.shape, dtype, config)
            parts: list[list[Array]] = [[] for _ in others]
            for piece in pieces(tensor):
                rows = to_float32(piece)
                quantized = quantize_rows(rows, how)
                error.add(rows, dequantize_rows(quantized, how))
                write(tensor.name, quantized.weights)
                made = [part for part in (quantized.scales, quantized.zeros) if part is not None]
                for kept, part in zip(parts, made, strict=True):
                    kept.append(part)
            for spec, kept in zip(others, parts, strict=True):
                write(spec.name, np.concatenate(kept).reshape(spec.shape))
            errors.append(error)
    return errors
