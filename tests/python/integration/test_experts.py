"""Adapters of experts as PEFT wrote them before transformers 5: one linear layer per expert, in LoRA and DoRA."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import adaptrt
from adaptrt._core import AdapterError
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.tools.inspect_adapter import describe_adapter
from support.families import SIZES, Family, save_family
from support.models import Reference, load_model, save_adapter
from support.ranks import answers_of_ranks
from support.serving import collect, make_request

EXPERTS, HIDDEN, INNER, RANK = 6, 36, 22, 4
FAMILY = Family(
    transformers.Qwen3MoeConfig, [],
    {**SIZES, "head_dim": 20, "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER,
     "norm_topk_prob": True},
)  # fmt: skip
CONFIG = BuildConfig(
    max_batch_size=4,
    max_num_tokens=64,
    max_seq_len=128,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=2 * RANK),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
PROMPT = np.random.default_rng(3).integers(2, 61, 30).tolist()
# The same tolerance as in test_families.py.
TOLERANCE = 1e-4
WIDTHS = {"gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER), "down_proj": (INNER, HIDDEN)}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_family(FAMILY, tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("engine")
    convert_checkpoint(model, directory / "checkpoint")
    build(directory / "checkpoint", CONFIG, directory / "engine")
    return directory / "engine"


def layer_of(layer: int, expert: int, name: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{name}"


def save_old_adapter(
    directory: Path, *, use_dora: bool = False, lora_bias: bool = False, experts: range = range(EXPERTS)
) -> Path:
    """Saves an adapter with a linear layer for each expert and, for plain LoRA, one for each router."""
    random = np.random.default_rng(7)

    def draw(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    tensors = {}
    for layer in range(3):
        paths = {layer_of(layer, e, name): sizes for e in experts for name, sizes in WIDTHS.items()}
        if not use_dora and not lora_bias:
            paths[f"model.layers.{layer}.mlp.gate"] = (HIDDEN, EXPERTS)
        for path, (inputs, outputs) in paths.items():
            prefix = f"base_model.model.{path}"
            tensors[f"{prefix}.lora_A.weight"] = draw(RANK, inputs) * inputs**-0.5
            tensors[f"{prefix}.lora_B.weight"] = draw(outputs, RANK) * 0.3
            if lora_bias:
                tensors[f"{prefix}.lora_B.bias"] = draw(outputs) * 0.3
            if use_dora:
                tensors[f"{prefix}.lora_magnitude_vector"] = 1 + 0.2 * np.abs(draw(outputs))
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "use_dora": use_dora,
        "lora_bias": lora_bias, "target_modules": [*WIDTHS, *(() if use_dora or lora_bias else ("gate",))],
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def logits_of(engine: Path, adapter: Path) -> np.ndarray:
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        lora = adaptrt.LoraConfig.from_peft(1, adapter, engine)
        return collect(executor, executor.enqueue_request(make_request(PROMPT, 1, lora))).context_logits


def check(actual: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(actual - expected).max() <= TOLERANCE * (expected.max() - expected.min())


def test_a_linear_layer_of_each_expert(model: Path, engine: Path, tmp_path: Path) -> None:
    """PEFT converts such an adapter into one of parameters when it loads it."""
    adapter = save_old_adapter(tmp_path / "adapter")
    expected = Reference(model, adapter).logits(PROMPT).numpy()
    base = Reference(model).logits(PROMPT).numpy()
    assert np.abs(expected - base).max() > 0.05 * (base.max() - base.min())
    check(logits_of(engine, adapter), expected)


def test_dora_of_each_expert(model: Path, engine: Path, tmp_path: Path) -> None:
    """PEFT no longer has this form; the test merges the formula that it had into the weights of the files."""
    adapter = save_old_adapter(tmp_path / "adapter", use_dora=True)
    tensors = load_file(adapter / "adapter_model.safetensors")
    weights = load_file(model / "model.safetensors")
    for name in [name for name in tensors if name.endswith("magnitude_vector")]:
        path = name.removeprefix("base_model.model.").removesuffix(".lora_magnitude_vector")
        a, b = (tensors[name.replace("lora_magnitude_vector", f"lora_{role}.weight")] for role in "AB")
        adapted = weights[f"{path}.weight"] + 2 * b @ a
        weights[f"{path}.weight"] = adapted * (tensors[name] / np.linalg.norm(adapted, axis=1))[:, np.newaxis]
    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    check(logits_of(engine, adapter), Reference(merged).logits(PROMPT).numpy())


def test_adapters_of_experts_that_are_dealt_to_ranks(tmp_path: Path) -> None:
    """DoRA magnitudes are normalised by the weights of all ranks, and biases are added only once."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 76}
    model = save_family(dataclasses.replace(FAMILY, fields={**FAMILY.fields, **sizes}), tmp_path / "model")
    adapters = [save_old_adapter(tmp_path / kind, **{kind: True}) for kind in ("use_dora", "lora_bias")]
    cases = [
        {"adapter": str(adapter), "task": task, "prompt": PROMPT, "tokens": 4} for task, adapter in enumerate(adapters)
    ]
    made = []
    for ranks, ep_size in ((1, 1), (2, 2), (4, 2)):
        checkpoint, engine = (tmp_path / f"{what}{ranks}" for what in ("checkpoint", "engine"))
        convert_checkpoint(model, checkpoint, tp_size=ranks, moe_ep_size=ep_size)
        build(checkpoint, CONFIG, engine)
        made += answers_of_ranks(ranks, engine, [cases], tmp_path, num_threads=1)
    one, *others = made
    for answers in others:
        for answer, expected in zip(answers, one, strict=True):
            assert answer.tokens == expected.tokens
            check(answer.context_logits, expected.context_logits)
            check(answer.generation_logits, expected.generation_logits)


class ShiftedExperts(torch.nn.Module):
    """The experts of a layer, each linear layer with the adapter's change merged and its bias added."""

    def __init__(self, layer: int, weights: dict[str, np.ndarray], adapter: dict[str, np.ndarray]) -> None:
        super().__init__()
        self._linears = []
        for expert in range(EXPERTS):
            linears = []
            for name in ("gate_proj", "up_proj", "down_proj"):
                path = layer_of(layer, expert, name)
                a, b = (adapter[f"base_model.model.{path}.lora_{role}.weight"] for role in "AB")
                shift = 2 * adapter[f"base_model.model.{path}.lora_B.bias"]
                linears.append((torch.tensor(weights[f"{path}.weight"] + 2 * b @ a), torch.tensor(shift)))
            self._linears.append(linears)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        linear = torch.nn.functional.linear
        result = torch.zeros_like(x)
        for expert, (gate, up, down) in enumerate(self._linears):
            inner = torch.nn.functional.silu(linear(x, *gate)) * linear(x, *up)
            result += (weights * (chosen == expert)).sum(-1, keepdim=True) * linear(inner, *down)
        return result


def test_biases_of_each_expert(model: Path, engine: Path, tmp_path: Path) -> None:
    """PEFT puts no lora_bias on parameters; the reference changes transformers' model, expert by expert."""
    adapter = save_old_adapter(tmp_path / "adapter", lora_bias=True)
    tensors, weights = load_file(adapter / "adapter_model.safetensors"), load_file(model / "model.safetensors")
    shifted, plain = load_model(model), load_model(model)
    without = {name: tensor * (0 if name.endswith("bias") else 1) for name, tensor in tensors.items()}
    for layer in range(3):
        shifted.model.layers[layer].mlp.experts = ShiftedExperts(layer, weights, tensors)
        plain.model.layers[layer].mlp.experts = ShiftedExperts(layer, weights, without)
    with torch.no_grad():
        expected, unshifted = (made(torch.tensor([PROMPT])).logits[0].numpy() for made in (shifted, plain))
    assert np.abs(expected - unshifted).max() > 0.05 * (expected.max() - expected.min())
    check(logits_of(engine, adapter), expected)


def test_experts_that_an_adapter_leaves_out(engine: Path, tmp_path: Path) -> None:
    some = save_old_adapter(tmp_path / "some", experts=range(1, 4))
    tensors = load_file(some / "adapter_model.safetensors")
    for expert in (0, 4, 5):
        for name, tensor in list(tensors.items()):
            if ".experts.1." in name:
                tensors[name.replace(".experts.1.", f".experts.{expert}.")] = np.zeros_like(tensor)
    everywhere = save_old_adapter(tmp_path / "everywhere")
    save_file(tensors, everywhere / "adapter_model.safetensors")
    np.testing.assert_array_equal(logits_of(engine, some), logits_of(engine, everywhere))


def test_parameters_and_linear_layers_are_the_same_rows(model: Path, tmp_path: Path) -> None:
    stacked = save_adapter(
        model, tmp_path / "stacked", 5, r=RANK, target_modules=[], target_parameters=["experts.down_proj"]
    )
    tensors = load_file(stacked / "adapter_model.safetensors")
    apart = {}
    for name, tensor in tensors.items():
        for expert in range(EXPERTS):
            path = name.replace(".experts.lora", f".experts.{expert}.down_proj.lora")
            of_expert = (
                tensor.reshape(EXPERTS, RANK, INNER)[expert]
                if "lora_A" in name
                else tensor.reshape(HIDDEN, RANK, EXPERTS)[:, :, expert]
            )
            apart[path] = np.ascontiguousarray(of_expert)
    old = save_old_adapter(tmp_path / "old")
    save_file(apart, old / "adapter_model.safetensors")
    new_rows, old_rows = (convert_adapter(path, storage_dtype="float32", base=model) for path in (stacked, old))
    np.testing.assert_array_equal(new_rows.weights, old_rows.weights)
    np.testing.assert_array_equal(new_rows.config, [[[14, layer, RANK, 0] for layer in range(3)]])
    assert new_rows.paths == tuple(f"model.layers.{layer}.mlp.experts" for layer in range(3))


BLOCK = "base_model.model.model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensors: tensors.pop(f"{BLOCK}.lora_A.weight"), "layers.0.mlp.experts needs both lora_A and lora_B"),
        (
            lambda tensors: tensors.update({f"{BLOCK}.lora_A.weight": np.ones((23, INNER), np.float32)}),
            r"those of 6 experts' gate_up_proj are \[6 rank, 36\]",
        ),
        (
            lambda tensors: tensors.update({f"{BLOCK}.lora_B.weight": np.full((HIDDEN, 24), np.nan, np.float32)}),
            "NaN",
        ),
    ],
)
def test_damage_is_named(model: Path, tmp_path: Path, change, complaint: str) -> None:
    adapter = save_adapter(
        model, tmp_path / "adapter", 5, r=RANK, target_modules=[], target_parameters=["experts.down_proj"]
    )
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=complaint):
        convert_adapter(adapter, storage_dtype="float32", base=model)


def test_a_parameter_that_is_not_targeted(model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(
        model, tmp_path / "adapter", 5, r=RANK, target_modules=[], target_parameters=["experts.down_proj"]
    )
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "target_parameters": ["experts.gate_up_proj"]}))
    complaint = re.escape("'model.layers.0.mlp.experts.down_proj' has tensors, but adapter_config.json's target_param")
    with pytest.raises(AdapterError, match=complaint):
        convert_adapter(adapter, storage_dtype="float32", base=model)


def test_inspection_has_a_line_for_all_experts(engine: Path, tmp_path: Path) -> None:
    adapter = save_old_adapter(tmp_path / "adapter", experts=range(1, 4))
    described = describe_adapter(adapter, engine)
    of_experts = [module for module in described.modules if module.module == "moe_4h_to_h"]
    assert [(module.layer, module.experts, module.in_size) for module in of_experts] == [
        (layer, 3, INNER) for layer in range(3)
    ]
    assert {module.path for module in of_experts} == {f"model.layers.{layer}.mlp.experts" for layer in range(3)}
    routers = [module for module in described.modules if module.module == "moe_router"]
    assert [module.experts for module in routers] == [None] * 3


def test_without_the_model_the_number_of_experts_is_not_known(tmp_path: Path) -> None:
    adapter = save_old_adapter(tmp_path / "adapter")
    with pytest.raises(AdapterError, match="whose number only the model states; give the base model"):
        convert_adapter(adapter, storage_dtype="float32")


def test_a_shared_expert(tmp_path: Path) -> None:
    """PEFT would match gate_proj of the experts too, so the test merges the adapter into the weights of the files."""
    fields = {
        **SIZES, "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER,
        "shared_expert_intermediate_size": 26,
    }  # fmt: skip
    model = save_family(Family(transformers.Qwen2MoeConfig, [], fields), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    random = np.random.default_rng(9)
    tensors = {}
    for layer in range(3):
        for name in WIDTHS:
            path = f"model.layers.{layer}.mlp.shared_expert.{name}"
            outputs, inputs = weights[f"{path}.weight"].shape
            a = random.standard_normal((RANK, inputs)).astype(np.float32) * inputs**-0.5
            b = random.standard_normal((outputs, RANK)).astype(np.float32) * 0.3
            weights[f"{path}.weight"] = weights[f"{path}.weight"] + 2 * b @ a
            tensors |= {f"base_model.model.{path}.lora_A.weight": a, f"base_model.model.{path}.lora_B.weight": b}
    adapter = save_old_adapter(tmp_path / "adapter")
    save_file(tensors, adapter / "adapter_model.safetensors")
    merged = tmp_path / "merged"
    merged.mkdir()
    (merged / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    convert_checkpoint(model, tmp_path / "checkpoint")
    build(tmp_path / "checkpoint", CONFIG, tmp_path / "engine")
    check(logits_of(tmp_path / "engine", adapter), Reference(merged).logits(PROMPT).numpy())
