"""Tensors of a GGUF file under Hugging Face's names, as Hugging Face's models have them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...common.safetensors_stream import TensorSpec
from ...common.safetensors_stream.reader import PIECE_BYTES
from .architecture import Architecture
from .blocks import BlockType
from .config_fields import ROPE_TENSORS, find_architecture, head_sizes, unread_positions
from .gguf_file import GgufModel
from .header import GgufTensor
from .metadata import Metadata

_OF_LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_PARTS: Final = ("attn_q", "attn_k", "attn_v")
_FUSED: Final = "attn_qkv"
_POSITIONS: Final = "position_embd"
_MAX_EXPERTS: Final = 4096
"""Each expert has its own names; a damaged file must not cause millions of them."""
_FLOAT32: Final = np.dtype(np.float32)

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class StoredBlocks:
    """Type and size in the file of a quantised tensor."""

    type: str
    """ggml's name."""
    num_bytes: int


@dataclass(frozen=True)
class _Stored:
    """Where the values of a Hugging Face tensor are, and how they differ."""

    tensor: GgufTensor
    rows: range
    """Rows of the tensor; elements of a tensor with one dimension."""
    head_size: int | None = None
    """Size of a head if the rows of each head are in the order of llama.cpp's rotation."""
    transposed: bool = False
    is_row: bool = False
    """True if a vector is a matrix with one row in Hugging Face's model."""
    row_of_matrix: int | None = None
    """Row that is a vector in Hugging Face's model; None: `rows` are rows."""
    added: float = 0.0
    """Number that the file's values have in addition."""
    rows_before: int = 0
    """Rows of Hugging Face's tensor before those of the file, which nothing reads; they are zeros here."""

    @property
    def is_vector(self) -> bool:
        """True if `rows` are elements of one row of the file's tensor."""
        return len(self.tensor.shape) == 1 or self.row_of_matrix is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the Hugging Face tensor."""
        if self.is_row:
            return (1, len(self.rows))
        if self.is_vector:
            return (len(self.rows),)
        shape = (self.rows_before + len(self.rows), self.tensor.shape[-1])
        return (shape[1], shape[0]) if self.transposed else shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return _FLOAT32 if self.added else self.tensor.type.dtype

    def indices(self, first: int, last: int) -> Array:
        """Rows of the tensor in the file that are the rows first .. last here."""
        own: Array = np.arange(first, last)
        if self.head_size is not None:
            # Here a head has the first elements of all pairs, then the second ones; in the file a pair is together.
            head, row = own // self.head_size, own % self.head_size
            half = self.head_size // 2
            own = head * self.head_size + row % half * 2 + row // half
        return own + self.rows.start


class GgufWeights:
    """The tensors of a GGUF file, or of all parts of a split one, dequantised; a WeightFile."""

    def __init__(self, path: Path) -> None:
        """Maps the file at `path`, or the one that it is a link to, so that errors name the user's file.

        Raises CheckpointError as GgufModel() and find_architecture().
        """
        self._model = GgufModel(path.parent / path.readlink() if path.is_symlink() else path)
        metadata = Metadata(self._model.metadata, str(self._model.path))
        architecture = find_architecture(self._model, metadata)
        self._stored = _stored_tensors(
            self._model, architecture, head_sizes(metadata), unread_positions(architecture, metadata)
        )
        self.specs: Final[Mapping[str, TensorSpec]] = {
            name: TensorSpec(name, stored.dtype, stored.shape) for name, stored in self._stored.items()
        }

    def where(self, name: str) -> str:
        """File and tensor in it, for error messages."""
        stored = self._stored[name].tensor.name
        return f"{self._model.path_of(stored)}: tensor '{stored}'"

    def blocks(self, name: str) -> StoredBlocks | None:
        """How a tensor is stored; None if its values are not quantised."""
        stored = self._stored[name]
        block_type, num_values = stored.tensor.type, math.prod(stored.shape)
        return StoredBlocks(block_type.name, block_type.bytes_of(num_values)) if block_type.is_quantized else None

    @property
    def matrices(self) -> Mapping[str, BlockType]:
        """Types of the quantised matrices whose rows are rows of the file, by name."""
        return {
            name: stored.tensor.type
            for name, stored in self._stored.items()
            if stored.tensor.type.is_quantized and not (stored.is_vector or stored.transposed or stored.rows_before)
        }

    def stored_rows(self, name: str, first: int, last: int) -> Array:
        """The blocks of rows first .. last of a tensor of `matrices`: bytes [rows, row_bytes]."""
        stored = self._stored[name]
        found = self._model.stored_rows(stored.tensor.name, stored.indices(first, last))
        self._model.release()
        return found

    def rows(self, name: str, first: int, last: int, *, step: int | None = None) -> Iterator[Array]:
        """Yields rows first .. last of a tensor as float32, or as the type of a tensor that is not quantised.

        step: rows at a time; None: about PIECE_BYTES.
        """
        stored = self._stored[name]
        width = stored.shape[-1] if len(stored.shape) > 1 else 1
        step = max(1, PIECE_BYTES // (4 * width)) if step is None else step
        whole = self._whole(stored) if stored.is_vector or stored.transposed else None
        for begin in range(first, last, step):
            end = min(begin + step, last)
            if whole is not None:
                yield whole[begin:end]
            else:
                yield self._piece(stored, begin, end)
            self._model.release()

    def _piece(self, stored: _Stored, begin: int, end: int) -> Array:
        before = stored.rows_before
        found = self._model.rows(stored.tensor.name, stored.indices(max(begin - before, 0), max(end - before, 0)))
        absent = np.zeros((end - begin - len(found), found.shape[1]), found.dtype)
        return np.concatenate([absent, found]) if len(absent) else found

    def _whole(self, stored: _Stored) -> Array:
        if stored.is_vector:
            row = stored.row_of_matrix or 0
            vector: Array = self._model.rows(stored.tensor.name, slice(row, row + 1))[0]
            vector = vector[stored.indices(0, len(stored.rows))]
            vector = vector.astype(np.float32) - np.float32(stored.added) if stored.added else vector
            return vector.reshape(stored.shape)
        values = self._model.rows(stored.tensor.name, slice(None))
        return np.ascontiguousarray(values[stored.rows.start : stored.rows.stop].T)


def _stored_tensors(
    model: GgufModel, architecture: Architecture, heads: tuple[int, int, int], positions_before: int
) -> dict[str, _Stored]:
    """The model's tensors by Hugging Face's names.

    positions_before: rows of the table of positions that the file does not have.

    Tensors that the architecture does not have keep their names, so that they are refused.
    """
    stored: dict[str, _Stored] = {}
    for tensor in model.tensors.values():
        if tensor.name in ROPE_TENSORS:
            continue
        match = _OF_LAYER.fullmatch(tensor.name)
        if match is None:
            module, _, kind = tensor.name.rpartition(".")
            name = architecture.model_names.get(module)
            found = _whole(tensor, module, architecture, None)
            if module == _POSITIONS and not found.is_vector:
                found = replace(found, rows_before=positions_before)
            stored[tensor.name if name is None else f"{name}.{kind}"] = found
            continue
        layer, module, kind = match[1], match[2], match[3]
        prefix = f"{architecture.layer_prefix}.{layer}"
        if module in architecture.layer_names:
            name = f"{prefix}.{architecture.layer_names[module]}.{kind}"
            stored[name] = _whole(tensor, module, architecture, heads[2])
        elif module in architecture.parameter_names:
            stored[f"{prefix}.{architecture.parameter_names[module]}"] = _whole(tensor, module, architecture, None)
        elif module in architecture.expert_names and _is_of_experts(tensor, kind):
            size = tensor.shape[1]
            for expert in range(tensor.shape[0]):
                name = f"{prefix}.{architecture.expert_names[module].format(expert)}.{kind}"
                bias = _Stored(tensor, range(size), row_of_matrix=expert)
                matrix = _Stored(tensor, range(expert * size, (expert + 1) * size))
                stored[name] = bias if kind == "bias" else matrix
        elif _is_fused(tensor, module, architecture, heads):
            for part, rows in zip(_PARTS, _rows_of_parts(*heads), strict=True):
                name = f"{prefix}.{architecture.layer_names[part]}.{kind}"
                stored[name] = _Stored(tensor, rows, _rotated_head(part, architecture, heads[2]))
        else:
            stored[tensor.name] = _whole(tensor, module, architecture, None)
    return stored


def _is_fused(tensor: GgufTensor, module: str, architecture: Architecture, heads: tuple[int, int, int]) -> bool:
    """True for q, k and v in one tensor, if the architecture has them apart."""
    outputs = tensor.shape[0] if len(tensor.shape) == 1 else tensor.num_rows
    return module == _FUSED and _PARTS[0] in architecture.layer_names and outputs == _rows_of_parts(*heads)[-1].stop


def _is_of_experts(tensor: GgufTensor, kind: str) -> bool:
    return len(tensor.shape) == (2 if kind == "bias" else 3) and tensor.shape[0] <= _MAX_EXPERTS


def _whole(tensor: GgufTensor, module: str, architecture: Architecture, head_size: int | None) -> _Stored:
    is_vector = len(tensor.shape) == 1
    return _Stored(
        tensor,
        range(tensor.shape[0] if is_vector else tensor.num_rows),
        None if head_size is None else _rotated_head(module, architecture, head_size),
        transposed=module in architecture.transposed and not is_vector,
        is_row=module in architecture.rows and is_vector,
        added=1.0 if architecture.norms_plus_one and module.endswith("_norm") else 0.0,
    )


def _rotated_head(module: str, architecture: Architecture, head_size: int) -> int | None:
    return head_size if architecture.is_permuted and module in _PARTS[:2] else None


def _rows_of_parts(heads: int, kv_heads: int, size: int) -> tuple[range, range, range]:
    query, both = heads * size, (heads + kv_heads) * size
    return range(query), range(query, both), range(both, both + kv_heads * size)
