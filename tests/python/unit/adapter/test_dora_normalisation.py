"""DoRA magnitudes are normalised exactly once, by the right base, and never counted as normalised by mistake."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from adaptrt import _core
from adaptrt.builder.cli import main as command_line
from adaptrt.common.safetensors_stream import reader
from adaptrt.formats.adapter import convert_adapter, normalize_adapter
from adaptrt.formats.checkpoint import pickled_file
from support.adapters import CONFIG, TENSORS, base_weights, edit_config, edit_tensors, merged_by_peft, merged_by_us
from support.models import ModelSpec, save_adapter, save_model

FLOAT32_TOLERANCE = 2e-6
SPEC = ModelSpec()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(SPEC, tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def dora(model: Path, tmp_path: Path) -> Path:
    return save_adapter(
        model, tmp_path / "dora", 1, r=5, use_dora=True, use_rslora=True,
        rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3},
    )  # fmt: skip


def test_normalised_magnitudes_follow_the_formula(model: Path, dora: Path, tmp_path: Path) -> None:
    normalize_adapter(dora, tmp_path / "out", model)
    before, after, base = load_file(dora / TENSORS), load_file(tmp_path / "out" / TENSORS), base_weights(model)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if "magnitude" not in name:
            np.testing.assert_array_equal(after[name], tensor)
            continue
        module = name.removesuffix(".lora_magnitude_vector")
        rank = 2 if "q_proj" in module else 5
        scale = (3 if "v_proj" in module else 10) / rank**0.5
        delta = before[f"{module}.lora_B.weight"].astype(float) @ before[f"{module}.lora_A.weight"].astype(float)
        adapted = base[module.removeprefix("base_model.model.")].astype(float) + scale * delta
        expected = tensor / np.linalg.norm(adapted, axis=1)
        np.testing.assert_allclose(after[name], expected, rtol=FLOAT32_TOLERANCE)
    assert (tmp_path / "out" / CONFIG).read_bytes() == (dora / CONFIG).read_bytes()


def test_normalised_adapters_convert_without_the_base(model: Path, dora: Path, tmp_path: Path) -> None:
    assert command_line(["normalize-dora", "-i", str(dora), "-o", str(tmp_path / "out"), "-b", str(model)]) == 0
    adapter = convert_adapter(tmp_path / "out", storage_dtype="float32")
    direct = convert_adapter(dora, storage_dtype="float32", base=model)
    np.testing.assert_array_equal(adapter.weights, direct.weights)
    np.testing.assert_array_equal(adapter.config, direct.config)
    ours, theirs = merged_by_us(base_weights(model), adapter), merged_by_peft(model, dora)
    for path, weight in theirs.items():
        atol = FLOAT32_TOLERANCE * np.abs(weight).max()
        np.testing.assert_allclose(ours[path], weight, rtol=0, atol=atol, err_msg=path)


def test_a_base_does_not_normalise_a_second_time(model: Path, dora: Path, tmp_path: Path) -> None:
    normalize_adapter(dora, tmp_path / "out", model)
    expected = convert_adapter(tmp_path / "out", storage_dtype="float32")
    again = convert_adapter(tmp_path / "out", storage_dtype="float32", base=model)
    np.testing.assert_array_equal(again.weights, expected.weights)


def test_unmarked_magnitudes_do_not_pass(dora: Path, tmp_path: Path, capsys) -> None:
    with pytest.raises(_core.AdapterError, match="not marked as normalised"):
        convert_adapter(dora, storage_dtype="float32")
    arguments = ["hf-lora-convert", "-i", str(dora), "-o", str(tmp_path / "out"), "--storage-type", "float32"]
    assert command_line(arguments) == 2
    assert "not marked as normalised" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert command_line([*arguments, "--dora_magnitudes", "normalized"]) == 0
    magnitude = load_file(dora / TENSORS)["base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"]
    row = np.load(tmp_path / "out" / "model.lora_weights.npy")[0, 0]
    np.testing.assert_array_equal(row[2 * 36 + 36 * 2 :][:36], magnitude)


def test_the_mark_is_lost_when_peft_saves_the_adapter_again(model: Path, dora: Path, tmp_path: Path) -> None:
    import peft
    import transformers

    normalize_adapter(dora, tmp_path / "out", model)
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    peft.PeftModel.from_pretrained(base, tmp_path / "out").save_pretrained(tmp_path / "again")
    with pytest.raises(_core.AdapterError, match="not marked as normalised"):
        convert_adapter(tmp_path / "again", storage_dtype="float32")


def test_a_second_run_is_refused(model: Path, dora: Path, tmp_path: Path) -> None:
    normalize_adapter(dora, tmp_path / "out", model)
    with pytest.raises(_core.AdapterError, match="normalised already"):
        normalize_adapter(tmp_path / "out", tmp_path / "twice", model)
    assert not (tmp_path / "twice").exists()


def test_an_unknown_mark_is_refused(model: Path, dora: Path) -> None:
    edit_tensors(dora, dict, {"adaptrt.dora_magnitudes": "squared"})
    with pytest.raises(_core.AdapterError, match=r"adaptrt\.dora_magnitudes = 'squared'; accepted: normalized"):
        convert_adapter(dora, storage_dtype="float32", base=model)


def test_strip_leaves_plain_lora(model: Path, dora: Path, tmp_path: Path) -> None:
    arguments = ["-i", str(dora), "-o", str(tmp_path / "out"), "-b", str(model), "--strip"]
    assert command_line(["normalize-dora", *arguments]) == 0
    adapter = convert_adapter(tmp_path / "out", storage_dtype="float32")
    assert not adapter.config[0, :, 3].any()
    ours, theirs = merged_by_us(base_weights(model), adapter), merged_by_peft(model, tmp_path / "out")
    for path, weight in theirs.items():
        np.testing.assert_allclose(ours[path], weight, rtol=0, atol=FLOAT32_TOLERANCE * np.abs(weight).max())
    before, after = (json.loads((directory / CONFIG).read_text()) for directory in (dora, tmp_path / "out"))
    assert after.pop("use_dora") is False
    assert before.pop("use_dora") is True
    assert after == before


def test_magnitudes_keep_their_spelling_and_become_one_dimensional(model: Path, dora: Path, tmp_path: Path) -> None:
    edit_tensors(
        dora,
        lambda tensors: {
            n.replace("lora_magnitude_vector", "weight_m_wdecomp.weight"): t[:, np.newaxis] if t.ndim == 1 else t
            for n, t in tensors.items()
        },
    )
    normalize_adapter(dora, tmp_path / "out", model)
    with safe_open(tmp_path / "out" / TENSORS, framework="numpy") as file:
        assert file.metadata() == {"format": "pt", "adaptrt.dora_magnitudes": "normalized"}
        tensor = file.get_tensor("base_model.model.model.layers.1.mlp.down_proj.weight_m_wdecomp.weight")
    assert tensor.shape == (36,)
    assert tensor.dtype == np.float32


def test_adapters_without_magnitudes_are_refused(model: Path, tmp_path: Path) -> None:
    directory = save_adapter(model, tmp_path / "lora", 0, r=2)
    for strip in (False, True):
        with pytest.raises(_core.AdapterError, match="not a DoRA adapter"):
            normalize_adapter(directory, tmp_path / "out", model, strip=strip)


def test_the_input_is_not_overwritten(model: Path, dora: Path) -> None:
    with pytest.raises(_core.AdapterError, match="is also the input"):
        normalize_adapter(dora, dora, model)


def sharded(model: Path, directory: Path) -> Path:
    tensors = load_file(model / "model.safetensors")
    directory.mkdir()
    weight_map = {name: f"model-{index % 3}.safetensors" for index, name in enumerate(sorted(tensors))}
    for shard in set(weight_map.values()):
        save_file({name: t for name, t in tensors.items() if weight_map[name] == shard}, directory / shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def pickled(model: Path, directory: Path) -> Path:
    directory.mkdir()
    tensors = load_file(model / "model.safetensors")
    torch.save({n: torch.from_numpy(t) for n, t in tensors.items()}, directory / "pytorch_model.bin")
    return directory


def without_prefix(model: Path, directory: Path) -> Path:
    directory.mkdir()
    tensors = load_file(model / "model.safetensors")
    save_file({n.removeprefix("model."): t for n, t in tensors.items()}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("layout", [sharded, pickled, without_prefix])
def test_layouts_of_the_base(layout, model: Path, dora: Path, tmp_path: Path, monkeypatch) -> None:
    expected = convert_adapter(dora, storage_dtype="float32", base=model)
    # Reading in pieces of a few rows must give the same result.
    monkeypatch.setattr(reader, "PIECE_BYTES", 4 * 36 * 5)
    monkeypatch.setattr(pickled_file, "PIECE_BYTES", 4 * 36 * 5)
    adapter = convert_adapter(dora, storage_dtype="float32", base=layout(model, tmp_path / "base"))
    np.testing.assert_allclose(adapter.weights, expected.weights, rtol=FLOAT32_TOLERANCE)


def test_a_base_that_does_not_fit_is_named(dora: Path, tmp_path: Path) -> None:
    other = save_model(ModelSpec(intermediate_size=40, num_hidden_layers=1), tmp_path / "other")
    with pytest.raises(_core.AdapterError) as error:
        convert_adapter(dora, storage_dtype="float32", base=other)
    text = str(error.value)
    assert "'model.layers.0.mlp.gate_proj'" in text
    assert "[37, 36], but it is [40, 36]" in text
    assert "'model.layers.1.self_attn.q_proj' does not exist" in text
    assert "layers.0.self_attn" not in text
    with pytest.raises(_core.CheckpointError, match="holds no weights"):
        convert_adapter(dora, storage_dtype="float32", base=tmp_path / "nowhere")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(_core.CheckpointError, match=r"model\.safetensors: "):
        convert_adapter(dora, storage_dtype="float32", base=tmp_path / "damaged")


def test_a_row_of_norm_zero_is_refused(model: Path, tmp_path: Path) -> None:
    directory = save_adapter(model, tmp_path / "a", 0, r=2, use_dora=True, target_modules=["q_proj"])
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"][3] = 0
    (tmp_path / "base").mkdir()
    save_file(tensors, tmp_path / "base" / "model.safetensors")

    def without_row_3(adapter):
        return {n: np.where(np.arange(len(t)) == 3, 0, t.T).T if "lora_B" in n else t for n, t in adapter.items()}

    edit_tensors(directory, without_row_3)
    with pytest.raises(_core.AdapterError, match=r"layers\.1\.self_attn\.q_proj\.lora_magnitude.*row 3"):
        convert_adapter(directory, storage_dtype="float32", base=tmp_path / "base")


def test_conv1d_weights_are_transposed(model: Path, tmp_path: Path) -> None:
    """Layers that Hugging Face holds as Conv1D store [in, out]; fan_in_fan_out is then true."""
    directory = save_adapter(model, tmp_path / "a", 0, r=2, use_dora=True, target_modules=["gate_proj", "q_proj"])
    expected = convert_adapter(directory, storage_dtype="float32", base=model)

    def conv1d(name: str) -> str:
        return name.replace("gate_proj", "c_fc").replace("q_proj", "c_attn")

    edit_tensors(directory, lambda tensors: {conv1d(name): tensor for name, tensor in tensors.items()})
    edit_config(directory, target_modules=["c_fc", "c_attn"], fan_in_fan_out=True)
    base = load_file(model / "model.safetensors")
    (tmp_path / "base").mkdir()
    save_file(
        {conv1d(n): np.ascontiguousarray(t.T) if "gate_proj" in n or "q_proj" in n else t for n, t in base.items()},
        tmp_path / "base" / "model.safetensors",
    )
    adapter = convert_adapter(directory, storage_dtype="float32", base=tmp_path / "base")
    np.testing.assert_array_equal(adapter.weights, expected.weights)
    edit_config(directory, fan_in_fan_out=False)
    with pytest.raises(_core.AdapterError, match="c_fc"):
        convert_adapter(directory, storage_dtype="float32", base=tmp_path / "base")
