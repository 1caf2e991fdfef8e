"""Swaps, versions, streams and evictions in any order on a real engine: no answer comes from a wrong version."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import adaptrt
from adaptrt import _core
from adaptrt.runtime.adapter_versions import VersionLimits
from support.examples import examples
from support.models import ModelSpec, save_adapter
from support.serving import build_random_engine

NAMES = ("a", "b")
NUM_CONTENTS = 4
# One rule does all of these, because Hypothesis disables rules for whole histories. Repeated entries occur more often.
OPERATIONS = (
    *("swap", "swap", "swap", "ask", "ask", "ask_known_version", "ask_known_version", "ask_known_version"),
    *("ask_version", "collect", "evict", "remove"),
)
PROMPT = list(range(3, 40))
MAX_TOKENS = 6


@dataclass(frozen=True)
class Place:
    engine: adaptrt.LoadedEngine
    contents: tuple[Path, ...]
    digests: tuple[str, ...]
    answers: tuple[list[int], ...]
    """Tokens that each content answers PROMPT with; all differ."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    base = tmp_path_factory.mktemp("versions")
    model, directory = build_random_engine(ModelSpec(), base)
    contents = tuple(save_adapter(model, base / f"c{seed}", seed, strength=3.0, r=4) for seed in range(NUM_CONTENTS))
    engine = adaptrt.load_engine(directory)
    answers, digests = [], []
    with adaptrt.Executor(engine, executor_config=adaptrt.ExecutorConfig(num_threads=1)) as executor:
        for content in contents:
            digests.append(str(executor.add_adapter(content.name, content).facts.digest))
            request_id = executor.enqueue_request(request(), adapter=content.name)
            answers.append(list(executor.await_responses(request_id)[-1].result.output_token_ids[0]))
    assert len({tuple(tokens) for tokens in answers}) == NUM_CONTENTS
    return Place(engine, contents, tuple(digests), tuple(answers))


def request() -> adaptrt.Request:
    output = adaptrt.OutputConfig(exclude_input_from_output=True)
    return adaptrt.Request(PROMPT, MAX_TOKENS, output_config=output)


class Versions(RuleBasedStateMachine):
    """Adapters of one executor, whose files are overwritten in place, as trainers do it."""

    place: Place
    num_answers = 0
    """Number of compared answers of all histories."""

    def __init__(self) -> None:
        super().__init__()
        # The host level has room for three adapters of the four contents and two names.
        peft = adaptrt.PeftCacheConfig(host_cache_size=50_000, max_adapter_size=4)
        config = adaptrt.ExecutorConfig(num_threads=1, peft_cache_config=peft)
        self._directory = Path(tempfile.mkdtemp())
        self._executor = adaptrt.Executor(self.place.engine, executor_config=config)
        self._current: dict[str, int] = {}
        self._running: dict[int, int] = {}
        """Content that must answer, by request."""

    @initialize(versions=st.integers(0, 3))
    def limit(self, versions: int) -> None:
        self._executor.adapters.version_limits = VersionLimits(max_versions=versions)

    @rule(
        operation=st.sampled_from(OPERATIONS),
        name=st.sampled_from(NAMES),
        content=st.integers(0, NUM_CONTENTS - 1),
        digits=st.integers(8, 64),
    )
    def step(self, operation: str, name: str, content: int, digits: int) -> None:
        if operation == "swap":
            self._swap(name, content)
        elif operation == "ask" and name in self._current:
            self._ask(name, self._current[name])
        elif operation == "ask_version":
            self._ask(f"{name}@{self.place.digests[content][:digits]}", content)
        elif operation == "ask_known_version":
            versions = [*self._executor.adapters.list_old(), *self._executor.adapters.list()]
            if versions:
                one = versions[content % len(versions)]
                digest = str(one.facts.digest)
                self._ask(f"{one.name}@{digest[:digits]}", self.place.digests.index(digest))
        elif operation == "collect":
            self._collect()
        elif operation == "evict" and (entries := self._executor.list_adapters()):
            _core.Executor.unload_adapter(self._executor, entries[content % len(entries)].task_id)
        elif operation == "remove" and name in self._current:
            self._executor.remove_adapter(name)
            del self._current[name]

    def _swap(self, name: str, content: int) -> None:
        shutil.copytree(self.place.contents[content], self._directory / name, dirs_exist_ok=True)
        with contextlib.suppress(adaptrt.LoraCacheFullError):  # requests hold all of the cache
            self._executor.add_adapter(name, self._directory / name, replace=True)
            self._current[name] = content

    def _ask(self, name: str, content: int) -> None:
        try:
            request_id = self._executor.enqueue_request(request(), adapter=name)
        except (adaptrt.AdapterError, adaptrt.EngineError, adaptrt.LoraCacheFullError):
            # The version has ended, its files were overwritten after it was evicted, or there is no room.
            return
        self._running[request_id] = content

    def _collect(self) -> None:
        for request_id, content in self._running.items():
            (response,) = self._executor.await_responses(request_id)
            assert not response.has_error(), response.error_msg
            assert response.result.output_token_ids[0] == self.place.answers[content]
            type(self).num_answers += 1
        self._running = {}

    @invariant()
    def old_versions_are_within_the_limit(self) -> None:
        store = self._executor.adapters
        old = store.list_old()
        assert len(old) <= store.version_limits.max_versions
        task_ids = [one.task_id for one in (*store.list(), *old)]
        assert len(set(task_ids)) == len(task_ids)
        assert {name: store.get(name).facts.digest for name in store.names} == {
            name: self.place.digests[content] for name, content in self._current.items()
        }

    def teardown(self) -> None:
        self._collect()
        self._executor.shutdown()
        shutil.rmtree(self._directory)


def test_no_answer_comes_from_a_wrong_version(place: Place) -> None:
    class OfPlace(Versions):
        pass

    OfPlace.place = place
    run_state_machine_as_test(
        OfPlace,
        settings=settings(
            max_examples=examples(8, 200),
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[*HealthCheck],
            phases=[Phase.generate],
        ),
    )
    assert OfPlace.num_answers > 20
