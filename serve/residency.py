"""Adapters by cache level: for the web page, and as metrics that routers read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric

from .._core import LoraCacheEntry, LoraCacheStats

RANK: Final = "0"
"""Label of the process that reports. Rank 0 decides for all ranks, so they hold the same adapters."""


class Level(str, Enum):
    """The best level that an adapter is on. An adapter on the device level is on the host level as well."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    UNLOADED = "unloaded"
    """The adapter lies below a root, and no request has asked for it."""


_VLLM_LEVELS: Final = {Level.DEVICE: "gpu", Level.HOST: "cpu"}
"""vLLM's names of the cache levels. It lists no adapters of the others."""


@dataclass(frozen=True)
class AdapterState:
    """One adapter and where it is."""

    name: str | None
    """Name; None: an adapter that clients know only by task_id, or an unloaded one that still runs."""
    task_id: int | None
    """None: the adapter is not loaded."""
    level: Level
    is_pinned: bool = False
    num_users: int = 0
    """Number of requests that run with it."""


def adapter_states(named: Iterable[tuple[str, int]], cached: Iterable[LoraCacheEntry]) -> Iterator[AdapterState]:
    """Yields named adapters in the given order, then the other cached ones. Adapters of virtual tokens are in no cache.

    named: name and task_id of each adapter that the server knows. cached: all entries of the LoRA cache.
    """
    entries = {entry.task_id: entry for entry in cached}
    for name, task_id in named:
        entry = entries.pop(task_id, None)
        yield AdapterState(name, task_id, Level.DISK) if entry is None else _cached(name, entry)
    for _, entry in sorted(entries.items()):
        yield _cached(None, entry)


def residency_metrics(
    named: Iterable[tuple[str, int]],
    cached: Sequence[LoraCacheEntry],
    stats: LoraCacheStats,
    most_named: int,
    room: int,
) -> Iterator[Metric]:
    """Yields vLLM's metrics of loaded adapters.

    most_named: maximum number of adapters that have a series of their own. room: number of adapters that the device
    level is assumed to hold while the cache is empty.
    """
    family = GaugeMetricFamily(
        "vllm:lora_adapter_loaded",
        "Always 1: the adapter is cached, and level is the best one that it is on.",
        labels=["adapter_name", "level", "pinned", "rank"],
    )
    for state in _most_wanted(adapter_states(named, cached), most_named):
        family.add_metric([str(state.name), _VLLM_LEVELS[state.level], str(state.is_pinned).lower(), RANK], 1)
    yield family
    for name, text, value in (
        ("num_gpu_loaded_lora_adapters", "Adapters on the device level.", stats.device_adapters),
        ("num_cpu_loaded_lora_adapters", "Adapters on the host level.", stats.host_adapters),
        (
            "max_gpu_lora_adapters",
            "Adapters that the device level holds: those that are there, and as many of the mean size as still fit.",
            _device_capacity(cached, stats, room),
        ),
    ):
        yield GaugeMetricFamily(f"vllm:{name}", text, value=value)


def _cached(name: str | None, entry: LoraCacheEntry) -> AdapterState:
    level = Level.DEVICE if entry.on_device else Level.HOST
    return AdapterState(name, entry.task_id, level, entry.pinned, entry.users)


def _most_wanted(states: Iterable[AdapterState], most: int) -> list[AdapterState]:
    """Returns the cached adapters with names, those of the device level first, then pinned and used ones."""
    named = (state for state in states if state.name is not None and state.level in _VLLM_LEVELS)
    return sorted(
        named, key=lambda state: (state.level is not Level.DEVICE, not state.is_pinned, -state.num_users, state.name)
    )[:most]


def _device_capacity(cached: Sequence[LoraCacheEntry], stats: LoraCacheStats, room: int) -> int:
    pages = sum(entry.device_pages for entry in cached)
    if pages == 0:
        return max(room, stats.device_adapters)
    free = max(0, stats.device_pages_total - stats.device_pages_used)
    return stats.device_adapters + free * len(cached) // pages
