"""GET /api/state: the content of the web page as a JSON snapshot, made on request."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from .._version import __version__
from .adapter_names import LONGEST_NAME
from .adapter_roots import RootNames
from .http import read_query
from .service import Service

DEFAULT_ROWS: Final = 100
MAX_ROWS: Final = 1000
"""Maximum number of adapters in one snapshot."""


class Level(str, Enum):
    """The best level that an adapter is on. An adapter on the device level is on the host level as well."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    UNLOADED = "unloaded"
    """The adapter lies below a root, and no request has asked for it."""


class StateQuery(BaseModel):
    """Selects the adapters that a snapshot lists. The counts are those of all adapters."""

    model_config = ConfigDict(extra="forbid")

    search: str = Field("", max_length=LONGEST_NAME)
    """Part of the adapters' names, in upper or lower case."""
    level: Level | None = None
    first: int = Field(0, ge=0, le=1 << 31)
    """Number of matching adapters to skip."""
    limit: int = Field(DEFAULT_ROWS, ge=0, le=MAX_ROWS)


@dataclass(frozen=True)
class AdapterState:
    """One adapter in the list."""

    name: str | None
    """Name; None: an adapter that clients know only by task_id, or an unloaded one that still runs."""
    task_id: int | None
    """None: the adapter is not loaded."""
    level: Level
    is_pinned: bool = False
    num_users: int = 0
    """Number of requests that run with it."""

    @property
    def shown_name(self) -> str:
        """Text that the search compares."""
        return f"task {self.task_id}" if self.name is None else self.name

    def fields(self) -> dict[str, Any]:
        """Returns the fields for JSON. Ids of named adapters exceed JavaScript's exact integers, so ids are texts."""
        return {
            "name": self.name,
            "task_id": None if self.task_id is None else str(self.task_id),
            "level": self.level.value,
            "pinned": self.is_pinned,
            "users": self.num_users,
        }


def routes(service: Service) -> APIRouter:
    """Makes the route."""
    router = APIRouter()

    @router.get("/api/state")
    async def state(request: Request) -> JSONResponse:
        query = read_query(request, StateQuery)
        not_loaded = await service.adapters.not_loaded()
        return JSONResponse(
            {
                "version": __version__,
                "models": list(service.model_names),
                "chats": service.prompts.has_template,
                "engine": _engine(service),
                "seconds": time.monotonic(),
                "tokens_generated": service.metrics.num_generated_tokens,
                **_load(service),
                "lora_cache": _lora_cache(service),
                "adapters": _adapters(service, query, not_loaded),
            },
            headers={"Cache-Control": "no-store"},
        )

    return router


def _engine(service: Service) -> dict[str, Any]:
    info = service.engine_info
    return {
        "dtype": info.dtype.name.lower(),
        "kernels": info.kernels,
        "max_batch_size": info.max_batch_size,
        "max_input_len": info.max_input_len,
        "max_seq_len": info.max_seq_len,
        "max_num_tokens": info.max_num_tokens,
        "tokens_per_block": info.tokens_per_block,
        "max_lora_rank": info.lora.max_rank if _has_lora(service) else None,
    }


def _load(service: Service) -> dict[str, Any]:
    """Returns the numbers of requests and KV blocks."""
    running, waiting = service.statistics.num_requests()
    kv_cache = service.statistics.kv_cache()
    return {
        "requests": {"running": running, "waiting": waiting},
        "kv_cache": None
        if kv_cache is None
        else {
            "used_blocks": service.statistics.num_used_blocks(),
            "total_blocks": kv_cache.max_num_blocks,
            "reused_blocks": kv_cache.reused_blocks,
            "missed_blocks": kv_cache.missed_blocks,
        },
    }


def _lora_cache(service: Service) -> dict[str, Any] | None:
    if not _has_lora(service):
        return None
    stats = service.executor.executor.lora_cache_stats()
    return {
        "device_pages_used": stats.device_pages_used,
        "device_pages_total": stats.device_pages_total,
        "page_bytes": stats.page_bytes,
        "host_bytes_used": stats.host_bytes_used,
        "host_bytes_total": stats.host_bytes_total,
        "device_evictions": stats.device_evictions,
        "host_evictions": stats.host_evictions,
        "loads_in_flight": stats.loads_in_flight,
    }


def _adapters(service: Service, query: StateQuery, not_loaded: RootNames) -> dict[str, Any]:
    unloaded = (AdapterState(name, None, Level.UNLOADED) for name in not_loaded.names)
    states = [*_adapter_states(service), *unloaded]
    searched = query.search.casefold()
    matching = [
        state for state in states if searched in state.shown_name.casefold() and query.level in (None, state.level)
    ]
    counts = Counter(state.level for state in states)
    return {
        "counts": {level.value: counts[level] for level in Level},
        "have_roots": bool(service.options.adapter_roots),
        "all_listed": not_loaded.is_complete,
        "matching": len(matching),
        "first": query.first,
        "list": [state.fields() for state in matching[query.first : query.first + query.limit]],
    }


def _adapter_states(service: Service) -> Iterator[AdapterState]:
    """Yields named adapters in the order in which they were added, then the others. Adapters of virtual tokens are in
    no cache.
    """
    entries = service.executor.executor.list_adapters() if _has_lora(service) else []
    cached = {entry.task_id: entry for entry in entries}
    for adapter in service.adapters.list():
        entry = cached.pop(adapter.task_id, None)
        if entry is None:
            yield AdapterState(adapter.name, adapter.task_id, Level.DISK)
        else:
            level = Level.DEVICE if entry.on_device else Level.HOST
            yield AdapterState(adapter.name, adapter.task_id, level, entry.pinned, entry.users)
    for task_id, entry in sorted(cached.items()):
        level = Level.DEVICE if entry.on_device else Level.HOST
        yield AdapterState(None, task_id, level, entry.pinned, entry.users)


def _has_lora(service: Service) -> bool:
    return bool(service.engine_info.lora.target_modules)
