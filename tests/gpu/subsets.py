"""What the checks are of, as run.py and check.py name it."""

from __future__ import annotations

from typing import Final

KERNELS: Final = "kernels"
SESSION: Final = "session"
"""Requests that are served over the kernels."""
LOST_DEVICE: Final = "lost-device"
"""A device that cannot be used any more, which takes its process along."""
