"""Which of NVIDIA's packages compiles: `tensorrt` where it is installed, `tensorrt_rtx` otherwise."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...._core import ConfigError

TENSORRT: Final = "tensorrt"
TENSORRT_RTX: Final = "tensorrt_rtx"
PACKAGES: Final = (TENSORRT, TENSORRT_RTX)
"""In the order of preference."""
_TITLES: Final = {TENSORRT: "TensorRT", TENSORRT_RTX: "TensorRT for RTX"}

# TensorRT for RTX's ONNX parser opens this name, which the wheel lacks: it has the library under its version alone.
# Without it the process ends in the middle of parsing, as soon as a node is a plugin.
_OPENED_BY_THE_PARSER: Final = "libtensorrt_rtx.so"
_LIBRARIES: Final = "tensorrt_rtx_libs"


@dataclass(frozen=True)
class Package:
    """A package that compiles plans, as it describes itself."""

    name: str
    """Of the module: one of PACKAGES."""
    version: str
    compute_capabilities: tuple[str, ...]
    """Those that can be named, such as 8.0; empty where plans are built for the GPU at hand only."""

    @property
    def title(self) -> str:
        """Its name and version as errors show them."""
        return f"{_TITLES[self.name]} {self.version}"

    @property
    def has_timing_cache(self) -> bool:
        """Whether what it measures can be kept: TensorRT for RTX measures nothing while it builds."""
        return self.name == TENSORRT


def installed_package() -> str:
    """The name of the package to build with. Raises ConfigError that names the extras when there is none."""
    for name in PACKAGES:
        if _is_installed(name):
            return name
    raise ConfigError(
        "backend tensorrt needs one of the packages tensorrt and tensorrt_rtx, and neither is installed: "
        "pip install adaptrt[tensorrt] (plans for the GPU of this machine) or "
        "pip install adaptrt[tensorrt-rtx] (also without a GPU)"
    )


def complete_libraries(name: str, directory: Path) -> Path | None:
    """What a process that imports the package needs in LD_LIBRARY_PATH beside the wheel: `directory`, or nothing.

    Makes the link that TensorRT for RTX's wheel lacks in `directory`.
    """
    if name != TENSORRT_RTX:
        return None
    spec = importlib.util.find_spec(_LIBRARIES)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        versioned = sorted(Path(place).glob(f"{_OPENED_BY_THE_PARSER}.*"))
        if versioned and not (Path(place) / _OPENED_BY_THE_PARSER).exists():
            (directory / _OPENED_BY_THE_PARSER).symlink_to(versioned[-1])
            return directory
    return None


def _is_installed(name: str) -> bool:
    # A directory of that name without an __init__.py, on which Python would fall back, has no loader.
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
