"""Options of a build that do not change its result."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..._core import ConfigError
from ...formats.engine.tensorrt.package import Package


@dataclass(frozen=True, kw_only=True)
class CompilerOptions:
    """Options that change how an engine is compiled, but not the result."""

    package: Package | None
    """TensorRT's package; None: another backend compiles."""
    workers: int = 1
    """Number of TensorRT plans, or of ranks' files, that are made at a time."""
    timing_cache: Path | None = None
    """TensorRT's timing cache; it is read if it exists, and written."""
    dump_onnx_to: Path | None = None
    """Path at which the network is also written as ONNX."""

    @property
    def needs_graph(self) -> bool:
        """True if the build makes the network's ONNX graph."""
        return self.package is not None or self.dump_onnx_to is not None

    def check(self) -> None:
        """Raises ConfigError if the package onnx is needed and not installed, or if the ONNX file cannot be written."""
        if self.needs_graph and find_spec("onnx") is None:
            what = "dump_onnx" if self.dump_onnx_to is not None else "backend tensorrt"
            raise ConfigError(f"{what} needs onnx: pip install 'adaptrt[onnx]'")
        path = self.dump_onnx_to
        if path is None:
            return
        if os.path.lexists(path) and not path.is_file():
            raise ConfigError(f"{path}: exists and is not a file, so the network cannot be written there")
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: cannot be written, because {path.parent} is not a directory")
