"""A compiled engine as the base of its adapters: what normalises DoRA magnitudes without the original model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import EmbeddingOp, ExpertsOp, LinearOp, LinearPart, PanelMatrix, Program, lora_modules
from ..builder.adapter import EMBEDDING, ModuleKey

_ROWS_AT_ONCE = 1024


class EngineBase:
    """The weights of an engine that was built with LoRA, as builder.adapter.BaseWeights.

    They are the ones that the adapter is served over, rounded to the engine's type.
    """

    def __init__(self, program: Program, storage: Any, directory: Path) -> None:
        """`storage` is kept alive, since it owns the bytes that `program` refers to."""
        self._storage = storage
        self._directory = directory
        self._parts: dict[tuple[int, str, int], LinearPart] = {}
        self._table: PanelMatrix | None = None
        names = {info.id: info.name for info in lora_modules()}
        for op in (*program.encoder, *program.body, *program.head):
            if isinstance(op, EmbeddingOp) and op.lora_site >= 0:
                self._table = op.table
            for first_site, parts in _adapted_parts(op):
                sites = program.lora.sites[first_site:]
                left = iter(parts)
                for site in sites[: len(parts) // len(sites[0].parts)]:  # of lm_head, its first slice
                    for site_part, part in zip(site.parts, left, strict=False):
                        self._parts[site.layer, names[site_part.module], site.expert] = part

    def describe(self) -> str:
        """The engine directory."""
        return str(self._directory)

    def shape(self, key: ModuleKey) -> tuple[int, int] | None:
        """(out, in) of this module; None when the engine does not have it."""
        if key.module.name == EMBEDDING:
            return None if self._table is None else (self._table.k, self._table.n)
        parts = self._parts_of(key)
        return (sum(part.weight.n for part in parts), parts[0].weight.k) if parts else None

    def row_blocks(self, key: ModuleKey) -> Iterator[npt.NDArray[np.float32]]:
        """W's rows in the order of the Hugging Face model, as float32 [rows, in]."""
        if key.module.name == EMBEDDING:
            if self._table is not None:
                yield np.ascontiguousarray(self._table.rows(0, self._table.n).T)
            return
        weights = [part.weight for part in self._parts_of(key)]
        for rows in key.in_source_order(sum(weight.n for weight in weights)):
            first = 0
            for weight in weights:
                begin, end = max(rows.start - first, 0), min(rows.stop - first, weight.n)
                for row in range(begin, end, _ROWS_AT_ONCE):
                    yield weight.rows(row, min(row + _ROWS_AT_ONCE, end))
                first += weight.n

    def bias(self, key: ModuleKey) -> npt.NDArray[np.float32] | None:
        """The bias in the order of the Hugging Face model, float32 [out]; None where there is none."""
        parts = self._parts_of(key)
        if not any(part.bias.size for part in parts):
            return None
        joined = np.concatenate(
            [part.bias.values() if part.bias.size else np.zeros(part.weight.n, np.float32) for part in parts]
        )
        return np.concatenate([joined[rows.start : rows.stop] for rows in key.in_source_order(len(joined))])

    def rows_at(self, key: ModuleKey, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Of lm_head or of the embedding, the tokens' rows, as float32 [tokens, in]."""
        table = self._table if key.module.name == EMBEDDING else self._parts_of(key)[0].weight
        assert table is not None  # the engine's modules have it
        return np.concatenate([table.rows(token, token + 1) for token in tokens])

    def _parts_of(self, key: ModuleKey) -> list[LinearPart]:
        keys = [(key.layer, part, key.expert) for part in key.module.parts]
        return [self._parts[key] for key in keys] if all(key in self._parts for key in keys) else []


def _adapted_parts(op: object) -> list[tuple[int, Sequence[LinearPart]]]:
    """The linear layers of an op that adapters act on: the first of their sites, and their parts site by site."""
    if isinstance(op, LinearOp) and op.lora_site >= 0:
        return [(op.lora_site, op.parts)]
    if isinstance(op, ExpertsOp) and op.gate_up_site >= 0:
        return [(op.gate_up_site, op.gate_up), (op.down_site, op.down)]
    return []
