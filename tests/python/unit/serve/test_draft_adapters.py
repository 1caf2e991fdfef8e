"""Adapters that bring one for the draft engine: it drafts with it, and both load, swap and unload as one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import adaptrt
from adaptrt import _core
from adaptrt.formats.adapter.adapter_copy import adapter_digests, copy_adapter
from adaptrt.formats.sources.kind import Kind
from adaptrt.formats.sources.needed_files import small_files, weight_files
from adaptrt.runtime.draft_adapters import task_id_of
from support.served_app import AppClient, AppPlace, make_place, run_app

FILES = ("adapter_config.json", "adapter_model.safetensors")
UPLOADS = {"enable_lora_upload": True}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> AppPlace:
    """The engine drafts for itself, so an adapter that brings itself makes all drafts right."""
    made = make_place(tmp_path_factory.mktemp("drafts"), ("poet", "clerk"))
    for name, draft in (("bundle", "poet"), ("other", "clerk")):
        shutil.copytree(made.root / draft, made.root / name)
        shutil.copytree(made.root / draft, made.root / name / "draft")
    return made


def drafting(place: AppPlace, **peft: int) -> adaptrt.ExecutorConfig:
    draft = adaptrt.DraftTargetDecodingConfig(4, str(place.engine))
    if peft:
        draft.peft_cache_config = adaptrt.PeftCacheConfig(**peft)
    return adaptrt.ExecutorConfig(num_threads=1, iter_stats_max_iterations=1000, draft_target_decoding_config=draft)


class Drafts:
    """Counts drafts of a server's requests."""

    def __init__(self, client: AppClient) -> None:
        self._client = client
        self.executor = client.service.executor.executor
        self._seen = (0, 0)

    async def of(self, model: str) -> tuple[int, int]:
        """Returns the numbers of drafts, and of right ones, for an answer of 21 tokens."""
        await self._client.tokens(model, max_tokens=21, ignore_eos=True, seed=1)
        found = self.executor.get_latest_iteration_stats()[-1].speculation_stats
        before, self._seen = self._seen, (found.draft_tokens, found.accepted_tokens)
        return self._seen[0] - before[0], self._seen[1] - before[1]

    def is_cached(self, version: adaptrt.runtime.named_adapter.NamedAdapter) -> bool:
        try:
            _core.Executor.put_draft_adapter(self.executor, adaptrt.LoraConfig(task_id_of(version)))
        except adaptrt.PeftTaskNotCachedError:
            return False
        return True


def test_a_bundle_drafts_with_its_own_adapter(place: AppPlace) -> None:
    plain: list[list[int]] = []

    async def without(client: AppClient) -> None:
        plain.extend(
            [await client.tokens(model, max_tokens=21, ignore_eos=True, seed=1) for model in ("poet", "clerk")]
        )

    async def body(client: AppClient) -> None:
        drafts = Drafts(client)
        made, right = await drafts.of("poet")  # the base model drafts, and is wrong
        assert right < made / 2
        made, right = await drafts.of("bundle")
        assert made == right > 10
        assert await client.tokens("bundle", max_tokens=21, ignore_eos=True, seed=1) == plain[0]
        # A new version brings its own; the old one keeps that with which it came.
        old = client.service.executor.executor.adapters.get("bundle")
        assert (await client.load("bundle", "other")).status_code == 200
        await drafts.of("base")
        assert [
            made == right > 10
            for made, right in [await drafts.of("bundle"), await drafts.of(f"bundle@{old.facts.digest}")]
        ] == [True] * 2
        assert await client.tokens("bundle", max_tokens=21, ignore_eos=True, seed=1) == plain[1]
        new = client.service.executor.executor.adapters.get("bundle")
        assert (drafts.is_cached(old), drafts.is_cached(new)) == (True, True)
        # An evicted draft adapter is read again.
        _core.Executor.unload_draft_adapter(drafts.executor, task_id_of(new))
        await drafts.of("base")
        made, right = await drafts.of("bundle")
        assert made == right > 10
        assert (await client.post("/v1/unload_lora_adapter", lora_name="bundle")).status_code == 200
        assert (drafts.is_cached(old), drafts.is_cached(new)) == (False, False)

    run_app(place, without)
    run_app(place, body, drafting(place))


def test_sent_bundles_and_old_versions_that_end(place: AppPlace) -> None:
    async def body(client: AppClient) -> None:
        drafts, versions = Drafts(client), []
        for name, inplace in (("bundle", "false"), ("other", "true")):
            below = [*FILES, *(f"draft/{file}" for file in FILES)]
            files = {file: (file, (place.root / name / file).read_bytes()) for file in below}
            form = {"lora_name": "sent", "load_inplace": inplace}
            answer = await client.http.post("/v1/upload_lora_adapter", data=form, files=files)
            assert answer.status_code == 200, answer.text
            made, right = await drafts.of("sent")
            assert made == right > 10
            versions.append(client.service.executor.executor.adapters.get("sent"))
        assert versions[0].facts.digest == adapter_digests(place.root / "bundle")[1] != versions[1].facts.digest
        assert [drafts.is_cached(one) for one in versions] == [False, True]

    limits = adaptrt.serve.options.ServerLimits(max_old_versions=0)
    run_app(place, body, drafting(place), limits=limits, **UPLOADS)


def test_a_bundle_with_a_wrong_draft_is_refused_as_a_whole(place: AppPlace, tmp_path: Path) -> None:
    wrong = shutil.copytree(place.root / "bundle", tmp_path / "wrong")
    config = wrong / "draft" / FILES[0]
    fields = json.loads(config.read_text())
    with adaptrt.Executor(place.engine, executor_config=drafting(place), compare_vocabularies=False) as executor:
        executor.add_adapter("it", place.root / "other")
        kept = executor.adapters.get("it")
        (row,) = executor.list_adapters()
        for change, said in (
            ({"r": 5}, "draft"),
            ({"peft_type": "PROMPT_TUNING"}, "virtual tokens do not fit"),
        ):
            config.write_text(json.dumps(fields | change))
            with pytest.raises(adaptrt.AdapterError, match=said):
                executor.add_adapter("it", wrong, replace=True)
        config.unlink()
        with pytest.raises(adaptrt.EngineError, match="draft/adapter_config"):
            executor.add_adapter("it", wrong, replace=True)
        assert executor.adapters.get("it") is kept
        assert [one.task_id for one in executor.list_adapters()] == [row.task_id]
        executor.remove_adapter("it")
        assert executor.list_adapters() == []
        with pytest.raises(adaptrt.AdapterError, match="expected less than"):
            executor.put_draft_adapter(adaptrt.LoraConfig(task_id_of(kept)))
        with pytest.raises(adaptrt.AdapterError, match="expected less than"):
            executor.unload_draft_adapter(task_id_of(kept))


def test_a_check_that_fails_leaves_no_draft_adapter(place: AppPlace) -> None:
    def check(_: object) -> None:
        raise adaptrt.AdapterError("no")

    seen: list[adaptrt.runtime.named_adapter.NamedAdapter] = []
    with adaptrt.Executor(place.engine, executor_config=drafting(place), compare_vocabularies=False) as executor:
        with pytest.raises(adaptrt.AdapterError, match="no"):
            executor.add_adapter("it", place.root / "bundle", check=lambda one: (seen.append(one), check(one))[1])
        with pytest.raises(adaptrt.PeftTaskNotCachedError):
            _core.Executor.unload_draft_adapter(executor, task_id_of(seen[0]))
        executor.add_adapter("it", place.root / "bundle")
        # The version is known already, so a failed reload leaves its draft adapter.
        with pytest.raises(adaptrt.AdapterError, match="no"):
            executor.add_adapter("it", place.root / "bundle", replace=True, check=check)
        _core.Executor.unload_draft_adapter(executor, task_id_of(executor.adapters.get("it")))


def test_drafts_that_find_no_room(place: AppPlace) -> None:
    """If one draft adapter fits, a second one takes its place. One that fits nowhere refuses its bundle."""

    async def body(client: AppClient) -> None:
        drafts = Drafts(client)
        for model in ("bundle", "other", "bundle"):
            made, right = await drafts.of(model)
            assert made == right > 10
            await drafts.of("base")

    run_app(place, body, drafting(place, host_cache_size=30_000, max_adapter_size=4))
    too_small = drafting(place, host_cache_size=8_000, max_adapter_size=1)
    with adaptrt.Executor(place.engine, executor_config=too_small, compare_vocabularies=False) as executor:
        with pytest.raises(adaptrt.LoraCacheFullError, match="bundle/draft: "):
            executor.add_adapter("it", place.root / "bundle")
        assert (executor.adapters.knows("it"), executor.list_adapters()) == (False, [])


def test_copies_and_downloads_have_the_draft(place: AppPlace, tmp_path: Path) -> None:
    copy_adapter(place.root / "bundle", tmp_path / "copy")
    assert adapter_digests(tmp_path / "copy") == adapter_digests(place.root / "bundle")
    assert adapter_digests(tmp_path / "copy")[1] != adapter_digests(place.root / "poet")[1]
    names = [*FILES, *(f"draft/{file}" for file in FILES), "draft/README.md", "other/adapter_config.json"]
    found = [*small_files(Kind.ADAPTER, names), *weight_files(Kind.ADAPTER, names)]
    assert sorted(found) == sorted(names[:4])


def test_a_draft_needs_no_draft_engine(place: AppPlace) -> None:
    with adaptrt.Executor(place.engine, executor_config=adaptrt.ExecutorConfig(num_threads=1)) as executor:
        executor.add_adapter("it", place.root / "bundle")
        assert executor.draft_reference("it") is None
        request = executor.enqueue_request(adaptrt.Request([3, 4, 5], 2), adapter="it")
        assert not executor.await_responses(request)[-1].has_error()
