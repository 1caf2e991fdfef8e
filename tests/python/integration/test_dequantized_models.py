"""Models published with quantised layers, kept or dequantised, against transformers over the same values."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import adaptrt
from adaptrt._core import DType, QuantAlgo
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.network.onnx_graph import NetworkOptions
from adaptrt.formats.adapter import HuggingFaceBase, convert_adapter
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.checkpoint.quantizer import dequantize_rows
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.runtime.engine import load_engine
from support.models import Reference, save_adapter, save_model
from support.oracle import NetworkOracle, SequenceChunk, step_inputs
from support.published import DEQUANTIZED, KEPT, SCHEMES, bits4, publish
from support.published_models import SPEC, WHOLE_SPEC, assert_same_weights
from support.serving import collect, make_request

# The same tolerance as in test_parity.py, because the values are the same.
FLOAT32_TOLERANCE = 1e-4
# bfloat16 engines round all activations; float16 engines round only those of embeddings and lm_head.
HALF_TOLERANCE = 0.03
CONFIG = BuildConfig(
    max_batch_size=4,
    max_num_tokens=128,
    max_seq_len=64,
    lora_config=LoraBuildConfig(max_lora_rank=8),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
W8A16 = QuantConfig(quant_algo=QuantAlgo.W8A16)
DTYPES = {
    np.dtype(np.float16): DType.FLOAT16,
    np.dtype(ml_dtypes.bfloat16): DType.BFLOAT16,
    np.dtype(np.float32): DType.FLOAT32,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(SPEC, tmp_path_factory.mktemp("dequantized") / "model")


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory) -> Path:
    return save_model(WHOLE_SPEC, tmp_path_factory.mktemp("kept") / "model")


@pytest.mark.parametrize("name", DEQUANTIZED)
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


@pytest.mark.parametrize("name", DEQUANTIZED)
def test_engines_compute_with_them(name: str, model: Path, tmp_path: Path) -> None:
    """Checks logits without and with adapters, whose magnitudes are normalised by the published values."""
    published = publish(model, tmp_path, SCHEMES[name])
    build(Checkpoint.of_model(published), CONFIG, tmp_path / "engine")
    _assert_logits(tmp_path / "engine", tmp_path / "values", tmp_path)


@pytest.mark.parametrize("name", KEPT)
def test_engines_keep_what_they_can(name: str, whole_model: Path, tmp_path: Path) -> None:
    """Engines multiply integers and scales in float32, where the format's library rounds to the scales' type."""
    published = publish(whole_model, tmp_path, KEPT[name], exact=True)
    checkpoint = Checkpoint.of_model(published)
    how = checkpoint.config.quantization
    assert how is not None
    assert checkpoint.dequantization is None
    assert checkpoint.kept is not None
    assert len(checkpoint.kept.matrices) == 14
    assert how.exclude_modules == ("lm_head",)
    report = build(checkpoint, CONFIG, tmp_path / "engine")
    plain = build(Checkpoint.of_model(whole_model), CONFIG, tmp_path / "plain")
    assert report.engine_bytes < 0.6 * plain.engine_bytes
    _assert_logits(tmp_path / "engine", tmp_path / "values", tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("nf4-double", "fp4", "gptq-3", "gptq-4-asymmetric", "gptq-8-no-groups", "awq-gemm"),
        *("gptq-8-groups", "gptq-8", "gptq-8-asymmetric", "packed-8-groups", "packed-8-asymmetric"),
        *("gptq-2-act-order", "gptq-3-act-order", "gptq-4-act-order", "gptq-8-act-order", "packed-8-act-order"),
        *("fp8-blocks-bfloat16", "float8-channel", "llm-int8"),
    ],
)
def test_kept_ones_are_the_same_in_one_pass_and_through_a_checkpoint(
    name: str, whole_model: Path, tmp_path: Path
) -> None:
    published = publish(whole_model, tmp_path, KEPT[name])
    build(Checkpoint.of_model(published), CONFIG, tmp_path / "engine")
    converted = convert_checkpoint(published, tmp_path / "checkpoint")
    opened = Checkpoint.open(tmp_path / "checkpoint")
    assert opened.config == converted.config
    build(opened, CONFIG, tmp_path / "other")
    found, expected = (tmp_path / place / "rank0.engine" for place in ("other", "engine"))
    assert found.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("nf4-double", DType.BFLOAT16),
        ("nf4", DType.FLOAT32),
        ("fp4-double", DType.BFLOAT16),
        ("fp4", DType.FLOAT32),
        ("nf4-float16", DType.FLOAT16),
        ("fp8-blocks", DType.BFLOAT16),
        ("fp8-blocks", DType.FLOAT16),
        ("fp8-blocks-bfloat16", DType.FLOAT32),
        ("float8-tensor", DType.BFLOAT16),
        ("float8-channel", DType.FLOAT16),
        ("float8-block", DType.FLOAT32),
        ("llm-int8", DType.FLOAT32),
        ("llm-int8", DType.FLOAT16),
        ("llm-int8", DType.BFLOAT16),
    ],
)
def test_numbers_give_the_bits_of_the_values_stored(name: str, dtype: DType, whole_model: Path, tmp_path: Path) -> None:
    """Compares logits of prompts and decode steps, with each kind of adapter."""
    scheme = bits4("nf4", "float16", nested=True) if name == "nf4-float16" else KEPT[name]
    published = publish(whole_model, tmp_path, scheme)
    values = tmp_path / "values"
    adapters = (None, save_adapter(values, tmp_path / "lora", 1, r=4))
    adapters += (save_adapter(values, tmp_path / "dora", 2, r=3, use_dora=True),)
    prompts = [np.random.default_rng(seed).integers(2, SPEC.vocab_size, 20 + seed).tolist() for seed in range(3)]
    answers = []
    for model in (published, values):
        checkpoint = Checkpoint.of_model(model, dtype)
        assert (checkpoint.kept is None) == (model == values)
        engine = tmp_path / f"{model.name}-engine"
        build(checkpoint, CONFIG, engine)
        with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
            requests = []
            for task_id, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
                lora = None if adapter is None else adaptrt.LoraConfig.from_peft(task_id, adapter, executor.engine)
                requests.append(make_request(prompt, 6, lora))
            answers.append([collect(executor, request_id) for request_id in executor.enqueue_requests(requests)])
    for found, expected in zip(*answers, strict=True):
        assert found.tokens == expected.tokens
        np.testing.assert_array_equal(found.context_logits, expected.context_logits)
        np.testing.assert_array_equal(found.generation_logits, expected.generation_logits)


@pytest.mark.parametrize("name", ["gptq-2", "gptq-3", "gptq-3-asymmetric"])
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
def test_fewer_bits_give_the_results_of_four(name: str, dtype: DType, whole_model: Path, tmp_path: Path) -> None:
    """Both engines come from one checkpoint that stores four bits; only the width in its config.json differs."""
    published = publish(whole_model, tmp_path, KEPT[name])
    convert_checkpoint(published, tmp_path / "checkpoint", dtype=dtype)
    config_file = tmp_path / "checkpoint" / "config.json"
    config = json.loads(config_file.read_text())
    bits = config["quantization"]["bits"]
    assert bits == KEPT[name].config["bits"]
    answers, matrices = [], []
    prompt = np.random.default_rng(3).integers(2, SPEC.vocab_size, 20).tolist()
    for number in (bits, 4):
        config["quantization"]["bits"] = number
        config_file.write_text(json.dumps(config))
        engine = tmp_path / f"{number} bits"
        build(tmp_path / "checkpoint", CONFIG, engine)
        header = safe_open(engine / "rank0.engine", "numpy")
        # Engines of four bits do not store the width, so that their files stay the same as before.
        assert ('"bits"' in header.metadata()["program"]) == (number != 4)
        matrices.append(len(header.get_tensor("transformer.layers.0.mlp.proj.weight")))
        with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
            answers.append(collect(executor, executor.enqueue_request(make_request(prompt, 6))))
    assert answers[0].tokens == answers[1].tokens
    np.testing.assert_array_equal(answers[0].context_logits, answers[1].context_logits)
    np.testing.assert_array_equal(answers[0].generation_logits, answers[1].generation_logits)
    assert matrices[0] == matrices[1] - 128 * 256 * (4 - bits) // 8
    config["quantization"]["bits"] = bits - 1 if bits == 3 else 5
    config_file.write_text(json.dumps(config))
    refusal = r"a weight of 2 bits is -?\d; it must be" if bits == 3 else "bits is 5; accepted: 2, 3, 4"
    with pytest.raises(adaptrt.CheckpointError, match=refusal):
        build(tmp_path / "checkpoint", CONFIG, tmp_path / "none")


@pytest.mark.parametrize(
    "name",
    [
        *("gptq-4", "awq-gemm", "packed-4-float16", "packed-8-symmetric-groups"),
        *("gptq-4-act-order-asymmetric", "gptq-8-act-order", "packed-8-groups"),
    ],
)
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_kept_integers_are_in_engines_of_any_type(name: str, dtype: DType, whole_model: Path, tmp_path: Path) -> None:
    published = publish(whole_model, tmp_path, KEPT[name], exact=True)
    build(Checkpoint.of_model(published, dtype), CONFIG, tmp_path / "engine")
    prompt = np.random.default_rng(3).integers(2, SPEC.vocab_size, 20).tolist()
    with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        answer = collect(executor, executor.enqueue_request(make_request(prompt, 1)))
    expected = Reference(tmp_path / "values").logits(prompt, answer.tokens).numpy()[: len(prompt)]
    assert np.abs(answer.context_logits - expected).max() <= HALF_TOLERANCE * (expected.max() - expected.min())


def test_layers_that_cannot_be_kept_are_dequantised_alone(model: Path, tmp_path: Path) -> None:
    """A row of mlp.down_proj is one and a half blocks. A quantised lm_head is kept."""
    published = publish(model, tmp_path, KEPT["nf4-double"])
    tensors = load_file(published / "model.safetensors")
    head = KEPT["nf4-double"].quantize(tensors.pop("lm_head.weight"), np.random.default_rng(1))
    tensors |= {f"lm_head{suffix}": tensor.copy() for suffix, tensor in head.tensors.items()}
    save_file(tensors, published / "model.safetensors")
    values = load_file(tmp_path / "values" / "model.safetensors")
    values["lm_head.weight"] = head.values.astype(np.float32)
    save_file(values, tmp_path / "values" / "model.safetensors")
    checkpoint = Checkpoint.of_model(published)
    assert checkpoint.config.quantization is not None
    downs = tuple(f"transformer.layers.{layer}.mlp.proj" for layer in range(2))
    assert checkpoint.config.quantization.exclude_modules == downs
    assert [name for name, _ in checkpoint.config.quantization.quantized_layers] == ["lm_head"]
    assert checkpoint.dequantization is not None
    assert checkpoint.dequantization.num_matrices == 2
    assert checkpoint.kept is not None
    assert len(checkpoint.kept.matrices) == 13
    build(checkpoint, CONFIG, tmp_path / "engine")
    _assert_logits(tmp_path / "engine", tmp_path / "values", tmp_path)


def test_parts_of_one_layer_are_kept_quantised_together_or_not_at_all(whole_model: Path, tmp_path: Path) -> None:
    published = publish(whole_model, tmp_path, KEPT["gptq-4"], exact=True)
    tensors = load_file(published / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.qzeros"] += 1
    tensors["model.layers.0.mlp.up_proj.scales"] = tensors["model.layers.0.mlp.up_proj.scales"].astype(np.float32)
    save_file(tensors, published / "model.safetensors")
    checkpoint = Checkpoint.of_model(published, DType.FLOAT32)
    how = checkpoint.config.quantization
    assert how is not None
    assert how.exclude_modules == ("transformer.layers.1.attention.qkv", "lm_head")
    assert how.scale_dtype is DType.FLOAT32
    assert checkpoint.dequantization is not None
    assert checkpoint.dequantization.num_matrices == 3
    build(checkpoint, CONFIG, tmp_path / "engine")


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("nf4-double", "of NF4"),
        ("fp8-blocks-bfloat16", "of E4M3"),
        ("float8-channel-float32", "of E4M3"),
        ("llm-int8", "of LLM_INT8"),
        ("gptq-4-act-order-asymmetric", "with an input permutation"),
        ("packed-8-groups", "of 8 bits with zero points"),
        ("gptq-8-asymmetric", "of 8 bits with zero points"),
    ],
)
def test_the_network_of_what_is_kept(name: str, refused: str, whole_model: Path, tmp_path: Path) -> None:
    published = publish(whole_model, tmp_path, KEPT[name])
    convert_checkpoint(published, tmp_path / "checkpoint")
    sizes = dataclasses.replace(CONFIG, tokens_per_block=4, plugin_config=PluginConfig(), lora_config=LoraBuildConfig())
    build(tmp_path / "checkpoint", sizes, tmp_path / "engine")
    engine = load_engine(tmp_path / "engine")
    native = adaptrt._core.CpuEngine(engine.program, engine.storage, 2)
    native.allocate_kv_blocks(8)
    oracle = NetworkOracle(tmp_path / "checkpoint", tmp_path, NetworkOptions(tokens_per_block=4), num_blocks=8)
    chunk = SequenceChunk(np.random.default_rng(4).integers(0, SPEC.vocab_size, 11).tolist(), 0, 11, [3, 0, 6])
    expected = oracle.step([chunk])
    inputs = step_inputs([chunk])
    del inputs["adapter_slots"]
    actual = native.step(token_ids=inputs.pop("input_ids"), **inputs)
    assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * (expected.max() - expected.min())
    with pytest.raises(adaptrt.ConfigError, match=f"weights {refused} need backend native"):
        build(tmp_path / "checkpoint", dataclasses.replace(sizes, backend="tensorrt"), tmp_path / "plans")


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
        ("gptq-4-uneven", DType.BFLOAT16, "float16; accepted: --dtype float32 or float16"),
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
    converted = convert_checkpoint(published, tmp_path / "checkpoint", dtype=DType.FLOAT32)
    if converted.kept is None:
        assert_same_weights(tmp_path / "checkpoint", tmp_path / "values", np.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types_that_the_library_rounds_to_itself(dtype: Any, model: Path, tmp_path: Path) -> None:
    published = publish(model, tmp_path, SCHEMES["llm-int8"])
    how = convert_checkpoint(published, tmp_path / "checkpoint", dtype=DTYPES[dtype]).config.quantization
    assert how is not None
    values = load_file(tmp_path / "values" / "model.safetensors")
    expected = values["model.layers.0.mlp.down_proj.weight"].astype(dtype).astype(np.float32)
    tensors = Checkpoint.open(tmp_path / "checkpoint").ranks[0]
    pieces = tensors.quantized_rows("transformer.layers.0.mlp.proj.weight", range(len(expected)))
    assert np.concatenate([dequantize_rows(piece, how) for piece in pieces]).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "name",
    [
        *("llm-int8", "nf4-double", "gptq-4-asymmetric", "fp8-blocks"),
        *("gptq-3-act-order", "gptq-8-act-order", "packed-8-groups", "packed-4-groups-of-16"),
    ],
)
def test_models_of_experts_with_tied_embeddings(name: str, tmp_path: Path) -> None:
    sizes = dataclasses.asdict(dataclasses.replace(SPEC, tie_word_embeddings=True))
    config = transformers.Qwen3MoeConfig(
        **{name: value for name, value in sizes.items() if name not in ("family", "extra")},
        moe_intermediate_size=64,
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
    published = publish(tmp_path / "model", tmp_path, SCHEMES[name], shards=2, exact=name not in DEQUANTIZED)
    opened = Checkpoint.of_model(published)
    made = opened.dequantization if name in DEQUANTIZED else opened.kept
    assert f"{2 * (4 + 3 * 4)} matrices" in made.describe()
    build(opened, CONFIG, tmp_path / "engine")
    prompt = list(range(2, 22))
    with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        answer = collect(executor, executor.enqueue_request(make_request(prompt, 6)))
    expected = Reference(tmp_path / "values").logits(prompt, answer.tokens).numpy()
    actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
    assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * (expected.max() - expected.min())


def test_an_order_that_is_none_is_refused(whole_model: Path, tmp_path: Path) -> None:
    convert_checkpoint(publish(whole_model, tmp_path, KEPT["gptq-4-act-order"]), tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "rank0.safetensors"
    tensors = load_file(file)
    name = "transformer.layers.1.mlp.proj.input_order"
    tensors[name][0, 3] = tensors[name][0, 4]
    save_file(tensors, file)
    with pytest.raises(
        adaptrt.CheckpointError, match=f"rank0.safetensors: tensor '{name}' is not a permutation of 256"
    ):
        build(tmp_path / "checkpoint", CONFIG, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_parts_and_layers_may_have_orders_of_their_own(whole_model: Path, tmp_path: Path) -> None:
    """One layer keeps its inputs in order, and the parts of another layer share a permutation."""
    in_order = publish(whole_model, tmp_path / "in-order", KEPT["gptq-4"], exact=True)
    published = publish(whole_model, tmp_path, KEPT["gptq-4-act-order"], exact=True)
    tensors, values = (load_file(place / "model.safetensors") for place in (published, tmp_path / "values"))
    others = load_file(in_order / "model.safetensors")
    other_values = load_file(tmp_path / "in-order" / "values" / "model.safetensors")
    replaced = [name for name in tensors if ".layers.0.mlp." in name]
    tensors |= {name: others[name] for name in replaced}
    values |= {name: value for name, value in other_values.items() if ".layers.0.mlp." in name}
    save_file(tensors, published / "model.safetensors")
    save_file(values, tmp_path / "values" / "model.safetensors")
    checkpoint = Checkpoint.of_model(published)
    assert checkpoint.kept is not None
    assert len(checkpoint.kept.matrices) == 14
    orders = checkpoint.ranks[0].permutations("transformer.layers.0.mlp.proj.weight")
    assert np.array_equal(orders, [np.arange(256)])
    build(checkpoint, CONFIG, tmp_path / "engine")
    _assert_logits(tmp_path / "engine", tmp_path / "values", tmp_path)


@pytest.mark.parametrize("name", ["nf4-double", "gptq-4", "llm-int8"])
def test_a_build_that_is_asked_to_rounds_the_values(name: str, whole_model: Path, tmp_path: Path) -> None:
    published = publish(whole_model, tmp_path, SCHEMES[name])
    how = W8A16
    report = build(Checkpoint.of_model(published, DType.FLOAT32), CONFIG, tmp_path / "engine", quantization=how)
    assert report.quantization_errors
    assert report.dequantization is not None
    assert report.kept is None
    build(Checkpoint.of_model(tmp_path / "values"), CONFIG, tmp_path / "expected", quantization=how)
    found, expected = ((tmp_path / place / "rank0.engine").read_bytes() for place in ("engine", "expected"))
    assert found == expected
    convert_checkpoint(published, tmp_path / "checkpoint", dtype=DType.FLOAT32)
    algo = "W8A16" if name == "llm-int8" else "W4A16"
    with pytest.raises(adaptrt.ConfigError, match=f"already {algo}"):
        build(tmp_path / "checkpoint", CONFIG, tmp_path / "other", quantization=how)


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
    with pytest.raises(
        adaptrt.CheckpointError, match="c_proj' is a Conv1D, which is not supported with quantised weights"
    ):
        convert_checkpoint(tmp_path / "model", tmp_path / "checkpoint")


def test_values_that_are_not_finite_are_refused(model: Path, tmp_path: Path) -> None:
    published = publish(model, tmp_path, SCHEMES["gptq-4"])
    tensors = load_file(published / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.scales"][0, 0] = np.nan
    save_file(tensors, published / "model.safetensors")
    with pytest.raises(adaptrt.CheckpointError, match=r"up_proj.qweight': holds nan; weights must be finite"):
        convert_checkpoint(published, tmp_path / "checkpoint")


def test_biases_of_zeros_and_tensors_that_are_there_twice(model: Path, tmp_path: Path) -> None:
    published = publish(model, tmp_path, SCHEMES["gptq-4-uneven"])
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
    with pytest.raises(adaptrt.CheckpointError, match=r"up_proj.weight': is there next to '.*up_proj.qweight'; remove"):
        convert_checkpoint(published, tmp_path / "other")
