"""Names of the parts of the checks and timings, for run.py and check.py."""

from __future__ import annotations

from typing import Final

KERNELS: Final = "kernels"
"""Checks of each kernel."""
SESSION: Final = "session"
"""Requests served with the kernels, and torch in a plan's place."""
ENGINE: Final = "engine"
"""Requests served by the native CUDA engine."""
SOAK: Final = "soak"
"""The same for minutes, with cancels and replaced adapters."""
TIMINGS: Final = "timings"
"""Times of each kernel."""
ENGINE_TIMINGS: Final = "engine-timings"
"""Times of the engine with random models."""
LOST_DEVICE: Final = "lost-device"
"""A lost device, after which the process cannot use CUDA."""
LOST_ENGINE: Final = "lost-engine"
"""The same with the engine."""

ALL: Final = (KERNELS, SESSION, ENGINE, SOAK, TIMINGS, ENGINE_TIMINGS, LOST_DEVICE, LOST_ENGINE)
