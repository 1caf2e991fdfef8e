"""Mutated files of virtual tokens are read as a table that an engine accepts, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from adaptrt import _core
from adaptrt.formats.adapter import is_prompt_tuned, read_prompt_embeddings
from support.adapters import CONFIG, TENSORS
from support.models import ModelSpec, save_model
from support.prompts import save_virtual_tokens

COUNT = 3
CHANGES = ["drop", "transpose", "truncate", "nan", "flat", "int", "empty", "renamed", "twice"]
scalars = [st.none(), st.booleans(), st.integers(-2, 40), st.floats(), st.text(max_size=4)]
values = st.one_of(*scalars, st.lists(st.integers(0, 3), max_size=2), st.dictionaries(st.text(max_size=3), st.none()))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    root = tmp_path_factory.mktemp("prompts")
    model = save_model(ModelSpec(), root / "model")
    made = [
        save_virtual_tokens(model, root / kind, COUNT, 1, encoded=kind == "encoded") for kind in ("plain", "encoded")
    ]
    return root, made


def changed(table: np.ndarray, what: str) -> dict[str, np.ndarray]:
    if what == "drop":
        return {}
    if what in ("renamed", "twice"):
        return {"embeddings": table, **({"prompt_embeddings": table} if what == "twice" else {})}
    arrays = {
        "transpose": table.T, "truncate": table[:-1], "nan": table * np.nan, "flat": table.reshape(-1),
        "int": table.astype(np.int32), "empty": table[:0],
    }  # fmt: skip
    return {"prompt_embeddings": np.ascontiguousarray(arrays[what])}


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    encoded=st.booleans(),
    fields=st.lists(st.tuples(st.integers(0, 99), values), max_size=2),
    change=st.none() | st.sampled_from(CHANGES),
    cut=st.integers(0, 40),
)
def test_a_table_or_a_refusal(files, encoded: bool, fields: list, change: str | None, cut: int) -> None:
    root, made = files
    mutated = root / "mutated"
    mutated.mkdir(exist_ok=True)
    config = json.loads((made[encoded] / CONFIG).read_text())
    for index, value in fields:
        config[sorted(config)[index % len(config)]] = value
    (mutated / CONFIG).write_text(json.dumps(config))
    tensors = load_file(made[encoded] / TENSORS)
    save_file(tensors if change is None else changed(tensors["prompt_embeddings"], change), mutated / TENSORS)
    if cut > 30:
        content = (mutated / TENSORS).read_bytes()
        (mutated / TENSORS).write_bytes(content[: -(cut - 30)])
    if not is_prompt_tuned(mutated):
        assert fields
        return
    table, refusal = read(mutated)
    if table is None:
        assert str(mutated) in refusal
        assert fields or change is not None or cut > 30, f"nothing was changed: {refusal}"
        return
    assert change is None
    assert cut <= 30
    assert table.shape == (config["num_virtual_tokens"], config["token_dim"])
    assert np.isfinite(table).all()


def read(directory: Path) -> tuple[np.ndarray | None, str]:
    try:
        return read_prompt_embeddings(directory, None)[1], ""
    except _core.AdapterError as error:
        return None, str(error)
