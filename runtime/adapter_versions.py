"""Versions of adapters: their names, NAME@DIGEST, and the old ones that requests can still ask for."""

from __future__ import annotations

import re
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from .._core import AdapterError
from .named_adapter import NamedAdapter

DIGEST_LENGTH: Final = 64
"""Number of hex digits of an adapter's digest."""
MIN_DIGITS: Final = 8
"""Number of hex digits with which a request may shorten a digest."""
SHOWN_DIGITS: Final = 12
"""Number of hex digits in lists for people."""
_VERSION: Final = re.compile(rf"(.+)@([0-9a-f]{{{MIN_DIGITS},{DIGEST_LENGTH}}})", re.DOTALL)
_WHOLE_DIGEST: Final = re.compile(rf"@[0-9a-f]{{{DIGEST_LENGTH}}}(?=$|:)")


@dataclass(frozen=True)
class VersionLimits:
    """Limits of the old versions of all adapters together."""

    max_versions: int = 16
    max_bytes: int = 256 << 20
    """Size of their files."""


class VersionHold:
    """Keeps a version from ending as long as this object exists."""

    def __init__(self, adapter: NamedAdapter) -> None:
        """Called only by OldVersions.hold()."""
        self.adapter: Final = adapter


def parse_version(name: str) -> tuple[str, str] | None:
    """Returns the adapter's name and the first digits of the digest in NAME@DIGITS; None for another text."""
    found = _VERSION.fullmatch(name)
    return None if found is None else (found[1], found[2])


def has_whole_digest(name: str) -> bool:
    """True for NAME@DIGEST with all digits. No adapter can have such a name: it would be taken for a version."""
    found = parse_version(name)
    return found is not None and len(found[1]) == DIGEST_LENGTH


def version_name(adapter: NamedAdapter) -> str | None:
    """Returns NAME@DIGEST with all digits; None if the digest has not been read yet."""
    return None if adapter.facts.digest is None else f"{adapter.name}@{adapter.facts.digest}"


def short_version_name(adapter: NamedAdapter) -> str:
    """Returns NAME@DIGITS for people, of a version whose digest is known. Requests can ask for it too."""
    return f"{adapter.name}@{(adapter.facts.digest or '')[:SHOWN_DIGITS]}"


def without_versions(name: str) -> str:
    """Removes whole digests from the name of a version, or of a weighted sum of versions."""
    return _WHOLE_DIGEST.sub("", name)


def choose_version(name: str, versions: Iterable[NamedAdapter]) -> NamedAdapter | None:
    """Returns the version whose digest begins with the digits in `name`; None: there is none.

    versions: those of the adapter. Raises AdapterError if several have such a digest.
    """
    parsed = parse_version(name)
    if parsed is None:
        return None
    found = [one for one in versions if (one.facts.digest or "").startswith(parsed[1])]
    if len(found) > 1:
        digests = ", ".join(str(one.facts.digest) for one in found)
        raise AdapterError(f"'{name}' begins the digests of {len(found)} versions: {digests}; expected more digits")
    return found[0] if found else None


class OldVersions:
    """Replaced adapters that requests can still ask for. Not thread-safe: the store calls it under its lock."""

    def __init__(self) -> None:
        self._versions: OrderedDict[tuple[str, str], NamedAdapter] = OrderedDict()
        """By name and digest; the one that was asked for longest ago first."""
        self._holds: weakref.WeakSet[VersionHold] = weakref.WeakSet()

    def __iter__(self) -> Iterator[NamedAdapter]:
        return iter(self._versions.values())

    def of(self, name: str) -> list[NamedAdapter]:
        """Returns the old versions of the adapter `name`."""
        return [one for one in self if one.name == name]

    def add(self, adapter: NamedAdapter) -> None:
        """Adds an adapter that was replaced; its digest is known."""
        self._versions[_key(adapter)] = adapter

    def mark_used(self, adapter: NamedAdapter) -> None:
        """Notes that a request asks for a version. Does nothing for a current one."""
        if _key(adapter) in self._versions:
            self._versions.move_to_end(_key(adapter))

    def take(self, name: str, digest: str) -> NamedAdapter | None:
        """Removes the version and returns it; None: there is none."""
        return self._versions.pop((name, digest), None)

    def take_all(self, name: str) -> list[NamedAdapter]:
        """Removes the old versions of the adapter `name` and returns them."""
        found = self.of(name)
        for one in found:
            del self._versions[_key(one)]
        return found

    def hold(self, adapter: NamedAdapter) -> VersionHold:
        """Keeps a version, current or old, from ending as long as the result exists."""
        made = VersionHold(adapter)
        self._holds.add(made)
        return made

    def take_excess(self, limits: VersionLimits) -> list[NamedAdapter]:
        """Removes versions until the others are within the limits, and returns them. Those that are held stay."""
        held = {hold.adapter.task_id for hold in self._holds}
        ended = []
        num_versions, num_bytes = len(self._versions), sum(one.facts.num_bytes for one in self)
        for key, one in list(self._versions.items()):
            if num_versions <= limits.max_versions and num_bytes <= limits.max_bytes:
                break
            if one.task_id in held:
                continue
            ended.append(self._versions.pop(key))
            num_versions -= 1
            num_bytes -= one.facts.num_bytes
        return ended


def _key(adapter: NamedAdapter) -> tuple[str, str]:
    return adapter.name, adapter.facts.digest or ""
