"""Adapters of virtual tokens on disk: reading, refusals, and the output of adaptrt inspect."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import adaptrt
from adaptrt.builder import cli
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.adapter import is_prompt_tuned, read_prompt_embeddings
from adaptrt.formats.adapter.recognise import PromptKind, recognise
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.formats.network.adapter_sites import AdaptedModules
from support import encoder_decoders, encoders
from support.adapters import CONFIG, TENSORS, edit_config, edit_tensors
from support.encoder_decoders import save_encoder_decoder
from support.encoders import save_encoder
from support.families import FAMILIES, save_family
from support.models import ModelSpec, save_adapter, save_model
from support.prompts import save_virtual_tokens, virtual_tokens_of

COUNT, WIDTH = 5, 36


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prompts")
    model = save_model(ModelSpec(), root / "model")
    save_virtual_tokens(model, root / "tuned", COUNT, 1)
    save_virtual_tokens(model, root / "encoded", COUNT, 2, encoded=True)
    save_adapter(model, root / "lora", 3, r=4)
    convert_checkpoint(model, root / "checkpoint")
    return root


@pytest.fixture(scope="module")
def modules(root: Path) -> AdaptedModules:
    return AdaptedModules(Checkpoint.open(root / "checkpoint").network)


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root / "tuned", tmp_path / "copied"))


def refusal(directory: Path, modules: AdaptedModules | None) -> str:
    with pytest.raises(adaptrt.AdapterError) as error:
        read_prompt_embeddings(directory, modules)
    assert str(directory) in str(error.value)
    return str(error.value)


def test_embeddings_are_served_as_the_file_has_them(root: Path, modules: AdaptedModules) -> None:
    for kind, name in (("tuned", PromptKind.PROMPT_TUNING), ("encoded", PromptKind.P_TUNING)):
        assert is_prompt_tuned(root / kind)
        found, table = read_prompt_embeddings(root / kind, modules)
        assert found is name
        assert table.dtype == np.float32
        assert np.array_equal(table, virtual_tokens_of(root / kind))
    assert not is_prompt_tuned(root / "lora")
    assert not is_prompt_tuned(root)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_files_of_two_bytes_are_widened(copied: Path, modules: AdaptedModules, dtype: torch.dtype) -> None:
    from safetensors.torch import load_file, save_file

    rounded = load_file(copied / TENSORS)["prompt_embeddings"].to(dtype)
    save_file({"prompt_embeddings": rounded}, copied / TENSORS)
    _, table = read_prompt_embeddings(copied, modules)
    assert np.array_equal(table, rounded.float().numpy())


def test_granite_multiplies_them_and_gemma_does_not(root: Path, tmp_path: Path) -> None:
    """The factor is the one that transformers applies to inputs_embeds, which PEFT passes to it."""
    for name, factor in (("granite", 3.0), ("gemma2", 1.0)):
        model = save_family(FAMILIES[name], tmp_path / name)
        convert_checkpoint(model, tmp_path / f"{name}-checkpoint")
        of_model = AdaptedModules(Checkpoint.open(tmp_path / f"{name}-checkpoint").network)
        _, table = read_prompt_embeddings(root / "tuned", of_model)
        assert np.array_equal(table, virtual_tokens_of(root / "tuned") * np.float32(factor))


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"task_type": "SEQ_CLS"}, 'task_type = "SEQ_CLS": virtual tokens are put before prompts; accepted: CAUSAL_LM'),
    ({"task_type": None}, "task_type = null"),
    ({"num_virtual_tokens": 0}, "num_virtual_tokens = 0: expected a whole number from 1"),
    ({"num_virtual_tokens": "5"}, 'num_virtual_tokens = "5": expected a whole number from 1'),
    ({"token_dim": 35}, "token_dim = 35: expected the model's hidden size 36"),
    ({"num_transformer_submodules": 2}, "num_transformer_submodules = 2: prompts of an encoder and a decoder"),
    ({"modules_to_save": ["lm_head"]}, 'modules_to_save = ["lm_head"]: layers that were trained together with'),
    ({"prompt_rotation": 3}, "prompt_rotation = 3: an unknown field"),
    ({"num_virtual_tokens": 6}, "tensor 'prompt_embeddings' is [5, 36]; adapter_config.json has num_virtual_tokens 6"),
]


@pytest.mark.parametrize(("fields", "reason"), FIELDS)
def test_fields_that_cannot_be_honoured(
    copied: Path, modules: AdaptedModules, fields: dict[str, Any], reason: str
) -> None:
    edit_config(copied, **fields)
    assert reason in refusal(copied, modules)


def test_missing_fields_are_all_named(copied: Path, modules: AdaptedModules) -> None:
    config = json.loads((copied / CONFIG).read_text())
    del config["num_virtual_tokens"], config["token_dim"]
    (copied / CONFIG).write_text(json.dumps(config))
    assert "num_virtual_tokens is missing; token_dim is missing" in refusal(copied, modules)


def test_tensors_that_are_none_of_theirs(copied: Path, modules: AdaptedModules) -> None:
    table = virtual_tokens_of(copied)
    broken = table.copy()
    broken[3, 35] = np.nan
    changes = [
        ({"prompt_embeddings": table, "other": table}, "tensor 'other' does not belong to virtual tokens"),
        ({"other": table}, "tensor 'prompt_embeddings' is missing"),
        ({"prompt_embeddings": table.astype(np.int32)}, "tensor 'prompt_embeddings' is of int32; accepted: float32"),
        ({"prompt_embeddings": table.T.copy()}, "tensor 'prompt_embeddings' is [36, 5]"),
        ({"prompt_embeddings": broken}, "tensor 'prompt_embeddings' holds nan at [3, 35]"),
    ]
    for tensors, reason in changes:
        edit_tensors(copied, lambda _, tensors=tensors: tensors)
        assert reason in refusal(copied, modules)


def test_pickles_and_pointers_are_not_read(copied: Path, modules: AdaptedModules) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\n"
    (copied / TENSORS).write_text(pointer)
    assert "is a Git LFS pointer" in refusal(copied, modules)
    (copied / TENSORS).unlink()
    assert "has no adapter_model.safetensors" in refusal(copied, modules)
    torch.save({}, copied / "adapter_model.bin")
    assert "has no adapter_model.safetensors; adapter_model.bin is not read" in refusal(copied, modules)
    (copied / CONFIG).write_text(pointer)
    with pytest.raises(adaptrt.AdapterError, match="is a Git LFS pointer"):
        is_prompt_tuned(copied)


def test_a_lora_config_is_not_made_of_them(root: Path, copied: Path) -> None:
    with pytest.raises(adaptrt.AdapterError, match="P-tuning, whose virtual tokens do not fit into a LoraConfig"):
        recognise(root / "encoded")
    edit_config(copied, peft_type="PREFIX_TUNING")
    with pytest.raises(adaptrt.AdapterError, match="keys and values that belong to no token, and engines keep only"):
        recognise(copied)


def test_engines_that_take_none_are_told_of_when_they_are_built(root: Path, tmp_path: Path) -> None:
    narrow = save_model(ModelSpec(hidden_size=24), tmp_path / "narrow")
    convert_checkpoint(narrow, tmp_path / "checkpoint")
    lora = LoraBuildConfig(lora_dir=(root / "tuned", root / "lora"))
    config = BuildConfig(
        max_batch_size=2, max_num_tokens=32, max_seq_len=32, lora_config=lora,
        plugin_config=PluginConfig(lora_plugin="auto"),
    )  # fmt: skip
    with pytest.raises(adaptrt.AdapterError, match="token_dim = 36: expected the model's hidden size 24"):
        build(tmp_path / "checkpoint", config, tmp_path / "engine")
    even = ModelSpec(num_attention_heads=4, num_key_value_heads=2, intermediate_size=40, vocab_size=64)
    convert_checkpoint(save_model(even, tmp_path / "even"), tmp_path / "ranks", tp_size=2)
    with pytest.raises(
        adaptrt.AdapterError, match="has virtual tokens; expected an engine with backend native and one rank"
    ):
        build(tmp_path / "ranks", config, tmp_path / "engine")


def test_models_with_an_encoder_take_none(root: Path, tmp_path: Path) -> None:
    for name, save in (
        ("t5", lambda to: save_encoder_decoder(encoder_decoders.MODELS["t5"], to)),
        ("bert", lambda to: save_encoder(encoders.MODELS["bert"], to)),
    ):
        convert_checkpoint(save(tmp_path / name), tmp_path / f"{name}-checkpoint")
        of_model = AdaptedModules(Checkpoint.open(tmp_path / f"{name}-checkpoint").network)
        assert "put before a decoder's prompts, but the model has an encoder" in refusal(root / "tuned", of_model)


def test_inspect_says_how_they_are_served(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, name in (("tuned", "prompt tuning"), ("encoded", "P-tuning")):
        assert cli.main(["inspect", str(root / kind)]) == 0
        text = capsys.readouterr().out
        assert f"kind            {name}\n" in text
        assert f"virtual tokens  {COUNT}, inserted before every prompt\n" in text
        assert "rows" not in text
    plain = BuildConfig(max_batch_size=2, max_num_tokens=32, max_seq_len=32)
    build(root / "checkpoint", plain, tmp_path / "engine")
    assert cli.main(["inspect", str(root / "tuned"), "--engine", str(tmp_path / "engine"), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["kind"] == "prompt tuning"
    assert described["virtual_tokens"] == COUNT
    assert described["modules"] == []
    assert described["engine"] == str(tmp_path / "engine")
