"""Chooses NVIDIA's package: `tensorrt` if it is installed, otherwise `tensorrt_rtx`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...._core import ConfigError

TENSORRT: Final = "tensorrt"
TENSORRT_RTX: Final = "tensorrt_rtx"
PACKAGES: Final = (TENSORRT, TENSORRT_RTX)
"""Packages in the order of preference."""
_TITLES: Final = {TENSORRT: "TensorRT", TENSORRT_RTX: "TensorRT for RTX"}

# The ONNX parser of TensorRT for RTX opens this name, but the wheel has the library only under its versioned name.
# Without it the process ends while parsing, at the first plugin node.
_OPENED_BY_THE_PARSER: Final = "libtensorrt_rtx.so"
_LIBRARIES: Final = "tensorrt_rtx_libs"


@dataclass(frozen=True)
class Package:
    """A package that compiles plans, as it describes itself."""

    name: str
    """Name of the module; one of PACKAGES."""
    version: str
    compute_capabilities: tuple[str, ...]
    """Accepted compute capabilities, such as 8.0; empty if the package only builds for this machine's GPU."""

    @property
    def title(self) -> str:
        """Name and version, for errors."""
        return f"{_TITLES[self.name]} {self.version}"

    @property
    def has_timing_cache(self) -> bool:
        """True if its measurements can be kept: TensorRT for RTX measures nothing while it builds."""
        return self.name == TENSORRT


def installed_package() -> str:
    """Name of the package to build with. Raises ConfigError that names the extras if none is installed."""
    for name in PACKAGES:
        if _is_installed(name):
            return name
    raise ConfigError(
        "backend tensorrt needs one of the packages tensorrt and tensorrt_rtx, and neither is installed: "
        "pip install 'adaptrt[tensorrt]' (plans for the GPU of this machine) or "
        "pip install 'adaptrt[tensorrt-rtx]' (also without a GPU)"
    )


def complete_libraries(name: str, directory: Path) -> Path | None:
    """Returns the directory that LD_LIBRARY_PATH needs in addition to the wheel, or None.

    For TensorRT for RTX, creates the link that its wheel lacks in `directory`.
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
    # A directory of that name without __init__.py is a namespace package, which has no origin.
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
