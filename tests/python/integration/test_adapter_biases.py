"""Adapters that add to outputs (lora_bias, trained biases, IA3 over biases) against PEFT in float32."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.builder.conversion.convert import convert_checkpoint
from support.families import FAMILIES, save_family
from support.kinds import save_kind
from support.models import ModelSpec, Reference, save_model
from support.serving import Answer, collect, make_request

# As in test_parity.py.
FLOAT32_TOLERANCE = 1e-4
CONFIG = BuildConfig(
    max_batch_size=16,
    max_num_tokens=256,
    max_seq_len=128,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=16),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
# The layers that have biases, and one that has none where there is such.
TARGETS = {
    "qwen2": (["q_proj", "k_proj", "v_proj"], ["o_proj"]),
    "qwen2-moe": (["q_proj", "k_proj", "v_proj"], ["o_proj"]),
    "gpt2": (["c_attn", "c_proj", "c_fc"], []),
    "gpt-neox": (["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"], []),
}


def kinds(name: str) -> dict[str, Any]:
    biased, others = TARGETS[name]
    of_all: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": [*biased, *others]}
    conv1d = {"fan_in_fan_out": True} if name == "gpt2" else {}
    made = {
        "plain": peft.LoraConfig(r=5, **conv1d, **of_all),
        "lora-bias": peft.LoraConfig(
            r=4, lora_alpha=6, lora_bias=True, target_modules=biased, task_type="CAUSAL_LM", **conv1d
        ),
        "trained": peft.LoraConfig(r=3, bias="lora_only", **conv1d, **of_all),
        "dora-trained": peft.LoraConfig(r=2, use_dora=True, bias="lora_only", **conv1d, **of_all),
        "both": peft.LoraConfig(
            r=2, bias="lora_only", lora_bias=True, target_modules=biased, task_type="CAUSAL_LM", **conv1d
        ),
        "vera-trained": peft.VeraConfig(r=7, projection_prng_key=11, bias="vera_only", **conv1d, **of_all),
        "ia3": peft.IA3Config(target_modules=biased, feedforward_modules=[], task_type="CAUSAL_LM"),
    }
    if others:
        # Some biases belong to layers that have no A and B.
        made["all"] = peft.LoraConfig(r=2, bias="all", target_modules=[*others, biased[0]], task_type="CAUSAL_LM")
    return made


class Served:
    """A random model, its engine, and an adapter of each kind."""

    def __init__(self, name: str, directory: Path) -> None:
        if name == "qwen2":
            self.model = save_model(ModelSpec(family=name), directory / "model")
        else:
            self.model = save_family(FAMILIES[name], directory / "model")
        convert_checkpoint(self.model, directory / "checkpoint")
        build(directory / "checkpoint", CONFIG, directory / "engine")
        self.engine = directory / "engine"
        self.adapters = {
            kind: save_kind(self.model, directory / kind, config, seed)
            for seed, (kind, config) in enumerate(kinds(name).items())
        }

    def answers(self, cases: list[tuple[str | None, list[int]]], **fields: object) -> list[Answer]:
        """What each (kind, prompt) gives, all of them at once; None: the base."""
        config = adaptrt.ExecutorConfig(**fields)
        with adaptrt.Executor(self.engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
            loras = {
                kind: adaptrt.LoraConfig.from_peft(task_id, directory, executor.engine)
                for task_id, (kind, directory) in enumerate(self.adapters.items())
            }
            requests = [make_request(prompt, 8, None if kind is None else loras[kind]) for kind, prompt in cases]
            return [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]

    def cases(self) -> list[tuple[str | None, list[int]]]:
        return [
            (kind, np.random.default_rng(seed).integers(2, 61, 5 + 3 * seed).tolist())
            for seed, kind in enumerate([*self.adapters, None])
        ]


@pytest.fixture(scope="module", params=list(TARGETS))
def served(request, tmp_path_factory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp(request.param))


def test_all_of_them_in_one_batch_are_what_peft_computes(served: Served) -> None:
    base = Reference(served.model)
    for (kind, prompt), answer in zip(served.cases(), served.answers(served.cases()), strict=True):
        reference = base if kind is None else Reference(served.model, served.adapters[kind])
        expected = reference.logits(prompt, answer.tokens).numpy()
        actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
        scale = expected.max() - expected.min()
        assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * scale, kind
        assert answer.tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist()
        if kind is not None:
            assert np.abs(base.logits(prompt).numpy() - answer.context_logits).max() > 0.01 * scale, kind


def test_a_crowd_changes_no_bit(served: Served) -> None:
    together = served.answers(served.cases(), enable_chunked_context=True, max_num_tokens=32, num_threads=2)
    for case, answer in zip(served.cases(), together, strict=True):
        (alone,) = served.answers([case], num_threads=1)
        assert answer.same_bits(alone), case[0]


def test_they_come_back_after_eviction(served: Served) -> None:
    loras = [adaptrt.LoraConfig.from_peft(1, directory, served.engine) for directory in served.adapters.values()]
    sizes = [np.asarray(lora.weights).nbytes for lora in loras]
    cache = adaptrt.PeftCacheConfig(max_adapter_size=1, optimal_adapter_size=1, host_cache_size=sum(sizes) // 3)
    config = adaptrt.ExecutorConfig(peft_cache_config=cache)
    prompt = list(range(5, 20))
    with adaptrt.Executor(served.engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
        for name, directory in served.adapters.items():
            executor.add_adapter(name, directory)

        def ask(name: str) -> Answer:
            return collect(executor, executor.enqueue_request(make_request(prompt, 4), adapter=name))

        first = {name: ask(name) for name in served.adapters}
        assert executor.lora_cache_stats().host_evictions > 0
        for name in reversed(served.adapters):
            assert ask(name).same_bits(first[name]), name


def test_an_engine_without_dora_adds_biases(tmp_path: Path) -> None:
    model = save_model(ModelSpec(family="qwen2"), tmp_path / "model")
    convert_checkpoint(model, tmp_path / "checkpoint")
    plain = dataclasses.replace(CONFIG, plugin_config=PluginConfig(lora_plugin="auto"))
    build(tmp_path / "checkpoint", plain, tmp_path / "engine")
    made = kinds("qwen2")
    trained = save_kind(model, tmp_path / "trained", made["trained"], 1)
    prompt = list(range(2, 30))
    with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        executor.add_adapter("trained", trained)
        answer = collect(executor, executor.enqueue_request(make_request(prompt, 1), adapter="trained"))
        with pytest.raises(adaptrt.AdapterError, match="it has a magnitude, but this engine was built without DoRA"):
            executor.add_adapter("ia3", save_kind(model, tmp_path / "ia3", made["ia3"], 1))
    expected = Reference(model, trained).logits(prompt).numpy()
    assert np.abs(answer.context_logits - expected).max() <= FLOAT32_TOLERANCE * (expected.max() - expected.min())
