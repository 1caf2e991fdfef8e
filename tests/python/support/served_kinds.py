"""An engine with adapters of several kinds: compared with PEFT in float32, and in a crowd with each request alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.engine.build_config import BuildConfig
from support.models import Reference
from support.serving import Answer, collect, make_request

# See test_parity.py. Factors that the conversion has multiplied add one rounding per product.
FLOAT32_TOLERANCE = 1e-4


def engine_of(model: Path, directory: Path, config: BuildConfig) -> Path:
    """Builds the engine of a Hugging Face directory in `directory`/engine."""
    convert_checkpoint(model, directory / "checkpoint")
    build(directory / "checkpoint", config, directory / "engine")
    return directory / "engine"


class ServedKinds:
    """A model, its engine, and an adapter of each kind."""

    def __init__(
        self,
        model: Path,
        engine: Path,
        adapters: Mapping[str, Path],
        *,
        by_peft: Mapping[str, Path] | None = None,
        vocabulary: int = 61,
        first_tokens: tuple[int, ...] = (),
        new_tokens: int = 6,
        extra_tokens: Mapping[str, int] | None = None,
    ) -> None:
        """by_peft: directory that PEFT reads for a kind, if it differs from the served one.

        first_tokens: first tokens of every prompt. extra_tokens: number of tokens that kinds add to the vocabulary;
        their prompts end with all of them. A negative number says how many of the base's tokens kinds lack.
        """
        self.extra_tokens = dict(extra_tokens or {})
        self.model, self.engine = model, engine
        self.adapters = dict(adapters)
        self.by_peft = {**adapters, **(by_peft or {})}
        self.vocabulary = vocabulary
        self._first_tokens = first_tokens
        self._new_tokens = new_tokens

    def lora(self, kind: str) -> adaptrt.LoraConfig:
        """Returns the adapter for a request."""
        return adaptrt.LoraConfig.from_peft(list(self.adapters).index(kind), self.adapters[kind], self.engine)

    def cases(self) -> list[tuple[str | None, list[int]]]:
        """Returns every kind, and None for the base, each with a prompt of another length."""
        return [
            (
                kind,
                [
                    *self._first_tokens,
                    *np.random.default_rng(seed)
                    .integers(2, self.vocabulary + min(0, self._extra_tokens_of(kind)), 5 + 3 * seed)
                    .tolist(),
                    *range(self.vocabulary, self.vocabulary + self._extra_tokens_of(kind)),
                ],
            )
            for seed, kind in enumerate([*self.adapters, None])
        ]

    def _extra_tokens_of(self, kind: str | None) -> int:
        return 0 if kind is None else self.extra_tokens.get(kind, 0)

    def answers(self, cases: list[tuple[str | None, list[int]]], **fields: object) -> list[Answer]:
        """Returns the answers to all (kind, prompt), run at once."""
        config = adaptrt.ExecutorConfig(**fields)
        with adaptrt.Executor(self.engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
            loras = {kind: self.lora(kind) for kind in {kind for kind, _ in cases} if kind is not None}
            requests = [
                make_request(prompt, self._new_tokens, None if kind is None else loras[kind]) for kind, prompt in cases
            ]
            return [collect(executor, request_id) for request_id in executor.enqueue_requests(requests)]

    def check_against_peft(self) -> None:
        """Compares logits and tokens of all kinds and the base, run in one batch, with PEFT. Checks that adapters
        change the logits by much more than the tolerance.
        """
        base = Reference(self.model)
        for (kind, prompt), answer in zip(self.cases(), self.answers(self.cases()), strict=True):
            extra = self._extra_tokens_of(kind)
            reference = base if kind is None else Reference(self.model, self.by_peft[kind], extra)
            expected = reference.logits(prompt, answer.tokens).numpy()
            actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
            scale = expected.max() - expected.min()
            assert np.abs(actual - expected).max() <= FLOAT32_TOLERANCE * scale, kind
            assert answer.tokens == expected[len(prompt) - 1 :].argmax(axis=1).tolist(), kind
            if extra:
                assert expected.shape[1] == self.vocabulary + extra
            elif kind is not None:
                assert np.abs(base.logits(prompt).numpy() - answer.context_logits).max() > 0.01 * scale, kind

    def check_crowd(self) -> None:
        """Checks that each request has the same bits as alone, with any chunks and threads."""
        together = self.answers(self.cases(), enable_chunked_context=True, max_num_tokens=32, num_threads=2)
        for case, answer in zip(self.cases(), together, strict=True):
            (alone,) = self.answers([case], num_threads=1)
            assert answer.same_bits(alone), case[0]

    def check_eviction(self, host_cache_size: int, rank: int = 1) -> dict[str, Answer]:
        """Runs adapters by name with a host level that holds only some of them. Checks that the bits are the same when
        an adapter is loaded again, and when each adapter replaces the one before under the same name.
        """
        cache = adaptrt.PeftCacheConfig(
            max_adapter_size=rank, optimal_adapter_size=rank, host_cache_size=host_cache_size
        )
        config = adaptrt.ExecutorConfig(peft_cache_config=cache)
        prompt = list(range(5, 20))
        with adaptrt.Executor(self.engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:
            for name, directory in self.adapters.items():
                executor.add_adapter(name, directory)

            def ask(name: str) -> Answer:
                return collect(executor, executor.enqueue_request(make_request(prompt, 4), adapter=name))

            first = {name: ask(name) for name in self.adapters}
            assert executor.lora_cache_stats().host_evictions > 0
            for name in reversed(self.adapters):
                assert ask(name).same_bits(first[name]), name
            for name, directory in self.adapters.items():
                executor.add_adapter("in turn", directory, replace=True)
                assert ask("in turn").same_bits(first[name]), name
        return first
