"""Batches on networks with every kind of op: tokens, log probs and logits are the same bits as alone."""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adaptrt
from adaptrt._core import DType, QuantAlgo
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.examples import examples
from support.families import FAMILIES, GEMMA4, LATENT, RECURRENT, RELATIVES, save_family
from support.models import save_adapter
from support.serving import Answer, collect, crowd_fields, make_request

# Together they have every op and every number type of engines.
ENGINES = {
    "phi4-mini-longrope": (DType.FLOAT32, None),
    "gemma2": (DType.BFLOAT16, None),
    "gemma3": (DType.FLOAT32, QuantAlgo.W8A8),
    "gpt2": (DType.FLOAT32, QuantAlgo.W8A16),
    "gpt-neox": (DType.BFLOAT16, QuantAlgo.W4A16),
    "cohere2": (DType.FLOAT16, None),
    "granite": (DType.BFLOAT16, QuantAlgo.W8A8),
    "olmo3": (DType.FLOAT32, None),
    "glm4": (DType.BFLOAT16, None),
    "phi2": (DType.FLOAT32, QuantAlgo.W4A16),
    "gpt-oss": (DType.BFLOAT16, None),
    "qwen3.5": (DType.BFLOAT16, None),
    "qwen3-next": (DType.FLOAT32, QuantAlgo.W4A16),
    "hunyuan": (DType.FLOAT16, None),
    "lfm2": (DType.BFLOAT16, QuantAlgo.W8A8),
    "mamba2": (DType.FLOAT32, None),
    "granite4-mamba-moe": (DType.BFLOAT16, None),
    "falcon-h1": (DType.BFLOAT16, QuantAlgo.W8A16),
    "deepseek-v2": (DType.BFLOAT16, None),
    "deepseek-v3": (DType.FLOAT32, QuantAlgo.W8A16),
    "gemma4-shared": (DType.BFLOAT16, QuantAlgo.W8A16),
    "gemma4-moe": (DType.FLOAT16, None),
    "llama4": (DType.BFLOAT16, None),
}
ADAPTERS = [{"r": 5}, {"r": 16, "use_rslora": True}, {"r": 4, "use_dora": True}]
# Lengths below, at and above the windows of 10 and 20 and longrope's 24 tokens, with shared beginnings.
LONG = [2 + position * 7 % 59 for position in range(70)]
PROMPTS = [LONG[:1], LONG[:9], LONG[:19], LONG[:20], LONG[:24], [*LONG[:21], 3, 3], LONG]
MAX_TOKENS = 8
BUILD = BuildConfig(
    max_batch_size=8,
    max_num_tokens=128,
    max_seq_len=128,
    max_beam_width=2,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=16),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)


Beams = tuple[list[list[int]], list[list[float]]]
"""Tokens and log probs of each beam."""


def collect_beams(executor: adaptrt.Executor, request_id: int) -> Beams:
    while True:
        response = executor.await_responses(request_id)[-1]
        assert not response.has_error(), response.error_msg
        if response.result.is_final:
            return response.result.output_token_ids, response.result.log_probs


class Service:
    """A family's engine and adapters; the answer of each (prompt, adapter) alone is computed once."""

    def __init__(self, name: str, directory: Path) -> None:
        dtype, algo = ENGINES[name]
        family = {**FAMILIES, **RELATIVES, **RECURRENT, **LATENT, **GEMMA4}[name]
        model = save_family(family, directory / "model")
        convert_checkpoint(model, directory / "checkpoint", dtype=dtype)
        quantization = None if algo is None else QuantConfig(quant_algo=algo)
        build(directory / "checkpoint", BUILD, directory / "engine", quantization=quantization)
        self.engine = directory / "engine"
        self.configs = [None]
        for seed, fields in enumerate(ADAPTERS):
            adapter = save_adapter(model, directory / f"{seed}", seed, target_modules=family.targets, **fields)
            self.configs.append(adaptrt.LoraConfig.from_peft(seed, adapter, self.engine))
        # One executor for all requests alone: starting one takes longer than a request.
        kv_cache = adaptrt.KvCacheConfig(max_tokens=2048, enable_block_reuse=False)
        self._quiet = self.executor(num_threads=1, max_beam_width=2, kv_cache_config=kv_cache)
        self.alone = cache(self._alone)

    def executor(self, **fields: object) -> adaptrt.Executor:
        return adaptrt.Executor(self.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(**fields))

    def request(self, prompt: int, adapter: int) -> adaptrt.Request:
        return make_request(PROMPTS[prompt], MAX_TOKENS, self.configs[adapter])

    def beam_request(self, prompt: int, adapter: int) -> adaptrt.Request:
        return adaptrt.Request(
            PROMPTS[prompt],
            MAX_TOKENS,
            sampling_config=adaptrt.SamplingConfig(2),
            output_config=adaptrt.OutputConfig(return_log_probs=True, exclude_input_from_output=True),
            lora_config=self.configs[adapter],
        )

    def beams_alone(self, prompt: int, adapter: int) -> Beams:
        return collect_beams(self._quiet, self._quiet.enqueue_request(self.beam_request(prompt, adapter)))

    def _alone(self, prompt: int, adapter: int) -> Answer:
        return collect(self._quiet, self._quiet.enqueue_request(self.request(prompt, adapter)))

    def close(self) -> None:
        self._quiet.shutdown()


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with contextlib.ExitStack() as services:

        @cache
        def made(name: str) -> Service:
            return services.enter_context(contextlib.closing(Service(name, tmp_path_factory.mktemp(name))))

        yield made


@settings(max_examples=examples(40, 200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(list(ENGINES)),
    cases=st.lists(st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, len(ADAPTERS))), min_size=2, max_size=10),
    policy=st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]),
    kv_tokens=st.sampled_from([88, 160, 2048]),
    reuse=st.booleans(),
    drafts=st.booleans(),
    fields=st.fixed_dictionaries(
        {
            "num_threads": st.integers(1, 4),
            "max_num_tokens": st.sampled_from([16, 33, 128]),
            "max_batch_size": st.integers(1, 8),
        }
    ),
)
def test_a_crowd_changes_no_bit(service, name, cases, policy, kv_tokens, reuse, drafts, fields) -> None:
    served = service(name)
    if drafts and (reuse or name not in RECURRENT):  # states are saved where snapshots for reuse are
        lookahead = adaptrt.LookaheadDecodingConfig(3, 2, 3)
        fields["decoding_config"] = adaptrt.DecodingConfig(lookahead_decoding_config=lookahead)
    with served.executor(**crowd_fields(policy, kv_tokens, reuse, **fields)) as executor:
        ids = executor.enqueue_requests([served.request(*case) for case in cases])
        answers = [collect(executor, request_id) for request_id in ids]
    for case, answer in zip(cases, answers, strict=True):
        assert answer.same_bits(served.alone(*case)), (name, case)


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_has_a_crowd(service, name: str) -> None:
    """The property above draws engines at random; this test runs each, with preempted sequences and small chunks."""
    served = service(name)
    cases = [(prompt, (prompt + shift) % (1 + len(ADAPTERS))) for prompt in range(len(PROMPTS)) for shift in range(2)]
    fields = crowd_fields("MAX_UTILIZATION", 88, reuse=False, num_threads=3, max_num_tokens=16)
    with served.executor(**fields) as executor:
        ids = executor.enqueue_requests([served.request(*case) for case in cases])
        for case, request_id in zip(cases, ids, strict=True):
            assert collect(executor, request_id).same_bits(served.alone(*case)), case


@pytest.mark.parametrize("name", [name for name in ENGINES if name in RECURRENT])
def test_states_are_copied_for_beams_and_kept_for_later_requests(service, name: str) -> None:
    """The second crowd continues from snapshots of the first; in both, sequences are preempted."""
    served = service(name)
    cases = [(6, 0), (4, 1), (5, 2), (6, 1), (3, 3)]
    fields = crowd_fields("MAX_UTILIZATION", 104, reuse=True, num_threads=3, max_num_tokens=33, max_beam_width=2)
    stats: list[adaptrt.IterationStats] = []
    with served.executor(**fields) as executor:
        for _ in range(2):
            requests = [make(*case) for case in cases for make in (served.request, served.beam_request)]
            ids = iter(executor.enqueue_requests(requests))
            for case in cases:
                assert collect(executor, next(ids)).same_bits(served.alone(*case)), case
                assert collect_beams(executor, next(ids)) == served.beams_alone(*case), case
            stats += executor.get_latest_iteration_stats()
    assert stats[-1].state_stats is not None
    assert stats[-1].state_stats.reused_snapshots > 0
    assert any(step.inflight_batching_stats.num_paused_requests for step in stats)


@pytest.mark.parametrize("name", [name for name in ENGINES if name in RECURRENT])
def test_states_survive_wrong_drafts_and_restarts(service, name: str, tmp_path: Path) -> None:
    """The second executor continues from the files of the first; in both, sequences are preempted."""
    served = service(name)
    cases = [(6, 0), (4, 1), (5, 2), (6, 1), (3, 3)]
    fields = crowd_fields("MAX_UTILIZATION", 104, reuse=True, num_threads=3, max_num_tokens=33)
    fields["kv_cache_config"] = adaptrt.KvCacheConfig(
        max_tokens=104, host_cache_size=1 << 24, host_cache_dir=str(tmp_path)
    )
    for is_second in (False, True):
        with served.executor(**fields) as executor:
            requests = []
            for place, case in enumerate(cases):
                drafts = list(served.alone(*case).tokens)
                drafts[1 + place] = (drafts[1 + place] + 1) % 60
                requests.append(
                    adaptrt.Request(
                        PROMPTS[case[0]],
                        MAX_TOKENS,
                        output_config=adaptrt.OutputConfig(return_log_probs=True, exclude_input_from_output=True),
                        lora_config=served.configs[case[1]],
                        external_draft_tokens_config=adaptrt.ExternalDraftTokensConfig(drafts),
                    )
                )
            ids = executor.enqueue_requests(requests)
            for case, request_id in zip(cases, ids, strict=True):
                alone = served.alone(*case)
                assert collect_beams(executor, request_id) == ([alone.tokens], [alone.log_probs.generated]), case
            stats = executor.get_latest_iteration_stats()
        drafted = [step.spec_decoding_stats for step in stats if step.spec_decoding_stats is not None]
        num_accepted = sum(step.num_accepted_tokens for step in drafted)
        assert 0 < num_accepted < sum(step.num_draft_tokens for step in drafted)
        if is_second:
            assert stats[-1].state_stats.second_level.read_blocks > 0
