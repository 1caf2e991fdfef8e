"""Processes of this machine, by what they run and have open."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path


def processes_with(module: str, file: Path) -> set[int]:
    """Those that run a module and have mapped a file, or one below a directory of this path."""
    return {
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and module in _text(entry / "cmdline") and str(file) in _text(entry / "maps")
    }


def has_mapped(process: int, name: str) -> bool:
    """Whether a process has a file whose path contains this."""
    return name in _text(Path(f"/proc/{process}/maps"))


def have_ended(processes: Collection[int]) -> bool:
    """Within some seconds."""
    for _ in range(100):
        if not any(Path(f"/proc/{process}").exists() for process in processes):
            return True
        time.sleep(0.05)
    return False


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # it has ended
        return ""
