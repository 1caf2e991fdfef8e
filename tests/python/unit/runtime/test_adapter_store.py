"""The facts that a store keeps in memory about adapters, and the limits of what it keeps."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from adaptrt.formats.engine.build_config import BuildConfig
from adaptrt.runtime import adapter_store
from adaptrt.runtime.adapter_store import AdapterStore

WIDTH = 8


def virtual_tokens(directory: Path, count: int) -> Path:
    directory.mkdir()
    config = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": count, "token_dim": WIDTH}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {"prompt_embeddings": np.full((count, WIDTH), count, np.float32)}, directory / "adapter_model.safetensors"
    )
    return directory


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    network = SimpleNamespace(given_columns=(0, 0))
    config = SimpleNamespace(build_config=BuildConfig(), adapter_checksums=(), source=None, network=network)
    engine: Any = SimpleNamespace(directory=tmp_path, config=config, num_ranks=1, adapted_modules=None, adapters={})
    return AdapterStore(engine)


def add(store: AdapterStore, name: str, directory: Path, *, replace: bool = False) -> None:
    adapter, config = store.read(name, directory, replace=replace)
    assert config is None  # virtual tokens have no weights
    store.keep(adapter)


def test_an_adapter_is_ready_while_its_virtual_tokens_are_in_memory(
    store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_store, "_MAX_PROMPTS", 2)
    for count in (1, 2):
        add(store, f"of {count}", virtual_tokens(tmp_path / f"{count}", count))
    for count in (2, 1):  # asking for "of 1" makes "of 2" the one that was not used for longest
        ready = store.ready(f"of {count}")
        assert ready is not None
        assert ready.prompt is not None
        assert (ready.num_virtual_tokens, ready.prompt.embedding_table.tolist()) == (count, [[count] * WIDTH] * count)
    add(store, "of 3", virtual_tokens(tmp_path / "3", 3))
    assert store.ready("of 2") is None
    for count in (1, 3):
        assert store.ready(f"of {count}") is not None
    prepared = store.prepare("of 2")
    assert (prepared.num_virtual_tokens, store.ready("of 2")) == (2, prepared)
    assert store.ready("of 1") is None


def test_an_adapter_replaced_by_the_same_files_keeps_what_is_known_of_it(
    store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_store, "time", SimpleNamespace(time=itertools.count(1).__next__))
    tuned = virtual_tokens(tmp_path / "tuned", 2)
    add(store, "tuned", tuned)
    before, prompt, both = store.get("tuned"), store.prompt_of("tuned"), store.task_id("tuned:0.5")
    add(store, "tuned", tuned, replace=True)
    assert (before.created, store.get("tuned").created) == (1, 2)
    assert store.task_id("tuned:0.5") == both
    save_file({"prompt_embeddings": np.zeros((2, WIDTH), np.float32)}, tuned / "adapter_model.safetensors")
    add(store, "tuned", tuned, replace=True)
    assert store.get("tuned").task_id > before.task_id
    assert store.task_id("tuned:0.5") != both
    assert store.prompt_of("tuned") != prompt


def test_so_many_sums_keep_their_task_ids(store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_store, "_MAX_SUMS", 3)
    add(store, "tuned", virtual_tokens(tmp_path / "tuned", 2))
    names = [f"tuned:0.{number}" for number in range(1, 5)]
    ids = [store.task_id(name) for name in names[:3]]
    assert [store.task_id(name) for name in names[:3]] == ids
    assert store.task_id(names[3]) == max(ids) + 1
    assert [store.task_id(name) for name in names[1:3]] == ids[1:]
    assert store.task_id(names[0]) == max(ids) + 2  # the first is forgotten, and its id is never used again
