"""Sources that requests may cause downloads from: hub:ORGANISATION/*, s3://BUCKET/PREFIX/*."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..._core import ConfigError
from .grammar import HUB_PREFIX, OBJECT_PREFIX, HubName, ObjectName, hub_name, object_name

ACCEPTED: Final = "expected hub:ORGANISATION/*, hub:ORGANISATION/NAME, s3://BUCKET/PREFIX/* or s3://BUCKET/PREFIX"
SHORT_HUB_PREFIX: Final = "hub:"
"""Begins a repository or an organisation of the Hub in the flags about sources."""
_ALL: Final = "/*"
_COMMIT: Final = re.compile(r"[0-9a-fA-F]{7,64}")


@dataclass(frozen=True)
class AllowedSources:
    """The sources that the operator of a server names."""

    organisations: frozenset[str] = frozenset()
    """Organisations of the Hub whose repositories are allowed, in lower case."""
    repositories: frozenset[str] = frozenset()
    """Allowed repositories of the Hub, in lower case."""
    prefixes: tuple[ObjectName, ...] = ()
    """Directories of object stores in which everything is allowed."""
    directories: tuple[ObjectName, ...] = ()
    """Directories of object stores that are allowed."""

    def allows(self, name: HubName | ObjectName) -> bool:
        """True if a request may cause a download of this name. Decided by the text alone.

        Commits and pull requests of the Hub are not allowed, because strangers can open a pull request, and its
        commits are commits of the repository.
        """
        if isinstance(name, HubName):
            if name.revision is not None and (name.revision.startswith("refs/") or _COMMIT.fullmatch(name.revision)):
                return False
            repository = name.repository.lower()
            return repository in self.repositories or repository.split("/")[0] in self.organisations
        if name in self.directories:
            return True
        return any(prefix.has_below(name) for prefix in self.prefixes)

    @property
    def kinds(self) -> tuple[HubName | ObjectName, ...]:
        """One name of each kind of store that is allowed."""
        hub = [HubName("org/name")] if self.organisations or self.repositories else []
        return (*hub, *(self.prefixes + self.directories)[:1])


def allowed_sources(patterns: Sequence[str], roots: Sequence[ObjectName] = ()) -> AllowedSources:
    """Parses patterns; each text may hold several, separated by commas. Everything below a root is allowed too.

    Raises ConfigError that names every pattern that cannot be used.
    """
    organisations: set[str] = set()
    repositories: set[str] = set()
    prefixes, directories = [*roots], list[ObjectName]()
    problems = []
    for pattern in [one.strip() for text in patterns for one in text.split(",")]:
        is_all = pattern.endswith(_ALL)
        place = pattern.removesuffix(_ALL)
        if pattern.startswith(SHORT_HUB_PREFIX):
            # An organisation has the form of one part of a repository's name.
            text = place.removeprefix(SHORT_HUB_PREFIX)
            hub = hub_name(f"{text}/x" if is_all else text)
            if hub is not None and hub.label.count("/") == 1 and hub.revision is None:
                (organisations.add(text.lower()) if is_all else repositories.add(text.lower()))
                continue
        elif pattern.startswith(OBJECT_PREFIX) and (objects := object_name(place)) is not None:
            (prefixes if is_all else directories).append(objects)
            continue
        problems.append(f"allowed_adapter_sources has {pattern!r}; {ACCEPTED}{_advice(pattern)}")
    if problems:
        raise ConfigError("; ".join(problems))
    return AllowedSources(frozenset(organisations), frozenset(repositories), tuple(prefixes), tuple(directories))


def _advice(pattern: str) -> str:
    return f" (hub: instead of {HUB_PREFIX})" if pattern.startswith(HUB_PREFIX) else ""
