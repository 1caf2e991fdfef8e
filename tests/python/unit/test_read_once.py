"""A command opens a model's config.json once, declares its network once, and reuses both."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from adaptrt import LLM, ConfigError
from adaptrt._core import AdaptrtError
from adaptrt.builder.cli import main as command_line
from adaptrt.builder.model_cache import first_use
from adaptrt.builder.model_cache.first_use import engine_for, plan_engine
from adaptrt.builder.model_cache.options import EngineOptions
from adaptrt.builder.model_cache.store import EngineCache
from adaptrt.common.progress import SilentProgress
from adaptrt.formats.checkpoint.config import CheckpointConfig
from adaptrt.formats.checkpoint.config_file import ConfigFile
from adaptrt.formats.models import llama
from adaptrt.formats.models.registry import specimen
from adaptrt.formats.network.network import Network
from adaptrt.runtime.engine import load_engine
from support.models import ALL_MODULES, ModelSpec, save_adapter, save_model
from support.opened import opens_of
from support.published import SCHEMES, publish
from support.published_models import WHOLE_SPEC
from support.tokenizers import byte_level, save_tokenizer

SPEC = ModelSpec(num_hidden_layers=1)
SMALL = EngineOptions(max_batch_size=4, max_num_tokens=64, max_seq_len=64)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a model, a checkpoint of it, and two adapters."""
    directory = tmp_path_factory.mktemp("read_once")
    model = save_model(SPEC, directory / "model")
    save_adapter(model, directory / "lora", 0, r=2, target_modules=ALL_MODULES)
    save_adapter(model, directory / "dora", 1, r=2, use_dora=True, target_modules=ALL_MODULES)
    run("convert-checkpoint", "--model_dir", model, "--output_dir", directory / "checkpoint")
    return directory


def run(*arguments: object) -> None:
    assert command_line([str(argument) for argument in arguments]) == 0


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> list[CheckpointConfig]:
    """Returns the configs whose networks were declared, without the small configs that list each family's names."""
    found: list[CheckpointConfig] = []
    family = llama.LLAMA
    smallest = specimen(family).config

    def declare(network: Network, config: CheckpointConfig) -> None:
        if config != smallest:
            found.append(config)
        family.declare(network, config)

    monkeypatch.setattr(llama, "LLAMA", replace(family, declare=declare))
    return found


@pytest.mark.parametrize(
    "command",
    [
        "convert-checkpoint --model_dir {model} --output_dir",
        "build --model_dir {model} --output_dir",
        "build --model_dir {model} --quantization w8a16 --int8_kv_cache --output_dir",
        "build --model_dir {model} --lora_plugin auto --dora_plugin enable --lora_dir {lora} {dora} --output_dir",
        "hf-lora-convert --in_file {lora} --base_model {model} --out_dir",
        "normalize-dora --in_dir {dora} --base_model {model} --out_dir",
    ],
)
def test_a_command_reads_and_declares_a_model_once(
    root: Path, tmp_path: Path, declared: list[CheckpointConfig], command: str
) -> None:
    places = {name: root / name for name in ("model", "lora", "dora")}
    with opens_of(root / "model" / "config.json") as opened:
        run(*command.format(**places).split(), tmp_path / "out")
    assert len(opened) == 1
    assert len(declared) == 1


def test_a_build_reads_and_declares_a_checkpoint_once(
    root: Path, tmp_path: Path, declared: list[CheckpointConfig]
) -> None:
    adapters = ("--lora_plugin", "auto", "--dora_plugin", "enable", "--lora_dir", root / "lora", root / "dora")
    with opens_of(root / "checkpoint" / "config.json") as opened:
        run("build", "--checkpoint_dir", root / "checkpoint", *adapters, "--output_dir", tmp_path / "engine")
    assert len(opened) == 1
    assert len(declared) == 1
    declared.clear()
    engine = load_engine(tmp_path / "engine")
    assert engine.adapted_modules.names
    assert engine.pooler is None
    assert engine.classes is None
    run("inspect", root / "lora", "--engine", tmp_path / "engine")
    assert len(declared) == 2


def test_layers_that_were_published_quantised_are_described_once(
    tmp_path: Path, declared: list[CheckpointConfig]
) -> None:
    model = save_model(WHOLE_SPEC, tmp_path / "model")
    published = publish(model, tmp_path, SCHEMES["gptq-4-act-order"])
    declared.clear()
    flags = ("--use_weight_only", "--weight_only_precision", "int4_gptq", "--quant_ckpt_path", published)
    with opens_of(published / "config.json") as opened:
        run("convert-checkpoint", "--model_dir", model, *flags, "--output_dir", tmp_path / "checkpoint")
    assert len(opened) == 1
    assert len(declared) == 1
    with opens_of(published / "config.json") as opened:
        run("build", "--model_dir", published, "--quantization", "w8a16", "--output_dir", tmp_path / "engine")
    assert len(opened) == 1
    assert len(declared) == 2


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineCache:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return EngineCache()


@pytest.mark.parametrize("kind", ["model", "checkpoint"])
def test_first_use_reads_and_declares_it_once(
    root: Path, cache: EngineCache, declared: list[CheckpointConfig], kind: str
) -> None:
    with opens_of(root / kind / "config.json") as opened:
        plan = plan_engine(root / kind, SMALL)
        assert plan is not None
        plan.check_adapter(root / "lora")
        plan.engine(SilentProgress())
    assert len(opened) == 2  # the second opening computes the digest
    assert len(declared) == 1
    with opens_of(root / kind / "config.json") as opened:
        engine_for(root / kind, SMALL)
    assert len(opened) == 1
    assert len(declared) == 1


def test_an_llm_opens_it_once(root: Path, tmp_path: Path, cache: EngineCache) -> None:
    model = Path(shutil.copytree(root / "model", tmp_path / "model"))
    save_tokenizer(byte_level(), model)
    with opens_of(model / "config.json") as opened, LLM(model, engine_options=SMALL):
        pass
    assert len(opened) == 2  # the second opening computes the digest


@pytest.mark.parametrize("is_made", [False, True])
def test_a_config_that_changes_after_it_was_read_makes_no_engine(
    root: Path, tmp_path: Path, cache: EngineCache, is_made: bool
) -> None:
    model = Path(shutil.copytree(root / "model", tmp_path / "model"))
    if is_made:
        engine_for(model, SMALL)
    plan = plan_engine(model, SMALL)
    assert plan is not None
    path = model / "config.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(ConfigError, match="its files were changed while they were read; try again"):
        plan.engine(SilentProgress())


def test_a_config_that_changes_while_it_is_read_makes_no_engine(
    root: Path, tmp_path: Path, cache: EngineCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(root / "model", tmp_path / "model"))

    def read_before_a_change(directory: Path, error: type[AdaptrtError]) -> ConfigFile:
        file = ConfigFile.read(directory, error)
        file.path.write_text(file.path.read_text() + " ")
        return file

    monkeypatch.setattr(first_use, "ConfigFile", SimpleNamespace(read=read_before_a_change))
    plan = plan_engine(model, SMALL)
    assert plan is not None
    with pytest.raises(ConfigError, match="its files were changed while they were read; try again"):
        plan.engine(SilentProgress())
