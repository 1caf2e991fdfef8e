"""Checks that all files of an adapter, which are read one after another, belong to one version."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from ..._core import AdapterError, AdaptrtError
from ...common.regular_file import FileVersion, file_version
from .new_embeddings import PICKLE as EMBEDDINGS_PICKLE
from .new_embeddings import SAFETENSORS as EMBEDDINGS_FILE
from .recognise import CONFIG_FILE, DRAFT_DIRECTORY, INITIAL_DIRECTORY, MLX_FILE, PICKLE_FILE, SAFETENSORS_FILE


def config_and_weights(directory: Path) -> list[str]:
    """Names of the files that define what an adapter computes."""
    weights = [name for name in (SAFETENSORS_FILE, PICKLE_FILE) if (directory / name).is_file()][:1]
    weights += [name for name in (MLX_FILE,) if (directory / name).is_file()]
    embeddings = [name for name in (EMBEDDINGS_FILE, EMBEDDINGS_PICKLE) if (directory / name).is_file()][:1]
    return [CONFIG_FILE, *(weights or [SAFETENSORS_FILE]), *embeddings]


def initial_files(directory: Path) -> list[str]:
    """Names of the same files of the initial adapter (initial.py)."""
    return _files_below(directory, INITIAL_DIRECTORY)


def draft_files(directory: Path) -> list[str]:
    """Names of the same files of the draft model's adapter."""
    return _files_below(directory, DRAFT_DIRECTORY)


def _files_below(directory: Path, name: str) -> list[str]:
    below = directory / name
    return [f"{name}/{file}" for file in config_and_weights(below)] if below.is_dir() else []


def _converted_files(directory: Path) -> list[str]:
    return [*config_and_weights(directory), *initial_files(directory)]


@contextlib.contextmanager
def one_version(directory: Path, files: Callable[[Path], list[str]] = _converted_files) -> Iterator[None]:
    """Context manager: checks on exit that none of an adapter's files changed since entry.

    files: returns the names of the files in a directory.

    Raises AdapterError if a file was written, replaced, added or removed. It replaces any other error of the block:
    parts of two versions need not fit together.
    """
    before = _versions(directory, files)
    try:
        yield
    except (AdaptrtError, OSError) as error:
        if _versions(directory, files) != before:
            raise _changed(directory) from error
        raise
    if _versions(directory, files) != before:
        raise _changed(directory)


def _versions(directory: Path, files: Callable[[Path], list[str]]) -> dict[str, FileVersion | None]:
    return {name: _version(directory / name) for name in files(directory)}


def _version(path: Path) -> FileVersion | None:
    try:
        return file_version(path)
    except OSError:  # the reader of the file reports the error
        return None


def _changed(directory: Path) -> AdapterError:
    return AdapterError(
        f"{directory}: the adapter's files were changed while they were read; try again when all are there"
    )
