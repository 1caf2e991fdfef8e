"""Drafts change no bit of a request's tokens, log probs and logits.

This holds in any batch, chunking and cache, greedy and sampled.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adaptrt
from support.models import save_adapter
from support.serving import LORA_MODULES, build_random_engine, run_command
from support.speculation import ADAPTERS, PROMPTS, SPEC, Ask, Service, asks, check_pauses, collect, drafts_of


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8 KV"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Service:
    directory = tmp_path_factory.mktemp("speculation")
    int8_kv = request.param == "int8 KV"
    dtype = "bfloat16" if int8_kv else request.param
    model, engine = build_random_engine(SPEC, directory, dtype, tokens_per_block=16)
    if int8_kv:
        engine = directory / "engine-int8-kv"
        run_command(
            "build", "--checkpoint_dir", directory / "checkpoint", "--output_dir", engine, "--int8_kv_cache",
            "--max_batch_size", 8, "--max_seq_len", 704, "--max_num_tokens", 1024, "--tokens_per_block", 16,
            "--lora_plugin", "auto", "--dora_plugin", "enable", "--max_lora_rank", 32,
            "--lora_target_modules", *LORA_MODULES,
        )  # fmt: skip
    adapters = [save_adapter(model, directory / f"adapter-{seed}", seed, **lora) for seed, lora in enumerate(ADAPTERS)]
    return Service(engine, adapters)


lookaheads = st.builds(
    adaptrt.LookaheadDecodingConfig,
    max_window_size=st.integers(1, 9),
    max_ngram_size=st.integers(2, 5),
    max_verification_set_size=st.integers(0, 4),
)
# The number of correct draft tokens at the start, and arbitrary tokens after them.
externals = st.none() | st.tuples(st.integers(0, 12), st.lists(st.integers(0, SPEC.vocab_size - 1), max_size=4))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(st.tuples(asks, st.none() | lookaheads, externals), min_size=1, max_size=8),
    for_all=st.none() | lookaheads,
    policy=st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]),
    chunking=st.sampled_from([None, adaptrt.ContextChunkingPolicy.EQUAL_PROGRESS]),
    kv_tokens=st.sampled_from([176, 256, 4096]),
    reuse=st.booleans(),
    max_num_tokens=st.sampled_from([3, 16, 33, 1024]),
    max_batch_size=st.integers(3, 8),
    num_threads=st.integers(1, 3),
)
def test_drafts_change_no_bit(
    service, asked, for_all, policy, chunking, kv_tokens, reuse, max_num_tokens, max_batch_size, num_threads
) -> None:
    with service.executor(
        enable_chunked_context=True,
        scheduler_config=adaptrt.SchedulerConfig(getattr(adaptrt.CapacitySchedulerPolicy, policy), chunking),
        kv_cache_config=adaptrt.KvCacheConfig(enable_block_reuse=reuse, max_tokens=kv_tokens),
        decoding_config=None if for_all is None else adaptrt.DecodingConfig(lookahead_decoding_config=for_all),
        max_num_tokens=max_num_tokens,
        max_batch_size=max_batch_size,
        num_threads=num_threads,
    ) as executor:
        ids = []
        for ask, lookahead, external in asked:
            drafts = None
            if external is not None:
                num_right, others = external
                tokens = [*service.alone(ask)[-1].tokens[:num_right], *others]
                drafts = adaptrt.ExternalDraftTokensConfig(tokens) if tokens else None
            request = service.request(ask, lookahead_config=lookahead, external_draft_tokens_config=drafts)
            ids.append(executor.enqueue_request(request))
        found = [collect(executor, request_id, ask.n) for request_id, (ask, _, _) in zip(ids, asked, strict=True)]
    for (ask, _, _), sequences in zip(asked, found, strict=True):
        assert sequences == service.alone(ask)


# The property above may draw such cases; these tests make sure that they occur.


def test_drafts_are_right_and_wrong(service: Service) -> None:
    lookahead = adaptrt.LookaheadDecodingConfig(6, 4, 4)
    config = adaptrt.DecodingConfig(lookahead_decoding_config=lookahead)
    with service.executor(decoding_config=config) as executor:
        for prompt in range(len(PROMPTS)):
            for adapter in (None, 0, 1):
                ask = Ask(prompt, adapter, 1, 0, 2, 60, prompt % 2 == 0, False, True)
                assert collect(executor, executor.enqueue_request(service.request(ask)), 1) == service.alone(ask)
        computed, right = drafts_of(executor)
    assert 50 < right < computed


def test_sequences_with_drafts_are_paused_and_resume_the_same(service: Service) -> None:
    lookahead = adaptrt.LookaheadDecodingConfig(6, 4, 4)
    check_pauses(service, decoding_config=adaptrt.DecodingConfig(lookahead_decoding_config=lookahead))


def test_text_that_repeats_itself_takes_few_steps(service: Service) -> None:
    # The bias forces the output to repeat the prompt, so nearly every draft is right.
    ask = Ask(5, None, 1, 0, 0, 60, False, False, False)
    bias = np.full(SPEC.vocab_size, -np.inf, np.float32)
    bias[6] = 0.0
    request = service.request(ask, lookahead_config=adaptrt.LookaheadDecodingConfig(8, 3, 4))
    request.embedding_bias = bias
    with service.executor() as executor:
        (result,) = [response.result for response in executor.await_responses(executor.enqueue_request(request))]
        assert result.output_token_ids[0] == [6] * 60
        assert result.decoding_iter < 15
        assert drafts_of(executor) == (60 - result.decoding_iter, 60 - result.decoding_iter)
