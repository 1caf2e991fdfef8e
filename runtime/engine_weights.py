"""A compiled engine as the base of its adapters: what normalises DoRA magnitudes without the original model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import LinearOp, PanelMatrix, Program, lora_modules
from ..builder.adapter import ModuleKey

_ROWS_AT_ONCE = 1024


class EngineBase:
    """The weights of an engine that was built with LoRA, as builder.adapter.BaseWeights.

    They are the ones that the adapter is served over, rounded to the engine's type.
    """

    def __init__(self, program: Program, storage: Any, directory: Path) -> None:
        """`storage` is kept alive, since it owns the bytes that `program` refers to."""
        self._storage = storage
        self._directory = directory
        self._weights: dict[tuple[int, str], PanelMatrix] = {}
        names = {info.id: info.name for info in lora_modules()}
        for op in program.body:
            if not isinstance(op, LinearOp) or op.lora_site < 0:
                continue
            site = program.lora.sites[op.lora_site]
            for site_part, part in zip(site.parts, op.parts, strict=True):
                self._weights[site.layer, names[site_part.module]] = part.weight

    def describe(self) -> str:
        """The engine directory."""
        return str(self._directory)

    def shape(self, key: ModuleKey) -> tuple[int, int] | None:
        """(out, in) of this module; None when the engine does not have it."""
        weights = self._weights_of(key)
        return (sum(weight.n for weight in weights), weights[0].k) if weights else None

    def row_blocks(self, key: ModuleKey) -> Iterator[npt.NDArray[np.float32]]:
        """W's rows in the order of the Hugging Face model, as float32 [rows, in]."""
        weights = self._weights_of(key)
        for rows in key.in_source_order(sum(weight.n for weight in weights)):
            first = 0
            for weight in weights:
                begin, end = max(rows.start - first, 0), min(rows.stop - first, weight.n)
                for row in range(begin, end, _ROWS_AT_ONCE):
                    yield weight.rows(row, min(row + _ROWS_AT_ONCE, end))
                first += weight.n

    def _weights_of(self, key: ModuleKey) -> list[PanelMatrix]:
        keys = [(key.layer, part) for part in key.module.parts]
        return [self._weights[key] for key in keys] if all(key in self._weights for key in keys) else []
