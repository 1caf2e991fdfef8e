"""Description of the machine."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..._core import amx_is_permitted, cpu_kernels


def describe_machine(num_threads: int, kernels: str = "") -> dict[str, Any]:
    """Describes the machine for the report. `kernels` as in ExecutorConfig."""
    return {
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "threads": num_threads,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernels": kernels or cpu_kernels()[0],
        "amx": amx_is_permitted(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def utc_now() -> str:
    """Current time in ISO 8601, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _processor() -> str:
    """CPU name from Linux; the architecture if there is no name, as on Arm and macOS."""
    described = Path("/proc/cpuinfo")
    if not described.exists():
        return platform.machine()
    for line in described.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
