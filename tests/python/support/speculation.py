"""Requests with drafts, and their results without drafts, for tests of speculation."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

import adaptrt
from support.models import ModelSpec

# Few tokens, so n-grams repeat, and drafts are sometimes right and sometimes wrong.
SPEC = ModelSpec(vocab_size=13)
ADAPTERS = [{"r": 4}, {"r": 7, "use_dora": True}]
LOOP = [2, 3, 4, 5] * 12
PROMPTS = [[5], [9, 8, 7, 9, 8], LOOP[:33], LOOP, [*LOOP[:18], 3, 3], [6] * 16]
SAMPLING: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"top_k": 3, "temperature": 0.6},
    {"top_p": 0.9, "temperature": 0.8, "top_p_decay": 0.9, "top_p_min": 0.5},
    {"min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": 0.1, "min_tokens": 9},
    {"top_k": 5, "no_repeat_ngram_size": 4},
]
END = 7


@dataclasses.dataclass(frozen=True)
class Ask:
    """Parameters of a request."""

    prompt: int
    adapter: int | None
    n: int
    seed: int
    sampling: int
    max_tokens: int
    streaming: bool
    stops: bool
    bias: bool


@dataclasses.dataclass
class Sequence:
    """Result of one sequence."""

    tokens: list[int]
    log_probs: list[float]
    logits: bytes
    top: list[Any]
    reason: adaptrt.FinishReason


class Service:
    """An engine and its adapters. Each request's result without drafts is computed once."""

    def __init__(self, engine: Path, adapters: list[Path]) -> None:
        """Loads engine and adapters."""
        self.engine = adaptrt.load_engine(engine)
        self.lora = [adaptrt.LoraConfig.from_peft(i, path, engine) for i, path in enumerate(adapters)]
        self.alone = cache(self._alone)

    def executor(self, **fields: Any) -> adaptrt.Executor:
        """Makes an executor with these fields of ExecutorConfig."""
        return adaptrt.Executor(self.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(**fields))

    def request(self, ask: Ask, **fields: Any) -> adaptrt.Request:
        """Makes a request with further fields of Request."""
        bias = np.zeros(SPEC.vocab_size, np.float32)
        bias[3:6] = 2.0  # likelier tokens make n-grams repeat more often
        return adaptrt.Request(
            PROMPTS[ask.prompt],
            ask.max_tokens,
            streaming=ask.streaming,
            sampling_config=adaptrt.SamplingConfig(seed=ask.seed, num_return_sequences=ask.n, **SAMPLING[ask.sampling]),
            output_config=adaptrt.OutputConfig(
                return_log_probs=True, return_generation_logits=True, exclude_input_from_output=True, top_log_probs=2
            ),
            end_id=END if ask.stops else None,
            stop_words=[[3, 4, 5]] if ask.stops else None,
            bad_words=[[4, 4]],
            embedding_bias=bias if ask.bias else None,
            lora_config=None if ask.adapter is None else self.lora[ask.adapter],
            **fields,
        )

    def _alone(self, ask: Ask) -> list[Sequence]:
        with self.executor(num_threads=1) as executor:
            return collect(executor, executor.enqueue_request(self.request(ask)), ask.n)


def collect(executor: adaptrt.Executor, request_id: int, n: int) -> list[Sequence]:
    """Waits for a request's end."""
    parts: list[list[adaptrt.Result]] = [[] for _ in range(n)]
    is_final = False
    while not is_final:
        for response in executor.await_responses(request_id, 60.0):
            assert not response.has_error(), response.error_msg
            parts[response.result.sequence_index].append(response.result)
            is_final = response.result.is_final
    return [
        Sequence(
            [token for result in results for token in result.output_token_ids[0]],
            results[-1].log_probs[0],
            b"".join(np.asarray(result.generation_logits).tobytes() for result in results),
            [entry for result in results for entry in result.top_log_probs[0]],
            results[-1].finish_reasons[0],
        )
        for results in parts
    ]


def drafts_of(executor: adaptrt.Executor) -> tuple[int, int]:
    """Returns (computed, accepted) drafts of all steps so far."""
    stats = [step.spec_decoding_stats for step in executor.get_latest_iteration_stats()]
    found = [step for step in stats if step is not None]
    return sum(step.num_draft_tokens for step in found), sum(step.num_accepted_tokens for step in found)


def check_pauses(service: Service, **fields: Any) -> None:
    """Checks that preempted sequences with drafts resume with the same results. fields: fields of ExecutorConfig that
    choose a source of drafts.
    """
    with service.executor(
        scheduler_config=adaptrt.SchedulerConfig(adaptrt.CapacitySchedulerPolicy.MAX_UTILIZATION),
        kv_cache_config=adaptrt.KvCacheConfig(enable_block_reuse=False, max_tokens=96),
        peft_cache_config=adaptrt.PeftCacheConfig(num_ensure_workers=0),  # so all start in the same step
        **fields,
    ) as executor:
        asked = [Ask(0, adapter, 1, 1, 2, 60, False, False, True) for adapter in (None, 0, 1)]
        ids = executor.enqueue_requests([service.request(ask) for ask in asked])
        for ask, request_id in zip(asked, ids, strict=True):
            assert collect(executor, request_id, ask.n) == service.alone(ask)
        steps = executor.get_latest_iteration_stats()
    assert max(step.inflight_batching_stats.num_paused_requests for step in steps) > 0
    assert any(step.spec_decoding_stats is not None for step in steps)


asks = st.builds(
    Ask,
    prompt=st.integers(0, len(PROMPTS) - 1),
    adapter=st.none() | st.integers(0, len(ADAPTERS) - 1),
    n=st.integers(1, 3),
    seed=st.integers(0, 3),
    sampling=st.integers(0, len(SAMPLING) - 1),
    max_tokens=st.sampled_from([1, 2, 30]),
    streaming=st.booleans(),
    stops=st.booleans(),
    bias=st.booleans(),
)
