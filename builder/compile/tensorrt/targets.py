"""Target GPUs of a build, checked against what a package supports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...._core import ConfigError
from ....formats.engine.tensorrt.capability import CURRENT, current_capability, parse_capability
from ....formats.engine.tensorrt.package import PACKAGES, Package


def target_problems(names: Sequence[str], timing_cache: Path | None, package: Package) -> list[str]:
    """Targets that this package does not support. Names that are not compute capabilities are rejected elsewhere."""
    found = []
    accepted = ", ".join((*package.compute_capabilities, CURRENT))
    for name in names:
        if parse_capability(name) is not None and name not in package.compute_capabilities:
            found.append(
                f"compute_capability is {name}, which {package.title} does not build for; accepted: {accepted}"
            )
    if timing_cache is not None and not package.has_timing_cache:
        found.append(
            f"timing_cache {timing_cache} cannot be used: {package.title} has no timing cache; only "
            f"{PACKAGES[0]} has one"
        )
    return found


def resolve_targets(names: Sequence[str], package: Package) -> tuple[str, ...]:
    """The compute capabilities, with `current` replaced by that of the local GPU.

    Raises ConfigError without a GPU, and for a GPU that the package does not support.
    """
    if tuple(names) != (CURRENT,):
        return tuple(names)
    there = ", ".join(package.compute_capabilities)
    try:
        current = current_capability()
    except ConfigError as error:
        if not package.compute_capabilities:
            raise
        raise ConfigError(
            f"{error}; without a GPU, {package.title} needs a compute capability by name: some of {there}"
        ) from None
    if package.compute_capabilities and current not in package.compute_capabilities:
        raise ConfigError(
            f"compute_capability {CURRENT} is {current}, which {package.title} does not build for; expected one "
            f"of {there}"
        )
    return (current,)
