"""Names of kernels as commands show them."""

from __future__ import annotations

from .._core import base_of_cpu_kernels


def describe_kernels(name: str) -> str:
    """Names the kernels, and those that they fall back to where their own instructions bring nothing."""
    base = base_of_cpu_kernels(name)
    return f"{name} (otherwise {base})" if base else name
