"""Names of adapters in random histories: threads add, replace, remove, load and evict adapters of a few names.

After each step, every name has an adapter that can be listed and found, the cache holds only these and old versions,
and the stored facts about an adapter match its files. Threads always take the locks in the same order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adaptrt
from adaptrt.runtime.adapter_facts import AdapterFacts
from adaptrt.runtime.named_adapter import NamedAdapter, UnknownAdapterError
from support.models import ModelSpec, save_adapter
from support.serving import build_random_engine

NAMES = ("x", "y")
DIRECTORIES = ("a", "b")
SECONDS = 60.0


class OrderedLock:
    """A lock for the store's tables that records whether the current thread holds it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._held = threading.local()

    @property
    def is_held(self) -> bool:
        return getattr(self._held, "depth", 0) > 0

    def __enter__(self) -> OrderedLock:
        self._condition.__enter__()
        self._held.depth = getattr(self._held, "depth", 0) + 1
        return self

    def __exit__(self, *exception: Any) -> None:
        self._held.depth -= 1
        self._condition.__exit__(*exception)

    def wait_for(self, predicate: Callable[[], bool]) -> bool:
        assert self._held.depth == 1
        return self._condition.wait_for(predicate, SECONDS)

    def notify_all(self) -> None:
        self._condition.notify_all()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[adaptrt.LoadedEngine, Path]:
    base = tmp_path_factory.mktemp("names")
    model, engine = build_random_engine(ModelSpec(), base)
    for seed, name in enumerate(DIRECTORIES):
        save_adapter(model, base / name, seed, r=2, **({"alora_invocation_tokens": [3 + seed]} if seed else {}))
    return adaptrt.load_engine(engine), base


@pytest.fixture(scope="module")
def executor(place: tuple[adaptrt.LoadedEngine, Path]) -> Iterator[adaptrt.Executor]:
    with adaptrt.Executor(place[0], executor_config=adaptrt.ExecutorConfig(num_threads=1)) as made:
        yield made


steps = st.tuples(
    st.sampled_from(["add", "replace", "remove", "load", "evict", "ask"]),
    st.sampled_from(NAMES),
    st.sampled_from(DIRECTORIES),
)


def take(executor: adaptrt.Executor, base: Path, step: tuple[str, str, str]) -> None:
    """Runs one step of one thread. Errors because a name is taken or gone are expected."""
    what, name, directory = step
    store = executor.adapters
    # Adapters may be evicted, and names may be taken or gone.
    with contextlib.suppress(adaptrt.PeftTaskNotCachedError, adaptrt.AdapterError):
        if what in ("add", "replace"):
            executor.add_adapter(name, base / directory, replace=what == "replace")
        elif what == "remove":
            executor.remove_adapter(name)
        elif what == "load":
            executor.load_adapter(name)
        elif what == "evict":
            executor._unload(store.get(name))
        else:
            store.prepare(name)


def check(executor: adaptrt.Executor, base: Path) -> None:
    """Checks the invariants while no thread changes anything."""
    store = executor.adapters
    listed = store.list()
    assert [adapter.name for adapter in listed] == list(store.names)
    assert len({adapter.task_id for adapter in listed}) == len(listed)
    known = {adapter.task_id for adapter in (*listed, *store.list_old())}
    assert {entry.task_id for entry in executor.list_adapters()} <= known
    for name in NAMES:
        assert store.knows(name) == (name in store.names)
        if not store.knows(name):
            with pytest.raises(UnknownAdapterError):
                store.find(name)
            continue
        adapter = store.get(name)
        assert store.find(name) is adapter
        ready = store.ready(name)
        assert ready is not None
        assert ready.num_virtual_tokens == 0
        expected = () if adapter.directory == base / "a" else (4,)
        assert adapter.facts.invocation_tokens == expected
        executor.load_adapter(name)
        assert adapter.task_id in {entry.task_id for entry in executor.list_adapters()}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(st.lists(steps, min_size=1, max_size=4), max_size=6))
def test_names_mean_adapters_whatever_happens_at_once(
    place: tuple[adaptrt.LoadedEngine, Path],
    executor: adaptrt.Executor,
    history: list[list[tuple[str, str, str]]],
) -> None:
    base = place[1]
    with ThreadPoolExecutor(4) as threads:
        for at_once in history:
            for done in [threads.submit(take, executor, base, step) for step in at_once]:
                done.result(SECONDS)
            check(executor, base)
    for name in executor.adapters.names:
        executor.remove_adapter(name)
    assert executor.list_adapters() == []


def test_nothing_is_read_under_the_lock_of_the_names(
    place: tuple[adaptrt.LoadedEngine, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock order is: changing() of one name, then the lock of the tables; under that lock nothing is read."""
    engine, base = place
    with adaptrt.Executor(engine, executor_config=adaptrt.ExecutorConfig(num_threads=1)) as executor:
        store, lock = executor.adapters, OrderedLock()
        monkeypatch.setattr(store, "_changed", lock)
        changing, names = store.changing, threading.local()

        @contextlib.contextmanager
        def checked(name: str) -> Iterator[None]:
            assert not lock.is_held
            assert not getattr(names, "changed", [])
            with changing(name):
                names.changed = [name]
                try:
                    yield
                finally:
                    names.changed = []

        monkeypatch.setattr(store, "changing", checked)
        unload = executor._unload

        def unload_in_turn(adapter: NamedAdapter) -> None:
            assert names.changed == [adapter.name]
            unload(adapter)

        monkeypatch.setattr(executor, "_unload", unload_in_turn)
        for place_, name in ((Path, "stat"), (Path, "read_bytes"), (Path, "open")):
            function = getattr(place_, name)

            def unlocked(*args: Any, function: Any = function, **kwargs: Any) -> Any:
                assert not lock.is_held
                return function(*args, **kwargs)

            monkeypatch.setattr(place_, name, unlocked)
        for step in (
            ("add", "x", "a"), ("ask", "x", "a"), ("load", "x", "a"), ("replace", "x", "b"),
            ("add", "y", "b"), ("ask", "x:0.5+y:0.5", "a"), ("load", "x:0.5+y:0.5", "a"), ("remove", "x", "a"),
        ):  # fmt: skip
            take(executor, base, step)
        for what in ("ask", "load"):  # the facts are unknown, as for an engine's own adapter
            store._adapters["y"] = replace(store.get("y"), facts=AdapterFacts())
            take(executor, base, (what, "y", "b"))
        assert store.for_request("y", [4]) is not None
        assert store.names == ("y",)
