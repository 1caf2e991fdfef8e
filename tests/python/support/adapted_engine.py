"""An engine of a family with adapters over it, compared with transformers + PEFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.families import Family, save_family
from support.models import Reference, save_adapter
from support.serving import Answer, collect, make_request

# Products and sums are in another order than in transformers, both in float32.
FLOAT32_TOLERANCE = 1e-4


class AdaptedEngine:
    """A family's tiny model, its engine, and adapters by name, all in one directory."""

    def __init__(
        self, family: Family, adapters: Mapping[str, Mapping[str, Any]], directory: Path, *, max_seq_len: int
    ) -> None:
        """adapters: arguments of save_adapter by name."""
        self.model, self.engine = directory / "model", directory / "engine"
        self.vocab_size = family.vocab_size
        save_family(family, self.model)
        convert_checkpoint(self.model, directory / "checkpoint")
        config = BuildConfig(
            max_batch_size=16,
            max_num_tokens=512,
            max_seq_len=max_seq_len,
            tokens_per_block=8,
            lora_config=LoraBuildConfig(max_lora_rank=16),
            plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
        )
        build(directory / "checkpoint", config, self.engine)
        self.adapters = {
            name: save_adapter(self.model, directory / name, seed, **settings)
            for seed, (name, settings) in enumerate(adapters.items())
        }

    def prompt(self, length: int) -> list[int]:
        """Returns a random prompt; those of equal length are the same."""
        return np.random.default_rng(length).integers(2, self.vocab_size, length).tolist()

    def answers(self, cases: Sequence[tuple[str | None, list[int]]], **fields: object) -> list[Answer]:
        """Returns the answer to each (adapter, prompt), all in one batch. fields: of ExecutorConfig."""
        loras = {
            name: adaptrt.LoraConfig.from_peft(number, directory, self.engine)
            for number, (name, directory) in enumerate(self.adapters.items(), 1)
            if any(name == other for other, _ in cases)
        }
        with adaptrt.Executor(self.engine, executor_config=adaptrt.ExecutorConfig(**fields)) as executor:
            requests = [make_request(prompt, 8, loras[name] if name else None) for name, prompt in cases]
            return [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]

    def check(self, name: str | None, prompt: list[int], answer: Answer) -> None:
        """Compares logits and greedy tokens with transformers + PEFT."""
        reference = Reference(self.model, self.adapters[name] if name else None)
        expected = reference.logits(prompt, answer.tokens).numpy()
        actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
        assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * (expected.max() - expected.min()), name
        assert answer.tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist()

    def check_all_in_one_batch(self, lengths: Sequence[int]) -> None:
        """Compares every adapter with the reference, each with a prompt of one of the lengths."""
        cases = [(name, self.prompt(length)) for name, length in zip(self.adapters, lengths, strict=True)]
        for case, answer in zip(cases, self.answers(cases), strict=True):
            self.check(*case, answer)

    def check_any_steps(self, lengths: Sequence[int]) -> None:
        """Checks that prompts of these lengths have the same bits in chunks as alone, and are right."""
        cases = [(None, self.prompt(length)) for length in lengths] + [("dora", self.prompt(90))]
        fields = {"enable_chunked_context": True, "max_num_tokens": 23, "num_threads": 3}
        for case, answer in zip(cases, self.answers(cases, **fields), strict=True):
            (alone,) = self.answers([case], num_threads=1)
            assert answer.same_bits(alone), len(case[1])
            self.check(*case, answer)
