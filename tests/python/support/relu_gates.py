"""Random models with ReLU-gated MLPs, as computed by transformers and by the published models' own code."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

import adaptrt
from adaptrt._core import DType, LinearEpilogue
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.formats.engine.plan import LinearOp, Program
from adaptrt.runtime.engine import load_engine
from support.families import LLAMA, SIZES, Family, save_family
from support.models import Reference, save_adapter
from support.serving import Answer, collect, make_request

# See test_families.py for the reason.
FLOAT32_TOLERANCE = 1e-4
THRESHOLD = 0.3
CONFIG = BuildConfig(
    max_batch_size=8,
    max_num_tokens=128,
    max_seq_len=160,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=16),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
ADAPTERS = {"lora": {"r": 5}, "rslora": {"r": 16, "use_rslora": True}, "dora": {"r": 4, "use_dora": True}}
LENGTHS = [1, 5, 17, 40]
# Whole panels of gated neurons; the hidden size has an incomplete last panel.
FIELDS = {**SIZES, "intermediate_size": 192, "hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 2}
BAMBOO_CODE = {
    "AutoConfig": "configuration_bamboo.BambooConfig",
    "AutoModelForCausalLM": "modeling_bamboo.BambooForCausalLM",
}


class FatRelu(nn.Module):
    """ProSparse's own code for hidden_act fatrelu."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x >= THRESHOLD, x, 0.0)


def double_relu(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """The MLP of Bamboo's own code."""
    return mlp.down_proj(torch.relu(mlp.gate_proj(x)) * torch.relu(mlp.up_proj(x)))


@dataclasses.dataclass(frozen=True)
class Gate:
    """A kind of ReLU: transformers' model of it, and the config.json of published models."""

    family: Family
    epilogue: LinearEpilogue
    published: dict[str, Any] = dataclasses.field(default_factory=dict)


GATES = {
    "relu": Gate(
        Family(transformers.LlamaConfig, LLAMA, {**FIELDS, "hidden_act": "relu", "mlp_bias": True}),
        LinearEpilogue.RELU_MUL,
    ),
    "fatrelu": Gate(
        Family(transformers.LlamaConfig, LLAMA, {**FIELDS, "hidden_act": "fatrelu", "hidden_act_param": THRESHOLD}),
        LinearEpilogue.RELU_MUL,
    ),
    "drelu": Gate(
        Family(transformers.MistralConfig, LLAMA, {**FIELDS, "hidden_act": "relu", "sliding_window": 20}),
        LinearEpilogue.RELU_MUL_RELU,
        {"architectures": ["BambooForCausalLM"], "model_type": "bamboo", "auto_map": BAMBOO_CODE},
    ),
}  # fmt: skip


def published(model: Path, directory: Path, **fields: Any) -> Path:
    """Copies the model with other fields in its config.json; None removes a field."""
    shutil.copytree(model, directory)
    config = json.loads((directory / "config.json").read_text()) | fields
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return directory


def make_model(gate: Gate, directory: Path) -> Path:
    """Makes a random model: in `model` for transformers, and in its published form. Returns the latter's directory."""
    return published(save_family(gate.family, directory / "model"), directory / "published", **gate.published)


def engine_of(model: Path, directory: Path, dtype: DType = DType.FLOAT32, **fields: Any) -> Path:
    """Builds an engine of a model in `directory` with these build fields."""
    convert_checkpoint(model, directory / "checkpoint", dtype=dtype)
    build(directory / "checkpoint", dataclasses.replace(CONFIG, **fields), directory / "engine")
    return directory / "engine"


def adapters_of(gate: Gate, directory: Path) -> dict[str, Path | None]:
    """Returns one adapter per entry of ADAPTERS for the model of make_model(), and None."""
    found: dict[str, Path | None] = {"base": None}
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        fields = {"target_modules": gate.family.targets, **settings}
        found[name] = save_adapter(directory / "model", directory / name, seed, **fields)
    return found


def answers_of(engine: Path, adapters: dict[str, Path | None], crowd: int, **fields: Any) -> list[Answer]:
    """Returns the answers to one prompt per adapter, with `crowd` prompts at a time."""
    requests = []
    for number, (adapter, length) in enumerate(zip(adapters.values(), LENGTHS, strict=True)):
        lora = None if adapter is None else adaptrt.LoraConfig.from_peft(number, adapter, engine)
        requests.append(make_request(prompt_of(length), 10, lora))
    answers = []
    config = adaptrt.ExecutorConfig(**fields)
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
        for first in range(0, len(requests), crowd):
            ids = executor.enqueue_requests(requests[first : first + crowd])
            answers += [collect(executor, request_id) for request_id in ids]
    return answers


def check_answers(engine: Path, gate: Gate, directory: Path) -> None:
    """Checks greedy tokens and logits of base and adapters against transformers with the model of make_model()."""
    adapters = adapters_of(gate, directory)
    for length, adapter, answer in zip(LENGTHS, adapters.values(), answers_of(engine, adapters, 4), strict=True):
        prompt = prompt_of(length)
        expected = Reference(directory / "model", adapter).logits(prompt, answer.tokens).numpy()
        actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
        assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * (expected.max() - expected.min())
        assert answer.tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist()


def prompt_of(length: int) -> list[int]:
    """Returns random tokens, the same for each length."""
    return np.random.default_rng(length).integers(2, 61, length).tolist()


def layers_of(engine: Path) -> list[LinearOp]:
    """Returns the linear layers of an engine's body."""
    program = load_engine(engine).storage.program
    assert isinstance(program, Program)
    return [op for op in program.body if isinstance(op, LinearOp)]
