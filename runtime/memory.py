"""Memory that this process may still take."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
# (limit, usage) of the control group that a container sees as its own: version 2, then version 1.
_CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def available_memory() -> int:
    """Bytes: what the machine has available, or what its control group leaves where that is less."""
    return min([_machine_available(), *_control_groups_available()])


def _machine_available() -> int:
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _control_groups_available() -> list[int]:
    available = []
    for limit, usage in _CONTROL_GROUPS:
        if limit.is_file() and (text := limit.read_text().strip()) != "max":
            available.append(max(int(text) - int(usage.read_text()), 0))
    return available
