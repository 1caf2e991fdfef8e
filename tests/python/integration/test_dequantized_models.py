"""Models whose layers were published in few bits that engines lack, against transformers over the same values."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import adaptrt
from adaptrt._core import DType, QuantAlgo
from adaptrt.builder import cli
from adaptrt.builder.adapter import HuggingFaceBase, convert_adapter
from adaptrt.builder.build import build
from adaptrt.builder.checkpoint.quantization import QuantConfig
from adaptrt.builder.config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.model_cache.first_use import engine_for
from adaptrt.builder.model_cache.options import EngineOptions
from adaptrt.builder.model_cache.store import EngineCache
from adaptrt.builder.progress import LineProgress
from support.models import ModelSpec, Reference, save_adapter, save_model
from support.published import KEPT, SCHEMES, publish
from support.serving import collect, make_request

# As in test_parity.py: the values are the same ones.
FLOAT32_TOLERANCE = 1e-4
SPEC = ModelSpec(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96)
CONFIG = BuildConfig(
    max_batch_size=4,
    max_num_tokens=128,
    max_seq_len=64,
    lora_config=LoraBuildConfig(max_lora_rank=8),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
LAYERS = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
DTYPES = {
    np.dtype(np.float16): DType.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): DType.BFLOAT16,
    np.dtype(np.float32): DType.FLOAT32,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(SPEC, tmp_path_factory.mktemp("dequantized") / "model")


def checkpoint_rows(checkpoint: Path) -> dict[str, np.ndarray]:
    return load_file(checkpoint / "rank0.safetensors")


def assert_same_weights(checkpoint: Path, values: Path, dtype: Any) -> None:
    """Bit for bit, in the checkpoint's type."""
    made, theirs = checkpoint_rows(checkpoint), load_file(values / "model.safetensors")
    for layer in range(SPEC.num_hidden_layers):
        expected = [theirs[f"model.layers.{layer}.{name}_proj.weight"].astype(dtype) for name in LAYERS]
        found = [
            made[f"transformer.layers.{layer}.{name}.weight"]
            for name in ("attention.qkv", "attention.dense", "mlp.gate", "mlp.fc", "mlp.proj")
        ]
        qkv = np.concatenate(expected[:3])
        # TensorRT-LLM's mlp.fc is the projection that the activation acts on.
        for own, other in zip(found, (qkv, expected[3], expected[5], expected[4], expected[6]), strict=True):
            assert own.dtype == dtype
            assert own.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", SCHEMES)
def test_the_checkpoint_has_the_published_values(name: str, model: Path, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    published = publish(model, tmp_path, scheme, exclude=("layers.1.mlp.down_proj",), shards=1 + len(name) % 3)
    dtype = scheme.dtype or np.dtype(ml_dtypes.bfloat16)
    converted = convert_checkpoint(published, tmp_path / "checkpoint", dtype=DTYPES[dtype])
    assert_same_weights(tmp_path / "checkpoint", tmp_path / "values", dtype)
    assert converted.config.quantization is None
    assert converted.dequantization is not None
    assert converted.dequantization.num_matrices == 13
    assert converted.dequantization.num_bytes == (2 * (64 * (64 + 32 + 32 + 64 + 3 * 96)) - 64 * 96) * dtype.itemsize
    assert f"of {np.dtype(dtype)}" in converted.dequantization.describe()


@pytest.mark.parametrize("name", ["nf4-double", "llm-int8", "gptq-3", "gptq-4-act-order", "awq-gemv", "fp8-blocks"])
def test_engines_compute_with_them(name: str, model: Path, tmp_path: Path) -> None:
    """Without and with adapters, whose magnitudes are normalised by the published values."""
    published = publish(model, tmp_path, SCHEMES[name])
    build(Checkpoint.of_model(published), CONFIG, tmp_path / "engine")
    _assert_logits(tmp_path / "engine", tmp_path / "values", tmp_path)


@pytest.mark.parametrize("name", KEPT)
def test_engines_keep_what_they_can(name: str, model: Path, tmp_path: Path) -> None:
    """Engines multiply integers and scales in float32, where the format's library rounds to the type of the scales."""
    published = publish(model, tmp_path, KEPT[name], exact=True)
    checkpoint = Checkpoint.of_model(published)
    assert checkpoint.config.quantization is not None
    assert checkpoint.dequantization is None
    assert checkpoint.config.quantization.exclude_modules == ("lm_head",)
    report = build(checkpoint, CONFIG, tmp_path / "engine")
    plain = build(Checkpoint.of_model(model), CONFIG, tmp_path / "plain")
    assert report.engine_bytes < 0.6 * plain.engine_bytes
    _assert_logits(tmp_path / "engine", tmp_path / "values", tmp_path)


def _assert_logits(engine: Path, values: Path, place: Path) -> None:
    adapters = {
        None: None,
        "lora": save_adapter(values, place / "lora", 1, r=4),
        "dora": save_adapter(values, place / "dora", 2, r=3, use_dora=True),
    }
    prompt = np.random.default_rng(3).integers(2, SPEC.vocab_size, 20).tolist()
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        for task_id, adapter in enumerate(adapters.values()):
            lora = None if adapter is None else adaptrt.LoraConfig.from_peft(task_id, adapter, executor.engine)
            answer = collect(executor, executor.enqueue_request(make_request(prompt, 6, lora)))
            expected = Reference(values, adapter).logits(prompt, answer.tokens).numpy()
            actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
            assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * (expected.max() - expected.min())
            assert answer.tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist()


@pytest.mark.parametrize("name", ["nf4-double", "gptq-4", "awq-gemm"])
def test_magnitudes_are_normalised_by_the_published_values(name: str, model: Path, tmp_path: Path) -> None:
    published = publish(model, tmp_path, SCHEMES[name])
    adapter = save_adapter(tmp_path / "values", tmp_path / "dora", 2, r=3, use_dora=True)
    found, expected = (
        convert_adapter(adapter, storage_dtype="float32", base=base) for base in (published, tmp_path / "values")
    )
    assert np.array_equal(found.weights, expected.weights)
    assert HuggingFaceBase(published).describe() == str(published)


@pytest.mark.parametrize(
    ("name", "dtype", "accepted"),
    [
        ("nf4", DType.FLOAT16, "bfloat16; accepted: --dtype float32 or bfloat16"),
        ("fp4", DType.BFLOAT16, "float32; accepted: --dtype float32"),
        ("gptq-4", DType.BFLOAT16, "float16; accepted: --dtype float32 or float16"),
        ("awq-gemm", DType.BFLOAT16, "float16; accepted: --dtype float32 or float16"),
        ("float8-channel", DType.BFLOAT16, "float16; accepted: --dtype float32 or float16"),
    ],
)
def test_types_that_would_round_once_more_are_refused(
    name: str, dtype: DType, accepted: str, model: Path, tmp_path: Path
) -> None:
    published = publish(model, tmp_path, SCHEMES[name])
    with pytest.raises(
        adaptrt.CheckpointError, match=f"would round the weights of .*q_proj.weight', which are {accepted}"
    ):
        convert_checkpoint(published, tmp_path / "checkpoint", dtype=dtype)
    assert not (tmp_path / "checkpoint").exists()
    convert_checkpoint(published, tmp_path / "checkpoint", dtype=DType.FLOAT32)
    assert_same_weights(tmp_path / "checkpoint", tmp_path / "values", np.float32)


@pytest.mark.parametrize("name", ["llm-int8", "fp8-blocks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types_that_the_library_rounds_to_itself(name: str, dtype: Any, model: Path, tmp_path: Path) -> None:
    published = publish(model, tmp_path, SCHEMES[name])
    convert_checkpoint(published, tmp_path / "checkpoint", dtype=DTYPES[dtype])
    assert_same_weights(tmp_path / "checkpoint", tmp_path / "values", dtype)


def test_models_of_experts_with_tied_embeddings(tmp_path: Path) -> None:
    sizes = dataclasses.asdict(dataclasses.replace(SPEC, tie_word_embeddings=True))
    config = transformers.Qwen3MoeConfig(
        **{name: value for name, value in sizes.items() if name not in ("family", "extra")},
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in tensors
    published = publish(tmp_path / "model", tmp_path, SCHEMES["gptq-4"], shards=2)
    opened = Checkpoint.of_model(published)
    assert opened.dequantization is not None
    assert opened.dequantization.num_matrices == 2 * (4 + 3 * 4)
    build(opened, CONFIG, tmp_path / "engine")
    prompt = list(range(2, 22))
    with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        answer = collect(executor, executor.enqueue_request(make_request(prompt, 6)))
    expected = Reference(tmp_path / "values").logits(prompt, answer.tokens).numpy()
    actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
    assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * (expected.max() - expected.min())


def test_they_can_be_cut_over_ranks_and_rounded_by_the_build(model: Path, tmp_path: Path) -> None:
    published = publish(model, tmp_path, SCHEMES["gptq-4"])
    convert_checkpoint(published, tmp_path / "cut", tp_size=2)
    convert_checkpoint(tmp_path / "values", tmp_path / "expected", tp_size=2)
    for rank in range(2):
        found, expected = (load_file(tmp_path / name / f"rank{rank}.safetensors") for name in ("cut", "expected"))
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in found)
    how = QuantConfig(quant_algo=QuantAlgo.W8A16)
    report = build(Checkpoint.of_model(published), CONFIG, tmp_path / "engine", quantization=how)
    assert report.quantization_errors
    assert report.dequantization is not None


def test_the_commands_say_what_became_of_them(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    published = publish(model, tmp_path, SCHEMES["nf4-double"])
    monkeypatch.setenv("COLUMNS", "400")
    where = ["--model_dir", str(published), "--output_dir"]
    assert cli.main(["convert-checkpoint", *where, str(tmp_path / "checkpoint")]) == 0
    said = r"14 matrices of bitsandbytes of 4 bits, 4\d\.\d KiB, become 240.0 KiB of float32"
    assert_said(capsys, f"dequantised: {said}")
    sizes = ["--max_batch_size", "2", "--max_num_tokens", "64", "--max_seq_len", "32"]
    assert cli.main(["build", *where, str(tmp_path / "engine"), *sizes]) == 0
    assert_said(capsys, f"dequantised +{said}")
    lines = tmp_path / "lines.txt"
    options = EngineOptions(max_batch_size=2, max_num_tokens=64, max_seq_len=32)
    with lines.open("w") as stream:
        engine_for(published, options, LineProgress(stream), cache=EngineCache(tmp_path / "cache"))
    assert "dequantised: 14 matrices of bitsandbytes of 4 bits, " in lines.read_text()


def assert_said(capsys: pytest.CaptureFixture[str], text: str) -> None:
    printed = capsys.readouterr().out
    assert re.search(text, printed), printed


def flags(model: Path, place: Path, *more: str) -> list[str]:
    return ["convert-checkpoint", "--model_dir", str(model), "--output_dir", str(place / "checkpoint"), *more]


def test_flags_of_published_models(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published = publish(model, tmp_path, SCHEMES["gptq-4"])
    precision = ["--use_weight_only", "--weight_only_precision", "int4_gptq"]
    assert cli.main(flags(published, tmp_path, *precision, "--per_group", "--group_size", "32")) == 0
    assert_same_weights(tmp_path / "checkpoint", tmp_path / "values", np.float32)
    assert cli.main(flags(model, tmp_path, *precision, "--quant_ckpt_path", str(published))) == 0
    assert_same_weights(tmp_path / "checkpoint", tmp_path / "values", np.float32)
    capsys.readouterr()
    other = save_model(dataclasses.replace(SPEC, num_hidden_layers=3), tmp_path / "other")
    what = "the model is GPTQ of 4 bits in groups of 32"
    for wrong, reason in (
        (flags(published, tmp_path, *precision, "--per_group"), f"group_size 128: {what}"),
        (flags(model, tmp_path, *precision), "weight_only_precision int4_gptq: the model is not quantised"),
        (flags(published, tmp_path, *precision[:2], "int4_awq"), f"int4_awq: {what}"),
        (flags(published, tmp_path, *precision[:2], "int8_gptq"), f"int8_gptq: {what}"),
        (flags(published, tmp_path, *precision, "--has_zero_point"), "has_zero_point needs weight_only_precision int4"),
        (flags(published, tmp_path, *precision[1:]), "weight_only_precision needs use_weight_only"),
        (flags(model, tmp_path, "--quant_ckpt_path", "x"), "quant_ckpt_path needs weight_only_precision int8_gptq"),
        (
            flags(model, tmp_path, *precision, "--quant_ckpt_path", str(published / "model.safetensors")),
            "model.safetensors: expected the directory of the published model",
        ),
        (
            flags(other, tmp_path, *precision, "--quant_ckpt_path", str(published)),
            "is another model than model_dir .*: num_hidden_layers differ",
        ),
    ):
        assert cli.main(wrong) == 2
        error = capsys.readouterr().err
        assert re.search(reason, error), error


def test_layers_that_conv1d_has_the_other_way_round_are_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=61, n_positions=64, n_embd=64, n_layer=1, n_head=4)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    prefix = next(name for name in tensors if name.endswith("h.0.attn.c_proj.weight")).removesuffix(".weight")
    layer = SCHEMES["gptq-4"].quantize(tensors.pop(f"{prefix}.weight"), np.random.default_rng(0))
    tensors |= {prefix + suffix: tensor for suffix, tensor in layer.tensors.items()}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": SCHEMES["gptq-4"].config}))
    with pytest.raises(adaptrt.CheckpointError, match="c_proj' is a Conv1D, which is not read quantised"):
        convert_checkpoint(tmp_path / "model", tmp_path / "checkpoint")


def test_values_that_are_not_finite_are_refused(model: Path, tmp_path: Path) -> None:
    published = publish(model, tmp_path, SCHEMES["gptq-4"])
    tensors = load_file(published / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.scales"][0, 0] = np.nan
    save_file(tensors, published / "model.safetensors")
    with pytest.raises(adaptrt.CheckpointError, match=r"up_proj.qweight': holds nan; weights must be finite"):
        convert_checkpoint(published, tmp_path / "checkpoint")


def test_biases_of_zeros_and_tensors_that_are_there_twice(model: Path, tmp_path: Path) -> None:
    published = publish(model, tmp_path, SCHEMES["gptq-4"])
    tensors = load_file(published / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"] = np.zeros(96, np.float16)
    save_file(tensors, published / "model.safetensors")
    convert_checkpoint(published, tmp_path / "checkpoint")
    assert_same_weights(tmp_path / "checkpoint", tmp_path / "values", np.float32)
    tensors["model.layers.0.mlp.up_proj.bias"][5] = 1
    save_file(tensors, published / "model.safetensors")
    with pytest.raises(adaptrt.CheckpointError, match=r"unexpected tensors: model.layers.0.mlp.up_proj.bias"):
        convert_checkpoint(published, tmp_path / "other")
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((96, 64), np.float16)
    save_file(tensors, published / "model.safetensors")
    with pytest.raises(adaptrt.CheckpointError, match=r"up_proj.weight': is there beside '.*up_proj.qweight'; remove"):
        convert_checkpoint(published, tmp_path / "other")
