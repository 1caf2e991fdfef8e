"""KV cache events, under the names of tensorrt_llm.bindings.executor.kv_cache."""

from ._core import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventDiffInt,
    KVCacheEventManager,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    UniqueToken,
)

__all__ = [
    "KVCacheCreatedData",
    "KVCacheEvent",
    "KVCacheEventDiffInt",
    "KVCacheEventManager",
    "KVCacheRemovedData",
    "KVCacheStoredBlockData",
    "KVCacheStoredData",
    "KVCacheUpdatedData",
    "UniqueToken",
]
