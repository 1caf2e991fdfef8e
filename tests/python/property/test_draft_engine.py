"""A draft engine changes no bit of a request's tokens, log probs and logits.

This holds in any batch, chunking and cache, for any drafts and any memory of the draft engine.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adaptrt
from support.models import ModelSpec, save_adapter
from support.serving import build_random_engine
from support.speculation import ADAPTERS, PROMPTS, SPEC, Ask, Service, asks, check_pauses, collect, drafts_of

SMALL = ModelSpec(vocab_size=SPEC.vocab_size, num_hidden_layers=1)
BLOCK_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A target with its adapters, and draft engines with theirs: the target itself, and a smaller model."""

    target: Service
    draft_engines: list[Path]
    draft_adapters: list[list[adaptrt.LoraConfig]]

    def config(self, engine: int, num_blocks: int, max_draft_len: int) -> adaptrt.DraftTargetDecodingConfig:
        block_bytes = BLOCK_TOKENS * 4096  # approximate; only few or many blocks matter
        return adaptrt.DraftTargetDecodingConfig(
            max_draft_len, str(self.draft_engines[engine]), kv_cache_size=num_blocks * block_bytes
        )


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    directory = tmp_path_factory.mktemp("draft-engine")
    engines, adapters = [], []
    for name, spec in (("target", SPEC), ("small", SMALL)):
        folder = directory / name
        folder.mkdir()
        model, engine = build_random_engine(spec, folder, "float32", tokens_per_block=BLOCK_TOKENS)
        engines.append(engine)
        adapters.append([save_adapter(model, folder / f"adapter-{i}", i, **lora) for i, lora in enumerate(ADAPTERS)])
    loras = [
        [adaptrt.LoraConfig.from_peft(i, path, engine) for i, path in enumerate(paths)]
        for engine, paths in zip(engines, adapters, strict=True)
    ]
    return Drafting(Service(engines[0], adapters[0]), engines, loras)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(
        st.tuples(asks, st.none() | st.integers(0, len(ADAPTERS) - 1), st.booleans()), min_size=1, max_size=8
    ),
    engine=st.integers(0, 1),
    num_blocks=st.sampled_from([1, 6, 64]),
    max_draft_len=st.integers(1, 6),
    policy=st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]),
    kv_tokens=st.sampled_from([176, 256, 4096]),
    reuse=st.booleans(),
    max_num_tokens=st.sampled_from([3, 33, 1024]),
    max_batch_size=st.integers(3, 8),
    num_threads=st.integers(1, 3),
)
def test_a_draft_engine_changes_no_bit(
    drafting, asked, engine, num_blocks, max_draft_len, policy, kv_tokens, reuse, max_num_tokens, max_batch_size,
    num_threads,
) -> None:  # fmt: skip
    service = drafting.target
    with service.executor(
        enable_chunked_context=True,
        scheduler_config=adaptrt.SchedulerConfig(getattr(adaptrt.CapacitySchedulerPolicy, policy)),
        kv_cache_config=adaptrt.KvCacheConfig(enable_block_reuse=reuse, max_tokens=kv_tokens),
        draft_target_decoding_config=drafting.config(engine, num_blocks, max_draft_len),
        max_num_tokens=max_num_tokens,
        max_batch_size=max_batch_size,
        num_threads=num_threads,
    ) as executor:
        ids = []
        for ask, draft_adapter, has_lookahead in asked:
            request = service.request(
                ask,
                draft_lora_config=None if draft_adapter is None else drafting.draft_adapters[engine][draft_adapter],
                lookahead_config=adaptrt.LookaheadDecodingConfig(4, 3, 4) if has_lookahead else None,
            )
            ids.append(executor.enqueue_request(request))
        found = [collect(executor, request_id, ask.n) for request_id, (ask, _, _) in zip(ids, asked, strict=True)]
    for (ask, _, _), sequences in zip(asked, found, strict=True):
        assert sequences == service.alone(ask)


# The property above may draw such cases; these tests make sure that they occur.


def test_the_model_itself_is_always_right(drafting: Drafting) -> None:
    service = drafting.target
    with service.executor(draft_target_decoding_config=drafting.config(0, 64, 4)) as executor:
        for prompt in range(len(PROMPTS)):
            for adapter in (None, 0, 1):
                ask = Ask(prompt, adapter, 1, 0, 0, 30, False, False, False)
                lora = None if adapter is None else drafting.draft_adapters[0][adapter]
                request = service.request(ask, draft_lora_config=lora)
                request.bad_words = None  # the draft engine does not know bad words
                (result,) = [one.result for one in executor.await_responses(executor.enqueue_request(request))]
                assert result.decoding_iter < 10
        steps = executor.get_latest_iteration_stats()
    stats = steps[-1].speculation_stats
    assert stats.accepted_tokens == stats.draft_tokens > 0
    assert stats.draft_engine is not None
    assert stats.draft_engine.error == ""
    assert steps[-1].cpu_mem_usage > stats.draft_engine.mem_usage > 0


def test_a_smaller_model_is_right_and_wrong(drafting: Drafting) -> None:
    service = drafting.target
    with service.executor(draft_target_decoding_config=drafting.config(1, 64, 4)) as executor:
        for prompt in range(len(PROMPTS)):
            for seed in range(6):
                ask = Ask(prompt, None, 1, seed, 2, 60, True, False, False)
                assert collect(executor, executor.enqueue_request(service.request(ask)), 1) == service.alone(ask)
        computed, right = drafts_of(executor)
    assert 0 < right < computed


def test_sequences_are_paused_and_resume_the_same(drafting: Drafting) -> None:
    check_pauses(drafting.target, draft_target_decoding_config=drafting.config(0, 64, 4))


def test_other_vocabularies_are_refused(drafting: Drafting, tmp_path: Path) -> None:
    _, other = build_random_engine(ModelSpec(vocab_size=SPEC.vocab_size + 1), tmp_path)
    config = adaptrt.DraftTargetDecodingConfig(speculative_model_dir=str(other))
    with pytest.raises(adaptrt.ConfigError, match=r"the draft engine's vocab_size is 14; accepted: the engine's, 13"):
        drafting.target.executor(draft_target_decoding_config=config)
    with pytest.raises(adaptrt.ConfigError, match="speculative_model_dir is empty; accepted: the directory"):
        drafting.target.executor(draft_target_decoding_config=adaptrt.DraftTargetDecodingConfig())
