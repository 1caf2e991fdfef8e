"""AdaptRT: compile a language model once, serve any mix of LoRA and DoRA adapters over it in one in-flight batch.

The names of tensorrt_llm.bindings.executor are here, so that `import adaptrt as trtllm_executor` carries scripts over.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import kv_cache
from ._core import (
    AdapterError,
    AdaptrtError,
    BatchingType,
    CapacitySchedulerPolicy,
    CheckpointError,
    ConfigError,
    ContextChunkingPolicy,
    DisServingRequestStats,
    DraftEngineStats,
    DraftTargetDecodingConfig,
    DType,
    DynamicBatchConfig,
    EngineError,
    ExecutorClosedError,
    ExecutorConfig,
    ExtendedRuntimePerfKnobConfig,
    FinishReason,
    GuidedDecodingConfig,
    GuidedDecodingParams,
    InflightBatchingStats,
    IterationStats,
    KvCacheConfig,
    KvCacheMetrics,
    KvCacheRetentionConfig,
    KvCacheStats,
    LogitsPostProcessorConfig,
    LoraCacheEntry,
    LoraCacheFullError,
    LoraCacheStats,
    LoraConfig,
    ModelType,
    OutputConfig,
    PeftCacheConfig,
    PeftTaskNotCachedError,
    PoolingActivation,
    PoolingLayer,
    PoolingParams,
    PoolingType,
    PromptTuningConfig,
    QueueFullError,
    Request,
    RequestError,
    RequestPerfMetrics,
    RequestStage,
    RequestStats,
    RequestStatsPerIteration,
    RequestType,
    Response,
    Result,
    SamplingConfig,
    SchedulerConfig,
    SecondLevelStats,
    SpecDecodingStats,
    SpeculationStats,
    SpeculativeDecodingMetrics,
    StatePoolStats,
    StaticBatchingStats,
    StepError,
    TimingMetrics,
    TokenRangeRetentionConfig,
)
from ._version import __version__

if TYPE_CHECKING:
    from .builder.model_cache.options import EngineOptions
    from .formats.adapter import invocation_start
    from .runtime.answer import AnswerStream, AsyncAnswer, Completion
    from .runtime.classifier import Classification
    from .runtime.engine import LoadedEngine, load_engine
    from .runtime.executor import Executor
    from .runtime.guide_trial import GuideLimits
    from .runtime.llm import LLM
    from .runtime.lora_request import LoRARequest
    from .runtime.memory_adapters import LoraTensors
    from .runtime.options.debug import DebugConfig
    from .runtime.options.elsewhere import (
        AdditionalModelOutput,
        AdditionalOutput,
        CacheTransceiverConfig,
        ContextPhaseParams,
        KvCacheTransferMode,
        MropeConfig,
        MultimodalInput,
        RuntimeDefaults,
        SpeculativeDecodingFastLogitsInfo,
    )
    from .runtime.options.parallel import (
        CommunicationMode,
        CommunicationType,
        OrchestratorConfig,
        ParallelConfig,
    )
    from .runtime.options.speculative import (
        DecodingConfig,
        DecodingMode,
        EagleConfig,
        ExternalDraftTokensConfig,
        LookaheadDecodingConfig,
        SpeculativeDecodingConfig,
    )
    from .runtime.sampling_params import SamplingParams
    from .runtime.token_log_probs import TokenLogProbs

# Imported when they are first asked for: the command line and the compiler need none of them.
_LAZY = {
    "AdditionalModelOutput": "runtime.options.elsewhere",
    "AdditionalOutput": "runtime.options.elsewhere",
    "AnswerStream": "runtime.answer",
    "AsyncAnswer": "runtime.answer",
    "CacheTransceiverConfig": "runtime.options.elsewhere",
    "Classification": "runtime.classifier",
    "CommunicationMode": "runtime.options.parallel",
    "CommunicationType": "runtime.options.parallel",
    "Completion": "runtime.answer",
    "ContextPhaseParams": "runtime.options.elsewhere",
    "DebugConfig": "runtime.options.debug",
    "DecodingConfig": "runtime.options.speculative",
    "DecodingMode": "runtime.options.speculative",
    "EagleConfig": "runtime.options.speculative",
    "EngineOptions": "builder.model_cache.options",
    "Executor": "runtime.executor",
    "ExternalDraftTokensConfig": "runtime.options.speculative",
    "GuideLimits": "runtime.guide_trial",
    "KvCacheTransferMode": "runtime.options.elsewhere",
    "LLM": "runtime.llm",
    "LoadedEngine": "runtime.engine",
    "LookaheadDecodingConfig": "runtime.options.speculative",
    "LoRARequest": "runtime.lora_request",
    "LoraTensors": "runtime.memory_adapters",
    "MropeConfig": "runtime.options.elsewhere",
    "MultimodalInput": "runtime.options.elsewhere",
    "OrchestratorConfig": "runtime.options.parallel",
    "ParallelConfig": "runtime.options.parallel",
    "RuntimeDefaults": "runtime.options.elsewhere",
    "SamplingParams": "runtime.sampling_params",
    "SpeculativeDecodingConfig": "runtime.options.speculative",
    "SpeculativeDecodingFastLogitsInfo": "runtime.options.elsewhere",
    "TokenLogProbs": "runtime.token_log_probs",
    "invocation_start": "formats.adapter",
    "load_engine": "runtime.engine",
}

__all__ = [
    "LLM",
    "AdapterError",
    "AdaptrtError",
    "AdditionalModelOutput",
    "AdditionalOutput",
    "AnswerStream",
    "AsyncAnswer",
    "BatchingType",
    "CacheTransceiverConfig",
    "CapacitySchedulerPolicy",
    "CheckpointError",
    "Classification",
    "CommunicationMode",
    "CommunicationType",
    "Completion",
    "ConfigError",
    "ContextChunkingPolicy",
    "ContextPhaseParams",
    "DType",
    "DebugConfig",
    "DecodingConfig",
    "DecodingMode",
    "DisServingRequestStats",
    "DraftEngineStats",
    "DraftTargetDecodingConfig",
    "DynamicBatchConfig",
    "EagleConfig",
    "EngineError",
    "EngineOptions",
    "Executor",
    "ExecutorClosedError",
    "ExecutorConfig",
    "ExtendedRuntimePerfKnobConfig",
    "ExternalDraftTokensConfig",
    "FinishReason",
    "GuideLimits",
    "GuidedDecodingConfig",
    "GuidedDecodingParams",
    "InflightBatchingStats",
    "IterationStats",
    "KvCacheConfig",
    "KvCacheMetrics",
    "KvCacheRetentionConfig",
    "KvCacheStats",
    "KvCacheTransferMode",
    "LoRARequest",
    "LoadedEngine",
    "LogitsPostProcessorConfig",
    "LookaheadDecodingConfig",
    "LoraCacheEntry",
    "LoraCacheFullError",
    "LoraCacheStats",
    "LoraConfig",
    "LoraTensors",
    "ModelType",
    "MropeConfig",
    "MultimodalInput",
    "OrchestratorConfig",
    "OutputConfig",
    "ParallelConfig",
    "PeftCacheConfig",
    "PeftTaskNotCachedError",
    "PoolingActivation",
    "PoolingLayer",
    "PoolingParams",
    "PoolingType",
    "PromptTuningConfig",
    "QueueFullError",
    "Request",
    "RequestError",
    "RequestPerfMetrics",
    "RequestStage",
    "RequestStats",
    "RequestStatsPerIteration",
    "RequestType",
    "Response",
    "Result",
    "RuntimeDefaults",
    "SamplingConfig",
    "SamplingParams",
    "SchedulerConfig",
    "SecondLevelStats",
    "SpecDecodingStats",
    "SpeculationStats",
    "SpeculativeDecodingConfig",
    "SpeculativeDecodingFastLogitsInfo",
    "SpeculativeDecodingMetrics",
    "StatePoolStats",
    "StaticBatchingStats",
    "StepError",
    "TimingMetrics",
    "TokenLogProbs",
    "TokenRangeRetentionConfig",
    "__version__",
    "invocation_start",
    "kv_cache",
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
