"""One replica's adapters: it makes changes in order, and drops an adapter if a change fails."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace as with_fields
from pathlib import Path

import pytest

import adaptrt
from adaptrt.formats.adapter.adapter_copy import adapter_digests
from adaptrt.runtime.named_adapter import NamedAdapter
from adaptrt.serve.async_executor import AsyncExecutor
from adaptrt.serve.errors import ApiError
from adaptrt.serve.options import ServerLimits
from adaptrt.serve.ray.adapter_changes import AdapterChange, Files, Refusal, refusal_of
from adaptrt.serve.ray.shared_adapters import SharedAdapters
from adaptrt.serve.uploaded_adapters import Upload, UploadStore
from support.models import ModelSpec, save_adapter
from support.serving import build_random_engine

NAMES = ("a", "b")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[adaptrt.LoadedEngine, Path]:
    base = tmp_path_factory.mktemp("shared")
    model, engine = build_random_engine(ModelSpec(), base)
    for seed, name in enumerate(NAMES):
        save_adapter(model, base / "root" / name, seed, strength=3.0, r=4)
    return adaptrt.load_engine(engine), base / "root"


@pytest.fixture
def root(engine: tuple[adaptrt.LoadedEngine, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(engine[1], tmp_path / "root"))


@pytest.fixture
def executor(engine: tuple[adaptrt.LoadedEngine, Path]) -> Iterator[adaptrt.Executor]:
    with adaptrt.Executor(engine[0], executor_config=adaptrt.ExecutorConfig(num_threads=1)) as made:
        yield made


class Others:
    """Requests of the replica to the others."""

    def __init__(self) -> None:
        self.changes: list[AdapterChange] = []
        self.marked: list[str] = []
        self.refusal: Refusal | None = None
        self.sent: dict[str, Files] = {}
        """Files that the coordinator has, by digest."""
        self.fetched: list[str] = []

    async def files_of(self, digest: str) -> Files:
        self.fetched.append(digest)
        return self.sent.get(digest, ())

    async def change_all(self, change: AdapterChange) -> Refusal | None:
        self.changes.append(change)
        return self.refusal

    async def mark(self, adapter: str) -> None:
        self.marked.append(adapter)


def run(executor: adaptrt.Executor, root: Path, body: Callable[[SharedAdapters, Others], Awaitable[None]]) -> None:
    async def main() -> None:
        asynchronous = AsyncExecutor(executor)
        asynchronous.start()
        others = Others()
        try:
            await body(
                SharedAdapters(
                    asynchronous, [root], frozenset({"base"}), "r1", others.change_all, others.files_of, others.mark
                ),
                others,
            )
        finally:
            await asynchronous.close()

    asyncio.run(main())


def load(number: int, name: str, path: Path, **fields: bool) -> AdapterChange:
    return AdapterChange(name, str(path), replace=True, number=number, **fields)


def test_requests_of_clients_become_changes(executor: adaptrt.Executor, root: Path) -> None:
    async def body(adapters: SharedAdapters, others: Others) -> None:
        await adapters.add_trusted("first", root / "a")
        adapters.finish_start()
        await adapters.load("x", "b", replace=True, pinned=True)
        await adapters.unload("first")
        loaded, unloaded = others.changes
        assert (loaded.name, loaded.path, loaded.replace, loaded.pinned) == ("x", str(root / "b"), True, True)
        assert (unloaded.name, unloaded.path, unloaded.is_initial) == ("first", None, True)
        # The coordinator tells replicas to make the change.
        assert (adapters.knows("x"), adapters.knows("first")) == (False, True)
        with pytest.raises(ApiError, match="expected a directory below"):
            await adapters.load("y", "/etc")
        with pytest.raises(ApiError, match="lora_name is 'base'"):
            await adapters.load("base", "a")
        assert len(others.changes) == 2
        others.refusal = Refusal("no room", 429, "RateLimitError", None)
        with pytest.raises(ApiError, match="no room") as refused:
            await adapters.unload("first")
        assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})

    run(executor, root, body)


def test_checks_change_nothing(executor: adaptrt.Executor, root: Path) -> None:
    async def body(adapters: SharedAdapters, _: Others) -> None:
        assert (await adapters.check(AdapterChange("x", str(root / "a")))).refusal is None
        assert not adapters.knows("x")
        await adapters.follow([load(1, "x", root / "a")])
        taken = await adapters.check(AdapterChange("x", str(root / "b")))
        assert taken.was_known
        assert taken.refusal is not None
        assert "already been loaded" in taken.refusal.message
        (root / "b" / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
        broken = await adapters.check(AdapterChange("x", str(root / "b"), replace=True))
        assert broken.refusal is not None
        assert broken.refusal.status == 400
        assert (await adapters.check(AdapterChange("x", None))).refusal is None

    run(executor, root, body)


def test_changes_are_made_once_and_in_their_order(executor: adaptrt.Executor, root: Path) -> None:
    async def body(adapters: SharedAdapters, _: Others) -> None:
        changes = [load(1, "x", root / "a"), load(2, "y", root / "a"), AdapterChange("x", None, number=3)]
        await adapters.follow(changes)
        assert [one.name for one in adapters.list()] == ["y"]
        await adapters.follow([load(1, "x", root / "a")])
        assert not adapters.knows("x")
        assert adapters.followed.number == 3
        await adapters.follow([load(4, "y", root / "b")])
        assert [str(one.path) for one in adapters.list()] == [str(root / "b")]

    run(executor, root, body)


def test_a_replica_that_cannot_follow_has_no_adapter_until_it_can(executor: adaptrt.Executor, root: Path) -> None:
    async def body(adapters: SharedAdapters, _: Others) -> None:
        await adapters.follow([load(1, "x", root / "a")])
        (root / "b").rename(root / "elsewhere")
        outcome = await adapters.follow([load(2, "x", root / "b"), load(3, "y", root / "a")])
        assert outcome.refusal is not None
        assert [one.name for one in adapters.list()] == ["y"]
        with pytest.raises(ApiError, match="is not a directory"):
            await adapters.find("x")
        (root / "elsewhere").rename(root / "b")
        assert await adapters.find("x")
        assert [str(one.path) for one in adapters.list()] == [str(root / "a"), str(root / "b")]
        await adapters.follow([AdapterChange("x", None, number=4)])
        assert not await adapters.find("x")

    run(executor, root, body)


def files_of(directory: Path) -> tuple[tuple[str, bytes], ...]:
    return tuple(
        (name, (directory / name).read_bytes()) for name in ("adapter_config.json", "adapter_model.safetensors")
    )


def sent(number: int, name: str, directory: Path) -> AdapterChange:
    digest = adapter_digests(directory)[1]
    return AdapterChange(name, None, replace=True, number=number, digest=digest, files=files_of(directory))


def test_sent_adapters_reach_all_replicas_and_are_stored_once(executor: adaptrt.Executor, root: Path) -> None:
    async def body(adapters: SharedAdapters, others: Others) -> None:
        store = UploadStore(ServerLimits())
        upload = Upload("x", store.store(dict(files_of(root / "a"))), load_inplace=False, pinned=True)
        expected = sent(0, "x", root / "a")
        assert await adapters.load_sent(upload) == f"x@{expected.digest}"
        (change,) = others.changes
        assert (change.path, change.digest, change.files) == (None, expected.digest, expected.files)
        assert (change.replace, change.pinned, change.is_unload, upload.source.directory.exists()) == (
            False, True, False, False,
        )  # fmt: skip
        assert (await adapters.check(change)).refusal is None
        assert not adapters.knows("x")
        checked = stored_by(adapters)
        assert len(checked) == 1
        assert (await adapters.follow([sent(1, "x", root / "a").without_files()])).refusal is None
        assert (others.fetched, stored_by(adapters)) == ([], checked)  # the files arrived with the check
        second = sent(2, "x", root / "b")
        others.sent[str(second.digest)] = second.files
        assert (await adapters.follow([second.without_files()])).refusal is None
        assert others.fetched == [second.digest]
        (path,) = [one.path for one in adapters.list()]
        assert not path.is_relative_to(root)
        await adapters.follow([second.without_files()])  # a change may arrive twice
        assert [one.path for one in adapters.list()] == [path]
        assert len(others.fetched) == 1
        # Its log has no bytes; a new coordinator gets them from the stored files.
        assert [one.files for one in adapters.followed.changes] == [(), ()]
        assert await adapters.changes() == (
            *(with_fields(sent(number, "x", root / name), made=change.made) for number, name, change in
              zip((1, 2), "ab", adapters.followed.changes, strict=True)),
        )  # fmt: skip
        refused = Upload("x", store.store(dict(files_of(root / "a"))), load_inplace=False, pinned=False)
        with pytest.raises(ApiError, match="already been loaded"):
            await adapters.load_sent(refused)
        assert not refused.source.directory.exists()
        taken = await adapters.check(with_fields(sent(0, "x", root / "a"), replace=False))
        assert taken.refusal is not None
        assert "already been loaded" in taken.refusal.message
        await adapters.follow([AdapterChange("x", None, number=3)])
        assert not path.exists()
        # An adapter that is not here any more is left out.
        assert [one.number for one in await adapters.changes()] == [3]

    run(executor, root, body)


def stored_by(adapters: SharedAdapters) -> list[Path]:
    """Directories with files of sent adapters."""
    return [path for path in adapters._uploads._sizes if path.exists()]


def test_files_of_a_sent_adapter_that_is_refused_are_deleted(executor: adaptrt.Executor, root: Path) -> None:
    async def body(adapters: SharedAdapters, others: Others) -> None:
        good = sent(1, "y", root / "a")
        broken = with_fields(
            good,
            name="x",
            files=(*files_of(root / "a")[:1], ("adapter_model.safetensors", b"{}")),
            number=2,
            digest="d",
        )
        others.sent = {str(good.digest): good.files, "d": broken.files}
        await adapters.follow([good.without_files()])
        (stored,) = [one.path for one in adapters.list()]
        for outcome in (await adapters.check(broken), await adapters.follow([broken.without_files()])):
            assert outcome.refusal is not None
            assert outcome.refusal.status == 400
        assert list(stored.parent.iterdir()) == [stored]
        assert [one.name for one in await adapters.changes()] == ["y"]

    run(executor, root, body)


def test_files_that_were_checked_are_deleted_if_no_change_follows(executor: adaptrt.Executor, root: Path) -> None:
    async def body(adapters: SharedAdapters, others: Others) -> None:
        first, second = (sent(0, "x", root / name) for name in "ab")
        assert (await adapters.check(first)).refusal is None
        (before,) = stored_by(adapters)
        assert (await adapters.check(second)).refusal is None  # the coordinator of the first check has ended
        (after,) = stored_by(adapters)
        assert after != before
        adapters.forget(str(first.digest))
        assert stored_by(adapters) == [after]
        adapters.forget(str(second.digest))
        assert stored_by(adapters) == []
        outcome = await adapters.follow([with_fields(second, number=1).without_files()])
        assert outcome.refusal is not None
        assert (outcome.refusal.status, others.fetched) == (503, [second.digest])
        assert f"the files of the sent adapter {second.digest} are not here any more" in outcome.refusal.message
        assert not adapters.knows("x")
        # The next request for it tries again.
        others.sent[str(second.digest)] = second.files
        assert await adapters.find("x")

    run(executor, root, body)


def test_new_replicas_get_old_versions(executor: adaptrt.Executor, root: Path) -> None:
    async def body(adapters: SharedAdapters, others: Others) -> None:
        change = sent(2, "x", root / "b")
        others.sent[str(change.digest)] = change.files
        await adapters.follow([load(1, "x", root / "a"), change.without_files()])
        old, new = (adapter_digests(root / name)[1] for name in "ab")
        assert [await adapters.current_version(name) for name in (f"x@{old[:8]}", "x")] == [f"x@{old}", f"x@{new}"]

    run(executor, root, body)


def test_a_proof_that_fails_at_one_replica_refuses_the_change(executor: adaptrt.Executor, root: Path) -> None:
    """The coordinator asks each replica first. The proof is checked with the adapter cached, and nothing stays."""

    def fails(adapter: NamedAdapter) -> None:
        assert any(one.task_id == adapter.task_id for one in executor.list_adapters())
        raise adaptrt.AdapterError("the proof fails")

    async def body(adapters: SharedAdapters, _: Others) -> None:
        await adapters.follow([load(1, "x", root / "a")])
        before = [one.task_id for one in executor.list_adapters()]
        adapters._executor.check_adapter = fails
        outcome = await adapters.check(AdapterChange("x", str(root / "b"), replace=True))
        assert outcome.refusal is not None
        assert (outcome.refusal.status, outcome.refusal.message) == (400, "the proof fails")
        assert refusal_of({"r1": outcome.refusal, "r2": None}) is not None
        assert [one.task_id for one in executor.list_adapters()] == before
        assert [one.path for one in adapters.list()] == [root / "a"]

    run(executor, root, body)


def test_requests_say_which_adapter_is_here(executor: adaptrt.Executor, root: Path) -> None:
    async def body(adapters: SharedAdapters, others: Others) -> None:
        await adapters.follow([load(1, "x", root / "a", pinned=True)])
        (entry,) = executor.list_adapters()
        assert entry.pinned
        for name in ("x", None):
            async with await adapters.submit(adaptrt.Request([3, 4], 1), name) as generation:
                await generation.next_results()
        assert others.marked == ["x"]

    run(executor, root, body)
