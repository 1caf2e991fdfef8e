"""Adapters in GGUF files have the rows of the PEFT adapters that they were made from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import transformers
from safetensors.numpy import load_file

from adaptrt import AdapterError
from adaptrt.builder import cli
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.sources import find_adapter
from support.families import LLAMA, SIZES, Family, save_family

gguf = pytest.importorskip("gguf")
gguf_files = pytest.importorskip("support.gguf_files")

HEADS = {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 3}
MODELS = {
    "llama": Family(transformers.LlamaConfig, LLAMA, HEADS),
    "qwen3": Family(transformers.Qwen3Config, LLAMA, {**HEADS, "head_dim": 20}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module", params=list(MODELS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """Architecture, model, and an adapter of PEFT on all its linear layers with two ranks."""
    directory = tmp_path_factory.mktemp(request.param)
    model = save_family(MODELS[request.param], directory / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=[*LLAMA, "lm_head"], rank_pattern={"layers.1.mlp.up_proj": 2},
        init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    peft.get_peft_model(loaded, config).save_pretrained(directory / "adapter")
    return request.param, model, directory / "adapter"


def write_adapter(adapter: Path, architecture: str, path: Path, **changes: Any) -> Path:
    """Writes an adapter as llama.cpp's converter does."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 3)
    tensors = {}
    for name, values in load_file(adapter / "adapter_model.safetensors").items():
        if ".base_layer." in name:
            continue
        inner, role, _ = name.removeprefix("base_model.model.").rsplit(".", 2)
        found = names.get_name(inner)
        if architecture == "llama" and role == "lora_B" and found.endswith(("attn_q", "attn_k")):
            values = gguf_files.permuted(values, 6 if found.endswith("q") else 3)
        tensors[f"{found}.weight.{role.lower()}"] = values, None
    keys: Mapping[str, Any] = {
        "general.type": "adapter", "general.file_type": 0, "adapter.type": "lora", "adapter.lora.alpha": 6.0, **changes
    }  # fmt: skip
    return Path(gguf_files.write_file(path, architecture, keys, tensors))


def test_the_rows_are_those_of_the_peft_adapter(trained: tuple[str, Path, Path], tmp_path: Path) -> None:
    architecture, model, adapter = trained
    file = write_adapter(adapter, architecture, tmp_path / "a.gguf")
    expected = convert_adapter(adapter, storage_dtype="float32", base=model)
    found = convert_adapter(find_adapter(str(file)).directory, storage_dtype="float32", base=model)
    np.testing.assert_array_equal(found.config, expected.config)
    np.testing.assert_array_equal(found.weights, expected.weights)
    assert found.paths == expected.paths


def test_commands_take_a_file(
    trained: tuple[str, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    architecture, model, adapter = trained
    file = write_adapter(adapter, architecture, tmp_path / "a.gguf")
    arguments = ["--in-file", str(file), "--out-dir", str(tmp_path / "rows"), "--storage-type", "float32"]
    assert cli.main(["hf-lora-convert", *arguments, "--base_model", str(model)]) == 0
    assert (tmp_path / "rows" / "model.lora_weights.npy").is_file()
    if architecture == "llama":
        assert cli.main(["hf-lora-convert", *arguments]) == 2
        assert "is in llama.cpp's order, which depends on the model" in capsys.readouterr().err
    else:
        assert cli.main(["inspect", str(file)]) == 0


def test_an_alora_keeps_its_invocation_tokens(trained: tuple[str, Path, Path], tmp_path: Path) -> None:
    architecture, model, adapter = trained
    file = write_adapter(adapter, architecture, tmp_path / "a.gguf", **{"adapter.alora.invocation_tokens": [3, 4]})
    found = convert_adapter(find_adapter(file).directory, storage_dtype="float32", base=model)
    assert found.invocation_tokens == (3, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.type": "model"}, "general.type is 'model'; expected adapter, because a LoRA adapter was named"),
        ({"adapter.type": "control"}, "'adapter.type' is 'control'; expected one of lora"),
        ({"adapter.lora.alpha": "six"}, "'adapter.lora.alpha' is 'six'; expected a number"),
        ({"adapter.new": 1}, "'adapter.new' is 1: an unknown key"),
    ],
)
def test_unusual_adapters_are_refused(
    changes: dict[str, Any], message: str, trained: tuple[str, Path, Path], tmp_path: Path
) -> None:
    architecture, _, adapter = trained
    file = write_adapter(adapter, architecture, tmp_path / "a.gguf", **changes)
    with pytest.raises(AdapterError, match=message):
        find_adapter(file)


def test_unknown_tensors_and_damaged_files_are_refused(tmp_path: Path) -> None:
    keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 1.0}
    values = np.ones((2, 4), np.float32)
    for name in ("token_embd.weight.lora_a", "blk.0.attn_norm.weight", "blk.0.ssm_in.weight.lora_a"):
        file = gguf_files.write_file(tmp_path / "a.gguf", "llama", keys, {name: (values, None)})
        with pytest.raises(AdapterError, match=rf"tensor '{name}' \[2, 4\] is not read; expected lora_a"):
            find_adapter(file)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(AdapterError, match="the file is cut off"):
        find_adapter(file)
    gguf_files.write_file(file, "mamba", keys, {})
    with pytest.raises(AdapterError, match=r"general\.architecture is 'mamba'"):
        find_adapter(file)
