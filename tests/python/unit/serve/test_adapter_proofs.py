"""Proofs of adapters: made by transformers and PEFT, and checked where the server and LLM load the adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adaptrt
from adaptrt import AdapterError
from adaptrt.builder.cli import main
from adaptrt.formats.adapter.proof import AdapterProof, parse_proof, read_proof
from adaptrt.runtime.text_requests import TextRequests
from support.examples import examples
from support.models import save_adapter
from support.served_app import AppClient, AppPlace, make_place, run_app

FILE = "adapter_proof.json"
UPLOADS = {"enable_lora_upload": True}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> AppPlace:
    made = make_place(tmp_path_factory.mktemp("proofs"), ("poet", "clerk"))
    command = ["prove", str(made.root / "poet"), "--model", str(made.model), "--tolerance", "0.01"]
    assert main([*command, "--prompts", "hello", "Once upon"]) == 0
    for name in ("of_base", "of_adapter", "of_text"):
        shutil.copytree(made.root / "poet", made.root / name)
    edit(made.root / "of_base", lambda proof: proof["prompts"][1]["base"][0].__setitem__(1, -9.0))
    edit(made.root / "of_adapter", lambda proof: proof["prompts"][1]["adapter"][2].__setitem__(1, -0.001))
    edit(made.root / "of_text", lambda proof: proof["prompts"][0].update(text="hallo"))
    return made


def edit(directory: Path, change: Callable[[Any], object]) -> None:
    path = directory / FILE
    proof = json.loads(path.read_text())
    change(proof)
    path.write_text(json.dumps(proof))


FAILURES = {
    "of_base": "fails: prompts[1]: with the base model, token ",
    "of_adapter": "fails: prompts[1]: with the adapter, token ",
    "of_text": "fails: prompts[0].text has ",
}


def test_the_server_checks_proofs_wherever_adapters_come_from(place: AppPlace) -> None:
    sent_files = ("adapter_config.json", "adapter_model.safetensors", FILE)

    async def body(client: AppClient) -> None:
        kept = await client.tokens("start")  # a proof that holds, at the start
        for name, said in FAILURES.items():
            refused = await client.load("start", name)  # at run time, instead of a good one
            assert (refused.status_code, said in refused.text) == (400, True), refused.text
            refused = await client.post("/v1/completions", model=name, prompt="hi", max_tokens=1)  # below the root
            assert (refused.status_code, said in refused.text) == (400, True), refused.text
        files = {one: (place.root / "of_adapter" / one).read_bytes() for one in sent_files}
        sent = await client.http.post(
            "/v1/upload_lora_adapter", data={"lora_name": "start", "load_inplace": "true"}, files=files
        )
        assert (sent.status_code, FAILURES["of_adapter"] in sent.text) == (400, True), sent.text
        assert await client.tokens("start") == kept
        (row,) = await client.adapters()
        assert (row["name"], row["level"], row["current"]) == ("start", "device", True)
        # A proof is part of the version.
        clerk = await client.load("start", "clerk")
        assert clerk.status_code == 200, clerk.text
        assert [one["current"] for one in await client.adapters()] == [True, False]

    run_app(place, body, lora_modules=(("start", place.root / "poet"),), **UPLOADS)


def test_a_server_does_not_start_with_a_proof_that_fails(place: AppPlace) -> None:
    async def body(client: AppClient) -> None:
        raise AssertionError("the server has started")

    with pytest.raises(adaptrt.ConfigError, match=r"lora_modules 'bad=.*: with the adapter, token"):
        run_app(place, body, lora_modules=(("bad", place.root / "of_adapter"),))


def test_llm_checks_proofs_and_keeps_the_old_version(
    place: AppPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with adaptrt.LLM(place.engine, adaptrt.ExecutorConfig(num_threads=1)) as llm:
        llm.load_lora("poet", place.root / "poet")
        kept = llm.executor.adapters.version_name("poet")
        answer = llm.generate("hello", lora="poet", max_tokens=4)
        llm.executor.pin_named_adapter("poet")
        for name, said in FAILURES.items():
            with pytest.raises(AdapterError) as raised:
                llm.load_lora("poet", place.root / name, replace=True)
            assert said in str(raised.value)
        with pytest.raises(AdapterError, match="with the base model"):
            llm.generate("hello", lora=place.root / "of_base")
        assert llm.executor.adapters.version_name("poet") == kept
        assert llm.generate("hello", lora="poet", max_tokens=4) == answer
        (row,) = llm.executor.list_adapters()
        assert row.pinned
        # The same files again, with a check that fails: the version stays.
        with monkeypatch.context() as patch:
            patch.setattr(TextRequests, "check_proof", fail)
            with pytest.raises(AdapterError, match="no"):
                llm.load_lora("poet", place.root / "poet", replace=True)
        assert llm.generate("hello", lora="poet", max_tokens=4) == answer
        assert llm.list_loras() == ["poet"]
        other = shutil.copytree(place.root / "poet", tmp_path / "other")
        edit(other, lambda proof: proof["prompts"][0].update(token_ids=[100_000], text=None))
        with pytest.raises(AdapterError, match="the proof cannot be checked: "):
            llm.load_lora("other", other)
        edit(other, lambda proof: proof.update(tolerance=True))
        with pytest.raises(AdapterError, match="tolerance is True; expected a number above 0, at most 10"):
            llm.load_lora("other", other)


def fail(*_: object) -> None:
    raise AdapterError("no")


def test_prove_refuses_what_proves_nothing(place: AppPlace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weak = save_adapter(place.model, tmp_path / "weak", 5, strength=0.001, r=4)
    assert main(["prove", str(weak), "--model", str(place.model)]) == 2
    assert "expected more than twice the tolerance of 0.25" in capsys.readouterr().err
    assert main(["prove", str(tmp_path), "--model", str(place.model)]) == 2
    assert "adapter_config.json: is missing; expected an adapter that PEFT has saved" in capsys.readouterr().err
    assert read_proof(weak) is None


GOOD = {"format": 1, "tolerance": 0.5, "prompts": [{"token_ids": [1], "adapter": [[2, -0.5]], "base": [[2, -1]]}]}
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from([[2, -0.5], [1]]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths of all values in JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, one in inner for found in places(one, (*path, key)))]


@settings(max_examples=examples(150, 3000), deadline=None)
@given(st.sampled_from(places(GOOD)[1:]), VALUES, st.booleans())
def test_any_value_in_a_proof_is_read_or_refused(path: tuple[Any, ...], value: Any, is_removed: bool) -> None:
    content = json.loads(json.dumps(GOOD))
    assert parse_proof(content, "x") == parse_proof(json.loads(parse_proof(content, "x").to_json()), "x")
    target = content
    for key in path[:-1]:
        target = target[key]
    if is_removed:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    proof = None
    try:
        proof = parse_proof(content, "x")
    except AdapterError as error:
        said = str(error)
    if proof is None:
        assert said.startswith("x: ")
        return
    assert isinstance(proof, AdapterProof)
    assert parse_proof(json.loads(proof.to_json()), "x") == proof


def test_a_server_checks_the_proofs_of_the_engines_own_adapters(place: AppPlace, tmp_path: Path) -> None:
    carried = [str(place.root / name) for name in ("poet", "of_adapter")]
    command = [
        "build",
        "--checkpoint_dir",
        str(place.engine.parent / "checkpoint"),
        "--output_dir",
        str(tmp_path / "e"),
    ]
    flags = ["--max_batch_size", "4", "--max_seq_len", "64", "--lora_plugin", "auto", "--lora_dir", *carried]
    assert main([*command, *flags]) == 0

    async def body(client: AppClient) -> None:
        raise AssertionError("the server has started")

    said = r"the engine carries adapter 'of_adapter': .*with the adapter, token .*; expected an engine that is built"
    with pytest.raises(adaptrt.ConfigError, match=said):
        run_app(AppPlace(tmp_path / "e", place.root, place.model), body)
