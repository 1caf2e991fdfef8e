"""Memory for weights that are not mapped: checks the room for them, and describes where they are."""

from __future__ import annotations

from pathlib import Path

from .._core import ConfigError, ExecutorConfig, Program, WeightPlacement
from ..common.progress import format_bytes
from ..formats.engine.engine_file import EngineFile, EngineLayout


def require_one_rank(weight_memory: int, num_ranks: int, directory: Path) -> None:
    """Raises ConfigError if the engine of a directory has several ranks, which must map their weights."""
    if num_ranks > 1:
        raise ConfigError(
            f"weight_memory is {weight_memory}; accepted: None and 0, because {directory} is an engine of several ranks"
        )


def require_room(
    program: Program, storage: EngineFile | EngineLayout, weight_memory: int, config: ExecutorConfig, available: int
) -> None:
    """Raises ConfigError if weights and the configured caches do not fit into `available` bytes.

    weight_memory: bytes that weights may take. Caches without a configured size take the remaining memory.
    """
    kv, peft = config.kv_cache_config, config.peft_cache_config
    demands = {"activations": storage.program.arena_bytes}
    if kv.max_tokens is not None:
        demands["KV cache"] = kv.max_tokens // program.tokens_per_block * program.kv_block_bytes()
    if program.lora.sites and peft is not None and peft.host_cache_size is not None:
        demands["adapters on the host level"] = peft.host_cache_size
    demands["weights"] = min(weight_memory, storage.num_bytes)
    needed = sum(demands.values())
    if needed > available:
        parts = ", ".join(f"{name} {num_bytes}" for name, num_bytes in demands.items())
        raise ConfigError(
            f"weight_memory is {weight_memory}: {needed} bytes are needed ({parts}); {available} are available"
        )


def describe_placement(placement: WeightPlacement) -> str:
    """Returns a description for the log."""
    kept = f"{format_bytes(placement.resident_bytes)} of weights stay in memory"
    locked = "" if placement.is_locked else " (not locked: RLIMIT_MEMLOCK is lower)"
    if not placement.file_bytes:
        return kept + locked
    how = "past the system's cache" if placement.is_direct else "through the system's cache"
    return (
        f"{kept}{locked}, {format_bytes(placement.file_bytes)} are read from the file {how} when they are used, into "
        f"{format_bytes(placement.buffer_bytes)}"
    )
