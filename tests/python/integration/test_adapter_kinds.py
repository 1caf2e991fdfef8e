"""Every kind of adapter that is served against transformers + PEFT in float32, all kinds in one batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import adaptrt
from adaptrt.builder.adapter import convert_adapter
from adaptrt.builder.build import build
from adaptrt.builder.config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.builder.conversion.convert import convert_checkpoint
from support.families import FAMILIES, LLAMA, save_family
from support.kinds import as_mlx, configs, save_kind, save_with_initial
from support.models import ModelSpec, Reference, save_model
from support.serving import Answer, collect, make_request

# As in test_parity.py; factors that are multiplied beforehand add a rounding to each product.
FLOAT32_TOLERANCE = 1e-4
CONFIG = BuildConfig(
    max_batch_size=16,
    max_num_tokens=256,
    max_seq_len=128,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=64),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
VOCABULARY = 61


class Served:
    """A random model, its engine, and an adapter of each kind."""

    def __init__(self, name: str, directory: Path) -> None:
        if name == "llama":
            spec = ModelSpec(hidden_size=36, intermediate_size=40)
            self.model, targets = save_model(spec, directory / "model"), LLAMA
        else:
            self.model, targets = save_family(FAMILIES[name], directory / "model"), FAMILIES[name].targets
        convert_checkpoint(self.model, directory / "checkpoint")
        build(directory / "checkpoint", CONFIG, directory / "engine")
        self.engine = directory / "engine"
        kinds = configs(targets, transposed=name == "gpt2")
        # What PEFT reads, which is what each is compared with, and what is served.
        self.by_peft = {
            kind: save_kind(self.model, directory / kind, config, seed)
            for seed, (kind, config) in enumerate(kinds.items())
        }
        self.adapters = dict(self.by_peft)
        for kind in ("lora", "dora"):
            self.by_peft[f"mlx-{kind}"] = self.by_peft[kind]
            self.adapters[f"mlx-{kind}"] = as_mlx(self.by_peft[kind], directory / f"mlx-{kind}", num_layers=-1)
        self.initial: dict[str, Path] = {}
        if name != "gpt2":
            for init in ("pissa", "olora"):
                adapter, initial = save_with_initial(
                    self.model, directory / init, init, 5, r=4, lora_alpha=6, target_modules=targets
                )
                self.by_peft[init] = self.adapters[init] = adapter
                self.initial[init] = initial

    def lora(self, kind: str) -> adaptrt.LoraConfig:
        task_id = list(self.adapters).index(kind)
        if kind not in self.initial:
            return adaptrt.LoraConfig.from_peft(task_id, self.adapters[kind], self.engine)
        converted = convert_adapter(
            self.adapters[kind], storage_dtype="float32", base=self.model, initial_adapter=self.initial[kind]
        )
        return adaptrt.LoraConfig(task_id, converted.weights, converted.config)

    def answers(self, cases: list[tuple[str, list[int]]], **fields: object) -> list[Answer]:
        """What each (kind, prompt) gives, all of them at once."""
        config = adaptrt.ExecutorConfig(**fields)
        with adaptrt.Executor(self.engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
            requests = [make_request(prompt, 8, self.lora(kind)) for kind, prompt in cases]
            return [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]

    def cases(self) -> list[tuple[str, list[int]]]:
        return [
            (kind, np.random.default_rng(seed).integers(2, VOCABULARY, 5 + 3 * seed).tolist())
            for seed, kind in enumerate(self.adapters)
        ]


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2"])
def served(request, tmp_path_factory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp(request.param))


def test_every_kind_in_one_batch_is_what_peft_computes(served: Served) -> None:
    base = Reference(served.model)
    for (kind, prompt), answer in zip(served.cases(), served.answers(served.cases()), strict=True):
        expected = Reference(served.model, served.by_peft[kind]).logits(prompt, answer.tokens).numpy()
        actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
        scale = expected.max() - expected.min()
        assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * scale, kind
        assert answer.tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist()
        # The adapter changes something, far beyond the tolerance.
        assert np.abs(base.logits(prompt).numpy() - answer.context_logits).max() > 0.01 * scale, kind


def test_a_crowd_of_kinds_changes_no_bit(served: Served) -> None:
    together = served.answers(served.cases(), enable_chunked_context=True, max_num_tokens=32, num_threads=2)
    for case, answer in zip(served.cases(), together, strict=True):
        (alone,) = served.answers([case], num_threads=1)
        assert answer.same_bits(alone), case[0]
