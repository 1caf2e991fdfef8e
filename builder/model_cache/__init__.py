"""Engines built from a model directory on first use, and the cache of them; see docs/model-cache.md."""

from .first_use import EnginePlan, engine_for, plan_engine
from .options import VLLM_LIMITS, EngineOptions
from .store import CachedEngine, EngineCache, default_cache_directory

__all__ = [
    "VLLM_LIMITS",
    "CachedEngine",
    "EngineCache",
    "EngineOptions",
    "EnginePlan",
    "default_cache_directory",
    "engine_for",
    "plan_engine",
]
