"""Directories below which adapters lie: finds adapters there by name, and lets no path lead out of them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from .._core import AdapterError
from ..formats.adapter.recognise import CONFIG_FILE, INITIAL_DIRECTORY
from ..formats.adapter.sum_of_names import parse_sum
from .adapter_names import is_name
from .root_paths import paths_below, root_spellings

MAX_FILES: Final = 4096
"""Entries that the directory of an adapter may have; all of them are looked at."""
MAX_LISTED: Final = 10_000
"""Adapters in one list of names."""
MAX_VISITED: Final = 100_000
"""Entries of directories that are looked at for one list of names."""
MAX_DEPTH: Final = 8
"""Directories between a root and an adapter in a list of names."""
_READ_BELOW: Final = (INITIAL_DIRECTORY, "additional_chat_templates")
"""Directories within an adapter's whose files are read too."""


@dataclass(frozen=True)
class RootNames:
    """Adapters that the roots hold."""

    names: tuple[str, ...]
    """In alphabetical order."""
    is_complete: bool
    """False if there may be more."""


class AdapterRoots:
    """The roots. All methods read the disk, so that none belongs to an event loop. Thread-safe."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """A root may be a link."""
        self.paths: Final = tuple(Path(os.path.realpath(root)) for root in roots)
        """The roots with their links resolved."""
        self._spellings: Final = root_spellings(roots)

    def find(self, name: str) -> Path | None:
        """The directory of the adapter that is named by its path from a root; None when there is none."""
        if not is_path_of_name(name):
            return None
        for root in self.paths:
            directory = root / name
            # Nothing is listed that has no config.
            if self._has_config(directory) and self._is_confined(directory):
                return directory
        return None

    def confine(self, path: str) -> Path | None:
        """The directory that a client names, absolute or as it lies below a root; None where it leads elsewhere."""
        if "\0" in path:
            return None
        for directory in paths_below(self._spellings, path):
            if self._is_confined(directory):
                return directory
        return None

    def names(self) -> RootNames:
        """The names of adapters, as find() takes them; those inside of an adapter's directory are left out."""
        names: set[str] = set()
        budget = MAX_VISITED
        is_complete = True
        for root in self.paths:
            waiting = deque([(root, 0)])
            while waiting:
                directory, depth = waiting.popleft()
                if budget <= 0 or len(names) >= MAX_LISTED:
                    return RootNames(tuple(sorted(names)), is_complete=False)
                entries = list(_entries(directory, budget))
                budget -= len(entries) + 1
                if depth > 0 and any(entry.name == CONFIG_FILE for entry in entries):
                    name = directory.relative_to(root).as_posix()
                    if self._roots_of(directory / CONFIG_FILE) and is_path_of_name(name):
                        names.add(name)
                    continue
                below = [directory / entry.name for entry in entries if self._is_listed(entry)]
                if depth < MAX_DEPTH:
                    waiting.extend((path, depth + 1) for path in below)
                elif below:
                    is_complete = False
        return RootNames(tuple(sorted(names)), is_complete)

    def _is_listed(self, entry: os.DirEntry[str]) -> bool:
        """True of a directory that the list of names looks into; of links, only those to adapters below a root."""
        if not entry.is_symlink():
            return entry.is_dir()
        return self._has_config(Path(entry.path))

    def _has_config(self, directory: Path) -> bool:
        """True if an adapter's config lies in a directory and below a root."""
        config = directory / CONFIG_FILE
        if not self._roots_of(config):
            return False
        try:
            return config.is_file()
        except OSError:  # a name that is too long
            return False

    def _roots_of(self, path: Path) -> list[Path]:
        """The roots below which a path lies when links are followed. Looks at nothing outside of them."""
        real = Path(os.path.realpath(path))
        return [root for root in self.paths if real.is_relative_to(root)]

    def _is_confined(self, directory: Path) -> bool:
        """True if a directory and all its files lie below one root when links are followed."""
        # The status of what lies outside the roots would tell a client what exists there.
        roots = self._roots_of(directory)
        if not roots:
            return False
        try:
            links = _links(directory)
            for name in _READ_BELOW:
                below = directory / name
                if any(Path(os.path.realpath(below)).is_relative_to(root) for root in roots) and below.is_dir():
                    links += _links(below)
        except OSError:  # too long, or not readable: for a client the same as a path that is not there
            return False
        return any(all(Path(os.path.realpath(link)).is_relative_to(root) for link in links) for root in roots)


def is_path_of_name(name: str) -> bool:
    """True if a model's name can be a path from a root and leads nowhere else."""
    if not is_name(name) or "\\" in name or _is_sum(name):
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and str(path) == name and not {".", ".."} & set(path.parts)


def _is_sum(name: str) -> bool:
    try:
        return parse_sum(name) is not None
    except AdapterError:  # it has too many terms
        return True


def _links(directory: Path) -> list[str]:
    """The links in a directory. Raises OSError for one that cannot be listed, or has more than MAX_FILES entries."""
    links = []
    with os.scandir(directory) as entries:
        for count, entry in enumerate(entries, start=1):
            if count > MAX_FILES:
                raise OSError(f"{directory} has more than {MAX_FILES} entries")
            if entry.is_symlink():
                links.append(entry.path)
    return links


def _entries(directory: Path, limit: int) -> Iterator[os.DirEntry[str]]:
    """Up to `limit` entries of a directory; none of one that cannot be listed."""
    try:
        with os.scandir(directory) as entries:
            for _, entry in zip(range(limit), entries, strict=False):
                yield entry
    except OSError:  # it may be gone, or another user's
        return
