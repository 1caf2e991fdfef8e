"""Finds adapters by name below the root directories. No path leads out of the roots."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from .._core import AdapterError
from ..formats.adapter.recognise import CONFIG_FILE, DRAFT_DIRECTORY, INITIAL_DIRECTORY
from ..formats.sources.sum_of_names import parse_sum
from .adapter_names import is_name
from .root_paths import paths_below, root_spellings

MAX_FILES: Final = 4096
"""Maximum number of entries in an adapter's directory; all of them are checked."""
MAX_LISTED: Final = 10_000
"""Maximum number of adapters in one list of names."""
MAX_VISITED: Final = 100_000
"""Maximum number of directory entries that are read for one list of names."""
MAX_DEPTH: Final = 8
"""Maximum depth of an adapter below its root, for lists of names."""
_READ_BELOW: Final = (INITIAL_DIRECTORY, DRAFT_DIRECTORY, "additional_chat_templates")
"""Subdirectories of an adapter whose files are read too."""


@dataclass(frozen=True)
class RootNames:
    """Names of the adapters below the roots."""

    names: tuple[str, ...]
    """Names in alphabetical order."""
    is_complete: bool
    """False if there may be more."""


class AdapterRoots:
    """The root directories. All methods read the disk, so the event loop must not call them. Thread-safe."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """A root may be a symbolic link."""
        self.paths: Final = tuple(Path(os.path.realpath(root)) for root in roots)
        """The roots with their links resolved."""
        self._spellings: Final = root_spellings(roots)

    def find(self, name: str) -> Path | None:
        """Returns the adapter's directory; the name is its path from a root. None if there is no such adapter."""
        if not is_path_of_name(name):
            return None
        for root in self.paths:
            directory = root / name
            # An adapter needs a config file, here and in names().
            if self._has_config(directory) and self._is_confined(directory):
                return directory
        return None

    def confine(self, path: str) -> Path | None:
        """Returns the directory for a client's path, absolute or relative to a root. None if it is outside of them."""
        if "\0" in path:
            return None
        for directory in paths_below(self._spellings, path):
            if self._is_confined(directory):
                return directory
        return None

    def names(self) -> RootNames:
        """Returns the names that find() accepts. Skips adapters that lie inside another adapter's directory."""
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
        """True for directories that the list of names descends into. A link counts only if it leads to an adapter below
        a root.
        """
        if not entry.is_symlink():
            return entry.is_dir()
        return self._has_config(Path(entry.path))

    def _has_config(self, directory: Path) -> bool:
        """True if the directory has an adapter's config file, and that file lies below a root."""
        config = directory / CONFIG_FILE
        if not self._roots_of(config):
            return False
        try:
            return config.is_file()
        except OSError:  # a name that is too long
            return False

    def _roots_of(self, path: Path) -> list[Path]:
        """Returns the roots that contain the path after links are resolved. Reads no status outside the roots."""
        real = Path(os.path.realpath(path))
        return [root for root in self.paths if real.is_relative_to(root)]

    def _is_confined(self, directory: Path) -> bool:
        """True if the directory and all its files lie below one root after links are resolved."""
        # The status of a file outside the roots would tell a client that it exists.
        roots = self._roots_of(directory)
        if not roots:
            return False
        try:
            links = _links(directory)
            for name in _READ_BELOW:
                below = directory / name
                if any(Path(os.path.realpath(below)).is_relative_to(root) for root in roots) and below.is_dir():
                    links += _links(below)
        except OSError:  # too long, or not readable: the client is told the same as for a missing path
            return False
        return any(all(Path(os.path.realpath(link)).is_relative_to(root) for link in links) for root in roots)


def is_path_of_name(name: str) -> bool:
    """True if the name is a relative path that stays below the root."""
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
    """Returns the symbolic links in a directory. Raises OSError if it cannot be listed or has more than MAX_FILES
    entries.
    """
    links = []
    with os.scandir(directory) as entries:
        for count, entry in enumerate(entries, start=1):
            if count > MAX_FILES:
                raise OSError(f"{directory} has more than {MAX_FILES} entries")
            if entry.is_symlink():
                links.append(entry.path)
    return links


def _entries(directory: Path, limit: int) -> Iterator[os.DirEntry[str]]:
    """Yields up to `limit` entries of a directory; none if it cannot be listed."""
    try:
        with os.scandir(directory) as entries:
            for _, entry in zip(range(limit), entries, strict=False):
                yield entry
    except OSError:  # the directory may be gone or belong to another user
        return
