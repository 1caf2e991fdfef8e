"""Starts processes that import the package under test, and finds processes by their program and open files."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path


def python_path(*folders: Path) -> str:
    """Returns a PYTHONPATH with these folders first.

    This process's own PYTHONPATH follows: the package under test may be there, and without it a child would import the
    installed package.
    """
    own = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([own] if own else [])])


def processes_with(module: str, file: Path) -> set[int]:
    """Returns the ids of processes that run a module and have mapped `file`, or a file below it."""
    return {
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and module in _text(entry / "cmdline") and str(file) in _text(entry / "maps")
    }


def has_mapped(process: int, name: str) -> bool:
    """True if a process has mapped a file whose path contains `name`."""
    return name in _text(Path(f"/proc/{process}/maps"))


def have_ended(processes: Collection[int]) -> bool:
    """Waits some seconds. Returns True if all processes have ended by then."""
    for _ in range(100):
        if not any(Path(f"/proc/{process}").exists() for process in processes):
            return True
        time.sleep(0.05)
    return False


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the process has ended
        return ""
