"""A digest of everything in a model directory that an engine is made from.

It is of the files' whole content: two fine-tunes of one base have the same names and sizes, and files out of archives
and container images the same times as well. As reading a large model takes a while, the digest is kept under the files'
identities (device, inode, size, time of the last change of content and of status), and taken from there while these
are the same.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import xxhash

from ..._core import ConfigError
from ...common.file_digest import add_file
from ...common.progress import Progress
from ...formats.checkpoint.config import CONFIG_FILE
from ...formats.hugging_face.sentence_transformers import pooling_files
from ..conversion.convert import copied_files
from .store import unless_read_only

_DIGEST: Final = re.compile(rb"[0-9a-f]{32}")


class ModelFiles:
    """The files of a model or a checkpoint as they are now."""

    def __init__(self, directory: Path, weight_files: Sequence[str]) -> None:
        """`weight_files` are the names of those with weights. Raises OSError for a file that cannot be looked at."""
        self._directory = directory
        self._paths = [
            *(path for path in [directory / CONFIG_FILE] if path.is_file()),
            *(directory / name for name in copied_files(directory)),
            *pooling_files(directory),
            *(directory / name for name in weight_files),
        ]
        self._identity = _identity(self._paths)
        self._digest: str | None = None

    def digest(self, known: Path, progress: Progress) -> str:
        """XXH3-128 of the files' names, sizes and bytes; `known` is the directory that keeps digests.

        A directory that cannot be written keeps none.

        Raises ConfigError when a file changes while it is read, OSError for one that cannot be read.
        """
        if self._digest is None:
            self._digest = self._kept_digest(known, progress)
        return self._digest

    def _kept_digest(self, known: Path, progress: Progress) -> str:
        remembered = known / self._identity
        if remembered.is_file() and _DIGEST.fullmatch(kept := remembered.read_bytes()):
            return kept.decode()
        digest = xxhash.xxh3_128()
        with progress.task("Reading the model", sum(path.stat().st_size for path in self._paths)) as advance:
            for path in self._paths:
                size = path.stat().st_size
                digest.update(f"{path.relative_to(self._directory)}:{size}\n".encode())
                add_file(digest, path)
                advance(size)
        self.check_unchanged()
        temporary = known / f"{self._identity}.{os.getpid()}.tmp"
        # Another process may be clearing the cache; the model is then read once more next time.
        with unless_read_only(), contextlib.suppress(FileNotFoundError):
            known.mkdir(exist_ok=True)
            temporary.write_text(digest.hexdigest(), encoding="ascii")
            temporary.replace(remembered)
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Raises ConfigError when a file is another one than it was."""
        if _identity(self._paths) != self._identity:
            raise ConfigError(f"{self._directory}: its files were changed while they were read; try again")


def _identity(paths: Sequence[Path]) -> str:
    digest = xxhash.xxh3_128()
    for path in paths:
        stat = path.stat()
        times = f"{stat.st_mtime_ns}:{stat.st_ctime_ns}"
        digest.update(f"{path.name}:{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{times}\n".encode())
    return digest.hexdigest()
