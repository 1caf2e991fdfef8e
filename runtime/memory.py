"""Measures the memory that this process may still allocate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))
"""Directories of control groups, version 2 and version 1. A container sees its own group there."""
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of both versions: the limit, the usage, and the line of memory.stat with reclaimable file cache."""


def available_memory() -> int:
    """Returns the available bytes: of the machine, or of its control groups if that is less."""
    groups = [_available_in(group, *files) for group, files in _control_groups() if (group / files[0]).is_file()]
    return min([_machine_available(), *(available for available in groups if available is not None)])


def _machine_available() -> int:
    if not _MEMINFO.exists():  # macOS does not tell a process what is available, only what there is
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _control_groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yields the control groups of this process, as far as they are visible, and their parents."""
    for version, root in enumerate(_ROOTS):
        group = root / _path_of_own_group(is_first_version=version == 1).lstrip("/")
        while True:
            yield group, _FILES[version]
            if group == root or root not in group.parents:
                break
            group = group.parent


def _path_of_own_group(*, is_first_version: bool) -> str:
    if not _OWN_GROUPS.is_file():
        return "/"
    for line in _OWN_GROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") if is_first_version else not controllers:
            return path
    return "/"


def _available_in(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Returns the bytes available in a group; None without a limit."""
    text = (group / limit).read_text().strip()
    if text == "max":
        return None
    statistics = group / "memory.stat"
    lines = statistics.read_text().splitlines() if statistics.is_file() else []
    kept = dict(line.split() for line in lines if len(line.split()) == 2)
    used = int((group / usage).read_text()) - int(kept.get(reclaimable, 0))
    return max(int(text) - max(used, 0), 0)
