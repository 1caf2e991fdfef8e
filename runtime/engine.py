"""Loads engine directories, whatever compiled them."""

from __future__ import annotations

from pathlib import Path

from .._core import EngineError
from ..builder.engine_config import EngineConfig
from .loaded_engine import LoadedEngine
from .native_engine import load_native_engine

__all__ = ["LoadedEngine", "load_engine"]


def load_engine(directory: str | Path) -> LoadedEngine:
    """Loads an engine that `adaptrt build` made.

    Raises EngineError with the path and the reason for a directory of another version, and one that is
    incomplete, damaged or inconsistent.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise EngineError(f"{directory}: is no directory")
    config = EngineConfig.load(directory)
    if config.tensorrt is None:
        return load_native_engine(directory, config)
    # Reads the network, and so brings onnx along, which native engines do without.
    from .tensorrt.engine import load_tensorrt_engine

    return load_tensorrt_engine(directory, config)
