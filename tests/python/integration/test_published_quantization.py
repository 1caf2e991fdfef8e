"""Models that were quantised before they were published, against transformers over the same values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import adaptrt
from adaptrt._core import QuantAlgo
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.checkpoint.quantizer import QuantizedRows, dequantize_rows
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.models import ModelSpec, Reference, save_adapter, save_model
from support.published import compressed_tensors_config
from support.serving import collect, make_request

# The same tolerance as in test_parity.py, because the values are the same.
FLOAT32_TOLERANCE = 1e-4
# Activations of 8 bits cause errors of a few percent of the range, as with weights that the build quantises.
INT8_ACTIVATIONS_TOLERANCE = 0.06
ROUND_ACTIVATIONS = ("w8a8", "w4a8", "w4a8-channel", "w4a8-packed")
SPEC = ModelSpec(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96)
CONFIG = BuildConfig(
    max_batch_size=4,
    max_num_tokens=128,
    max_seq_len=64,
    lora_config=LoraBuildConfig(max_lora_rank=8),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False, "group_size": None}
INT4 = {**INT8, "num_bits": 4, "strategy": "group", "group_size": 32, "actorder": None, "observer": "mse"}
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "w8a16": ("int-quantized", INT8, None),
    "w8a8": ("int-quantized", INT8, TOKENS),
    "w4a8": ("int-quantized", INT4, TOKENS),
    "w4a8-channel": ("int-quantized", {**INT4, "strategy": "channel", "group_size": None}, TOKENS),
    "w4a8-packed": ("pack-quantized", {**INT4, "symmetric": False}, TOKENS),
    "bytes-4": ("int-quantized", INT4, None),
    "packed-8": ("pack-quantized", INT8, None),
    "packed-4": ("pack-quantized", INT4, None),
    "packed-4-asymmetric": ("pack-quantized", {**INT4, "symmetric": False}, None),
    "packed-4-channel": ("pack-quantized", {**INT4, "strategy": "channel", "group_size": None}, None),
}


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Packs unsigned numbers into int32 words, the first number in the lowest bits."""
    per_word = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per_word))).astype(np.uint32)
    words = padded.reshape(len(numbers), -1, per_word) << (np.arange(per_word, dtype=np.uint32) * bits)
    return np.bitwise_or.reduce(words, axis=2).view(np.int32)


def publish(model: Path, directory: Path, scheme: str, exclude: tuple[str, ...] = ()) -> Path:
    """Writes the quantised model; `directory`/values is a model with the values that the integers stand for."""
    file_format, weights, activations = SCHEMES[scheme]
    bits, size = weights["num_bits"], weights["group_size"]
    tensors, values = {}, {}
    for name, tensor in load_file(model / "model.safetensors").items():
        source = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or source.endswith(exclude):
            tensors[name] = values[name] = tensor
            continue
        grouped = tensor.reshape(len(tensor), -1, size or tensor.shape[1])
        zeros = np.zeros((*grouped.shape[:2], 1), np.float32)
        if weights["symmetric"]:
            scales = np.abs(grouped).max(axis=2, keepdims=True) / (2 ** (bits - 1) - 1)
        else:
            low, high = (np.clip(edge(grouped, axis=2, keepdims=True), *limits) for edge, limits in (
                (np.min, (None, 0)), (np.max, (0, None))))  # fmt: skip
            scales = (high - low) / 15
        scales = scales.astype(ml_dtypes.bfloat16).astype(np.float32)
        if not weights["symmetric"]:
            zeros = np.clip(np.rint(-low / scales), 0, 15) - 8
        integers = np.clip(np.rint(grouped / scales) + zeros, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        values[name] = ((integers - zeros) * scales).reshape(tensor.shape).astype(np.float32)
        flat = integers.reshape(tensor.shape)
        tensors[f"{source}.weight_scale"] = scales[:, :, 0].astype(ml_dtypes.bfloat16)
        if file_format == "int-quantized":
            tensors[name] = flat.astype(np.int8)
            continue
        offset = 2 ** (bits - 1)
        tensors[f"{source}.weight_packed"] = packed((flat + offset).astype(np.uint32), bits)
        tensors[f"{source}.weight_shape"] = np.array(tensor.shape, np.int64)
        if not weights["symmetric"]:
            by_group = (zeros[:, :, 0] + offset).astype(np.uint32).T
            tensors[f"{source}.weight_zero_point"] = np.ascontiguousarray(packed(by_group, bits).T)
    config = json.loads((model / "config.json").read_text())
    write(directory / "values", config, values)
    config["quantization_config"] = compressed_tensors_config(file_format, weights, activations)
    return write(directory / "published", config, tensors)


def write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(SPEC, tmp_path_factory.mktemp("published") / "model")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_checkpoint_has_the_published_values(scheme: str, model: Path, tmp_path: Path) -> None:
    published = publish(model, tmp_path, scheme, exclude=("layers.1.mlp.down_proj",))
    convert_checkpoint(published, tmp_path / "checkpoint")
    opened = Checkpoint.open(tmp_path / "checkpoint")
    how = opened.config.quantization
    assert how is not None
    assert how.exclude_modules == ("transformer.layers.1.mlp.proj", "lm_head")
    algos = {"w8a16": QuantAlgo.W8A16, "packed-8": QuantAlgo.W8A16, "w8a8": QuantAlgo.W8A8}
    algos |= dict.fromkeys(ROUND_ACTIVATIONS[1:], QuantAlgo.W4A8)
    assert how.quant_algo is algos.get(scheme, QuantAlgo.W4A16)
    values = load_file(tmp_path / "values" / "model.safetensors")
    name = "transformer.layers.0.attention.qkv.weight"
    expected = np.concatenate([values[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"])
    pieces = list(opened.ranks[0].quantized_rows(name, range(len(expected))))
    rows = [dequantize_rows(QuantizedRows(piece.weights, piece.scales, piece.zeros), how) for piece in pieces]
    assert np.array_equal(np.concatenate(rows), expected)
    plain = np.concatenate(list(opened.ranks[0].rows("transformer.layers.1.mlp.proj.weight", range(64))))
    assert np.array_equal(plain, values["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_engines_compute_with_them(scheme: str, model: Path, tmp_path: Path) -> None:
    """Checks logits without and with adapters, whose magnitudes are normalised by the published values."""
    published = publish(model, tmp_path, scheme)
    build(Checkpoint.of_model(published), CONFIG, tmp_path / "engine")
    adapters = {
        None: None,
        "lora": save_adapter(tmp_path / "values", tmp_path / "lora", 1, r=4),
        "dora": save_adapter(tmp_path / "values", tmp_path / "dora", 2, r=3, use_dora=True),
    }
    prompt = np.random.default_rng(3).integers(2, SPEC.vocab_size, 20).tolist()
    with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        for task_id, adapter in enumerate(adapters.values()):
            lora = None if adapter is None else adaptrt.LoraConfig.from_peft(task_id, adapter, executor.engine)
            answer = collect(executor, executor.enqueue_request(make_request(prompt, 6, lora)))
            expected = Reference(tmp_path / "values", adapter).logits(prompt, answer.tokens).numpy()
            actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
            tolerance = INT8_ACTIVATIONS_TOLERANCE if scheme in ROUND_ACTIVATIONS else FLOAT32_TOLERANCE
            assert np.abs(actual - expected).max() <= tolerance * (expected.max() - expected.min())
            if scheme not in ROUND_ACTIVATIONS:
                assert answer.tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist()


def changed(published: Path, change: Any) -> Path:
    config = json.loads((published / "config.json").read_text())
    change(config["quantization_config"])
    (published / "config.json").write_text(json.dumps(config))
    return published


def of_weights(**fields: Any) -> Any:
    return lambda config: config["config_groups"]["group_0"]["weights"].update(fields)


@pytest.mark.parametrize(
    ("scheme", "change", "reason"),
    [
        ("w8a16", lambda c: c.update(quant_method="hqq"), 'quant_method is "hqq"; accepted: compressed-tensors, bits'),
        ("w8a16", lambda c: c.update(format="float-quantized"), 'weights.type is "int"; accepted: float'),
        ("w8a16", lambda c: c.update(format="dense"), 'format is "dense"; accepted: int-quantized, pack-quantized'),
        ("w8a16", lambda c: c.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is set"),
        ("w8a16", lambda c: c.update(new_feature=1), "quantization_config.new_feature"),
        ("w8a16", lambda c: c["config_groups"].update(other={}), "config_groups has 2 groups"),
        ("w8a16", lambda c: c["config_groups"]["group_0"].update(targets=["Embedding"]), "targets must be"),
        ("w8a16", of_weights(num_bits=3), "num_bits is 3; accepted: 4 or 8"),
        ("w8a16", of_weights(num_bits=4), "has integers from -127 to 127; expected -8 to 7 for 4 bits"),
        ("bytes-4", of_weights(symmetric=False), "symmetric must be true for int-quantized"),
        ("w8a16", of_weights(type="float"), 'type is "float"'),
        ("w8a16", of_weights(symmetric=False), "symmetric must be true for int-quantized"),
        ("w8a16", of_weights(strategy="group", group_size=32), "strategy must be channel for 8 bits"),
        ("w8a16", of_weights(dynamic=True), "dynamic is true; accepted: false"),
        ("packed-4", of_weights(group_size=48), "weight_scale': 64 inputs; expected a multiple of group_size 48"),
        ("packed-4", of_weights(actorder="first"), 'actorder is "first"; accepted: null, static or weight, group'),
        ("w8a16", of_weights(actorder="group"), 'actorder is "group", which needs strategy group and format pack'),
        ("packed-4", of_weights(actorder="group"), "q_proj.weight_g_idx' is missing"),
        (
            "packed-8",
            lambda c: c["config_groups"]["group_0"].update(
                input_activations=TOKENS, weights={**INT8, "strategy": "group", "group_size": 32}
            ),
            r"needs weights of 8 bits \(channel, symmetric\), or of 4 bits without permuted inputs",
        ),
        (
            "packed-4",
            lambda c: c["config_groups"]["group_0"].update(
                input_activations=TOKENS, weights={**INT4, "actorder": "group"}
            ),
            r"needs weights of 8 bits \(channel, symmetric\), or of 4 bits without permuted inputs",
        ),
        (
            "w8a8",
            lambda c: c["config_groups"]["group_0"]["input_activations"].update(dynamic=False),
            "input_activations.dynamic is false; accepted: true",
        ),
    ],
)  # fmt: skip
def test_other_configurations_are_refused(scheme: str, change: Any, reason: str, model: Path, tmp_path: Path) -> None:
    published = changed(publish(model, tmp_path, scheme), change)
    with pytest.raises(adaptrt.CheckpointError, match=reason):
        convert_checkpoint(published, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def with_tensors(published: Path, change: Any) -> Path:
    tensors = load_file(published / "model.safetensors")
    change(tensors)
    save_file(tensors, published / "model.safetensors")
    return published


LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("scheme", "change", "reason"),
    [
        ("w8a16", lambda t: t.pop(f"{LAYER}.weight_scale"), r"q_proj.weight' is of int8; accepted: float32"),
        ("w8a16", lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"][:-1]}), r"expected \[63, 1\]"),
        ("w8a16", lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"].astype(np.float32)}), "is of float32"),
        ("w8a16", lambda t: t.update({f"{LAYER}.input_scale": np.ones(1, np.float32)}), "unexpected tensors"),
        ("w8a16", lambda t: t.update({"lm_head.weight_scale": np.ones((61, 1), np.float32)}), "accepted: int8"),
        ("packed-4", lambda t: t.pop(f"{LAYER}.weight_shape"), "q_proj.weight_shape' is missing"),
        ("packed-4", lambda t: t.update({f"{LAYER}.weight_shape": np.array([64, 96])}), r"expected \[64, 12\]"),
        ("w8a16", lambda t: t[f"{LAYER}.weight_scale"].fill(np.inf), "must be finite"),
        ("packed-4", lambda t: t.update({f"{LAYER}.weight_g_idx": np.zeros(64, np.int32)}), "unexpected tensors"),
    ],
)  # fmt: skip
def test_other_tensors_are_refused(scheme: str, change: Any, reason: str, model: Path, tmp_path: Path) -> None:
    published = with_tensors(publish(model, tmp_path, scheme), change)
    with pytest.raises(adaptrt.CheckpointError, match=reason):
        convert_checkpoint(published, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("scheme", ["packed-4", "packed-4-asymmetric", "w8a16"])
def test_integers_may_be_multiplied_with_int8_activations(scheme: str, model: Path, tmp_path: Path) -> None:
    published = publish(model, tmp_path, scheme)
    report = build(Checkpoint.of_model(published), CONFIG, tmp_path / "engine", int8_activations=True)
    how = report.checkpoint.quantization
    assert how is not None
    assert how.quant_algo is (QuantAlgo.W8A8 if scheme == "w8a16" else QuantAlgo.W4A8)
    assert report.kept is not None
    assert f"as {how.quant_algo.name}" in report.kept.describe()
    prompt = np.random.default_rng(3).integers(2, SPEC.vocab_size, 20).tolist()
    with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        answer = collect(executor, executor.enqueue_request(make_request(prompt, 6)))
    expected = Reference(tmp_path / "values").logits(prompt, answer.tokens).numpy()
    actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
    difference = np.abs(actual - expected).max() / (expected.max() - expected.min())
    assert 0 < difference <= INT8_ACTIVATIONS_TOLERANCE


def test_int8_activations_need_integers_that_kernels_multiply_so(model: Path, tmp_path: Path) -> None:
    with pytest.raises(adaptrt.ConfigError, match="int8_activations: the weights are not quantised"):
        build(Checkpoint.of_model(model), CONFIG, tmp_path / "engine", int8_activations=True)
    published = publish(model, tmp_path, "packed-8")
    grouped = changed(published, of_weights(strategy="group", group_size=32))
    opened = Checkpoint.of_model(with_tensors(grouped, as_groups))
    with pytest.raises(adaptrt.ConfigError, match="int8_activations: the weights are W8A16 in groups of 32"):
        build(opened, CONFIG, tmp_path / "engine", int8_activations=True)
    assert not (tmp_path / "engine").exists()


def as_groups(tensors: dict[str, np.ndarray]) -> None:
    """Stores one scale per 32 inputs instead of one scale for all inputs."""
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        _, inputs = tensors[name.replace("weight_scale", "weight_shape")]
        tensors[name] = np.repeat(tensors[name], int(inputs) // 32, axis=1)


def test_magnitudes_are_normalised_by_the_published_values(model: Path, tmp_path: Path) -> None:
    published = publish(model, tmp_path, "w8a16")
    adapter = save_adapter(tmp_path / "values", tmp_path / "dora", 2, r=3, use_dora=True)
    found, expected = (
        convert_adapter(adapter, storage_dtype="bfloat16", base=base) for base in (published, tmp_path / "values")
    )
    # The library rounds the weights to bfloat16, the type of the scales.
    assert np.allclose(found.weights.astype(np.float32), expected.weights.astype(np.float32), rtol=0.02)
