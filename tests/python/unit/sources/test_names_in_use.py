"""Names of Hub repositories in commands and the API; the Hub is a dictionary of directories."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from adaptrt import LLM, AdapterError, ConfigError, LoraConfig
from adaptrt.builder.cli import main as command_line
from adaptrt.builder.commands import build as build_command
from adaptrt.builder.model_cache.first_use import engine_for
from adaptrt.builder.model_cache.options import EngineOptions
from adaptrt.builder.model_cache.store import EngineCache
from adaptrt.formats.engine.engine_config import EngineConfig
from adaptrt.formats.sources import HubName, Source, source
from adaptrt.formats.sources.hub import Snapshot
from adaptrt.formats.sources.kind import Kind
from adaptrt.formats.sources.lease import Lease
from adaptrt.serve import command as serve_command
from support.models import ModelSpec, save_adapter, save_model
from support.tokenizers import byte_level, save_tokenizer

SPEC = ModelSpec(vocab_size=300, num_hidden_layers=1)
SMALL = EngineOptions(max_batch_size=4, max_num_tokens=64, max_seq_len=96, max_lora_rank=8)
COMMITS = ("a" * 40, "b" * 40)


class FakeHub:
    """The directories of repositories, which all share one commit."""

    def __init__(self, directories: dict[str, Path]) -> None:
        self.directories = directories
        self.commit = COMMITS[0]
        self.asked: list[str] = []

    def fetch(self, name: HubName, kind: Kind) -> Snapshot:
        self.asked.append(name.label)
        if name.label not in self.directories:
            raise kind.error(f"{name.without_prefix}: no such repository")
        return Snapshot(self.directories[name.label], HubName(name.repository, self.commit, name.folder))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("names")
    model = save_model(SPEC, root / "model")
    save_tokenizer(byte_level(), model)
    for number, name in enumerate(("poet", "shout")):
        adapter = save_adapter(model, root / name, number, r=2)
        config = json.loads((adapter / "adapter_config.json").read_text())
        base = "org/model" if name == "poet" else "org/other"
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": base}))
    return root


@pytest.fixture
def hub(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    fake = FakeHub({"org/model": saved / "model", "org/poet": saved / "poet", "org/loras/shout": saved / "shout"})
    monkeypatch.setattr(source, "fetch", fake.fetch)
    return fake


def test_a_commit_is_in_the_record_and_in_the_key(hub: FakeHub, saved: Path) -> None:
    first = engine_for("org/model", SMALL)
    assert EngineConfig.load(first).source == f"hf://org/model@{COMMITS[0]}"
    assert engine_for("org/model@main", SMALL) == first
    (entry,) = EngineCache().entries()
    assert entry.model == f"hf://org/model@{COMMITS[0]}"
    hub.commit = COMMITS[1]
    second = engine_for("org/model", SMALL)
    assert second != first
    assert EngineConfig.load(second).source == f"hf://org/model@{COMMITS[1]}"
    local = engine_for(saved / "model", SMALL)
    assert EngineConfig.load(local).source is None
    assert local not in (first, second)


def test_a_changed_record_is_refused(hub: FakeHub) -> None:
    engine = engine_for("org/model", SMALL)
    path = engine / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "source": f"hf://org/model@{COMMITS[1]}"}))
    with pytest.raises(Exception, match="does not have its checksum"):
        EngineConfig.load(engine)


def test_llm_and_its_adapters_by_name(hub: FakeHub, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM("org/model", engine_options=SMALL) as llm, caplog.at_level(logging.WARNING, "adaptrt"):
        llm.executor.add_adapter("poet", "org/poet")
        assert not caplog.records
        llm.executor.add_adapter("shout", "org/loras/shout")
        assert [record.getMessage() for record in caplog.records] == [
            f"{saved / 'shout'}: adapter 'shout' was trained on org/other, and the engine was built from "
            f"hf://org/model@{COMMITS[0]}"
        ]
        assert llm.executor.adapters.get("poet").directory == saved / "poet"
        assert llm.generate("hello", lora="poet", max_tokens=4).text is not None
        with pytest.raises(AdapterError, match="org/none: no such repository"):
            llm.executor.add_adapter("none", "org/none")
        with pytest.raises(AdapterError, match="org/poet: is not a directory"):
            llm.executor.add_adapter("path", Path("org/poet"))
        released: list[str] = []
        lease = cast(Lease, SimpleNamespace(release=lambda: released.append("first")))
        other = cast(Lease, SimpleNamespace(release=lambda: released.append("second")))
        llm.executor.add_adapter("leased", Source("x", saved / "poet", lease=lease))
        assert released == []
        llm.executor.add_adapter("leased", Source("x", saved / "shout", lease=other), replace=True)
        assert released == []  # requests may still ask for the old version
        llm.executor.remove_adapter("leased")
        assert sorted(released) == ["first", "second"]
        engine = llm.executor.engine
        caplog.clear()
        named = LoraConfig.from_peft(1, "org/poet:0.5+org/loras/shout:0.25", engine)
        assert [record.getMessage().split(", and")[0] for record in caplog.records] == [
            f"{saved / 'shout'}: adapter 'org/loras/shout' was trained on org/other"
        ]
        asked = len(hub.asked)
        assert llm.generate("hello", lora="org/loras/shout:0.5+poet:0.5", max_tokens=4).text is not None
        assert hub.asked[asked:] == ["org/loras/shout"]
        paths = LoraConfig.from_peft(1, {saved / "poet": 0.5, str(saved / "shout"): 0.25}, engine)
        assert np.array_equal(named.weights, paths.weights)
        assert np.array_equal(LoraConfig.from_peft(1, "org/poet", engine).weights,
                              LoraConfig.from_peft(1, saved / "poet", engine).weights)  # fmt: skip


def test_serve_takes_names(hub: FakeHub, saved: Path) -> None:
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    args = parser.parse_args(["org/model@v1", "--lora_modules", "poet=org/poet", f"shout={saved / 'shout'}"])
    options = serve_command.options_of(args)
    assert options.served_model_name == ("org/model",)
    assert options.lora_modules == (("poet", saved / "poet"), ("shout", saved / "shout"))
    assert hub.asked == ["org/poet"]  # the model is fetched only after the flags were checked
    args = parser.parse_args(["org/model", "--lora_modules", "a=org/none", "b=gs://x/y", "--adapter_root", "nowhere"])
    with pytest.raises(
        ConfigError, match="adapter_root is 'nowhere'; expected a directory, s3://BUCKET/PREFIX, or hf://ORGANISATION"
    ) as info:
        serve_command.options_of(args)
    assert "org/none: no such repository" in str(info.value)
    assert "URL with the scheme gs" in str(info.value)


def test_build_names_carried_adapters_by_the_last_part(hub: FakeHub, saved: Path) -> None:
    link = Path("link")
    link.symlink_to(saved / "poet")
    parser = argparse.ArgumentParser()
    build_command.add_arguments(parser)
    flags = ["--model_dir", "org/model", "--lora_dir", "org/loras/shout", "link"]
    lora = build_command.config_of(parser.parse_args(flags)).lora_config
    assert lora.lora_dir == (saved / "shout", link)
    assert lora.adapter_names == ("shout", "poet")
    only_local = parser.parse_args(["--model_dir", "org/model", "--lora_dir", str(saved / "poet")])
    assert build_command.config_of(only_local).lora_config.adapter_names == ()


def test_commands_take_names(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--max_batch_size", "2", "--max_num_tokens", "32", "--max_seq_len", "32"]
    flags = ["--model_dir", "org/model", "--output_dir", str(tmp_path / "engine"), *sizes]
    assert command_line(["build", *flags, "--lora_plugin", "auto", "--lora_dir", "org/poet"]) == 0
    assert EngineConfig.load(tmp_path / "engine").build_config.lora_config.adapter_names == ("poet",)
    assert command_line(["inspect", str(tmp_path / "engine")]) == 0
    assert f"hf://org/model@{COMMITS[0]}" in capsys.readouterr().out.replace("\n", "")
    assert command_line(["inspect", "org/poet"]) == 0
    assert command_line(["convert-checkpoint", "--model_dir", "org/model", "--output_dir", str(tmp_path / "ckpt")]) == 0
    converted = tmp_path / "converted"
    assert command_line(["hf-lora-convert", "-i", "org/poet", "-o", str(converted), "--base_model", "org/model"]) == 0
    assert (converted / "model.lora_weights.npy").is_file()
    capsys.readouterr()
    assert command_line(["convert-checkpoint", "--model_dir", "org/none", "--output_dir", str(tmp_path / "no")]) == 2
    assert "org/none: no such repository" in capsys.readouterr().err
    shutil.rmtree(converted)
