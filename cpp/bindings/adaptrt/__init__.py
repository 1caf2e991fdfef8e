"""AdaptRT: compile a language model once, serve any mix of LoRA and DoRA adapters over it in one in-flight batch.

The names of tensorrt_llm.bindings.executor are here, so that `import adaptrt as trtllm_executor` carries scripts over.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._core import (
    AdapterError,
    AdaptrtError,
    BatchingType,
    CapacitySchedulerPolicy,
    CheckpointError,
    ConfigError,
    ContextChunkingPolicy,
    DType,
    DynamicBatchConfig,
    EngineError,
    ExecutorClosedError,
    ExecutorConfig,
    FinishReason,
    InflightBatchingStats,
    IterationStats,
    KvCacheConfig,
    KvCacheStats,
    LoraCacheEntry,
    LoraCacheFullError,
    LoraCacheStats,
    ModelType,
    OutputConfig,
    PeftCacheConfig,
    PeftTaskNotCachedError,
    QueueFullError,
    Request,
    RequestError,
    RequestStage,
    RequestStats,
    RequestStatsPerIteration,
    Response,
    Result,
    SamplingConfig,
    SchedulerConfig,
    StepError,
)
from ._version import __version__

if TYPE_CHECKING:
    from .builder.model_cache import EngineOptions
    from .runtime.answer import Completion
    from .runtime.engine import LoadedEngine, load_engine
    from .runtime.executor import Executor
    from .runtime.llm import LLM, AnswerStream
    from .runtime.lora_config import LoraConfig

# Imported when they are first asked for: the command line and the compiler need none of them.
_LAZY = {
    "LLM": "runtime.llm",
    "AnswerStream": "runtime.llm",
    "Completion": "runtime.answer",
    "EngineOptions": "builder.model_cache",
    "Executor": "runtime.executor",
    "LoadedEngine": "runtime.engine",
    "LoraConfig": "runtime.lora_config",
    "load_engine": "runtime.engine",
}

__all__ = [
    "LLM",
    "AdapterError",
    "AdaptrtError",
    "AnswerStream",
    "BatchingType",
    "CapacitySchedulerPolicy",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "ContextChunkingPolicy",
    "DType",
    "DynamicBatchConfig",
    "EngineError",
    "EngineOptions",
    "Executor",
    "ExecutorClosedError",
    "ExecutorConfig",
    "FinishReason",
    "InflightBatchingStats",
    "IterationStats",
    "KvCacheConfig",
    "KvCacheStats",
    "LoadedEngine",
    "LoraCacheEntry",
    "LoraCacheFullError",
    "LoraCacheStats",
    "LoraConfig",
    "ModelType",
    "OutputConfig",
    "PeftCacheConfig",
    "PeftTaskNotCachedError",
    "QueueFullError",
    "Request",
    "RequestError",
    "RequestStage",
    "RequestStats",
    "RequestStatsPerIteration",
    "Response",
    "Result",
    "SamplingConfig",
    "SchedulerConfig",
    "StepError",
    "__version__",
    "load_engine",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
