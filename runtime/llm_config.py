"""Converts LLM's own arguments to an ExecutorConfig."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from .._core import ConfigError, DraftTargetDecodingConfig, ExecutorConfig, ModelType, PeftCacheConfig
from ..common.byte_size import parse_weight_memory
from ..common.shown_value import shown
from .loaded_engine import LoadedEngine
from .options.parallel import ParallelConfig
from .options.speculative import DecodingConfig, LookaheadDecodingConfig


def with_kernels(config: ExecutorConfig | None, kernels: str) -> ExecutorConfig | None:
    """Returns a configuration with these kernels; does not change the caller's."""
    if not kernels:
        return config
    changed = ExecutorConfig() if config is None else copy.copy(config)
    if changed.kernels not in ("", kernels):
        raise ConfigError(f"kernels is '{kernels}', and executor_config has '{changed.kernels}'; expected one of them")
    changed.kernels = kernels
    return changed


def with_device_ids(config: ExecutorConfig | None, device_ids: Sequence[int] | None) -> ExecutorConfig | None:
    """Returns a configuration with this GPU; does not change the caller's."""
    if device_ids is None:
        return config
    changed = ExecutorConfig() if config is None else copy.copy(config)
    parallel = copy.copy(changed.parallel_config or ParallelConfig())
    if parallel.device_ids not in (None, list(device_ids)):
        raise ConfigError(
            f"device_ids is {list(device_ids)}, and executor_config has {parallel.device_ids}; expected one of them"
        )
    parallel.device_ids = list(device_ids)
    changed.parallel_config = parallel
    return changed


def with_lora_storage(config: ExecutorConfig | None, lora_storage: str) -> ExecutorConfig | None:
    """Returns a configuration that stores adapters in this way; does not change the caller's."""
    if not lora_storage:
        return config
    changed = ExecutorConfig() if config is None else copy.copy(config)
    default = PeftCacheConfig()
    cache = copy.copy(changed.peft_cache_config or default)
    if cache.lora_storage not in (default.lora_storage, lora_storage):
        raise ConfigError(
            f"lora_storage is '{lora_storage}', and executor_config has '{cache.lora_storage}'; expected one of them"
        )
    cache.lora_storage = lora_storage
    changed.peft_cache_config = cache
    return changed


def with_weight_memory(config: ExecutorConfig | None, weight_memory: int | str | None) -> ExecutorConfig | None:
    """Returns a configuration with this memory for weights; does not change the caller's."""
    if weight_memory is None:
        return config
    num_bytes = parse_weight_memory(weight_memory, "weight_memory")
    changed = ExecutorConfig() if config is None else copy.copy(config)
    if changed.weight_memory not in (None, num_bytes):
        raise ConfigError(
            f"weight_memory is {num_bytes}, and executor_config has {changed.weight_memory}; expected one of them"
        )
    changed.weight_memory = num_bytes
    return changed


def needs_chunks(engine: LoadedEngine) -> bool:
    """True if a prompt of the engine can be longer than a step; such prompts are computed over several steps."""
    if engine.model_type is not ModelType.DECODER_ONLY:
        return False
    limits = engine.config.build_config
    longest = limits.max_input_len or limits.max_seq_len or 0
    return limits.max_num_tokens < longest


def with_chunks(config: ExecutorConfig | None, engine: LoadedEngine, *, is_given: bool) -> ExecutorConfig | None:
    """Returns a configuration that divides long prompts, unless the caller gave one. Does not change the caller's."""
    if is_given or not needs_chunks(engine):
        return config
    changed = ExecutorConfig() if config is None else copy.copy(config)
    changed.enable_chunked_context = True
    return changed


def with_speculation(
    config: ExecutorConfig | None, speculative_config: LookaheadDecodingConfig | DraftTargetDecodingConfig | None
) -> ExecutorConfig | None:
    """Returns a configuration with these drafts; does not change the caller's."""
    if speculative_config is None:
        return config
    if not isinstance(speculative_config, LookaheadDecodingConfig | DraftTargetDecodingConfig):
        raise ConfigError(
            f"speculative_config is {shown(speculative_config)}; expected LookaheadDecodingConfig, or "
            "DraftTargetDecodingConfig(speculative_model_dir=...) for a draft model"
        )
    changed = ExecutorConfig() if config is None else copy.copy(config)
    if isinstance(speculative_config, DraftTargetDecodingConfig):
        if changed.draft_target_decoding_config is not None:
            raise ConfigError(
                "speculative_config is given, and executor_config has a draft_target_decoding_config; expected one of "
                "them"
            )
        changed.draft_target_decoding_config = speculative_config
        return changed
    if changed.decoding_config is not None:
        raise ConfigError(
            "speculative_config is given, and executor_config has a decoding_config; expected one of them"
        )
    changed.decoding_config = DecodingConfig(lookahead_decoding_config=speculative_config)
    return changed
