"""GET /v1/adapters: the versions of adapters, with their sizes, levels and users."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from .._core import LoraCacheEntry
from ..runtime.adapter_versions import version_name
from ..runtime.named_adapter import NamedAdapter
from .residency import adapter_states
from .service import Service

LIST_PATH: Final = "/v1/adapters"
DEFAULT_ROWS: Final = 100
MAX_ROWS: Final = 1000


class AdaptersQuery(BaseModel):
    """Selects the rows of the list."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = None
    """The adapter whose versions are listed; None: all."""
    first: int = Field(0, ge=0, le=1 << 31)
    """Number of rows to skip."""
    limit: int = Field(DEFAULT_ROWS, ge=0, le=MAX_ROWS)


def adapter_list(service: Service, query: AdaptersQuery) -> dict[str, Any]:
    """Returns the list. An adapter's current version comes first, then its old ones, the newest first."""
    has_lora = bool(service.engine_info.lora.target_modules)
    cached = service.executor.executor.list_adapters() if has_lora else []
    rows = list(_rows(service.adapters.list_versions(), cached, query.name))
    return {"object": "list", "data": rows[query.first : query.first + query.limit], "total": len(rows)}


def _rows(
    versions: Sequence[tuple[NamedAdapter, bool]], cached: list[LoraCacheEntry], name: str | None
) -> Iterator[dict[str, Any]]:
    entries = {entry.task_id: entry for entry in cached}
    states = adapter_states([(one.name, one.task_id) for one, _ in versions], cached)
    for (one, is_current), state in zip(versions, states, strict=False):
        if name not in (None, one.name):
            continue
        entry, facts = entries.get(one.task_id), one.facts
        yield {
            "id": version_name(one) or one.name,
            "object": "adapter",
            "name": one.name,
            "digest": facts.digest,
            "current": is_current,
            "kind": facts.kind,
            "max_rank": facts.max_rank,
            "bytes": facts.num_bytes or None,
            "host_bytes": None if entry is None else entry.host_bytes,
            "device_pages": None if entry is None else entry.device_pages,
            "level": state.level.value,
            "pinned": state.is_pinned,
            "users": state.num_users,
            "created": one.created,
            "last_used": None if facts.last_used is None else int(facts.last_used),
            "source": facts.source or str(one.directory),
        }
