"""Names of the checks' subsets, for run.py and check.py."""

from __future__ import annotations

from typing import Final

KERNELS: Final = "kernels"
SESSION: Final = "session"
"""Requests served with the kernels."""
LOST_DEVICE: Final = "lost-device"
"""A lost device, after which the process cannot use CUDA."""
