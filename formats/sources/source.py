"""Turns names of models and adapters into local directories."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from ..._core import AdapterError, CheckpointError, ConfigError
from ...common.progress import progress_on
from ..gguf.model_directory import gguf_file_of, is_gguf_file, label_of
from .downloads import DownloadCache, missing_config
from .gguf_models import GgufModels
from .grammar import HubName, LocalName, ObjectName, parse_name, weighted_sum_name
from .hub import fetch
from .hub_gguf import fetch_gguf
from .kind import Kind
from .lease import Lease, Leases
from .objects import ObjectStore


@dataclass(frozen=True)
class Source:
    """A local directory, and the name that it comes from. It may be used like a path."""

    given: str
    """The name as the user wrote it."""
    directory: Path
    origin: HubName | ObjectName | None = None
    """Name in the Hub, with the commit as its revision, or in an object store; None for a path."""
    version: str | None = None
    """Version of the files of an object store."""
    lease: Lease | None = field(default=None, compare=False, repr=False)
    """Keeps files in the cache of downloads as long as the source exists."""

    def __fspath__(self) -> str:
        return str(self.directory)

    def __str__(self) -> str:
        return self.given

    @property
    def label(self) -> str:
        """Short name, for example of a served model: the repository, or the last part of the path."""
        if self.origin is not None:
            return self.origin.label
        file = gguf_file_of(self.directory)
        return self.directory.absolute().name if file is None else label_of(file)

    @property
    def last_part(self) -> str:
        """Last part of the name: of the repository or folder, or of the path after its links are resolved."""
        if self.origin is None:
            file = gguf_file_of(self.directory)
            return Path(os.path.realpath(self.directory)).name if file is None else label_of(file)
        return self.origin.label.rpartition("/")[2]

    @property
    def record(self) -> str | None:
        """The exact name with its commit or version, for records of what was built from it; None for a path."""
        if self.origin is None:
            return None
        return str(self.origin) if self.version is None else f"{self.origin}@{self.version}"


def find_model(name: str | os.PathLike[str]) -> Source:
    """Returns the directory of a model, checkpoint or engine. Downloads what the cache does not have.

    A GGUF file gets a directory in the cache of GGUF models. Any other path is returned even if it does not exist; its
    reader reports that.

    Raises ConfigError, and CheckpointError for a GGUF file that is not read.
    """
    return _find(name, Kind.MODEL)


def model_label(name: str | os.PathLike[str]) -> str:
    """Returns the label of find_model(name), and downloads nothing. Raises ConfigError."""
    if isinstance(name, Source):
        return name.label
    meaning = parse_name(name, ConfigError)
    if not isinstance(meaning, LocalName):
        return meaning.label
    return label_of(meaning.path) if is_gguf_file(meaning.path) else meaning.path.absolute().name


def find_adapter(name: str | os.PathLike[str]) -> Source:
    """Returns the directory of an adapter, like find_model().

    Raises AdapterError, and ConfigError if the cache of GGUF files cannot be written.
    """
    return _find(name, Kind.ADAPTER)


def find_sum(name: str | os.PathLike[str]) -> dict[Source, float] | None:
    """Returns the adapters and weights of a weighted sum such as "a:0.7+b:0.3"; None for other names.

    An existing path is no sum. Raises AdapterError like find_adapter(), and for an adapter that occurs twice.
    """
    named = weighted_sum_name(name)
    if named is None:
        return None
    terms: dict[Source, float] = {}
    for term, weight in named.terms:
        source = find_adapter(term)
        if source in terms:
            raise AdapterError(f"the weighted sum '{name}' has '{term}' twice; expected each adapter once")
        terms[source] = weight
    return terms


def _find(name: str | os.PathLike[str], kind: Kind) -> Source:
    if isinstance(name, Source):
        return name
    meaning = parse_name(name, kind.error)
    given = os.fspath(name)
    if isinstance(meaning, LocalName):
        if is_gguf_file(meaning.path):
            directory, lease = _directory_of(meaning.path, kind)
            return Source(given, directory, lease=lease)
        return Source(given, meaning.path)
    if isinstance(meaning, ObjectName):
        download = DownloadCache().fetch(ObjectStore(meaning, kind), progress=progress_on())
        if download is None:
            raise kind.error(missing_config(meaning, kind))
        return Source(given, download.directory, meaning, download.version, download.lease)
    if meaning.gguf:
        file = fetch_gguf(meaning, kind)
        directory, lease = _directory_of(file.path, kind)
        return Source(given, directory, file.name, lease=Leases(lease, file.lease))
    snapshot = fetch(meaning, kind)
    return Source(given, snapshot.directory, snapshot.name, lease=snapshot.lease)


def _directory_of(file: Path, kind: Kind) -> tuple[Path, Lease]:
    """The directory of a GGUF file. Raises `kind.error`, and CheckpointError for a file of a model."""
    try:
        return GgufModels().directory_of(file, kind)
    except CheckpointError as error:
        raise error if kind is Kind.MODEL else kind.error(str(error)) from None
