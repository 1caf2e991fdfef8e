"""GET /api/state: the content of the web page as a JSON snapshot, made on request."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from .._version import __version__
from .adapter_names import LONGEST_NAME
from .adapter_roots import RootNames
from .http import read_query
from .residency import AdapterState, Level, adapter_states
from .service import Service

STATE_PATH: Final = "/api/state"
DEFAULT_ROWS: Final = 100
MAX_ROWS: Final = 1000
"""Maximum number of adapters in one snapshot."""


class StateQuery(BaseModel):
    """Selects the adapters that a snapshot lists. The counts are those of all adapters."""

    model_config = ConfigDict(extra="forbid")

    search: str = Field("", max_length=LONGEST_NAME)
    """Part of the adapters' names, in upper or lower case."""
    level: Level | None = None
    first: int = Field(0, ge=0, le=1 << 31)
    """Number of matching adapters to skip."""
    limit: int = Field(DEFAULT_ROWS, ge=0, le=MAX_ROWS)


def routes(service: Service) -> APIRouter:
    """Makes the route."""
    router = APIRouter()

    @router.get(STATE_PATH)
    async def state(request: Request) -> JSONResponse:
        query = read_query(request, StateQuery)
        not_loaded = await service.adapters.not_loaded()
        return JSONResponse(
            {
                "version": __version__,
                "models": list(service.model_names),
                "chats": service.prompts.has_template,
                "images": _images(service),
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


def _images(service: Service) -> dict[str, int] | None:
    """Returns the limits of images; None: prompts may have none."""
    limits = service.options.limits.images
    if not service.vision.takes_images or limits.max_images == 0:
        return None
    return {"max_images": limits.max_images, "max_bytes": limits.max_bytes}


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
    states = [*states_of(service), *unloaded]
    searched = query.search.casefold()
    matching = [
        state for state in states if searched in _shown_name(state).casefold() and query.level in (None, state.level)
    ]
    counts = Counter(state.level for state in states)
    return {
        "counts": {level.value: counts[level] for level in Level},
        "have_roots": bool(service.options.adapter_roots),
        "all_listed": not_loaded.is_complete,
        "matching": len(matching),
        "first": query.first,
        "list": [_row(state) for state in matching[query.first : query.first + query.limit]],
    }


def states_of(service: Service) -> Iterator[AdapterState]:
    """Yields the state of each known adapter, of its old versions, and of weighted sums that are cached."""
    entries = service.executor.executor.list_adapters() if _has_lora(service) else []
    cached = {entry.task_id for entry in entries}
    sums = [(name, task_id) for name, task_id in service.adapters.shown_sums() if task_id in cached]
    return adapter_states([*service.adapters.shown_names(), *sums], entries)


def _shown_name(state: AdapterState) -> str:
    """Returns the text that the search compares."""
    return f"task {state.task_id}" if state.name is None else state.name


def _row(state: AdapterState) -> dict[str, Any]:
    """Returns the fields for JSON. Ids of named adapters exceed JavaScript's exact integers, so ids are texts."""
    return {
        "name": state.name,
        "task_id": None if state.task_id is None else str(state.task_id),
        "level": state.level.value,
        "pinned": state.is_pinned,
        "users": state.num_users,
    }


def _has_lora(service: Service) -> bool:
    return bool(service.engine_info.lora.target_modules)
