"""A mapped GGUF file, or the parts of a split one: metadata, and rows of tensors."""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..._core import CheckpointError
from ...common.regular_file import file_version
from ...common.shown_value import shown
from .header import GgufHeader, GgufTensor, Value, parse_header

SUFFIX: Final = ".gguf"
_PART: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_COUNT: Final = "split.count"
_NUMBER: Final = "split.no"
_TOTAL: Final = "split.tensors.count"

Array = np.ndarray[Any, np.dtype[Any]]


class GgufFile:
    """One open file with a checked header."""

    def __init__(self, path: Path) -> None:
        """Maps the file. Raises CheckpointError if it cannot be read; see parse_header()."""
        self.path: Final = path
        try:
            size = file_version(path)[2]
            if size == 0:
                raise CheckpointError(f"{path}: is empty; expected a GGUF file")
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as reason:
            raise CheckpointError(f"{path}: cannot be read: {getattr(reason, 'strerror', None) or reason}") from None
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.header: Final[GgufHeader] = parse_header(self._map, str(path))

    @property
    def tensors(self) -> Mapping[str, GgufTensor]:
        """The file's tensors by name."""
        return self.header.tensors

    def stored_rows(self, name: str) -> Array:
        """The bytes of a tensor, a read-only view [rows, row_bytes]; the rows of all leading dimensions."""
        tensor = self.tensors[name]
        view = self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        return view.reshape(tensor.num_rows, tensor.row_bytes)

    def rows(self, name: str, rows: slice | Array) -> Array:
        """Values of rows of a tensor: a copy [rows, width] of its type's dtype."""
        return self.tensors[name].type.values(self.stored_rows(name)[rows])

    def release(self) -> None:
        """Releases the pages of the mapping; later reads load them from the file again."""
        self._map.madvise(mmap.MADV_DONTNEED)


class GgufModel:
    """A file that is not split, or all parts of a split one."""

    def __init__(self, path: Path) -> None:
        """Opens the file at `path` and, if it is a part of a split file, the parts next to it.

        Raises CheckpointError for a missing part, and for parts that do not belong together.
        """
        self.paths: Final = part_paths(path)
        self._files = [GgufFile(part) for part in self.paths]
        self.metadata: Final[Mapping[str, Value]] = self._files[0].header.metadata
        self._check_parts()
        self._file_of: dict[str, GgufFile] = {}
        for file in self._files:
            for name in file.tensors:
                if name in self._file_of:
                    raise CheckpointError(f"{file.path}: tensor '{name}' is also in {self._file_of[name].path}")
                self._file_of[name] = file
        total = self.metadata.get(_TOTAL, len(self._file_of))
        if total != len(self._file_of):
            raise CheckpointError(
                f"{self.path}: {_TOTAL} is {shown(total)}, but the parts have {len(self._file_of)} tensors"
            )

    @property
    def path(self) -> Path:
        """The file, or the first part; errors begin with it."""
        return self.paths[0]

    @property
    def tensors(self) -> Mapping[str, GgufTensor]:
        """All tensors by name."""
        return {name: file.tensors[name] for name, file in self._file_of.items()}

    def rows(self, name: str, rows: slice | Array) -> Array:
        """See GgufFile.rows()."""
        return self._file_of[name].rows(name, rows)

    def stored_rows(self, name: str, rows: Array) -> Array:
        """The bytes of rows of a tensor: a copy [rows, row_bytes]."""
        return self._file_of[name].stored_rows(name)[rows]

    def path_of(self, name: str) -> Path:
        """File of a tensor."""
        return self._file_of[name].path

    def release(self) -> None:
        """See GgufFile.release()."""
        for file in self._files:
            file.release()

    def _check_parts(self) -> None:
        named = len(self.paths)
        count = self.metadata.get(_COUNT, 1)
        if count not in (named, 0 if named == 1 else named):
            expected = "a name that ends with -00001-of-0000N.gguf, as gguf-split writes it" if named == 1 else named
            raise CheckpointError(f"{self.path}: {_COUNT} is {shown(count)}; expected {expected}")
        if named == 1:
            return
        for number, file in enumerate(self._files):
            found = file.header.metadata.get(_NUMBER), file.header.metadata.get(_COUNT)
            if found != (number, named):
                raise CheckpointError(
                    f"{file.path}: {_NUMBER} and {_COUNT} are {shown(found)}; expected {(number, named)}, as in its "
                    "name"
                )


def part_paths(path: Path) -> list[Path]:
    """Paths of all parts of a split file, given any of them; [path] for other files.

    Raises CheckpointError that names the missing parts.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match[1], int(match[3])
    if not 1 <= int(match[2]) <= count:
        raise CheckpointError(f"{path}: is named part {int(match[2])} of {count}; expected a part from 1 on")
    paths = [path.with_name(f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}") for number in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        others = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{path}: is one of {count} parts, and {', '.join(missing[:3])}{others} are missing; download all parts "
            "into one directory"
        )
    return paths
