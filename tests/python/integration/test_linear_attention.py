"""Linear attention against transformers + PEFT in float32: prompts around its chunks, adapters of every kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import adaptrt
from adaptrt._core import AdapterError
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.families import LINEAR_TARGETS, RECURRENT, save_family
from support.models import Reference, save_adapter
from support.serving import Answer, collect, make_request

# transformers computes prompts in chunks of 64 tokens: it solves a triangular system in each of them. AdaptRT computes
# token by token. Both are float32, and rounding errors of the states decay with them.
FLOAT32_TOLERANCE = 1e-4
FAMILY = RECURRENT["qwen3.5"]
TARGETS = FAMILY.targets
ADAPTERS = {
    "lora": {"target_modules": TARGETS, "r": 5},
    "rslora": {"target_modules": TARGETS, "r": 16, "use_rslora": True},
    "dora": {"target_modules": TARGETS, "r": 4, "use_dora": True},
    "rank pattern": {
        "target_modules": TARGETS,
        "r": 3,
        "rank_pattern": {"in_proj_qkv": 7, "q_proj": 9, "in_proj_a": 1},
        "alpha_pattern": {"out_proj": 3, "q_proj": 4},
    },
    "linear attention of one layer": {"target_modules": LINEAR_TARGETS, "r": 6, "layers_to_transform": [2]},
    "queries and gates": {"target_modules": ["q_proj", "in_proj_z"], "r": 2, "use_dora": True},
    "decay": {"target_modules": ["in_proj_b", "in_proj_a"], "r": 2, "use_dora": True},
}
LENGTHS = [1, 5, 64, 65, 300]
"""A chunk of transformers has 64 tokens."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the model, its engine, and the adapters by name."""
    made = tmp_path_factory.mktemp("linear_attention")
    save_family(FAMILY, made / "model")
    convert_checkpoint(made / "model", made / "checkpoint")
    config = BuildConfig(
        max_batch_size=16,
        max_num_tokens=512,
        max_seq_len=320,
        tokens_per_block=8,
        lora_config=LoraBuildConfig(max_lora_rank=16),
        plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
    )
    build(made / "checkpoint", config, made / "engine")
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        save_adapter(made / "model", made / name, seed, **settings)
    return made


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(2, FAMILY.vocab_size, length).tolist()


def answers(directory: Path, cases: list[tuple[str | None, list[int]]], **fields: object) -> list[Answer]:
    """Returns the answer to each (adapter, prompt), all in one batch."""
    numbers = {name: number for number, name in enumerate(ADAPTERS, 1)}
    engine = directory / "engine"
    loras = {name: adaptrt.LoraConfig.from_peft(numbers[name], directory / name, engine) for name, _ in cases if name}
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(**fields)) as executor:
        requests = [make_request(prompt, 10, loras[name] if name else None) for name, prompt in cases]
        return [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]


def check(directory: Path, name: str | None, prompt: list[int], answer: Answer) -> None:
    expected = Reference(directory / "model", directory / name if name else None).logits(prompt, answer.tokens).numpy()
    actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
    assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * (expected.max() - expected.min()), name
    assert answer.tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist()


def test_every_adapter_in_one_batch(directory: Path) -> None:
    cases = [(name, prompt_of(length)) for name, length in zip(ADAPTERS, [*LENGTHS[::-1], 17, 130], strict=True)]
    for case, answer in zip(cases, answers(directory, cases), strict=True):
        check(directory, *case, answer)


def test_prompts_of_every_length_have_the_same_bits_in_any_steps(directory: Path) -> None:
    cases = [(None, prompt_of(length)) for length in LENGTHS] + [("dora", prompt_of(90))]
    fields = {"enable_chunked_context": True, "max_num_tokens": 23, "num_threads": 3}
    for case, answer in zip(cases, answers(directory, cases, **fields), strict=True):
        (alone,) = answers(directory, [case], num_threads=1)
        assert answer.same_bits(alone), len(case[1])
        check(directory, *case, answer)


def test_adapters_of_other_layers_are_refused(directory: Path, tmp_path: Path) -> None:
    """A layer with attention has no linear attention."""
    adapter = save_adapter(directory / "model", tmp_path / "adapter", 0, target_modules=["in_proj_z"], r=2)
    file = adapter / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    renamed = {name.replace("layers.0.", "layers.1."): tensor for name, tensor in tensors.items()}
    safetensors.numpy.save_file(renamed, file)
    with pytest.raises(AdapterError, match=r"layers\.1\.linear_attn\.in_proj_z"):
        adaptrt.LoraConfig.from_peft(1, adapter, directory / "engine")
