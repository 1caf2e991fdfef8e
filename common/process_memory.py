"""Memory use of this process."""

from __future__ import annotations

import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory() -> int:
    """Peak resident memory of the process in bytes, including pages of mapped files."""
    if not _STATUS.exists():  # macOS; on Linux, getrusage would include the process that started this one
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = _STATUS.read_text(encoding="ascii", errors="replace")
    return int(status.split("VmHWM:")[1].split()[0]) << 10
