"""CPUs that this process may use."""

from __future__ import annotations

import os


def num_usable_cpus() -> int:
    """Number of CPUs that this process may use. macOS has no CPU affinity, so there it is the number of all CPUs."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
