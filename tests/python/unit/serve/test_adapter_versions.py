"""Versions of adapters: replaced ones are asked for by digest, keep to their limits, and never mix with others."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

import adaptrt
from adaptrt.formats.adapter.adapter_copy import adapter_files
from adaptrt.runtime.adapter_versions import VersionLimits, choose_version
from adaptrt.runtime.named_adapter import NamedAdapter
from adaptrt.serve.adapters import ServedAdapters
from adaptrt.serve.async_executor import AsyncExecutor
from adaptrt.serve.errors import ApiError
from adaptrt.serve.records import RequestRecord, current_request
from support.models import ModelSpec, save_adapter
from support.serving import build_random_engine

PROMPT = list(range(3, 13))
MAX_TOKENS = 8
VERSIONS = ("v0", "v1", "v2")


@dataclass(frozen=True)
class Place:
    engine: adaptrt.LoadedEngine
    root: Path
    answers: dict[str, list[int]]
    """Tokens that each directory below the root answers PROMPT with."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    base = tmp_path_factory.mktemp("versions")
    model, directory = build_random_engine(ModelSpec(), base)
    for seed, name in enumerate(VERSIONS):
        save_adapter(model, base / "root" / name, seed, strength=3.0, r=4)
    engine = adaptrt.load_engine(directory)
    answers = {}
    with adaptrt.Executor(engine, executor_config=adaptrt.ExecutorConfig(num_threads=1)) as executor:
        for name in VERSIONS:
            executor.add_adapter(name, base / "root" / name)
            id = executor.enqueue_request(adaptrt.Request(PROMPT, MAX_TOKENS), adapter=name)
            answers[name] = list(executor.await_responses(id)[-1].result.output_token_ids[0][len(PROMPT) :])
    assert len({tuple(tokens) for tokens in answers.values()}) == len(VERSIONS)
    return Place(engine, base / "root", answers)


@pytest.fixture
def executor(place: Place) -> Iterator[adaptrt.Executor]:
    with adaptrt.Executor(place.engine, executor_config=adaptrt.ExecutorConfig(num_threads=1)) as made:
        yield made


def run(place: Place, executor: adaptrt.Executor, body: Callable[[ServedAdapters], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        asynchronous = AsyncExecutor(executor)
        asynchronous.start()
        try:
            await body(ServedAdapters(asynchronous, [place.root], frozenset()))
        finally:
            await asynchronous.close()

    asyncio.run(main())


async def answer(adapters: ServedAdapters, name: str) -> list[int]:
    tokens: list[int] = []
    async with await adapters.submit(adaptrt.Request(PROMPT, MAX_TOKENS, streaming=True), name) as generation:
        while results := await generation.next_results():
            tokens += [token for result in results for token in result.output_token_ids[0]]
    return tokens


async def load_all(adapters: ServedAdapters) -> list[str]:
    """Loads all versions one after the other as "it"; returns their names."""
    names = []
    for path in VERSIONS:
        await adapters.load("it", path, replace=True)
        names.append(await adapters.current_version("it") or "")
    return names


def digest_of(directory: Path) -> str:
    files = {name: (directory / name).read_bytes() for name in adapter_files(directory)}
    return hashlib.sha256(b"".join(f"{name}:{len(data)}\n".encode() + data for name, data in files.items())).hexdigest()


def test_replaced_versions_answer_by_their_digest(place: Place, executor: adaptrt.Executor) -> None:
    async def body(adapters: ServedAdapters) -> None:
        names = await load_all(adapters)
        assert names == [f"it@{digest_of(place.root / path)}" for path in VERSIONS]
        # The same prompt each time: KV of one version would be found for another if their keys were equal.
        for name in (*names, names[0], "it"):
            path = VERSIONS[-1] if name == "it" else VERSIONS[names.index(name)]
            assert await answer(adapters, name) == place.answers[path]
        short = names[1][: len("it@") + 8]
        assert await adapters.current_version(short) == names[1]
        assert await answer(adapters, short) == place.answers["v1"]
        assert await answer(adapters, f"{names[0]}:1.0") == place.answers["v0"]
        await answer(adapters, "it:0.5")
        sums = dict(adapters.shown_sums())
        assert list(sums) == [f"{names[0][: len('it@') + 12]}:1.0", "it:0.5"]
        assert set(sums.values()) < {entry.task_id for entry in executor.list_adapters()}
        assert await adapters.current_version(f"{short}:0.5+it:0.5") == f"{names[1]}:0.5+{names[2]}:0.5"
        for unknown in ("it@" + "0" * 8, names[0][:-57], names[0].upper(), f"other@{names[0][3:]}"):
            assert await adapters.current_version(unknown) is None
        task_ids = {executor.adapters.get(name).task_id for name in names}
        await adapters.unload("it")
        assert task_ids.isdisjoint(entry.task_id for entry in executor.list_adapters())
        assert not await adapters.find(names[0])

    run(place, executor, body)


def test_a_version_that_returns_keeps_its_task(place: Place, executor: adaptrt.Executor) -> None:
    async def body(adapters: ServedAdapters) -> None:
        names = await load_all(adapters)
        task_ids = [executor.adapters.get(name).task_id for name in names]
        assert len(set(task_ids)) == len(names)
        await adapters.load("it", "v0", replace=True)
        assert executor.adapters.get("it").task_id == task_ids[0]
        assert {one.task_id for one in executor.adapters.list_old()} == set(task_ids[1:])
        assert await answer(adapters, "it") == place.answers["v0"]

    run(place, executor, body)


def test_versions_below_a_root_are_found_again(place: Place, executor: adaptrt.Executor) -> None:
    async def body(adapters: ServedAdapters) -> None:
        name = f"v1@{digest_of(place.root / 'v1')}"
        assert await adapters.find(name[: len("v1@") + 12])
        assert await answer(adapters, name) == place.answers["v1"]
        assert not await adapters.find(f"v1@{'f' * 64}")

    run(place, executor, body)


@pytest.mark.parametrize("limits", [VersionLimits(max_versions=1), VersionLimits(max_bytes=20_000)])
def test_old_versions_end_at_their_limits(place: Place, executor: adaptrt.Executor, limits: VersionLimits) -> None:
    async def body(adapters: ServedAdapters) -> None:
        executor.adapters.version_limits = limits
        await adapters.load("it", "v0")
        first = await adapters.current_version("it")
        size = executor.adapters.get("it").facts.num_bytes
        assert size <= 20_000 < 2 * size
        request = adaptrt.Request(PROMPT, MAX_TOKENS, streaming=True)
        async with await adapters.submit(request, "it") as generation:
            names = await load_all(adapters)
            assert names[0] == first
            assert [await adapters.find(name) for name in names] == [False, True, True]
            tokens: list[int] = []
            while results := await generation.next_results():
                tokens += [token for result in results for token in result.output_token_ids[0]]
        assert tokens == place.answers["v0"]
        assert len(executor.list_adapters()) == 2
        with pytest.raises(adaptrt.AdapterError) as ended:
            await answer(adapters, names[0])
        assert str(ApiError.of(ended.value)) == "The adapter 'it' does not exist."

    run(place, executor, body)


def test_a_version_stays_until_its_request_ends(place: Place, executor: adaptrt.Executor) -> None:
    async def body(adapters: ServedAdapters) -> None:
        executor.adapters.version_limits = VersionLimits(max_versions=0)
        await adapters.load("it", "v0")
        token = current_request.set(RequestRecord())
        name = await adapters.current_version("it")
        assert name is not None
        current_request.reset(token)
        await adapters.load("it", "v1", replace=True)
        assert not await adapters.find(name)  # the record has gone
        record = RequestRecord()
        token = current_request.set(record)
        name = await adapters.current_version("it")
        current_request.reset(token)
        await adapters.load("it", "v2", replace=True)
        assert await answer(adapters, str(name)) == place.answers["v1"]
        record.versions.clear()
        await adapters.load("it", "v0", replace=True)
        assert executor.adapters.list_old() == ()

    run(place, executor, body)


def test_old_versions_leave_the_cache_first(place: Place) -> None:
    two_adapters = 30_000
    config = adaptrt.ExecutorConfig(
        num_threads=1, peft_cache_config=adaptrt.PeftCacheConfig(host_cache_size=two_adapters, max_adapter_size=4)
    )
    with adaptrt.Executor(place.engine, executor_config=config) as executor:

        def cached() -> dict[int, bool]:
            return {entry.task_id: entry.outdated for entry in executor.list_adapters()}

        other = executor.add_adapter("other", place.root / "v2").task_id
        old = executor.add_adapter("it", place.root / "v0")
        new = executor.add_adapter("it", place.root / "v1", replace=True).task_id
        assert cached() == {other: False, new: False}  # the old version made room, although it was used last
        executor.load_adapter(f"it@{old.facts.digest}")
        assert cached() == {new: False, old.task_id: True}
        executor.load_adapter("other")
        assert cached() == {other: False, new: False}
        request_id = executor.enqueue_request(adaptrt.Request(PROMPT, 1), adapter=f"it@{old.facts.digest}")
        executor.await_responses(request_id)
        assert cached() == {other: False, old.task_id: True}
        executor.add_adapter("it", place.root / "v0", replace=True)
        assert cached() == {other: False, old.task_id: False}


def test_a_new_version_takes_over_the_pin(place: Place) -> None:
    one_adapter = 18_000
    config = adaptrt.ExecutorConfig(
        num_threads=1, peft_cache_config=adaptrt.PeftCacheConfig(host_cache_size=one_adapter, max_adapter_size=4)
    )
    with adaptrt.Executor(place.engine, executor_config=config) as executor:
        executor.add_adapter("it", place.root / "v0")
        executor.pin_named_adapter("it")
        executor.add_adapter("it", place.root / "v1", replace=True)
        (entry,) = executor.list_adapters()
        assert (entry.task_id, entry.pinned) == (executor.adapters.get("it").task_id, True)


def test_a_refused_version_leaves_the_pin(place: Place, tmp_path: Path) -> None:
    config = adaptrt.ExecutorConfig(
        num_threads=1, peft_cache_config=adaptrt.PeftCacheConfig(host_cache_size=30_000, max_adapter_size=4)
    )
    with adaptrt.Executor(place.engine, executor_config=config) as executor:
        for name in ("it", "other"):
            executor.add_adapter(name, place.root / ("v0" if name == "it" else "v1"))
            executor.pin_named_adapter(name)
        before = executor.list_adapters()
        assert len(before) == 2
        larger = shutil.copytree(place.root / "v2", tmp_path / "larger")
        save_adapter(place.root.parent / "model", larger, 9, strength=3.0, r=8)
        with pytest.raises(adaptrt.LoraCacheFullError):
            executor.add_adapter("it", larger, replace=True)
        assert executor.list_adapters() == before
        assert executor.adapters.list_old() == ()


def test_digits_of_several_versions_are_refused() -> None:
    versions = [NamedAdapter("it", task_id, Path("it"), "") for task_id in range(2)]
    for one, end in zip(versions, "12", strict=True):
        one.facts.digest = "a" * 63 + end
    assert choose_version("it@" + "a" * 63 + "2", versions) is versions[1]
    with pytest.raises(adaptrt.AdapterError, match=r"'it@aaaaaaaa' begins the digests of 2 versions: a+1, a+2; expec"):
        choose_version("it@aaaaaaaa", versions)


def test_no_adapter_has_a_versions_name(place: Place, executor: adaptrt.Executor) -> None:
    async def body(adapters: ServedAdapters) -> None:
        with pytest.raises(ApiError, match="which is a version's; expected another name") as refused:
            await adapters.load(f"it@{'0' * 64}", "v0")
        assert refused.value.status == HTTPStatus.BAD_REQUEST
        await adapters.load(f"it@{'0' * 40}", "v0")  # a commit's name
        assert await answer(adapters, f"it@{'0' * 40}") == place.answers["v0"]

    run(place, executor, body)
