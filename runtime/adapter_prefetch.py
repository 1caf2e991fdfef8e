"""Reads prefetch directories of converted adapters."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from .._core import AdapterError, LoraConfig
from ..common.regular_file import open_regular, read_into
from ..formats.adapter.convert import CONFIG_FILE, WEIGHTS_FILE
from ..formats.adapter.one_version import one_version
from .named_adapter import FIRST_NAMED_TASK_ID

_ARCHIVE: Final = b"PK"
"""First bytes of an archive of several arrays."""
_HEADER_READERS: Final = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def prefetched_adapters(directory: str | Path) -> Iterator[tuple[Path, LoraConfig]]:
    """Yields the adapters of a prefetch directory in the order of their task_ids, each with its folder.

    A folder's name is the digits of its task_id. It holds model.lora_weights.npy and model.lora_config.npy. Raises
    AdapterError that names all invalid entries, or the file that cannot be read.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise AdapterError(f"lora_prefetch_dir is '{directory}'; expected a directory")
    folders: dict[int, Path] = {}
    problems = []
    for folder in sorted(directory.iterdir()):
        if not folder.is_dir() or not (folder.name.isascii() and folder.name.isdigit()):
            problems.append(f"{folder} is not a folder named by the digits of a task_id")
        elif int(folder.name) >= FIRST_NAMED_TASK_ID:
            problems.append(f"{folder} names a task_id of {FIRST_NAMED_TASK_ID} or more")
        elif int(folder.name) in folders:
            problems.append(f"{folder} and {folders[int(folder.name)]} name the same task_id")
        else:
            folders[int(folder.name)] = folder
    if problems:
        raise AdapterError(f"lora_prefetch_dir {directory}: " + "; ".join(problems))
    for task_id, folder in sorted(folders.items()):
        with one_version(folder, lambda _: [WEIGHTS_FILE, CONFIG_FILE]):
            adapter = LoraConfig(task_id, _load_array(folder / WEIGHTS_FILE), _load_array(folder / CONFIG_FILE))
        yield folder, adapter


def _load_array(path: Path) -> npt.NDArray[Any]:
    try:
        with open_regular(path) as file:
            return _read_array(file, path)
    except OSError as error:
        raise AdapterError(f"{path}: cannot be read: {error.strerror}") from None


def _read_array(file: io.FileIO, path: Path) -> npt.NDArray[Any]:
    """Reads the array in an open file. Compares the header with the file's size before it allocates memory."""
    if file.read(len(_ARCHIVE)) == _ARCHIVE:
        raise AdapterError(f"{path}: is an archive of arrays; expected one array")
    file.seek(0)
    try:
        version = npy.read_magic(file)
        if version not in _HEADER_READERS:
            raise ValueError(f"format version {version}; expected one of {', '.join(map(str, _HEADER_READERS))}")
        shape, is_fortran, dtype = _HEADER_READERS[version](file)
    except OSError:
        raise
    except Exception as error:  # numpy parses the header as Python and raises many types of errors
        first_line = str(error).partition("\n")[0]
        raise AdapterError(f"{path}: cannot be read as a NumPy array: {first_line}") from None
    if dtype.hasobject or any(size < 0 for size in shape):
        raise AdapterError(f"{path}: cannot be read as a NumPy array: is {dtype} {list(shape)}; expected numbers")
    needed, stored = math.prod(shape) * dtype.itemsize, os.fstat(file.fileno()).st_size - file.tell()
    if needed != stored:
        raise AdapterError(
            f"{path}: cannot be read as a NumPy array: {dtype} {list(shape)} needs {needed} bytes after the header; "
            f"the file has {stored}"
        )
    array = np.empty(shape[::-1] if is_fortran else shape, dtype)
    if needed > 0:
        read_into(file, path, array.reshape(-1).view(np.uint8).data)
    return array.T if is_fortran else array
