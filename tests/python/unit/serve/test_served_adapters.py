"""Adapters at run time: found below roots, confined to them, replaced under running requests, and unloaded."""

from __future__ import annotations

import asyncio
import pickle
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import adaptrt
from adaptrt import _core
from adaptrt.runtime.adapter_facts import AdapterFacts
from adaptrt.runtime.named_adapter import NamedAdapter
from adaptrt.serve.adapter_roots import MAX_FILES
from adaptrt.serve.adapters import ServedAdapters
from adaptrt.serve.async_executor import AsyncExecutor
from adaptrt.serve.errors import ApiError
from support.models import ModelSpec, save_adapter
from support.serving import build_random_engine

PROMPT = [3, 4, 5]
MAX_TOKENS = 12
SECONDS = 60.0


@dataclass(frozen=True)
class Place:
    engine: adaptrt.LoadedEngine
    root: Path
    outside: Path
    model: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    base = tmp_path_factory.mktemp("adapters")
    model, engine = build_random_engine(ModelSpec(), base)
    root = base / "root"
    for seed, name in enumerate(["poet", "org/clerk"]):
        save_adapter(model, root / name, seed, strength=3.0, r=4)
    save_adapter(model, base / "outside", 7, strength=3.0, r=4)
    (root / "link").symlink_to(base / "outside")
    shutil.copytree(root / "poet", root / "half-link")
    (root / "half-link" / "adapter_model.safetensors").unlink()
    (root / "half-link" / "adapter_model.safetensors").symlink_to(base / "outside" / "adapter_model.safetensors")
    shutil.copytree(root / "poet", root / "initial-link")
    shutil.copytree(root / "half-link", root / "initial-link" / "initial_adapter", symlinks=True)
    shutil.copytree(root / "poet", root / "broken")
    (root / "broken" / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    return Place(adaptrt.load_engine(engine), root, base / "outside", model)


@pytest.fixture
def executor(place: Place) -> Iterator[adaptrt.Executor]:
    config = adaptrt.ExecutorConfig(num_threads=1)
    with adaptrt.Executor(place.engine, adaptrt.ModelType.DECODER_ONLY, config) as made:
        yield made


def run(
    place: Place,
    executor: adaptrt.Executor,
    body: Callable[[ServedAdapters], Coroutine[Any, Any, None]],
    *,
    reserved: tuple[str, ...] = (),
) -> None:
    async def main() -> None:
        asynchronous = AsyncExecutor(executor)
        asynchronous.start()
        try:
            await body(ServedAdapters(asynchronous, [place.root], frozenset(reserved)))
        finally:
            await asynchronous.close()

    asyncio.run(main())


async def answer(adapters: ServedAdapters, name: str | None) -> list[int]:
    request = adaptrt.Request(PROMPT, MAX_TOKENS, streaming=True)
    tokens: list[int] = []
    async with await adapters.submit(request, name) as generation:
        while results := await generation.next_results():
            tokens += [token for result in results for token in result.output_token_ids[0]]
    return tokens


def expected(place: Place, directory: Path | None) -> list[int]:
    config = adaptrt.ExecutorConfig(num_threads=1)
    with adaptrt.Executor(place.engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
        lora = None if directory is None else adaptrt.LoraConfig.from_peft(1, directory, place.engine)
        id = executor.enqueue_request(adaptrt.Request(PROMPT, MAX_TOKENS, lora_config=lora))
        return list(executor.await_responses(id)[-1].result.output_token_ids[0][len(PROMPT) :])


def test_adapters_are_found_by_their_paths_from_a_root(place: Place, executor: adaptrt.Executor) -> None:
    async def body(adapters: ServedAdapters) -> None:
        assert adapters.list() == []
        found = await asyncio.gather(*(adapters.find(name) for name in ["poet", "poet", "org/clerk", "nobody"]))
        assert found == [True, True, True, False]
        assert sorted(adapter.name for adapter in adapters.list()) == ["org/clerk", "poet"]
        poet, clerk, base = [await answer(adapters, name) for name in ("poet", "org/clerk", None)]
        assert poet == expected(place, place.root / "poet")
        assert clerk == expected(place, place.root / "org" / "clerk")
        assert len({tuple(poet), tuple(clerk), tuple(base)}) == 3

    run(place, executor, body)


def test_a_weighted_sum_adds_its_terms(place: Place, executor: adaptrt.Executor) -> None:
    async def body(adapters: ServedAdapters) -> None:
        assert await adapters.find("poet:0.5+org/clerk:0.5")
        assert sorted(adapter.name for adapter in adapters.list()) == ["org/clerk", "poet"]
        assert await answer(adapters, "poet:1.0+org/clerk:0") == expected(place, place.root / "poet")
        for name in ("poet:0.5+nobody:0.5", "poet:0.5+org/clerk", "poet:x", "poet:0.5:0.5", ":1"):
            assert not await adapters.find(name)
        # Unloading a term also unloads the sum.
        await adapters.unload("poet")
        with pytest.raises(adaptrt.AdapterError, match="no adapter named 'poet'"):
            await answer(adapters, "poet:0.5+org/clerk:0.5")

    run(place, executor, body)


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "org/../poet",
        "./poet",
        "poet/",
        "/etc",
        "",
        "link",
        "half-link",
        "initial-link",
        "a\0b",
        "a\\b",
        "x" * 300,
        "x" * 256,
        "\N{GRINNING FACE}" * 64,
    ],
)
def test_names_lead_nowhere_else(place: Place, executor: adaptrt.Executor, name: str) -> None:
    async def body(adapters: ServedAdapters) -> None:
        assert not await adapters.find(name)
        assert adapters.list() == []

    run(place, executor, body)


@pytest.mark.parametrize(
    "path",
    [
        "../outside",
        "link",
        "half-link",
        "initial-link",
        "nowhere",
        "poet/adapter_config.json",
        "a\0b",
        "",
        "x" * 300,
        "y/" * 3000,
    ],
)
def test_paths_outside_the_roots_are_refused_alike(place: Place, executor: adaptrt.Executor, path: str) -> None:
    async def body(adapters: ServedAdapters) -> None:
        for asked in (path, str(place.root / path) if "\0" not in path and path else "/etc", str(place.outside)):
            with pytest.raises(ApiError) as refused:
                await adapters.load("name", asked)
            assert refused.value.status == HTTPStatus.BAD_REQUEST
            assert refused.value.param == "lora_path"
        assert adapters.list() == []

    run(place, executor, body)


def test_a_path_tells_nothing_of_what_lies_outside_the_roots(
    place: Place, executor: adaptrt.Executor, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(place.root)

    async def body(adapters: ServedAdapters) -> None:
        poet = place.root / "poet"
        said = set()
        for outside in (tmp_path, tmp_path / "there", tmp_path / "nowhere", Path("/proc/self/mem"), place.root):
            up = "../" * len(outside.parts)
            for asked in (f"{outside}/{up}{poet}", f"{outside}/../{'../' * 20}{poet}", str(tmp_path / "link" / "poet")):
                with pytest.raises(ApiError) as refused:
                    await adapters.load("name", asked)
                said.add((refused.value.status, refused.value.param, str(refused.value).replace(asked, "PATH")))
        assert len(said) == 1
        await adapters.load("absolute", str(poet))

    run(place, executor, body)


def test_an_absolute_path_may_begin_as_the_root_was_given(
    place: Place, executor: adaptrt.Executor, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(place.root)

    async def body(adapters: ServedAdapters) -> None:
        for name, path in (("given", tmp_path / "link"), ("resolved", place.root)):
            await adapters.load(name, str(path / "poet"))
        with pytest.raises(ApiError, match="below the server's adapter roots"):
            await adapters.load("prefix", f"{place.root}-other/poet")
        for name in ("org/name", "hf://org/name", "s3://bucket/name"):
            with pytest.raises(ApiError, match="or a name that the server's allowed_adapter_sources has"):
                await adapters.load("remote", name)

    run(Place(place.engine, tmp_path / "link", place.outside, place.model), executor, body)


def test_an_adapter_that_cannot_be_served_is_refused_and_forgotten(place: Place, executor: adaptrt.Executor) -> None:
    async def body(adapters: ServedAdapters) -> None:
        for load in (lambda: adapters.find("broken"), lambda: adapters.load("broken", "broken")):
            with pytest.raises(ApiError, match=r"broken/adapter_model\.safetensors") as refused:
                await load()
            assert refused.value.status == HTTPStatus.BAD_REQUEST
        assert adapters.list() == []
        assert executor.list_adapters() == []

    run(place, executor, body)


def test_a_name_is_loaded_once_unless_it_is_replaced(place: Place, executor: adaptrt.Executor) -> None:
    async def body(adapters: ServedAdapters) -> None:
        await adapters.load("it", "poet")
        with pytest.raises(ApiError, match="'it' has already been loaded"):
            await adapters.load("it", "org/clerk")
        assert await answer(adapters, "it") == expected(place, place.root / "poet")
        await adapters.load("it", "org/clerk", replace=True)
        assert await answer(adapters, "it") == expected(place, place.root / "org" / "clerk")
        assert [adapter.path for adapter in adapters.list()] == [place.root / "org" / "clerk"]

    run(place, executor, body)


def test_a_request_whose_adapter_was_unloaded_tells_of_no_others(place: Place, executor: adaptrt.Executor) -> None:
    async def body(adapters: ServedAdapters) -> None:
        await adapters.load("secret", "poet")
        for ask in (answer(adapters, "it"), answer(adapters, "secret:0.5+it:0.5")):
            # The same as for a request that found its adapter before another one unloaded it.
            with pytest.raises(adaptrt.AdapterError) as lost:
                await ask
            for error in (lost.value, pickle.loads(pickle.dumps(lost.value))):
                refused = ApiError.of(error)
                assert (refused.status, refused.param) == (HTTPStatus.NOT_FOUND, "model")
                assert str(refused) == "The adapter 'it' does not exist."

    run(place, executor, body)


def test_requests_keep_the_adapter_that_they_began_with(place: Place, executor: adaptrt.Executor) -> None:
    async def body(adapters: ServedAdapters) -> None:
        await adapters.load("it", "poet")
        request = adaptrt.Request(PROMPT, MAX_TOKENS, streaming=True)
        async with await adapters.submit(request, "it") as generation:
            await adapters.load("it", "org/clerk", replace=True)
            later = await answer(adapters, "it")
            tokens: list[int] = []
            while results := await generation.next_results():
                tokens += [token for result in results for token in result.output_token_ids[0]]
        assert tokens == expected(place, place.root / "poet")
        assert later == expected(place, place.root / "org" / "clerk")

    run(place, executor, body)


def test_loads_and_unloads_of_one_name_leave_a_whole_list(place: Place, executor: adaptrt.Executor) -> None:
    async def body(adapters: ServedAdapters) -> None:
        for _ in range(30):
            outcomes = await asyncio.gather(
                adapters.load("it", "poet", replace=True),
                adapters.unload("it"),
                adapters.load("it", "org/clerk", replace=True),
                adapters.unload("it"),
                return_exceptions=True,
            )
            refused = [error for error in outcomes if error is not None]
            assert all(isinstance(error, ApiError) and error.status == HTTPStatus.NOT_FOUND for error in refused)
            listed = {adapter.name for adapter in adapters.list()}
            assert listed == set(executor.adapters.names)
            assert len(executor.list_adapters()) == len(listed) + len(executor.adapters.list_old())

    run(place, executor, body)


def test_a_name_is_unknown_only_after_its_adapter_left_the_cache(
    place: Place, executor: adaptrt.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[bool] = []
    unload = executor._unload

    def unload_and_look(adapter: NamedAdapter) -> None:
        known.append(executor.adapters.knows("it"))
        unload(adapter)

    monkeypatch.setattr(executor, "_unload", unload_and_look)
    executor.add_adapter("it", place.root / "poet")
    executor.remove_adapter("it")
    assert known == [True]
    assert not executor.adapters.knows("it")


def test_requests_that_wait_for_a_changing_name_are_woken(executor: adaptrt.Executor) -> None:
    began, entered, order = threading.Event(), threading.Event(), []

    def change() -> None:
        began.set()
        with executor.adapters.changing("it"):
            order.append("second")
        entered.set()

    thread = threading.Thread(target=change, daemon=True)
    with executor.adapters.changing("it"):
        thread.start()
        assert began.wait(SECONDS)
        assert not entered.wait(0.05)
        order.append("first")
    assert entered.wait(SECONDS)
    assert order == ["first", "second"]


def test_a_bounded_number_of_sums_keep_their_task_ids(executor: adaptrt.Executor, place: Place) -> None:
    executor.add_adapter("poet", place.root / "poet")
    store = executor.adapters
    ids = [store.task_id(f"poet:{i}") for i in range(1024)]
    assert len(set(ids)) == 1024
    assert [store.task_id(f"poet:{i}") for i in range(1024)] == ids
    newest = store.task_id("poet:1024")
    assert [store.task_id(f"poet:{i}") for i in range(1, 1024)] == ids[1:]  # the oldest was dropped
    assert store.task_id("poet:1024") == newest
    assert store.task_id("poet:0") not in {*ids, newest}


@pytest.mark.parametrize("name", ["base", "poet:0.5", "poet:0.5+org/clerk:1"])
def test_names_of_the_base_and_of_sums_are_refused(place: Place, executor: adaptrt.Executor, name: str) -> None:
    async def body(adapters: ServedAdapters) -> None:
        for load in (adapters.load(name, "poet"), adapters.add_trusted(name, place.root / "poet")):
            with pytest.raises(ApiError, match="expected another name"):
                await load
        assert adapters.list() == []

    run(place, executor, body, reserved=("base",))
    if name != "base":
        with pytest.raises(adaptrt.AdapterError, match="is a weighted sum"):
            executor.add_adapter(name, place.root / "poet")


def test_a_failed_swap_leaves_the_old_adapter(place: Place, executor: adaptrt.Executor) -> None:
    async def body(adapters: ServedAdapters) -> None:
        await adapters.load("it", "poet")
        with pytest.raises(ApiError, match="broken"):
            await adapters.load("it", "broken", replace=True)
        assert await answer(adapters, "it") == expected(place, place.root / "poet")

    run(place, executor, body)


def test_unloaded_adapters_leave_both_cache_levels(place: Place, executor: adaptrt.Executor) -> None:
    async def body(adapters: ServedAdapters) -> None:
        await adapters.load("it", "poet", pinned=True)
        assert [(entry.pinned, entry.on_device) for entry in executor.list_adapters()] == [(True, True)]
        await adapters.unload("it")
        assert executor.list_adapters() == []
        stats = executor.lora_cache_stats()
        assert (stats.host_bytes_used, stats.device_pages_used) == (0, 0)
        assert not await adapters.find("it")
        with pytest.raises(ApiError) as refused:
            await adapters.unload("it")
        assert refused.value.status == HTTPStatus.NOT_FOUND

    run(place, executor, body)


def evict(executor: adaptrt.Executor, task_id: int) -> None:
    """Evicts an adapter from the cache, as a lack of room would."""
    _core.Executor.unload_adapter(executor, task_id)


def test_requests_with_cached_adapters_need_no_thread_and_no_file(place: Place, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(place.root, root, symlinks=True)
    names = ("poet", "org/clerk", "poet:0.5+org/clerk:0.5")
    with adaptrt.Executor(place.engine, executor_config=adaptrt.ExecutorConfig(num_threads=1)) as executor:

        async def body(adapters: ServedAdapters) -> None:
            first = {}
            for name in names:
                assert await adapters.find(name)
                first[name] = await answer(adapters, name)
            shutil.rmtree(root)
            adapters._work = SimpleNamespace()  # type: ignore[assignment]
            for name in names:
                assert await adapters.find(name)
                assert (await adapters.ready(name)).num_virtual_tokens == 0
                assert await answer(adapters, name) == first[name]

        run(replace(place, root=root), executor, body)


def test_an_adapter_of_which_nothing_is_known_is_read_once(place: Place, tmp_path: Path) -> None:
    carried = Path(shutil.copytree(place.root / "poet", tmp_path / "poet"))
    with adaptrt.Executor(place.engine, executor_config=adaptrt.ExecutorConfig(num_threads=1)) as executor:
        made = executor.add_adapter("poet", carried)
        # Adapters that an engine carries start without facts.
        executor.adapters.remove("poet")
        executor.adapters.keep(replace(made, facts=AdapterFacts(digest=made.facts.digest)))

        async def body(adapters: ServedAdapters) -> None:
            assert executor.adapters.ready("poet") is None
            first = await answer(adapters, "poet")
            shutil.rmtree(carried)
            adapters._work = SimpleNamespace()  # type: ignore[assignment]
            assert await answer(adapters, "poet") == first

        run(place, executor, body)


def test_equal_finds_read_an_adapter_once(
    place: Place, executor: adaptrt.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read = executor.adapters.read

    def read_and_count(name: str, *args: Any, **kwargs: Any) -> Any:
        reads.append(name)
        return read(name, *args, **kwargs)

    monkeypatch.setattr(executor.adapters, "read", read_and_count)

    async def body(adapters: ServedAdapters) -> None:
        tasks = [asyncio.create_task(adapters.find("poet")) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert found[1::2] == [True] * 10
        assert reads == ["poet"]

    run(place, executor, body)


def test_adapters_of_the_roots_are_listed_until_they_are_loaded(place: Place, executor: adaptrt.Executor) -> None:
    async def body(adapters: ServedAdapters) -> None:
        listed = await adapters.not_loaded()
        assert listed.names == ("half-link", "initial-link", "org/clerk", "poet")
        assert listed.is_complete
        await adapters.load("poet", "poet")
        assert (await adapters.not_loaded()).names == ("half-link", "initial-link", "org/clerk")

    run(place, executor, body, reserved=("broken",))


def test_a_directory_of_many_files_is_refused(place: Place, executor: adaptrt.Executor, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(place.root / "poet", root / "many")
    for i in range(MAX_FILES):
        (root / "many" / f"{i}").touch()

    async def body(adapters: ServedAdapters) -> None:
        assert not await adapters.find("many")
        with pytest.raises(ApiError, match="expected a directory below"):
            await adapters.load("name", "many")

    run(replace(place, root=root), executor, body)


def test_a_cached_adapter_is_not_read_again(place: Place, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(place.root / "poet", root / "poet")
    with adaptrt.Executor(place.engine) as executor:
        executor.add_adapter("poet", root / "poet")
        shutil.rmtree(root)
        executor.load_adapter("poet")
        evict(executor, executor.adapters.task_id("poet"))
        with pytest.raises(adaptrt.EngineError, match="adapter 'poet' cannot be read"):
            executor.load_adapter("poet")


def test_an_evicted_adapter_is_read_again_and_a_changed_one_is_refused(place: Place, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(place.root / "poet", root / "poet")
    with adaptrt.Executor(place.engine) as executor:

        async def body(adapters: ServedAdapters) -> None:
            assert await adapters.find("poet")
            (task_id,) = [entry.task_id for entry in executor.list_adapters()]
            evict(executor, task_id)
            assert await answer(adapters, "poet") == expected(place, place.root / "poet")
            evict(executor, task_id)
            config = root / "poet" / "adapter_config.json"
            config.write_text(config.read_text() + "\n")
            with pytest.raises(adaptrt.EngineError, match="adapter 'poet' was changed after it was added"):
                await answer(adapters, "poet")

        run(Place(place.engine, root, place.outside, place.model), executor, body)


def test_the_directory_that_an_adapter_came_from(place: Place, executor: adaptrt.Executor) -> None:
    async def body(adapters: ServedAdapters) -> None:
        assert not adapters.is_from("poet", "poet")
        await adapters.find("poet")
        for path in ("poet", "./poet", "org/../poet", str(place.root / "poet"), f"{place.root}/poet/"):
            assert adapters.is_from("poet", path), path
        for path in ("org/clerk", "..", "/poet", "", "a\0b"):
            assert not adapters.is_from("poet", path), path

    run(place, executor, body)


def test_prompts_without_the_tokens_of_an_alora_adapter_are_the_base_models(place: Place, tmp_path: Path) -> None:
    save_adapter(place.model, tmp_path / "invoked", 1, strength=3.0, r=4, alora_invocation_tokens=[9])
    save_adapter(place.model, tmp_path / "at-once", 1, strength=3.0, r=4, alora_invocation_tokens=PROMPT)
    with adaptrt.Executor(place.engine) as executor:

        async def body(adapters: ServedAdapters) -> None:
            assert await adapters.find("invoked")
            assert await adapters.find("at-once")
            base = await answer(adapters, None)
            assert await answer(adapters, "invoked") == base
            assert await answer(adapters, "at-once") != base
            assert executor.adapters.for_request("invoked", PROMPT) is None

        run(Place(place.engine, tmp_path, place.outside, place.model), executor, body)
    with adaptrt.Executor(place.engine) as executor:
        for name in ("invoked", "at-once"):
            executor.add_adapter(name, tmp_path / name)
        # There is no draft engine: a request with a draft adapter would be rejected.
        executor._draft_adapters = executor.adapters
        request_id = executor.enqueue_request(adaptrt.Request(PROMPT, MAX_TOKENS), adapter="invoked")
        tokens = executor.await_responses(request_id)[-1].result.output_token_ids[0]
        assert tokens[len(PROMPT) :] == expected(place, None)
        with pytest.raises(adaptrt.RequestError, match="draft_lora_config"):
            executor.enqueue_request(adaptrt.Request(PROMPT, MAX_TOKENS), adapter="at-once")
