"""Loads engine directories of all compilers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from .._core import EngineError
from ..builder.model_cache.store import key_of_engine
from ..common.json_fields import parse_json_object
from ..formats.engine.build_config import CUDA
from ..formats.engine.engine_config import EngineConfig
from .cuda_engine import cuda_engine_in_memory, load_cuda_engine
from .loaded_engine import IN_MEMORY, LoadedEngine
from .native_engine import load_native_engine, native_engine_in_memory
from .ranks import rank_in

__all__ = ["LoadedEngine", "load_engine", "load_engine_bytes"]


def load_engine(directory: str | Path, *, weight_memory: int | None = None) -> LoadedEngine:
    """Loads an engine that `adaptrt build` made. For an engine of several ranks, loads this process's rank.

    weight_memory: see ExecutorConfig.weight_memory. If set, the file is checked without keeping it in memory.

    Raises EngineError with path and reason for a directory of another version and for one that is incomplete, damaged
    or inconsistent; ConfigError for a weight_memory that the engine cannot have.
    """
    directory = Path(directory)
    try:
        return _load(directory, weight_memory)
    except EngineError as error:
        key = key_of_engine(directory)
        if key is None:
            raise
        raise EngineError(
            f"{error}; the engine is in the cache: adaptrt cache --remove {key} deletes it, and it is made again when "
            "its model is used"
        ) from None


def _load(directory: Path, weight_memory: int | None) -> LoadedEngine:
    if not directory.exists():
        raise EngineError(f"{directory}: File does not exist; accepted: the directory of an engine")
    if not directory.is_dir():
        raise EngineError(f"{directory}: is not a directory; accepted: the directory of an engine")
    config = EngineConfig.load(directory)
    if config.tensorrt is None:
        if config.build_config.backend == CUDA:
            return load_cuda_engine(directory, config).with_weight_memory(weight_memory)
        rank = rank_in(config.pretrained_config.mapping.world_size)
        return load_native_engine(directory, config, rank, weight_memory)
    try:
        # Imported here because it imports onnx, which native engines do not need.
        from .tensorrt.engine import load_tensorrt_engine
    except ModuleNotFoundError as error:
        if error.name != "onnx":
            raise
        raise EngineError(f"{directory}: TensorRT engines need onnx: pip install 'adaptrt[onnx]'") from error

    return load_tensorrt_engine(directory, config).with_weight_memory(weight_memory)


def load_engine_bytes(engine: bytes | bytearray | memoryview, config: str) -> LoadedEngine:
    """Loads a native or CUDA engine from the bytes of its rank0.engine and the text of its config.json.

    The bytes are copied in memory to an address that suits the kernels, so the caller may free them afterwards.
    Adapters in the engine's directory are not loaded.

    Raises EngineError like load_engine, and for TensorRT engines, whose plans need a directory.
    """
    parsed = EngineConfig.from_json(parse_json_object(config, str(IN_MEMORY), EngineError), str(IN_MEMORY))
    if parsed.tensorrt is not None:
        raise EngineError(
            f"{IN_MEMORY}: is a TensorRT engine; accepted: native and CUDA engines, or the engine's directory"
        )
    ranks = parsed.pretrained_config.mapping.world_size
    if ranks > 1:
        raise EngineError(f"{IN_MEMORY}: is an engine of {ranks} ranks; accepted: of one, or the engine's directory")
    without_adapters = dataclasses.replace(parsed, adapter_checksums=())
    if parsed.build_config.backend == CUDA:
        return cuda_engine_in_memory(IN_MEMORY, without_adapters, engine)
    return native_engine_in_memory(IN_MEMORY, without_adapters, engine)
