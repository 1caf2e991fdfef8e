"""Directories of GGUF files: of a model as Hugging Face has it, whose weights are links, or of an adapter of PEFT."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Final

import xxhash

from ..._core import ConfigError
from ...common.entry_cache import EntryCache, cache_directory
from ...common.file_digest import add_file
from ...common.file_lock import file_lock
from ...common.output_directory import replaced_directory
from ..checkpoint.config import PRODUCER
from ..gguf import gguf_file
from ..gguf.adapter_directory import write_adapter_directory
from ..gguf.gguf_file import part_paths
from ..gguf.model_directory import write_model_directory
from .downloads import FILES_DIRECTORY, CachedDownload, find_download
from .kind import Kind
from .lease import Lease

_KIND: Final = "an entry of AdaptRT's cache of GGUF models"


class GgufModels(EntryCache[CachedDownload]):
    """The directories of GGUF files that were used. An entry has no weights, and takes as much space as a tokenizer."""

    def __init__(self, directory: Path | None = None) -> None:
        """None: $XDG_CACHE_HOME/adaptrt/gguf or ~/.cache/adaptrt/gguf. Reads and creates nothing yet."""
        place = cache_directory("gguf") if directory is None else directory
        super().__init__(place, content=FILES_DIRECTORY, noun="directory of a GGUF file", producer=PRODUCER)

    def find(self, key: str) -> CachedDownload | None:
        """The entry with a key, even if it is damaged; None if there is none."""
        return find_download(self, key)

    def directory_of(self, path: Path, kind: Kind) -> tuple[Path, Lease]:
        """Returns the directory of a GGUF file, written on first use, and the lease that keeps it.

        Raises the errors of write_model_directory() or write_adapter_directory(), ConfigError if the cache cannot be
        written.
        """
        key = _key(part_paths(path.absolute()), kind)
        # Without the lock, because the cache may be read-only.
        with contextlib.suppress(FileNotFoundError):  # another process is deleting the entry
            if self.is_entry(self.place(key)):
                return self._used(key)
        self.make_directory()
        try:
            with file_lock(self.lock_file(key), on_wait=lambda: None):
                if not self.is_entry(self.place(key)):
                    self._write(key, path.absolute(), kind)
                return self._used(key)
        except OSError as reason:
            raise ConfigError(
                f"{self.directory}: cannot be written: {reason.strerror}; set XDG_CACHE_HOME to another directory"
            ) from None

    def _used(self, key: str) -> tuple[Path, Lease]:
        lease = Lease(self.used_file(key))
        self.touch(key)
        return self.place(key) / FILES_DIRECTORY, lease

    def _write(self, key: str, path: Path, kind: Kind) -> None:
        self.remove_unfinished(key)
        place = self.place(key)
        with replaced_directory(place, is_ours=self.is_of_entry, kind=_KIND, error=ConfigError) as directory:
            files = directory / FILES_DIRECTORY
            files.mkdir()
            write = write_model_directory if kind is Kind.MODEL else write_adapter_directory
            write(path, files)
            self.describe(directory, {"name": str(path), "kind": kind.value})


def _key(paths: list[Path], kind: Kind) -> str:
    """Key of the versions of these files, and of the code that reads them."""
    digest = xxhash.xxh3_128(kind.value.encode())
    for path in paths:
        try:
            status = path.stat()
        except OSError as reason:
            raise ConfigError(f"{path}: cannot be read: {reason.strerror}") from None
        facts = [os.fspath(path), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        digest.update(json.dumps(facts).encode())
    for code in sorted(Path(gguf_file.__file__).parent.glob("*.py")):
        add_file(code, digest)
    return digest.hexdigest()[:16]
