"""The two-level LoRA cache against a simple model of it, over random histories."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from adaptrt import _core
from support.examples import examples
from support.lora_tensors import (
    FUSED,
    NUMPY_TYPES,
    SITES,
    TARGETS,
    Row,
    check_device,
    parts_of,
    random_row,
    sizes_of,
    small_layout,
    to_tensors,
)

NUM_TASKS = 128
MAX_RANK = 4
PAGE_BYTES = 2048
# One rule does all of these. Hypothesis disables rules for whole histories, and a history without finished requests or
# without sent adapters soon does nothing. Repeated entries occur more often.
OPERATIONS = (
    *("send", "send", "send", "send", "send_again", "ask", "ask", "ask_for_any"),
    *("start", "start", "start", "start", "stop", "stop", "stop", "stop"),
    *("finish", "finish", "finish", "finish", "finish", "finish", "finish", "finish"),
    *("pin", "unpin", "unpin", "unload", "outdate", "outdate"),
)
ALIGNMENT = 64


def make_rows(task: int, version: int) -> list[Row]:
    """Returns the adapter of a task's version: any modules and ranks, one type, some rows with vectors."""
    rng = np.random.default_rng((task, version))
    dtype = list(NUMPY_TYPES.values())[rng.integers(3)]
    rows = []
    for layer in range(2):
        for site in SITES:
            fused = [name for name, parts in FUSED.items() if set(parts) == set(site)]
            names = fused if fused and rng.random() < 0.3 else list(site)
            for name in names:
                if rng.random() < 0.4:
                    rank = int(rng.integers(1, MAX_RANK + 1))
                    rows.append(random_row(rng, name, layer, rank, bool(rng.random() < 0.3), dtype))
    if not rows:
        rows.append(random_row(rng, "attn_q", 0, 1, False, dtype))
    return [rows[i] for i in rng.permutation(len(rows))]


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def size_of(rows: list[Row], dtype: _core.DType) -> tuple[int, int]:
    """Returns (bytes of the packed adapter, pages that first fit uses in the order of the sites)."""
    free: list[int] = []
    total = 0
    for layer in range(2):
        for site in SITES:
            here = [row for row in rows if row.layer == layer and set(parts_of(row.module)) <= set(site)]
            if not here:
                continue
            size = aligned(_core.panel_bytes(dtype, sum(row.rank for row in here), here[0].a.shape[1]))
            for row in here:
                for part in parts_of(row.module):
                    out_size = sizes_of(part)[1]
                    size += aligned(_core.panel_bytes(dtype, out_size, row.rank))
                    size += sum(aligned(4 * out_size) for vector in (row.magnitude, row.shift) if vector is not None)
            total += size
            fitting = [page for page, room in enumerate(free) if room >= size]
            if fitting:
                free[fitting[0]] -= size
            else:
                free.append(PAGE_BYTES - size)
    return total, len(free)


@dataclass(eq=False)
class Generation:
    """One version of a task's adapter in the model."""

    task: int
    version: int
    rows: list[Row]
    size: int
    pages: int
    users: int = 0
    leases: int = 0
    pinned: bool = False
    outdated: bool = False
    listed: bool = True
    on_device: bool = False

    @property
    def in_use(self) -> bool:
        return self.users > 0 or self.leases > 0


@dataclass
class Model:
    """The cache's guarantees, modelled with lists that start with outdated generations, and otherwise with the least
    recently used one."""

    dtype: _core.DType
    host_bytes: int
    device_pages: int
    max_host_bytes: int = 0
    max_device_pages: int = 0
    num_adapters: int = 0
    largest: tuple[int, int] = (0, 0)
    generations: list[Generation] = field(default_factory=list)
    host_idle: list[Generation] = field(default_factory=list)
    device_idle: list[Generation] = field(default_factory=list)
    host_hits: int = 0
    host_misses: int = 0
    host_evictions: int = 0
    device_hits: int = 0
    device_misses: int = 0
    device_evictions: int = 0

    def grow(self, size: int, pages: int) -> None:
        """Makes room for `num_adapters` of the largest size so far, up to the maximum of each level."""
        self.largest = (max(self.largest[0], size), max(self.largest[1], pages))
        wanted = [max(each * self.num_adapters, new) for each, new in zip(self.largest, (size, pages), strict=True)]
        self.host_bytes = max(self.host_bytes, min(wanted[0], self.max_host_bytes))
        self.device_pages = max(self.device_pages, min(wanted[1], self.max_device_pages))

    def listed(self, task: int) -> Generation | None:
        return next((g for g in self.generations if g.listed and g.task == task), None)

    def used_bytes(self) -> int:
        return sum(g.size for g in self.generations)

    def used_pages(self) -> int:
        return sum(g.pages for g in self.generations if g.on_device)

    def pinned_pages(self, without: Generation | None = None) -> int:
        return sum(g.pages for g in self.generations if g.pinned and g is not without)

    def obtainable(self) -> int:
        return self.device_pages - self.used_pages() + sum(g.pages for g in self.device_idle)

    def settle(self, g: Generation) -> None:
        """Updates the lists to a generation's state; a generation that just became idle counts as most recently
        used."""
        if g.on_device and not g.listed and not g.in_use:
            g.on_device = False
        if not g.listed and not g.in_use:
            self.generations.remove(g)
        alive = g in self.generations
        for idle, should in (
            (self.host_idle, alive and not g.in_use and not g.pinned),
            (self.device_idle, alive and g.on_device and g.leases == 0 and not g.pinned),
        ):
            if should and g not in idle:
                idle.insert(sum(other.outdated for other in idle) if g.outdated else len(idle), g)
            elif not should and g in idle:
                idle.remove(g)

    def outdate(self, g: Generation) -> None:
        """Marks a generation as outdated, or as current again; it then counts as just used."""
        for idle in (self.host_idle, self.device_idle):
            if g in idle:
                idle.remove(g)
        g.outdated = not g.outdated
        self.settle(g)

    def drop(self, g: Generation) -> None:
        g.listed = False
        g.pinned = False
        self.settle(g)

    def find(self, task: int) -> Generation | type[Exception]:
        g = self.listed(task)
        if g is None:
            self.host_misses += 1
            return _core.PeftTaskNotCachedError
        return self.hit(g)

    def hit(self, g: Generation) -> Generation | type[Exception]:
        if not g.pinned and g.pages + self.pinned_pages() > self.device_pages:
            return _core.LoraCacheFullError
        self.host_hits += 1
        g.users += 1
        self.settle(g)
        return g

    def starves(self, pages: int, pinned: int, without: tuple[Generation | None, ...]) -> bool:
        """Returns whether `pages` more pinned pages would keep a generation in use off the device."""
        waiting = [g.pages for g in self.generations if g.in_use and not g.pinned and g not in without]
        return pages + pinned + max(waiting, default=0) > self.device_pages

    def send(self, task: int, version: int, rows: list[Row], replace: bool) -> Generation | type[Exception]:
        new = Generation(task, version, rows, *size_of(rows, self.dtype))
        old = self.listed(task)
        if new.size > max(self.host_bytes, self.max_host_bytes) or new.pages > max(
            self.device_pages, self.max_device_pages
        ):
            return _core.LoraCacheFullError
        if old is not None and old.version == version:
            return self.hit(old)
        if old is not None and not replace:
            return _core.AdapterError
        self.grow(new.size, new.pages)
        pinned = old is not None and old.pinned
        others = self.pinned_pages(without=old)
        if new.pages + others > self.device_pages:
            return _core.LoraCacheFullError
        if pinned and old is not None:
            old.pinned = False
            starved = self.starves(new.pages, others, ())
            old.pinned = True
            if starved:
                return _core.LoraCacheFullError
        free = self.host_bytes - self.used_bytes()
        if old is not None and not old.in_use:
            free += old.size
        victims = []
        for g in self.host_idle:
            if free >= new.size:
                break
            if g is not old:
                victims.append(g)
                free += g.size
        if free < new.size:
            return _core.LoraCacheFullError
        if old is not None:
            self.drop(old)
        for g in victims:
            self.host_evictions += 1
            self.device_evictions += g.on_device
            self.drop(g)
        self.host_misses += 1
        self.generations.append(new)
        new.pinned = pinned
        new.users = 1
        return new

    def acquire(self, g: Generation) -> bool:
        if not g.on_device:
            if self.obtainable() < g.pages:
                return False
            while self.device_pages - self.used_pages() < g.pages:
                victim = self.device_idle.pop(0)
                victim.on_device = False
                self.device_evictions += 1
            self.device_misses += 1
            g.on_device = True
        else:
            self.device_hits += 1
        g.leases += 1
        self.settle(g)
        return True

    def pin(self, g: Generation) -> bool:
        if g.pinned and g.on_device:
            return True
        if not g.pinned:  # a replacement that inherited its pin was checked when it was stored
            others = self.pinned_pages()
            if g.pages + others > self.device_pages or self.starves(g.pages, others, (g,)):
                return False
        if not g.on_device:
            if not self.acquire(g):
                return False
            g.leases -= 1
        g.pinned = True
        self.settle(g)
        return True


class LoraCacheMachine(RuleBasedStateMachine):
    """Requests of random tasks arrive, start, pause and end; operators pin, unpin and unload."""

    @initialize(
        dtype=st.sampled_from(list(NUMPY_TYPES)),
        host_bytes=st.integers(3_000, 12_000),
        device_pages=st.integers(1, 16),
        max_host_bytes=st.sampled_from([0, 8_000, 20_000]),
        max_device_pages=st.sampled_from([0, 8, 24]),
        num_adapters=st.integers(0, 4),
    )
    def make(
        self,
        dtype: _core.DType,
        host_bytes: int,
        device_pages: int,
        max_host_bytes: int,
        max_device_pages: int,
        num_adapters: int,
    ) -> None:
        self.dtype = dtype
        sizes = _core.LoraCacheSizes(host_bytes, PAGE_BYTES, device_pages, max_host_bytes, max_device_pages)
        self.cache = _core.LoraCache(small_layout(dtype, max_rank=MAX_RANK), sizes, num_adapters)
        self.model = Model(dtype, host_bytes, device_pages, max_host_bytes, max_device_pages, num_adapters)
        self.requests: list[tuple[_core.AdmittedAdapter, Generation]] = []
        self.leases: list[tuple[_core.DeviceLease, Generation]] = []

    @rule(
        operation=st.sampled_from(OPERATIONS),
        index=st.integers(0, 255),
        version=st.integers(0, 1),
        replace=st.booleans(),
    )
    def step(self, operation: str, index: int, version: int, replace: bool) -> None:
        if operation == "send":
            self.send(index % NUM_TASKS, version, replace)
        elif operation == "send_again":
            self.send_again(index, version, replace)
        else:
            getattr(self, operation)(index)

    def admitted(self, config: _core.LoraConfig, expected: Generation | type[Exception]) -> None:
        if not isinstance(expected, Generation):
            with pytest.raises(expected) as refusal:
                self.cache.admit(config)
            assert refusal.type is expected
            return
        adapter = self.cache.admit(config)
        assert adapter.bytes == expected.size
        assert self.cache.pages_needed(adapter) == expected.pages
        self.requests.append((adapter, expected))

    def some_listed(self, index: int) -> Generation | None:
        listed = [g for g in self.model.generations if g.listed]
        return listed[index % len(listed)] if listed else None

    def send(self, task: int, version: int, replace: bool) -> None:
        rows = make_rows(task, version)
        weights, config = to_tensors(rows, padding=task % 3)
        if task % 2:
            weights, config = weights[None], config[None]
        expected = self.model.send(task, version, rows, replace)
        self.admitted(_core.LoraConfig(task, weights, config, replace), expected)

    def send_again(self, index: int, version: int, replace: bool) -> None:
        g = self.some_listed(index)
        if g is not None:
            self.send(g.task, version, replace)

    def ask(self, index: int) -> None:
        g = self.some_listed(index)
        task = index if g is None else g.task
        self.admitted(_core.LoraConfig(task), self.model.find(task))

    def ask_for_any(self, index: int) -> None:
        task = index % NUM_TASKS
        self.admitted(_core.LoraConfig(task), self.model.find(task))

    def start(self, index: int) -> None:
        if not self.requests:
            return
        adapter, g = self.requests[index % len(self.requests)]
        costs_nothing = self.cache.is_leased(adapter)
        assert costs_nothing == (g.on_device and (g.leases > 0 or g.pinned))
        before = self.cache.obtainable_pages()
        lease = self.cache.acquire(adapter)
        assert (lease is not None) == self.model.acquire(g)
        if lease is not None:
            assert before - self.cache.obtainable_pages() == (0 if costs_nothing else g.pages)
            check_device(self.cache, lease, g.rows, NUMPY_TYPES[self.dtype])
            self.leases.append((lease, g))

    def stop(self, index: int) -> None:
        if not self.leases:
            return
        lease, g = self.leases.pop(index % len(self.leases))
        check_device(self.cache, lease, g.rows, NUMPY_TYPES[self.dtype])
        del lease
        g.leases -= 1
        self.model.settle(g)

    def finish(self, index: int) -> None:
        if not self.requests:
            return
        adapter, g = self.requests.pop(index % len(self.requests))
        del adapter
        g.users -= 1
        self.model.settle(g)

    def pin(self, index: int) -> None:
        g = self.some_listed(index)
        if g is None:
            return
        fits = self.model.pin(g)
        try:
            self.cache.pin(g.task)
        except _core.LoraCacheFullError:
            assert not fits
        else:
            assert fits

    def unpin(self, index: int) -> None:
        g = self.some_listed(index)
        if g is not None:
            self.cache.unpin(g.task)
            g.pinned = False
            self.model.settle(g)

    def outdate(self, index: int) -> None:
        g = self.some_listed(index)
        if g is not None:
            self.model.outdate(g)
            for _ in range(2):  # the second call changes nothing
                self.cache.set_outdated(g.task, g.outdated)

    def unload(self, index: int) -> None:
        g = self.some_listed(index)
        if g is not None:
            self.cache.unload(g.task)
            self.model.drop(g)

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.cache.check_invariants() == []
        stats = self.cache.stats()
        for name in (
            "host_hits",
            "host_misses",
            "host_evictions",
            "device_hits",
            "device_misses",
            "device_evictions",
        ):
            assert getattr(stats, name) == getattr(self.model, name), name
        assert stats.host_bytes_used == self.model.used_bytes() <= stats.host_bytes_total
        # Both levels have one copy, in the memory of the host level.
        assert stats.memory_bytes == stats.host_bytes_used
        assert stats.loads_in_flight == stats.failed_loads == stats.load_seconds == 0
        assert (stats.host_bytes_total, stats.device_pages_total) == (self.model.host_bytes, self.model.device_pages)
        assert stats.host_adapters == len(self.model.generations)
        assert stats.device_pages_used == self.model.used_pages() <= stats.device_pages_total
        assert stats.device_adapters == sum(g.on_device for g in self.model.generations)
        assert self.cache.obtainable_pages() == self.model.obtainable()
        listed = sorted((g for g in self.model.generations if g.listed), key=lambda g: g.task)
        assert self.cache.list() == [
            _core.LoraCacheEntry(g.task, g.size, g.pages, g.on_device, g.pinned, g.users, g.outdated) for g in listed
        ]

    def teardown(self) -> None:
        """After all requests end, the cache holds only listed adapters."""
        self.leases.clear()
        self.requests.clear()
        if hasattr(self, "cache"):
            assert self.cache.check_invariants() == []
            assert self.cache.stats().host_adapters == len(self.cache.list())


TestLoraCache = LoraCacheMachine.TestCase
TestLoraCache.settings = settings(
    max_examples=examples(12, 200), stateful_step_count=500, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_every_module_is_drawn() -> None:
    drawn = {row.module for task in range(NUM_TASKS) for row in make_rows(task, 0)}
    assert drawn == set(TARGETS)
