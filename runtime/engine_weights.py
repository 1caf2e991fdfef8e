"""Weights of a compiled engine, for normalising DoRA magnitudes without the original model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._core import (
    EmbeddingOp,
    ExpertsOp,
    LatentQueriesOp,
    LatentValuesOp,
    LayerNormOp,
    LinearOp,
    LinearPart,
    LoraPart,
    LoraSite,
    PanelMatrix,
    Program,
    QuantAlgo,
    VectorView,
    lora_modules,
)
from ..formats.adapter import EMBEDDING, ModuleKey
from ..formats.network.adapter_sites import KV_B, LATENT_MODULES
from .file_weights import MappedWeights

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class _Piece:
    """The part of a module's weight that a rank has."""

    part: LinearPart
    first_output: int
    """First output of the module, and the row of the part that has it."""
    first_row: int
    count: int
    """Number of these outputs, which are neighbours."""
    first_input: int
    outputs: int
    """Number of outputs of the whole module; the same for inputs."""
    inputs: int


class EngineBase:
    """The weights of an engine that was built with LoRA, as formats.adapter.BaseWeights.

    The adapter is served on these weights, rounded to the engine's type.
    """

    def __init__(
        self, ranks: Sequence[tuple[Program, Any]], directory: Path, weights: MappedWeights | None = None
    ) -> None:
        """ranks: program and storage of each rank; the storage owns the bytes that the program points to.

        weights: reads the weights; None: from the program's mapping.
        """
        self._weights = MappedWeights() if weights is None else weights
        self._storages = [storage for _, storage in ranks]
        self._directory = directory
        self._pieces: dict[tuple[int, str, int], list[_Piece]] = {}
        self._table: PanelMatrix | None = None
        self._norm_biases: dict[int, VectorView] = {}
        names = {info.id: info.name for info in lora_modules()}
        for program, _ in ranks:
            for op in (*program.encoder, *program.body, *program.head):
                if isinstance(op, EmbeddingOp) and op.lora_site >= 0:
                    self._table = op.table
                if isinstance(op, LayerNormOp) and op.lora_site >= 0:
                    self._norm_biases[program.lora.sites[op.lora_site].layer] = op.bias
                for first_site, parts in _adapted_parts(op):
                    sites = program.lora.sites[first_site:]
                    left = iter(parts)
                    for site in sites[: len(parts) // len(sites[0].parts)]:  # of lm_head, only its first slice
                        for site_part, part in zip(site.parts, left, strict=False):
                            key = site.layer, names[site_part.module], site.expert
                            self._pieces.setdefault(key, []).extend(_pieces_of(site, site_part, part))

    def describe(self) -> str:
        """Returns the path of the engine directory."""
        return str(self._directory)

    def shape(self, key: ModuleKey) -> tuple[int, int] | None:
        """Returns (out, in) of a module; None if the engine does not have it."""
        if key.module.name == EMBEDDING:
            return None if self._table is None else (self._table.k, self._table.n)
        if key.module.name == KV_B:
            heads = self._heads_of(key)
            outputs = sum(keys[0].inputs + values[0].outputs for keys, values in heads)
            return (outputs, heads[0][1][0].inputs) if heads else None
        parts = self._parts_of(key)
        return (sum(pieces[0].outputs for pieces in parts), parts[0][0].inputs) if parts else None

    def row_blocks(self, key: ModuleKey) -> Iterator[npt.NDArray[np.float32]]:
        """Yields W's rows in the order of the Hugging Face model, as float32 [rows, in]."""
        if key.module.name == EMBEDDING:
            if self._table is not None:
                yield np.ascontiguousarray(self._weights.rows(self._table, 0, self._table.n).T)
            return
        if key.module.name == KV_B:
            for keys, values in self._heads_of(key):
                yield np.ascontiguousarray(self._rows(keys, 0, keys[0].outputs).T)
                yield self._rows(values, 0, values[0].outputs)
            return
        parts = self._parts_of(key)
        for rows in key.in_source_order(sum(pieces[0].outputs for pieces in parts)):
            first = 0
            for pieces in parts:
                outputs = pieces[0].outputs
                begin, end = max(rows.start - first, 0), min(rows.stop - first, outputs)
                for row in range(begin, end, _ROWS_AT_ONCE):
                    yield self._rows(pieces, row, min(row + _ROWS_AT_ONCE, end))
                first += outputs

    def bias(self, key: ModuleKey) -> npt.NDArray[np.float32] | None:
        """Returns the bias in the order of the Hugging Face model, float32 [out]; None if there is none."""
        if key.module.is_norm:
            return self._norm_biases[key.layer].values() if key.layer in self._norm_biases else None
        parts = self._parts_of(key)
        if not any(piece.part.bias.size for pieces in parts for piece in pieces):
            return None
        joined = np.concatenate([self._bias(pieces) for pieces in parts])
        return np.concatenate([joined[rows.start : rows.stop] for rows in key.in_source_order(len(joined))])

    def rows_at(self, key: ModuleKey, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Returns rows of lm_head or of the embedding for the tokens, as float32 [tokens, in]."""
        table = self._table if key.module.name == EMBEDDING else self._parts_of(key)[0][0].part.weight
        assert table is not None  # the engine's modules have it
        return np.concatenate([self._weights.rows(table, token, token + 1) for token in tokens])

    def rounding(self, key: ModuleKey) -> float:
        """Returns the rounding error of int8 weights relative to the largest element of a row, half a step; 0 for other
        weights.
        """
        parts = [] if key.module.name == EMBEDDING else self._parts_of(key)
        algos = {piece.part.weight.quantization.algo for pieces in parts for piece in pieces}
        return 0.5 / 127 if algos & {QuantAlgo.W8A16, QuantAlgo.W8A8} else 0.0

    def _heads_of(self, key: ModuleKey) -> list[tuple[list[_Piece], list[_Piece]]]:
        """Returns the keys' and the values' weight of each head of latent attention."""
        of_heads: list[tuple[list[_Piece], list[_Piece]]] = []
        while all((key.layer, name, len(of_heads)) in self._pieces for name in LATENT_MODULES):
            keys, values = (self._pieces[key.layer, name, len(of_heads)] for name in LATENT_MODULES)
            of_heads.append((keys, values))
        return of_heads

    def _parts_of(self, key: ModuleKey) -> list[list[_Piece]]:
        keys = [(key.layer, part, key.expert) for part in key.module.parts]
        return [self._pieces[key] for key in keys] if all(key in self._pieces for key in keys) else []

    def _rows(self, pieces: Sequence[_Piece], begin: int, end: int) -> npt.NDArray[np.float32]:
        """Returns rows [begin, end) of the whole weight."""
        whole = np.empty((end - begin, pieces[0].inputs), np.float32)
        for piece in pieces:
            weight = piece.part.weight
            first = max(begin, piece.first_output)
            last = min(end, piece.first_output + piece.count)
            if first < last:
                columns = slice(piece.first_input, piece.first_input + weight.k)
                before = piece.first_output - piece.first_row
                rows = self._weights.rows(weight, first - before, last - before)
                whole[first - begin : last - begin, columns] = rows
        return whole

    def _bias(self, pieces: Sequence[_Piece]) -> npt.NDArray[np.float32]:
        """Returns the bias of the whole module. If the module's inputs are split, one rank has the bias."""
        whole = np.zeros(pieces[0].outputs, np.float32)
        for piece in pieces:
            if piece.part.bias.size:
                outputs = slice(piece.first_output, piece.first_output + piece.count)
                values = self._weights.values(piece.part.bias)
                whole[outputs] = values[piece.first_row : piece.first_row + piece.count]
        return whole


def _pieces_of(site: LoraSite, site_part: LoraPart, part: LinearPart) -> Iterator[_Piece]:
    """Yields a piece for each range of neighbouring outputs that a rank has."""
    ranges = list(site_part.output_ranges) or [site_part.first_output, part.weight.n]
    outputs = part.weight.n + site_part.num_remote_outputs
    row = 0
    for first, count in zip(ranges[::2], ranges[1::2], strict=True):
        yield _Piece(part, first, row, count, site.first_input, outputs, site.whole_in_size)
        row += count


def _adapted_parts(op: object) -> list[tuple[int, Sequence[LinearPart]]]:
    """Returns the linear layers of an op that adapters act on: index of the first site, and parts site by site."""
    if isinstance(op, LinearOp) and op.lora_site >= 0:
        return [(op.lora_site, op.parts)]
    if isinstance(op, LatentQueriesOp) and op.lora_site >= 0:
        return [(op.lora_site, op.keys)]
    if isinstance(op, LatentValuesOp) and op.lora_site >= 0:
        return [(op.lora_site, op.values)]
    if isinstance(op, ExpertsOp) and op.gate_up_site >= 0:
        return [(op.gate_up_site, op.gate_up), (op.down_site, op.down)]
    return []
