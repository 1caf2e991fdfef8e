"""GPT-OSS beyond the tests of every family: clamped gates, heads split over ranks, and refused configs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import adaptrt
from adaptrt._core import CheckpointError, ConfigError, DType
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.families import ATTENTION, RELATIVES, save_family
from support.models import Reference, save_adapter
from support.ranks import answers_of_ranks
from support.serving import collect, make_request

FAMILY = RELATIVES["gpt-oss"]
CONFIG = BuildConfig(
    max_batch_size=4,
    max_num_tokens=64,
    max_seq_len=128,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=8),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
# The same tolerance as in test_families.py.
TOLERANCE = 1e-4
PROMPT = np.random.default_rng(3).integers(2, 61, 40).tolist()
ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 4, "target_modules": ATTENTION, "target_parameters": list(FAMILY.parameters)},
    {"r": 3, "target_modules": ATTENTION, "use_dora": True},
)


def save_clamped(directory: Path, **fields: Any) -> Path:
    """Saves a model in which some gates, and some of the values they multiply, exceed the clamp at 7."""
    model = save_family(dataclasses.replace(FAMILY, fields={**FAMILY.fields, **fields}), directory)
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("gate_up_proj"):
            tensors[name] = 4 * tensor
        if name.endswith("sinks"):
            tensors[name] = 6 * tensor
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_clamped(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory) -> list[Path]:
    place = tmp_path_factory.mktemp("adapters")
    return [save_adapter(model, place / str(seed), seed, **fields) for seed, fields in enumerate(ADAPTERS)]


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory) -> Path:
    engine = tmp_path_factory.mktemp("engine") / "engine"
    build(Checkpoint.of_model(model), CONFIG, engine)
    return engine


def answers(engine: Path, adapters: list[Path | None], **config: Any):
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(**config)) as executor:
        requests = []
        for task_id, adapter in enumerate(adapters):
            lora = None if adapter is None else adaptrt.LoraConfig.from_peft(task_id, adapter, engine)
            requests.append(make_request(PROMPT, 6, lora))
        return [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]


def test_gates_beyond_their_bounds(model: Path, engine: Path, adapters: list[Path]) -> None:
    cases = [None, *adapters]
    for adapter, answer in zip(cases, answers(engine, cases), strict=True):
        expected = Reference(model, adapter).logits(PROMPT, answer.tokens).numpy()
        actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
        assert np.abs(actual - expected).max() <= TOLERANCE * (expected.max() - expected.min())
        assert answer.tokens == expected[len(PROMPT) - 1 :].argmax(axis=1).tolist()


@pytest.mark.parametrize("dtype", DType)
def test_adapters_of_experts_in_a_crowd_change_no_bit(
    dtype: DType, model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    build(Checkpoint.of_model(model, dtype), CONFIG, tmp_path / "engine")
    cases = [None, *adapters, adapters[0]]
    together = answers(tmp_path / "engine", cases, enable_chunked_context=True, max_num_tokens=16, num_threads=3)
    for adapter, answer in zip(cases, together, strict=True):
        (alone,) = answers(tmp_path / "engine", [adapter], num_threads=1)
        assert answer.same_bits(alone)


def test_one_pass_and_a_checkpoint_are_the_same(model: Path, engine: Path, tmp_path: Path) -> None:
    convert_checkpoint(model, tmp_path / "checkpoint")
    build(tmp_path / "checkpoint", CONFIG, tmp_path / "engine")
    found, expected = ((place / "rank0.engine").read_bytes() for place in (tmp_path / "engine", engine))
    assert found == expected


def test_ranks_have_heads_with_their_sinks_and_experts_with_their_biases(tmp_path: Path) -> None:
    """Ranks hold a share of every expert, or whole experts, or a pipeline stage."""
    model = save_clamped(tmp_path / "model", num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4,
                         layer_types=["sliding_attention", "full_attention"] * 2)  # fmt: skip
    paths = [save_adapter(model, tmp_path / str(seed), seed, **fields) for seed, fields in enumerate(ADAPTERS)]
    cases = [{"adapter": str(path), "task": task, "prompt": PROMPT, "tokens": 4} for task, path in enumerate(paths)]
    made = []
    for number, sizes in enumerate(
        ({}, {"tp_size": 2}, {"tp_size": 2, "moe_ep_size": 2}, {"tp_size": 2, "pp_size": 2})
    ):
        checkpoint, cut = (tmp_path / f"{what}{number}" for what in ("checkpoint", "engine"))
        convert_checkpoint(model, checkpoint, **sizes)
        build(checkpoint, CONFIG, cut)
        ranks = sizes.get("tp_size", 1) * sizes.get("pp_size", 1)
        made += answers_of_ranks(ranks, cut, [cases], tmp_path, num_threads=1)
    one, *others = made
    for found in others:
        for answer, expected in zip(found, one, strict=True):
            assert answer.tokens == expected.tokens
            scale = expected.context_logits.max() - expected.context_logits.min()
            assert np.abs(answer.context_logits - expected.context_logits).max() <= TOLERANCE * scale


def test_outputs_of_gate_and_up_take_turns(model: Path, adapters: list[Path]) -> None:
    """gate and up alternate in an adapter's B, just as in the model's tensors; both share the same A."""
    made = convert_adapter(adapters[0], storage_dtype="float32", base=model)
    modules = {int(row[0]) for row in made.config[0]}
    assert {13, 14, 15, 16} <= modules
    assert "model.layers.0.mlp.experts" in made.paths


def rewritten(model: Path, place: Path, change) -> Path:
    """Copies the model with a changed config.json."""
    place.mkdir()
    config = json.loads((model / "config.json").read_text())
    change(config)
    (place / "config.json").write_text(json.dumps(config))
    (place / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    return place


def test_missing_fields_have_the_defaults_of_transformers(model: Path, tmp_path: Path) -> None:
    """OpenAI's own files store rope_theta next to rope_scaling, and give some fields other names."""

    def as_openai(config: dict[str, Any]) -> None:
        rope = config.pop("rope_parameters")
        config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
        config |= {"experts_per_token": 3, "initial_context_length": 16}
        del config["swiglu_alpha"]

    found = Checkpoint.of_model(rewritten(model, tmp_path / "openai", as_openai)).config
    assert found == Checkpoint.of_model(model).config
    without = Checkpoint.of_model(
        rewritten(
            model, tmp_path / "without", lambda config: config.pop("rope_parameters") and config.pop("layer_types")
        )
    ).config
    assert without.rotary_base == 150000.0
    assert without.rotary_scaling is not None
    assert (without.rotary_scaling.factor, without.rotary_scaling.truncate) == (32.0, False)
    assert without.sliding_window_layers == (0, 2)


@pytest.mark.parametrize(("field", "value"), [("swiglu_limit", 5.0), ("swiglu_alpha", 1.0), ("hidden_act", "gelu")])
def test_other_activations_are_refused(field: str, value: Any, model: Path, tmp_path: Path) -> None:
    changed = rewritten(model, tmp_path / "changed", lambda config: config.update({field: value}))
    with pytest.raises(CheckpointError, match=f"{field} is"):
        Checkpoint.of_model(changed)


def test_tensorrt_and_graphs_are_refused(model: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(
        CONFIG, backend="tensorrt", lora_config=LoraBuildConfig(), plugin_config=PluginConfig()
    )
    with pytest.raises(ConfigError, match="GptOssForCausalLM has attention sinks, which need backend native"):
        build(Checkpoint.of_model(model, DType.BFLOAT16), config, tmp_path / "engine")
    with pytest.raises(ConfigError, match="attention with sinks cannot be written as ONNX"):
        build(Checkpoint.of_model(model), CONFIG, tmp_path / "engine", dump_onnx_to=tmp_path / "network.onnx")
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("name", "shape", "complaint"),
    [
        ("gate_up_proj", (6, 36), r"is \[6, 36\]; expected \[experts, in, out\], out a multiple of 2"),
        ("gate_up_proj_bias", (6, 75), r"is \[6, 75\]; expected \[experts, out\], out a multiple of 2"),
        ("down_proj", (5, 38, 36), r"missing tensors: model\.layers\.1\.mlp\.experts\.5\.down_proj\.weight"),
        ("down_proj_bias", (6, 35), r"experts\.0\.down_proj\.bias' is \[35\], but config.json makes it \[36\]"),
    ],
)
def test_tensors_of_other_shapes_are_refused(
    name: str, shape: tuple[int, ...], complaint: str, model: Path, tmp_path: Path
) -> None:
    changed = rewritten(model, tmp_path / "changed", lambda config: None)
    tensors = load_file(model / "model.safetensors")
    tensors[f"model.layers.1.mlp.experts.{name}"] = np.zeros(shape, np.float32)
    save_file(tensors, changed / "model.safetensors")
    with pytest.raises(CheckpointError, match=complaint):
        Checkpoint.of_model(changed)
