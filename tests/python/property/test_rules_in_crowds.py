"""Guides, post-processors, decaying top_p, biases and forbidden words do not depend on the batch or on the request's
other sequences."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adaptrt
from support.examples import examples
from support.guides import json_schema, regex
from support.models import ModelSpec, save_adapter, save_model
from support.serving import Answer, build_engine, collect, collect_sequences, crowd_fields, make_request
from support.tokenizers import SPECIAL, byte_level, save_tokenizer

SPEC = ModelSpec(hidden_size=72, head_dim=24, num_attention_heads=4, num_key_value_heads=2, vocab_size=270)
TOKENIZER = byte_level()
PROMPTS = [TOKENIZER.encode(text).ids for text in ("a", "Say hello", "long " * 20, "long " * 20 + "longer")]
ADAPTERS = [{"r": 4}, {"r": 7, "use_dora": True}]
MAX_TOKENS = 24
SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
}


def shifted(_id: int, logits: Any, tokens: list[list[int]], _stream: int, _client_id: int | None) -> None:
    """Changes logits depending on the generated tokens."""
    logits[0, 0, tokens[0][-1]] -= 3.0
    logits[0, 0, (len(tokens[0]) * 7) % SPEC.vocab_size] += 5.0


def shifted_all(ids: list[int], logits: list[Any], tokens: list[Any], stream: int, client_ids: list[Any]) -> None:
    for each in zip(ids, logits, tokens, client_ids, strict=True):
        shifted(each[0], each[1], each[2], stream, each[3])


BIAS = np.random.default_rng(4).normal(0, 1, SPEC.vocab_size).astype(np.float32)
RULES: list[dict[str, Any]] = [
    {},
    {"guided_decoding_params": json_schema(SCHEMA), "embedding_bias": BIAS},
    {"guided_decoding_params": regex("[a-z]{3,40}(x|yz)")},
    {"guided_decoding_params": regex("([0-9]{2} )*[a-f]"), "logits_post_processor": shifted},
    {"logits_post_processor_name": "shifted", "bad_words": [[TOKENIZER.encode("e").ids[0]], [5, 6]]},
    {"logits_post_processor_name": adaptrt.Request.BATCHED_POST_PROCESSOR_NAME},
    {"embedding_bias": BIAS, "end_id": 9},
]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.95, "top_p_decay": 0.9, "top_p_min": 0.2, "top_p_reset_ids": 40, "temperature": 1.4, "seed": 11},
    {"min_p": 0.02, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "seed": 12},
]


class Service:
    def __init__(self, engine: Path, adapters: list[Path]) -> None:
        self.engine = engine
        self._configs = [adaptrt.LoraConfig.from_peft(i, path, engine) for i, path in enumerate(adapters)]
        # One executor for all requests alone: each start, and each executor's first guide, takes longer than the work.
        kv_cache = adaptrt.KvCacheConfig(max_tokens=4096, enable_block_reuse=False)
        self.quiet = self.executor(num_threads=1, kv_cache_config=kv_cache)
        self.alone = cache(self._alone)

    def executor(self, **fields: Any) -> adaptrt.Executor:
        processors = adaptrt.LogitsPostProcessorConfig({"shifted": shifted}, shifted_all)
        config = adaptrt.ExecutorConfig(logits_post_processor_config=processors, **fields)
        return adaptrt.Executor(self.engine, executor_config=config)

    def request(
        self, prompt: int, adapter: int | None, rule: int, sampling: int, sequence: int = 0, num_sequences: int = 1
    ) -> adaptrt.Request:
        """Makes a request of `num_sequences`, or of one that equals sequence `sequence` of such a request."""
        lora = None if adapter is None else self._configs[adapter]
        fields = dict(SAMPLINGS[sampling])
        if "seed" in fields:
            fields["seed"] += sequence
        fields["num_return_sequences"] = num_sequences
        if "guided_decoding_params" in RULES[rule]:
            fields.pop("no_repeat_ngram_size", None)  # it may forbid the only token that a guide allows
        config = adaptrt.SamplingConfig(**fields)
        return make_request(PROMPTS[prompt], MAX_TOKENS, lora, False, sampling_config=config, **RULES[rule])

    def _alone(self, *case: Any) -> Answer:
        return collect(self.quiet, self.quiet.enqueue_request(self.request(*case)))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("rules")
    model = save_model(SPEC, directory / "model")
    save_tokenizer(TOKENIZER, model)
    assert SPECIAL.index("</s>") == 1
    adapters = [save_adapter(model, directory / f"adapter-{i}", i, **lora) for i, lora in enumerate(ADAPTERS)]
    made = Service(build_engine(model, directory, tokens_per_block=16), adapters)
    with made.quiet:
        yield made


arrivals = st.lists(
    st.tuples(
        st.integers(0, len(PROMPTS) - 1),
        st.none() | st.integers(0, len(ADAPTERS) - 1),
        st.integers(0, len(RULES) - 1),
        st.integers(0, len(SAMPLINGS) - 1),
        st.sampled_from([1, 1, 2, 4]),  # sequences
        st.sampled_from([0.0, 0.0, 0.002]),  # seconds before it arrives
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=examples(40, 200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=arrivals,
    num_threads=st.integers(1, 3),
    max_num_tokens=st.sampled_from([16, 33, 1024]),
    max_batch_size=st.integers(4, 8),
    policy=st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"]),
    kv_tokens=st.sampled_from([288, 4096]),
    reuse=st.booleans(),
)
def test_a_crowd_changes_no_bit(
    service: Service,
    arrivals: list[Any],
    num_threads: int,
    max_num_tokens: int,
    max_batch_size: int,
    policy: str,
    kv_tokens: int,
    reuse: bool,
) -> None:
    fields = crowd_fields(
        policy, kv_tokens, reuse, num_threads=num_threads, max_num_tokens=max_num_tokens, max_batch_size=max_batch_size
    )
    with service.executor(**fields) as executor:
        ids = []
        for *case, num_sequences, delay in arrivals:
            time.sleep(delay)
            ids.append(executor.enqueue_request(service.request(*case, num_sequences=num_sequences)))
        found = [collect_sequences(executor, request_id) for request_id in ids]
    for (*case, num_sequences, _), answers in zip(arrivals, found, strict=True):
        assert len(answers) == num_sequences
        for sequence, answer in enumerate(answers):
            alone = service.alone(*case, sequence)
            if sequence > 0:
                alone = alone.without_prompt_log_probs()
            assert answer.same_log_probs(alone), (case, sequence)
