"""A compiled engine as the base of its adapters: what normalises DoRA magnitudes without the original model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import ExpertsOp, LinearOp, LinearPart, PanelMatrix, Program, lora_modules
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
        self._weights: dict[tuple[int, str, int], PanelMatrix] = {}
        names = {info.id: info.name for info in lora_modules()}
        for op in (*program.encoder, *program.body):
            for first_site, parts in _adapted_parts(op):
                sites = program.lora.sites[first_site:]
                left = iter(parts)
                for site in sites[: len(parts) // len(sites[0].parts)]:
                    for site_part, part in zip(site.parts, left, strict=False):
                        self._weights[site.layer, names[site_part.module], site.expert] = part.weight

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
        keys = [(key.layer, part, key.expert) for part in key.module.parts]
        return [self._weights[key] for key in keys] if all(key in self._weights for key in keys) else []


def _adapted_parts(op: object) -> list[tuple[int, Sequence[LinearPart]]]:
    """The linear layers of an op that adapters act on: the first of their sites, and their parts site by site."""
    if isinstance(op, LinearOp) and op.lora_site >= 0:
        return [(op.lora_site, op.parts)]
    if isinstance(op, ExpertsOp) and op.gate_up_site >= 0:
        return [(op.gate_up_site, op.gate_up), (op.down_site, op.down)]
    return []
