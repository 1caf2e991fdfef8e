"""Tensors of a Hugging Face model directory: one or several files, safetensors, pickled or GGUF."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from ..._core import CheckpointError
from ...common.json_fields import describe, load_json_object
from ...common.safetensors_stream import SafetensorsReader, TensorSpec
from ...common.safetensors_stream.reader import PIECE_BYTES
from ..gguf.model_directory import weight_links
from ..gguf.tensors import GgufWeights, StoredBlocks
from .casting import Array
from .pickled_file import PickledFile

INDEX_SUFFIX: Final = ".index.json"


class WeightFile(Protocol):
    """An open file of tensors."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Dtype and shape of the tensors, by name."""

    def rows(self, name: str, first: int, last: int, *, step: int | None = None) -> Iterator[Array]:
        """Yields rows first .. last of a tensor, `step` at a time, or in pieces of a few MiB.

        A scalar counts as a row.
        """


class MadeTensor(Protocol):
    """A tensor computed from other tensors of the model while it is read."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the source tensors, the one with most of the values first."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, of one or two dimensions."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""

    def rows(self, rows: range, step: int) -> Iterator[Array]:
        """Yields rows, `step` at a time."""


class MadeMatrix(MadeTensor, Protocol):
    """The weight of a quantised linear layer."""

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""


_READERS: Final[tuple[tuple[str, type[Any]], ...]] = (
    ("model.safetensors", SafetensorsReader),
    ("pytorch_model.bin", PickledFile),
)
WEIGHT_FILES: Final = tuple(whole for whole, _ in _READERS)
"""Names of models in one file, preferred format first. A model of several files has an index of such a name and
INDEX_SUFFIX."""

MODULE_WEIGHTS: Final = "model.safetensors"
"""Name of the file with the tensors of a module of sentence-transformers."""


class HfWeights:
    """All tensors of a model directory."""

    def __init__(self, model_dir: Path) -> None:
        """Opens every file.

        Raises CheckpointError that lists all differences between the files' headers and the index.
        """
        self._files: dict[str, WeightFile] = {}
        self._file_of: dict[str, str] = {}
        self._made: dict[str, MadeTensor] = {}
        self._matrices: dict[str, MadeMatrix] = {}
        self._directory = model_dir
        gguf = weight_links(model_dir)
        whole, reader = (gguf[0], GgufWeights) if gguf else _weights_of(model_dir)
        if (model_dir / whole).exists():
            self._open(whole, reader)
            self._file_of = dict.fromkeys(self._files[whole].specs, whole)
        else:
            self._open_shards(whole + INDEX_SUFFIX, reader)
        self._stored = {name: name for name in self._file_of}

    def renamed(self, name_now: Callable[[str], str]) -> HfWeights:
        """Returns the same tensors, renamed by `name_now`.

        Raises CheckpointError if two tensors would have one name.
        """
        result = copy.copy(self)
        result._stored = {}
        for before, stored in self._stored.items():
            name = name_now(before)
            if name in result._stored:
                raise CheckpointError(
                    f"{self._directory}: tensors '{result._stored[name]}' and '{stored}' are both '{name}'"
                )
            result._stored[name] = stored
        return result

    def with_module(self, place: str) -> HfWeights:
        """Returns a copy that also has the tensors of the subdirectory `place`, named {place}.{name}. GGUF files have
        them among their own.

        Raises CheckpointError if their file cannot be read.
        """
        if self.gguf_files:
            return self
        result = copy.copy(self)
        file = f"{place}/{MODULE_WEIGHTS}"
        opened = _InModule(SafetensorsReader(self._directory / file), f"{place}.")
        result._files = {**self._files, file: opened}
        result._file_of = {**self._file_of, **dict.fromkeys(opened.specs, file)}
        result._stored = {**self._stored, **{name: name for name in opened.specs}}
        return result

    def with_matrices(self, matrices: Mapping[str, MadeMatrix]) -> HfWeights:
        """Like with_made(), for the weights of quantised layers."""
        result = self.with_made(matrices)
        result._matrices = dict(matrices)
        return result

    def with_made(self, made: Mapping[str, MadeTensor]) -> HfWeights:
        """Returns a copy in which `made`, by their new names, replace the tensors that they are made from.

        Raises CheckpointError if another tensor already has such a name.
        """
        result = copy.copy(self)
        used = {name for tensor in made.values() for name in tensor.tensors}
        for name, tensor in made.items():
            if name in self._stored and name not in used:
                raise CheckpointError(f"{self.where(name)}: is there next to '{tensor.tensors[0]}'; remove one of them")
        result._made = {**self._made, **made}
        result._stored = {name: stored for name, stored in self._stored.items() if name not in used}
        result._stored.update((name, name) for name in made)
        return result

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    @property
    def directory(self) -> Path:
        """The model's directory."""
        return self._directory

    @property
    def matrices(self) -> dict[str, MadeMatrix]:
        """Weights of quantised layers, by their current names."""
        return {name: self._matrices[stored] for name, stored in self._stored.items() if stored in self._matrices}

    @property
    def names(self) -> list[str]:
        """Names of all tensors, file by file."""
        return list(self._stored)

    def spec(self, name: str) -> TensorSpec:
        """A tensor's dtype and shape."""
        stored = self._stored[name]
        if (made := self._made.get(stored)) is not None:
            return TensorSpec(name, made.dtype, made.shape)
        spec = self._files[self._file_of[stored]].specs[stored]
        return replace(spec, name=name)

    def stored_bytes(self, names: Iterable[str]) -> int:
        """Size in files of the tensors, or of the tensors that they are made from; each counts once."""
        made_of = {own for name in names for own in self._sources(self._stored[name])}
        return sum(self._num_bytes(own) for own in made_of)

    def _num_bytes(self, stored: str) -> int:
        file = self._files[self._file_of[stored]]
        blocks = file.blocks(stored) if isinstance(file, GgufWeights) else None
        return file.specs[stored].num_bytes if blocks is None else blocks.num_bytes

    @property
    def gguf_files(self) -> list[GgufWeights]:
        """The open GGUF files: one, or none."""
        return [file for file in self._files.values() if isinstance(file, GgufWeights)]

    def _sources(self, stored: str) -> list[str]:
        """Names in files of a tensor, or of the tensors that it is made from, which may be made themselves."""
        if (made := self._made.get(stored)) is None:
            return [stored]
        return [source for own in made.tensors for source in ([own] if own == stored else self._sources(own))]

    def blocks(self, name: str) -> StoredBlocks | None:
        """How a tensor of a GGUF file is stored; None for values that are not quantised, and for other files."""
        stored = self._stored[name]
        file = None if stored in self._made else self._files[self._file_of[stored]]
        return file.blocks(stored) if isinstance(file, GgufWeights) else None

    def rows(self, name: str, rows: range, step: int | None = None) -> Iterator[Array]:
        """Yields rows of a tensor, `step` at a time, or in pieces of a few MiB. A scalar counts as a row."""
        stored = self._stored[name]
        if (made := self._made.get(stored)) is not None:
            row_bytes = math.prod(made.shape[1:]) * made.dtype.itemsize
            return made.rows(rows, max(1, PIECE_BYTES // max(1, row_bytes)) if step is None else step)
        return self._files[self._file_of[stored]].rows(stored, rows.start, rows.stop, step=step)

    def joined_rows(self, name: str, rows: range | None = None) -> Array:
        """Returns rows of a tensor, or all rows, in one array."""
        spec = self.spec(name)
        if rows is None:
            rows = range(spec.shape[0] if spec.shape else 1)
        pieces = list(self.rows(name, rows))
        return np.concatenate(pieces) if pieces else np.empty((0, *spec.shape[1:]), spec.dtype)

    def where(self, name: str) -> str:
        """File and tensor, for error messages."""
        stored = self._sources(self._stored[name])[0]
        file = self._files[self._file_of[stored]]
        if isinstance(file, GgufWeights):
            return file.where(stored)
        return f"{self._directory / self._file_of[stored]}: tensor '{stored}'"

    def _open(self, file: str, reader: type[Any]) -> None:
        self._files[file] = reader(self._directory / file)

    def _open_shards(self, index: str, reader: type[Any]) -> None:
        path = self._directory / index
        self._file_of = read_index(path)
        for file in sorted(set(self._file_of.values())):
            self._open(file, reader)
        problems = self._disagreements()
        if problems:
            raise CheckpointError(f"{path}: " + "; ".join(problems))

    def _disagreements(self) -> list[str]:
        found: dict[str, list[str]] = {}
        for file, opened in self._files.items():
            for name in opened.specs:
                found.setdefault(name, []).append(file)
        problems = []
        for name in {**self._file_of, **found}:
            said, holders = self._file_of.get(name), found.get(name, [])
            if said is None:
                problems.append(f"tensor '{name}' is in {' and '.join(holders)}, but not in the index")
            elif holders != [said]:
                where = f"is in {' and '.join(holders)}" if holders else "is in no shard"
                problems.append(f"tensor '{name}' is said to be in {said}, but {where}")
        return problems


class _InModule:
    """A file whose tensors have longer names."""

    def __init__(self, file: WeightFile, prefix: str) -> None:
        self._file = file
        self._prefix = prefix
        self.specs = {prefix + name: replace(spec, name=prefix + name) for name, spec in file.specs.items()}

    def rows(self, name: str, first: int, last: int, *, step: int | None = None) -> Iterator[Array]:
        """See WeightFile.rows."""
        return self._file.rows(name.removeprefix(self._prefix), first, last, step=step)


def weight_file_names(model_dir: Path) -> list[str]:
    """Names of the files that HfWeights reads, including the index. Raises CheckpointError like HfWeights."""
    if gguf := weight_links(model_dir):
        return gguf
    whole, _ = _weights_of(model_dir)
    if (model_dir / whole).exists():
        return [whole]
    index = whole + INDEX_SUFFIX
    return [index, *sorted(set(read_index(model_dir / index).values()))]


def read_index(path: Path, *, check_files: bool = True) -> dict[str, str]:
    """Reads the shard of each tensor. Raises CheckpointError if a shard is not a file next to the index.

    check_files: False: the shards need not exist yet.
    """
    weight_map = load_json_object(path, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is {describe(weight_map)}; expected an object of file names")
    problems = [
        f"tensor '{name}' is said to be in {describe(file)}; expected the plain name of a file here"
        for name, file in weight_map.items()
        if not _is_plain_name(file)
    ]
    files = sorted({file for file in weight_map.values() if _is_plain_name(file)})
    problems += [f"shard {file} is missing" for file in files if check_files and not (path.parent / file).is_file()]
    if problems:
        raise CheckpointError(f"{path}: " + "; ".join(problems))
    return weight_map


def _weights_of(model_dir: Path) -> tuple[str, type[Any]]:
    """Returns the single-file name and the reader of the first format that the directory holds."""
    for whole, reader in _READERS:
        present = [name for name in (whole, whole + INDEX_SUFFIX) if (model_dir / name).exists()]
        if len(present) > 1:
            raise CheckpointError(f"{model_dir}: holds both {present[0]} and {present[1]}; remove the stale one")
        if present:
            return whole, reader
    expected = ", ".join(f"{whole}, {whole}{INDEX_SUFFIX}" for whole, _ in _READERS)
    raise CheckpointError(f"{model_dir}: holds no weights; expected one of {expected}")


def _is_plain_name(file: object) -> bool:
    # Follows symbolic links on purpose: the Hugging Face cache consists of them.
    return isinstance(file, str) and file not in ("", ".", "..") and not set(file) & set("/\\\0")
