"""Adapters whose files change while they are read give one version or an error; no file is mapped."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from adaptrt import AdapterError
from adaptrt.formats.adapter import convert as convert_module
from adaptrt.formats.adapter import convert_adapter, is_prompt_tuned, mlx_reader, new_embeddings, peft_reader
from adaptrt.formats.adapter import prompt_embeddings as prompts
from adaptrt.formats.adapter.adapter_copy import adapter_files, copy_adapter
from adaptrt.formats.adapter.one_version import one_version

CHANGED = "the adapter's files were changed while they were read"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A PEFT adapter of rank 2 with the files of a tokenizer."""
    directory = tmp_path / "adapter"
    directory.mkdir()
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{path}.lora_A.weight": np.ones((2, 8), np.float32),
        f"{path}.lora_B.weight": np.ones((8, 2), np.float32),
    }
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def _replace(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy(path, other)
    other.replace(path)


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b" ")


def _later(path: Path) -> None:
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


@pytest.mark.parametrize("change", [_replace, _append, _later, Path.unlink])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_change_while_files_are_read_is_seen(adapter: Path, name: str, change: Callable[[Path], None]) -> None:
    with one_version(adapter):
        pass
    with pytest.raises(AdapterError, match=CHANGED), one_version(adapter):
        change(adapter / name)


def test_a_file_that_appears_is_seen(adapter: Path) -> None:
    with pytest.raises(AdapterError, match=CHANGED), one_version(adapter):
        (adapter / "new_embeddings.safetensors").write_bytes(b"")


def test_only_the_files_that_are_read_count(adapter: Path) -> None:
    with one_version(adapter):
        _append(adapter / "tokenizer.json")
    with pytest.raises(AdapterError, match=CHANGED), one_version(adapter, adapter_files):
        _append(adapter / "tokenizer.json")


def test_an_error_of_a_changed_adapter_says_that_it_was_changed(adapter: Path) -> None:
    def fail() -> None:
        with one_version(adapter):
            _append(adapter / "adapter_config.json")
            raise AdapterError("the rank is 4")

    with pytest.raises(AdapterError, match=CHANGED) as raised:
        fail()
    assert str(raised.value.__cause__) == "the rank is 4"
    with pytest.raises(AdapterError, match="the rank is 4"), one_version(adapter):
        raise AdapterError("the rank is 4")


def test_a_conversion_reads_one_version(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert convert_adapter(adapter, storage_dtype="float32").config.tolist()[0][0][2] == 2
    read = convert_module.read_adapter

    def read_and_change(*arguments: Any, **options: Any) -> Any:
        found = read(*arguments, **options)
        _replace(adapter / "adapter_config.json")
        return found

    monkeypatch.setattr(convert_module, "read_adapter", read_and_change)
    with pytest.raises(AdapterError, match=CHANGED):
        convert_adapter(adapter, storage_dtype="float32")


def test_a_copy_is_of_one_version(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copyfile

    def copy_and_change(source: Path, destination: Path) -> Any:
        done = copy(source, destination)
        _append(adapter / "adapter_config.json")
        return done

    monkeypatch.setattr(shutil, "copyfile", copy_and_change)
    with pytest.raises(AdapterError, match=CHANGED):
        copy_adapter(adapter, tmp_path / "copy")


def test_new_embeddings_are_copied_along(adapter: Path, tmp_path: Path) -> None:
    before = copy_adapter(adapter, tmp_path / "before")
    (adapter / "new_embeddings.safetensors").write_bytes(b"rows")
    assert copy_adapter(adapter, tmp_path / "after") != before
    assert (tmp_path / "after" / "new_embeddings.safetensors").read_bytes() == b"rows"


class TestNothingIsMapped:
    """If another process truncates a mapped file, this process dies, so adapter readers copy files to memory."""

    @pytest.fixture(autouse=True)
    def watched(self, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
        reads: list[bool] = []
        for module in (peft_reader, mlx_reader, new_embeddings, prompts):
            reader = module.SafetensorsReader

            class Watched(reader):  # type: ignore[misc, valid-type]
                def __init__(self, *arguments: Any, in_memory: bool = False, **options: Any) -> None:
                    reads.append(in_memory)
                    super().__init__(*arguments, in_memory=in_memory, **options)

            monkeypatch.setattr(module, "SafetensorsReader", Watched)
        return reads

    def test_peft_files_of_one_version(self, adapter: Path, watched: list[bool]) -> None:
        convert_adapter(adapter, storage_dtype="float32")
        assert watched == [True]

    def test_mlx_files_of_one_version(self, adapter: Path, watched: list[bool]) -> None:
        fields = {
            "fine_tune_type": "lora",
            "num_layers": -1,
            "lora_parameters": {"rank": 2, "scale": 1.0, "dropout": 0.0},
        }
        (adapter / "adapter_config.json").write_text(json.dumps(fields))
        (adapter / "adapter_model.safetensors").unlink()
        path = "model.layers.0.self_attn.q_proj"
        tensors = {f"{path}.lora_a": np.ones((8, 2), np.float32), f"{path}.lora_b": np.ones((2, 8), np.float32)}
        save_file(tensors, adapter / "adapters.safetensors")
        convert_adapter(adapter, storage_dtype="float32")
        assert watched == [True]

    def test_new_embeddings_of_one_version(self, adapter: Path, watched: list[bool]) -> None:
        rows = {name: np.ones((2, 8), np.float32) for name in ("input_embeddings", "output_embeddings")}
        save_file(rows, adapter / "new_embeddings.safetensors")
        assert len(new_embeddings.read_new_embeddings(adapter)) == 2
        assert watched == [True]

    def test_virtual_tokens_of_one_version(self, adapter: Path, watched: list[bool]) -> None:
        fields = {
            "peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 3, "token_dim": 8,
            "num_transformer_submodules": 1, "num_layers": 1, "num_attention_heads": 1,
        }  # fmt: skip
        (adapter / "adapter_config.json").write_text(json.dumps(fields))
        save_file({"prompt_embeddings": np.ones((3, 8), np.float32)}, adapter / "adapter_model.safetensors")
        assert is_prompt_tuned(adapter)
        assert prompts.read_prompt_embeddings(adapter, None)[1].shape == (3, 8)
        assert watched == [True]

    def test_a_reader_of_the_same_file_has_its_own_copy(self, adapter: Path) -> None:
        _, tensors, _ = peft_reader._read_file(adapter)
        before = {name: tensor.copy() for name, tensor in tensors.items()}
        with (adapter / "adapter_model.safetensors").open("r+b") as file:
            file.truncate(8)
        assert all(np.array_equal(tensors[name], tensor) for name, tensor in before.items())
