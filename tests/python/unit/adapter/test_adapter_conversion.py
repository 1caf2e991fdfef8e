"""Converted adapters change the base's weights exactly as PEFT does."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file as save_torch_file

from adaptrt import _core
from adaptrt.builder.cli import main as command_line
from adaptrt.common.parallel import use_threads
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.checkpoint.config import ParallelMapping
from adaptrt.formats.hugging_face.hf_config import load_hf_config
from adaptrt.formats.models.registry import declare
from adaptrt.formats.network.adapter_sites import AdaptedModules
from support.adapters import CONFIG, TENSORS, base_weights, edit_config, edit_tensors, merged_by_peft, merged_by_us
from support.models import ModelSpec, save_adapter, save_model

# Both sides compute W + s B A in float32, with products in different orders.
FLOAT32_TOLERANCE = 2e-6
SPEC = ModelSpec()

KINDS = {
    "attention": {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "rank-beyond-the-hidden-size": {"r": 50, "target_modules": ["q_proj", "down_proj"]},
    "rslora": {"r": 9, "lora_alpha": 7, "use_rslora": True},
    "rank-pattern-names": {"r": 8, "rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 1}},
    "rank-pattern-regex": {"r": 8, "rank_pattern": {r"^model\.layers\.0\..*": 2, r"layers\.\d\.mlp\..*": 5}},
    "rank-pattern-anchored-elsewhere": {"r": 8, "rank_pattern": {r"^layers\.0\..*": 2}},
    "alpha-pattern": {"r": 4, "lora_alpha": 6, "alpha_pattern": {"v_proj": 5, r".*self_attn.*": 0.5}},
    "both-patterns-rslora": {
        "r": 4,
        "use_rslora": True,
        "rank_pattern": {"k_proj": 7},
        "alpha_pattern": {"k_proj": 3, "mlp.down_proj": 9},
    },
    "one-layer": {"r": 3, "layers_to_transform": [1]},
    "layers-pattern": {"r": 3, "layers_to_transform": 0, "layers_pattern": "layers"},
    "regex-targets": {"r": 3, "target_modules": r".*layers\.1\.(self_attn\.q|mlp\.up)_proj"},
    "excluded": {"r": 3, "exclude_modules": ["v_proj", "model.layers.0.mlp.up_proj"]},
    "negative-alpha": {"r": 3, "lora_alpha": -4},
    "gaussian": {"r": 3, "init_lora_weights": "gaussian"},
    "mica": {"r": 3, "init_lora_weights": "mica"},
    "fan-in-fan-out-on-linears": {"r": 3, "fan_in_fan_out": True},
    "dora": {"r": 5, "use_dora": True},
    "dora-rslora-patterns": {
        "r": 5,
        "use_dora": True,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"gate_proj": 1},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(SPEC, tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def base(model) -> dict[str, np.ndarray]:
    return base_weights(model)


def assert_same_weights(actual, expected, tolerance=FLOAT32_TOLERANCE) -> None:
    assert actual.keys() == expected.keys()
    for path, weight in expected.items():
        np.testing.assert_allclose(actual[path], weight, rtol=0, atol=tolerance * np.abs(weight).max(), err_msg=path)


@pytest.mark.parametrize("kind", KINDS)
def test_same_weights_as_peft(kind: str, model: Path, base, tmp_path: Path) -> None:
    directory = save_adapter(model, tmp_path / kind, 3, **KINDS[kind])
    adapter = convert_adapter(directory, storage_dtype="float32", base=model)
    expected = merged_by_peft(model, directory)
    assert_same_weights(merged_by_us(base, adapter), expected)
    changed = {path for path in base if not np.array_equal(base[path], expected[path])}
    assert changed == set(adapter.paths)


@pytest.mark.parametrize("kind", ["attention", "dora-rslora-patterns"])
def test_several_threads_convert_as_one_does(kind: str, model: Path, tmp_path: Path) -> None:
    directory = save_adapter(model, tmp_path / kind, 3, **KINDS[kind])
    one = convert_adapter(directory, storage_dtype="bfloat16", base=model)
    with use_threads(3):
        several = convert_adapter(directory, storage_dtype="bfloat16", base=model)
    assert several.weights.tobytes() == one.weights.tobytes()
    assert np.array_equal(several.config, one.config)
    assert several.changes_nothing == one.changes_nothing


@pytest.mark.parametrize("is_overflow", [False, True])
def test_several_threads_find_the_problems_that_one_finds(is_overflow: bool, model: Path, tmp_path: Path) -> None:
    directory = save_adapter(model, tmp_path / "a", 0, r=2, **({"lora_alpha": 1e7} if is_overflow else {}))

    def damage(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name in list(tensors)[::3]:
            tensors[name][0, 0] = np.nan
        return tensors

    if not is_overflow:
        edit_tensors(directory, damage)
    errors = []
    for count in (1, 3):
        with use_threads(count), pytest.raises(_core.AdapterError, match=r"tensor '.*; tensor '.*") as raised:
            convert_adapter(directory, storage_dtype="float16")
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


def test_rows_are_ordered_by_layer_then_module(model: Path, tmp_path: Path) -> None:
    adapter = convert_adapter(save_adapter(model, tmp_path / "a", 0, r=2), storage_dtype="float32")
    keys = adapter.config[0, :, [1, 0]].T.tolist()
    assert keys == [[layer, module] for layer in range(2) for module in (1, 2, 3, 4, 5, 6, 7)]
    assert adapter.config.dtype == np.int32
    names = [_core.lora_modules()[module].name for module in adapter.config[0, :7, 0]]
    assert [path.rpartition(".")[2] for path in adapter.paths[:7]] == [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj",
    ]  # fmt: skip
    assert names == ["attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate"]


def with_prefix(old: str, new: str):
    return lambda name: name.replace(old, new, 1)


@pytest.mark.parametrize(
    "rename",
    [
        with_prefix("base_model.model.", ""),
        with_prefix("base_model.model.model.", "base_model.model."),
        with_prefix("base_model.model.model.", ""),
        lambda name: name.replace(".weight", ".default.weight").replace("vector", "vector.default"),
        lambda name: name.replace("magnitude_vector", "magnitude_vector.weight"),
        lambda name: name.replace("lora_magnitude_vector", "weight_m_wdecomp.weight"),
        lambda name: name.replace("magnitude_vector", "magnitude_vector.default.weight").replace(
            "_A.", "_A.default."
        ).replace("_B.", "_B.default."),
    ],
)  # fmt: skip
def test_spellings_of_keys(rename, model: Path, tmp_path: Path) -> None:
    directory = save_adapter(model, tmp_path / "a", 0, r=2, use_dora=True)
    expected = convert_adapter(directory, storage_dtype="float32", base=model)
    edit_tensors(directory, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})
    adapter = convert_adapter(directory, storage_dtype="float32", base=model)
    np.testing.assert_array_equal(adapter.weights, expected.weights)
    np.testing.assert_array_equal(adapter.config, expected.config)


def test_magnitudes_of_the_first_dora_code_are_two_dimensional(model: Path, tmp_path: Path) -> None:
    directory = save_adapter(model, tmp_path / "a", 0, r=2, use_dora=True)
    expected = convert_adapter(directory, storage_dtype="float32", base=model)
    edit_tensors(
        directory,
        lambda tensors: {
            name.replace("lora_magnitude_vector", "weight_m_wdecomp.weight"): (
                tensor[:, np.newaxis] if "magnitude" in name else tensor
            )
            for name, tensor in tensors.items()
        },
    )
    adapter = convert_adapter(directory, storage_dtype="float32", base=model)
    np.testing.assert_array_equal(adapter.weights, expected.weights)


def test_tensors_decide_which_modules_are_adapted(model: Path, base, tmp_path: Path) -> None:
    directory = save_adapter(model, tmp_path / "a", 0, r=2)
    edit_tensors(
        directory,
        lambda tensors: {n: t for n, t in tensors.items() if "layers.0" not in n or "k_proj" in n},
    )
    adapter = convert_adapter(directory, storage_dtype="float32", base=model)
    assert len(adapter.paths) == 8
    assert_same_weights(merged_by_us(base, adapter), merged_by_peft(model, directory))


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_b_is_scaled_in_float32_and_rounded_once(stored, storage: str, model: Path, tmp_path: Path) -> None:
    directory = save_adapter(model, tmp_path / "a", 5, r=3, lora_alpha=7)
    tensors = {name: torch.from_numpy(tensor).to(stored) for name, tensor in load_file(directory / TENSORS).items()}
    save_torch_file(tensors, directory / TENSORS)
    dtype = np.dtype(ml_dtypes.bfloat16) if storage == "bfloat16" else np.dtype(storage)
    adapter = convert_adapter(directory, storage_dtype=storage)
    for path, row in zip(adapter.paths, adapter.weights[0], strict=True):
        module = f"base_model.model.{path}"
        a, b = (tensors[f"{module}.lora_{name}.weight"].to(torch.float32).numpy().reshape(-1) for name in "AB")
        expected = np.concatenate([a, b * np.float32(7 / 3)]).astype(dtype)
        np.testing.assert_array_equal(row[: expected.size].view(np.uint8), expected.view(np.uint8))
        assert not row[expected.size :].any()


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_pickled_adapters_and_stored_types(stored, model: Path, base, tmp_path: Path) -> None:
    directory = save_adapter(model, tmp_path / "a", 0, r=2)
    tensors = {name: torch.from_numpy(t).to(stored) for name, t in load_file(directory / TENSORS).items()}
    torch.save(tensors, directory / "adapter_model.bin")
    (directory / TENSORS).unlink()
    adapter = convert_adapter(directory, storage_dtype="float32")
    edited = {name: tensor.float() for name, tensor in tensors.items()}
    torch.save(edited, directory / "adapter_model.bin")
    assert_same_weights(merged_by_us(base, adapter), merged_by_peft(model, directory))


def test_safetensors_are_preferred_to_a_pickle(model: Path, tmp_path: Path) -> None:
    directory = save_adapter(model, tmp_path / "a", 0, r=2)
    (directory / "adapter_model.bin").write_bytes(b"never read")
    convert_adapter(directory, storage_dtype="float32")


@pytest.mark.parametrize(
    ("storage", "dtype"), [("float32", np.float32), ("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)]
)
def test_command_writes_what_tensorrt_llm_writes(storage: str, dtype, model: Path, tmp_path: Path, capsys) -> None:
    directory = save_adapter(model, tmp_path / "a", 0, r=3, rank_pattern={"q_proj": 4})
    arguments = ["hf-lora-convert", "-i", str(directory), "-o", str(tmp_path / "out"), "-v"]
    assert command_line(arguments + ([] if storage == "float16" else ["--storage-type", storage])) == 0
    assert "model.layers.1.mlp.up_proj" in capsys.readouterr().out
    weights = np.load(tmp_path / "out" / "model.lora_weights.npy")
    config = np.load(tmp_path / "out" / "model.lora_config.npy")
    expected = convert_adapter(directory, storage_dtype="float32")
    assert weights.shape == expected.weights.shape == (1, 14, (36 + 36) * 4)
    assert weights.dtype == ("V2" if storage == "bfloat16" else dtype)
    np.testing.assert_array_equal(weights.view(dtype), expected.weights.astype(dtype))
    np.testing.assert_array_equal(config, expected.config)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.lora_config.npy", "model.lora_weights.npy",
    ]  # fmt: skip


def test_scale_is_folded_before_the_cast(model: Path, tmp_path: Path) -> None:
    directory = save_adapter(model, tmp_path / "a", 0, r=3, lora_alpha=1, target_modules=["q_proj"])
    b = load_file(directory / TENSORS)["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    row = convert_adapter(directory, storage_dtype="float16").weights[0, 0]
    np.testing.assert_array_equal(row[3 * 36 :], (b * np.float32(1 / 3)).astype(np.float16).reshape(-1))


def test_halves_of_gate_up_proj_change_places(model: Path, tmp_path: Path) -> None:
    """Hugging Face's fused layer has [gate; up]; the module mlp_gate_up expects [up; gate]."""
    directory = save_adapter(model, tmp_path / "a", 0, r=3, lora_alpha=3, use_dora=True, target_modules=["gate_proj"])
    rng = np.random.default_rng(1)
    sizes = {"lora_A.weight": (3, 36), "lora_B.weight": (74, 3), "lora_magnitude_vector": (74,)}
    tensors = {
        name.replace("gate_proj", "gate_up_proj"): rng.random(sizes[name.partition("gate_proj.")[2]], np.float32)
        for name in load_file(directory / TENSORS)
    }
    edit_tensors(directory, lambda _: tensors)
    edit_config(directory, target_modules=["gate_up_proj"])
    adapter = convert_adapter(directory, storage_dtype="float32", magnitudes_normalized=True)
    assert adapter.config[0].tolist() == [[18, 0, 3, 1], [18, 1, 3, 1]]
    a, b, magnitude = np.split(adapter.weights[0, 1], np.cumsum([3 * 36, 74 * 3]))
    prefix = "base_model.model.model.layers.1.mlp.gate_up_proj."
    gate, up = np.split(tensors[prefix + "lora_B.weight"], 2)
    np.testing.assert_array_equal(a.reshape(3, 36), tensors[prefix + "lora_A.weight"])
    np.testing.assert_array_equal(b.reshape(74, 3), np.concatenate([up, gate]))
    gate, up = np.split(tensors[prefix + "lora_magnitude_vector"], 2)
    np.testing.assert_array_equal(magnitude, np.concatenate([up, gate]))
    odd = {name: tensor[:73] if len(tensor) == 74 else tensor for name, tensor in tensors.items()}
    edit_tensors(directory, lambda _: odd)
    with pytest.raises(_core.AdapterError, match="has 73 outputs"):
        convert_adapter(directory, storage_dtype="float32", magnitudes_normalized=True)


def test_shape_and_layers_of_the_serving_model_are_compared(model: Path, tmp_path: Path) -> None:
    directory = save_adapter(model, tmp_path / "a", 0, r=2)
    config = load_hf_config(model, dtype=_core.DType.FLOAT32, mapping=ParallelMapping())

    def convert(**changes: int) -> None:
        modules = AdaptedModules(declare(dataclasses.replace(config, **changes)))
        convert_adapter(directory, storage_dtype="float32", modules=modules)

    convert()
    with pytest.raises(_core.AdapterError, match=r"layers\.1\.self_attn\.q_proj.*1 layers"):
        convert(num_hidden_layers=1)
    with pytest.raises(_core.AdapterError, match=r"gate_proj.*\(36, 37\).*mlp_h_to_4h.*\(36, 40\)") as error:
        convert(intermediate_size=40)
    assert "q_proj" not in str(error.value)


def test_refused_input_leaves_the_output_alone(model: Path, tmp_path: Path, capsys) -> None:
    directory = save_adapter(model, tmp_path / "a", 0, r=2)
    out = tmp_path / "out"
    assert command_line(["hf-lora-convert", "-i", str(directory), "-o", str(out)]) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    edit_config(directory, bias="some", use_qalora=True)
    capsys.readouterr()
    assert command_line(["hf-lora-convert", "-i", str(directory), "-o", str(out)]) == 2
    error = capsys.readouterr().err
    assert str(directory / CONFIG) in error
    assert 'bias = "some"' in error
    assert "use_qalora = true" in error
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_unknown_storage_type(model: Path, tmp_path: Path) -> None:
    directory = save_adapter(model, tmp_path / "a", 0, r=2)
    with pytest.raises(_core.ConfigError, match="int8"):
        convert_adapter(directory, storage_dtype="int8")


def test_overflow_of_the_storage_type_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    directory = save_adapter(model, tmp_path / "a", 0, r=2, lora_alpha=1e7)
    with pytest.raises(_core.AdapterError, match=r"q_proj\.lora_B\.weight'.*scale 5e\+06.*float16"):
        convert_adapter(directory, storage_dtype="float16")
    convert_adapter(directory, storage_dtype="bfloat16")


def test_a_missing_directory_file_or_format(tmp_path: Path, model: Path) -> None:
    with pytest.raises(_core.AdapterError, match="is not a directory"):
        convert_adapter(tmp_path / "nowhere", storage_dtype="float32")
    directory = save_adapter(model, tmp_path / "a", 0, r=2)
    data = (directory / TENSORS).read_bytes()
    (directory / TENSORS).write_bytes(data[:-7])
    with pytest.raises(_core.AdapterError, match=r"adapter_model\.safetensors: "):
        convert_adapter(directory, storage_dtype="float32")
    (directory / TENSORS).unlink()
    with pytest.raises(_core.AdapterError, match=r"neither adapter_model\.safetensors nor adapter_model\.bin"):
        convert_adapter(directory, storage_dtype="float32")
    (directory / "adapter_model.bin").write_bytes(data)
    with pytest.raises(_core.AdapterError, match=r"adapter_model\.bin: cannot be read"):
        convert_adapter(directory, storage_dtype="float32")
    shutil.rmtree(directory)
    directory.mkdir()
    with pytest.raises(_core.AdapterError, match=r"has no adapter_config\.json; expected the directory"):
        convert_adapter(directory, storage_dtype="float32")
