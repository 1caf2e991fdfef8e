"""Latent attention against transformers + PEFT in float32: adapters of every kind on every linear layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import adaptrt
from adaptrt._core import AdapterError
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.families import LATENT, save_family
from support.models import Reference, save_adapter
from support.serving import Answer, collect, make_request

# The products are in another order than in transformers, both in float32.
FLOAT32_TOLERANCE = 1e-4
FAMILY = LATENT["deepseek-v3"]
TARGETS = FAMILY.targets
ADAPTERS = {
    "lora": {"target_modules": TARGETS, "r": 5},
    "dora": {"target_modules": TARGETS, "r": 4, "use_dora": True},
    "rank pattern": {
        "target_modules": TARGETS,
        "r": 3,
        "use_rslora": True,
        "rank_pattern": {"kv_b_proj": 7, "q_a_proj": 1},
        "alpha_pattern": {"kv_b_proj": 3, "o_proj": 4},
    },
    "keys and values": {"target_modules": ["kv_b_proj"], "r": 6, "layers_to_transform": [1]},
    # Its factors of keys are in a row of q_b_proj, which the adapter does not have.
    "factors of keys and values": {"target_modules": ["kv_b_proj"], "r": 2, "use_dora": True},
    "biases": {"target_modules": ["kv_b_proj", "q_b_proj", "kv_a_proj_with_mqa"], "r": 2, "lora_bias": True},
    "compressed rows": {"target_modules": ["kv_a_proj_with_mqa", "q_a_proj"], "r": 2},
}
LENGTHS = [1, 5, 64, 65, 200]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the model, its engine, and the adapters by name."""
    made = tmp_path_factory.mktemp("latent_attention")
    save_family(FAMILY, made / "model")
    convert_checkpoint(made / "model", made / "checkpoint")
    config = BuildConfig(
        max_batch_size=16,
        max_num_tokens=512,
        max_seq_len=256,
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
        requests = [make_request(prompt, 8, loras[name] if name else None) for name, prompt in cases]
        return [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]


def check(directory: Path, name: str | None, prompt: list[int], answer: Answer) -> None:
    expected = Reference(directory / "model", directory / name if name else None).logits(prompt, answer.tokens).numpy()
    actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
    assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * (expected.max() - expected.min()), name
    assert answer.tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist()


def test_every_adapter_in_one_batch(directory: Path) -> None:
    cases = [(name, prompt_of(length)) for name, length in zip(ADAPTERS, [*LENGTHS[::-1], 17, 90], strict=True)]
    for case, answer in zip(cases, answers(directory, cases), strict=True):
        check(directory, *case, answer)


def test_prompts_of_every_length_have_the_same_bits_in_any_steps(directory: Path) -> None:
    cases = [(None, prompt_of(length)) for length in LENGTHS] + [("dora", prompt_of(90))]
    fields = {"enable_chunked_context": True, "max_num_tokens": 23, "num_threads": 3}
    for case, answer in zip(cases, answers(directory, cases, **fields), strict=True):
        (alone,) = answers(directory, [case], num_threads=1)
        assert answer.same_bits(alone), len(case[1])
        check(directory, *case, answer)


def test_an_adapter_that_begins_within_a_prompt_must_leave_keys_and_values(directory: Path, tmp_path: Path) -> None:
    """Tokens before the invocation have the base's keys and values; compressed rows may change."""
    settings = {"r": 2, "alora_invocation_tokens": [5, 6]}
    adapter = save_adapter(directory / "model", tmp_path / "kv", 0, target_modules=["kv_b_proj"], **settings)
    with pytest.raises(AdapterError, match=r"kv_b_proj': aLoRA changes keys and values from its invocation on"):
        adaptrt.LoraConfig.from_peft(1, adapter, directory / "engine")
    other = save_adapter(directory / "model", tmp_path / "q", 0, target_modules=["kv_a_proj_with_mqa"], **settings)
    adaptrt.LoraConfig.from_peft(1, other, directory / "engine", active_from=3)
