"""A name means the same wherever it is given: in Python, in commands and in requests."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

import adaptrt
from adaptrt import LLM, AdapterError, AdaptrtError, ConfigError, LoraConfig
from adaptrt.builder.commands import build as build_command
from adaptrt.formats.sources import find_adapter
from adaptrt.serve import command as serve_command
from adaptrt.serve.app import make_app
from adaptrt.serve.options import ServerOptions
from adaptrt.serve.service import Service
from adaptrt.tools import hf_lora_convert, inspect
from adaptrt.tools.bench import engine_rows
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine
from support.tokenizers import byte_level, save_tokenizer

SUM = "a:0.7+b:0.3"
ONE_TERM = "org/poet:1"
ADAPTERS = ("a", "b", SUM, ONE_TERM, "plain")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("surfaces")
    model = save_model(ModelSpec(vocab_size=272, num_hidden_layers=1), made / "model")
    save_tokenizer(byte_level(), model)
    for seed, name in enumerate(ADAPTERS):
        save_adapter(model, made / "adapters" / name, seed, strength=3.0, r=4)
    build_engine(model, made)
    return made


@pytest.fixture(scope="module")
def llm(root: Path) -> Iterator[LLM]:
    with LLM(root / "engine") as made:
        yield made


@pytest.fixture
def here(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(root / "adapters")
    return root / "adapters"


def bits(config: LoraConfig) -> bytes:
    return np.asarray(config.weights).tobytes()


def by_lora(llm: LLM, name: str | Path) -> bytes:
    """The adapter that the argument `lora` of LLM's methods loads."""
    (used,) = llm._hold(1, name).names
    assert used is not None
    return bits(llm.executor.adapters.load(used))


def by_load_lora(llm: LLM, name: str | Path) -> bytes:
    return bits(llm.executor.adapters.load(llm.load_lora("loaded", name, replace=True).name))


def by_from_peft(llm: LLM, name: str | Path) -> bytes:
    return bits(LoraConfig.from_peft(1, name, llm.executor.engine))


def by_serve_flag(llm: LLM, name: str | Path) -> bytes:
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    options = serve_command.options_of(parser.parse_args(["model", "--lora_modules", f"poet={name}"]))
    ((_, directory),) = options.lora_modules
    return bits(LoraConfig.from_peft(1, Path(directory), llm.executor.engine))


def by_request(llm: LLM, name: str | Path) -> bytes:
    """The adapter that POST /v1/load_lora_adapter loads from below a root."""

    async def main() -> bytes:
        executor = adaptrt.Executor(llm.executor.engine.directory)
        options = ServerOptions(served_model_name=("base",), adapter_roots=(Path.cwd(),), enable_lora_loading=True)
        service = await Service.open(executor, options)
        try:
            transport = httpx.ASGITransport(make_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                body = {"lora_name": "poet", "lora_path": str(name)}
                answer = await http.post("/v1/load_lora_adapter", json=body)
            if answer.status_code != 200:
                raise AdapterError(answer.text)
            return bits(executor.adapters.load("poet"))
        finally:
            await service.close()

    return asyncio.run(main())


def by_command(llm: LLM, name: str | Path, command: Callable[[argparse.Namespace], int], *flags: str) -> bytes:
    """Runs a command that reads one adapter, and returns the bits of the adapter that it read."""
    read: list[Path] = []
    module = __import__(command.__module__, fromlist=["find_adapter"])
    with pytest.MonkeyPatch.context() as patch:

        def find(given: str) -> object:
            found = find_adapter(given)
            read.append(found.directory)
            return found

        patch.setattr(module, "find_adapter", find)
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        assert command(parser.parse_args([*flags, str(name)])) == 0
    return bits(LoraConfig.from_peft(1, read[0], llm.executor.engine))


def by_inspect(llm: LLM, name: str | Path) -> bytes:
    return by_command(llm, name, inspect.run)


def by_convert(llm: LLM, name: str | Path) -> bytes:
    return by_command(llm, name, hf_lora_convert.run, "-o", str(Path.cwd().parent / "converted"), "-i")


def by_bench(llm: LLM, name: str | Path) -> bytes:
    """The adapter that `adaptrt bench --lora_dir` uses."""
    read: list[Path] = []

    class StopError(Exception):
        pass

    def stop(directories: list[Path], engine: object) -> None:
        read.extend(directories)
        raise StopError

    parser = argparse.ArgumentParser()
    engine_rows.add_arguments(parser)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_rows, "_adapters", stop)
        with contextlib.suppress(StopError):
            engine_rows.engine_rows(parser.parse_args(["--lora_dir", str(name)]), llm.executor.engine)  # type: ignore[arg-type]
    return bits(LoraConfig.from_peft(1, read[0], llm.executor.engine))


SURFACES = (by_lora, by_load_lora, by_from_peft, by_serve_flag, by_request, by_inspect, by_convert, by_bench)
SUMS = (by_lora, by_from_peft)
"""Surfaces that accept weighted sums; the others need one adapter."""


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_existing_path_wins(here: Path, llm: LLM, surface: Callable[[LLM, str | Path], bytes], name: str) -> None:
    expected = bits(LoraConfig.from_peft(1, here / name, llm.executor.engine))
    for given in (name, f"./{name}", here / name):
        assert surface(llm, given) == expected


@pytest.mark.parametrize("surface", SURFACES)
def test_a_sum_without_such_a_path(here: Path, llm: LLM, surface: Callable[[LLM, str | Path], bytes]) -> None:
    expected = bits(LoraConfig.from_peft(1, {here / "a": 0.5, here / "b": 0.25}, llm.executor.engine))
    for name in ("a:0.5+b:0.25", "./a:0.5+./b:0.25", f"{here}/a:0.5+{here}/b:0.25"):
        if surface in SUMS:
            assert surface(llm, name) == expected
            continue
        with pytest.raises(AdaptrtError, match=r"weighted sum|not a directory|expected a directory"):
            surface(llm, name)


@pytest.mark.parametrize("surface", [one for one in SURFACES if one is not by_request])
def test_an_ambiguous_name_is_refused(
    tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, surface: Callable[[LLM, str | Path], bytes]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    with pytest.raises(AdaptrtError, match=r"could be a path.*write '\./models/poet' or 'hf://models/poet'"):
        surface(llm, "models/poet")


def test_terms_whose_paths_cannot_be_written(
    here: Path, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(here / "a", tmp_path / "x+y" / "poet")
    monkeypatch.chdir(tmp_path / "x+y")
    with pytest.raises(AdapterError, match=r"weighted sum of the paths .*expected paths without '\+', or names that"):
        llm.generate("x", lora="poet:0.5")


def test_a_carried_adapter_needs_another_name(here: Path, root: Path) -> None:
    parser = argparse.ArgumentParser()
    build_command.add_arguments(parser)
    flags = ["--model_dir", str(root / "model"), "--output_dir", "x", "--lora_dir", SUM, "--lora_plugin", "auto"]
    with pytest.raises(ConfigError, match=r"the adapter's name is 'a:0.7\+b:0.3', which is a weighted sum"):
        build_command.run(parser.parse_args(flags))
