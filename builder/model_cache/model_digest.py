"""A digest of all files in a model directory that an engine is built from.

It covers the files' whole content. Names and sizes are not enough: two fine-tunes of one base share them, and files
from archives and container images share the modification times as well. Reading a large model takes a while, so the
digest is stored under the files' identities, and reused while these stay the same. A file's identity is its device,
inode, size, and times of the last change of content and of status.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import xxhash

from ..._core import ConfigError
from ...common.entry_cache import unless_read_only
from ...common.file_digest import add_file
from ...common.progress import Progress
from ...formats.checkpoint.config import CONFIG_FILE
from ...formats.hugging_face.image_processor import image_processor_files
from ...formats.hugging_face.sentence_transformers import pooling_files
from ..conversion.convert import copied_files

_DIGEST: Final = re.compile(rb"[0-9a-f]{32}")


class ModelFiles:
    """The files of a model or a checkpoint, as they were before they were read."""

    def __init__(self, directory: Path, config_state: str) -> None:
        """Looks at all files but those with weights. `config_state`: file_state() of config.json before it was read.

        Raises OSError if a file's status cannot be read.
        """
        self._directory = directory
        others = [*(directory / name for name in copied_files(directory)), *pooling_files(directory)]
        others += image_processor_files(directory)
        self._paths = [directory / CONFIG_FILE, *others]
        self._states = [config_state, *map(file_state, others)]
        self._digest: str | None = None

    def add_weights(self, names: Iterable[str]) -> None:
        """Looks at the files with weights, whose names follow from other files. Raises OSError as __init__()."""
        paths = [self._directory / name for name in names]
        self._paths += paths
        self._states += map(file_state, paths)

    def digest(self, known: Path, progress: Progress) -> str:
        """XXH3-128 of the files' names, sizes and bytes. `known` is the directory in which digests are stored.

        If that directory is read-only, the digest is not stored.

        Raises ConfigError if a file has changed since its state was taken, OSError if one cannot be read.
        """
        if self._digest is None:
            self._digest = self._kept_digest(known, progress)
        return self._digest

    def _kept_digest(self, known: Path, progress: Progress) -> str:
        identity = _identity(self._states)
        remembered = known / identity
        if remembered.is_file() and _DIGEST.fullmatch(kept := remembered.read_bytes()):
            self.check_unchanged()
            return kept.decode()
        digest = xxhash.xxh3_128()
        with progress.task("Reading the model", sum(path.stat().st_size for path in self._paths)) as advance:
            for path in self._paths:
                size = path.stat().st_size
                digest.update(f"{path.relative_to(self._directory)}:{size}\n".encode())
                add_file(path, digest)
                advance(size)
        self.check_unchanged()
        temporary = known / f"{identity}.{os.getpid()}.tmp"
        # Another process may be clearing the cache. Then the model is read again next time.
        with unless_read_only(), contextlib.suppress(FileNotFoundError):
            known.mkdir(exist_ok=True)
            temporary.write_text(digest.hexdigest(), encoding="ascii")
            temporary.replace(remembered)
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Raises ConfigError if a file has changed."""
        if [file_state(path) for path in self._paths] != self._states:
            raise ConfigError(f"{self._directory}: its files were changed while they were read; try again")


def file_state(path: Path) -> str:
    """Identifies a version of a file: it changes if the file is written or replaced. Raises OSError."""
    stat = path.stat()
    times = f"{stat.st_mtime_ns}:{stat.st_ctime_ns}"
    return f"{path.name}:{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{times}\n"


def _identity(states: Sequence[str]) -> str:
    digest = xxhash.xxh3_128()
    for state in states:
        digest.update(state.encode())
    return digest.hexdigest()
