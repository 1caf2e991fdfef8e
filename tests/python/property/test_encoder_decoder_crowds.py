"""Batches with equal encoder inputs: keeping, sharing and evicting them changes no bit of any answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.encoder_decoders import MODELS, save_adapter_of, save_encoder_decoder, tokens_of
from support.examples import examples

CONFIG = BuildConfig(
    max_batch_size=8,
    max_num_tokens=48,
    max_seq_len=48,
    max_encoder_input_len=40,
    max_beam_width=2,
    tokens_per_block=8,
    lora_config=LoraBuildConfig(max_lora_rank=8),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
INPUTS = [tokens_of(length, 3) for length in (1, 8, 9, 24, 40)]
STARTS = [tokens_of(length, 4) for length in (1, 11)]
ADAPTERS: list[dict[str, object]] = [{"r": 5}, {"r": 4, "use_dora": True}]


@dataclasses.dataclass(frozen=True)
class Guest:
    """A request: indices of an encoder input, a decoder start and an adapter, and its options."""

    encoder: int
    start: int
    adapter: int | None
    beams: bool
    wants_output: bool


class Service:
    """A model, its adapters and its engine; the answer to each guest alone is computed once."""

    def __init__(self, name: str, directory: Path) -> None:
        kind = MODELS[name]
        model = save_encoder_decoder(kind, directory / "model")
        self.engine = directory / "engine"
        build(Checkpoint.of_model(model), CONFIG, self.engine)
        self._loras: list[adaptrt.LoraConfig] = []
        for seed, lora in enumerate(ADAPTERS):
            adapter = save_adapter_of(kind, model, directory / str(seed), seed, **lora)
            self._loras.append(adaptrt.LoraConfig.from_peft(seed, adapter, self.engine))
        # One executor for all requests alone: starting one takes longer than a request.
        self.quiet = self.executor(num_threads=1, kv_cache_config=adaptrt.KvCacheConfig(enable_block_reuse=False))
        self._alone: dict[Guest, list[bytes]] = {}

    def request(self, guest: Guest) -> adaptrt.Request:
        return adaptrt.Request(
            STARTS[guest.start],
            7,
            encoder_input_token_ids=INPUTS[guest.encoder],
            sampling_config=adaptrt.SamplingConfig(beam_width=2 if guest.beams else 1),
            lora_config=None if guest.adapter is None else self._loras[guest.adapter],
            output_config=adaptrt.OutputConfig(
                return_context_logits=True, return_log_probs=True, return_encoder_output=guest.wants_output
            ),
        )

    def executor(self, **fields: object) -> adaptrt.Executor:
        config = adaptrt.ExecutorConfig(max_beam_width=2, enable_chunked_context=True, **fields)
        return adaptrt.Executor(self.engine, adaptrt.ModelType.ENCODER_DECODER, config)

    def alone(self, guest: Guest) -> list[bytes]:
        if guest not in self._alone:
            self._alone[guest] = bits(self.quiet, self.quiet.enqueue_request(self.request(guest)))
        return self._alone[guest]


def bits(executor: adaptrt.Executor, request_id: int) -> list[bytes]:
    (response,) = executor.await_responses(request_id)
    assert not response.has_error(), response.error_msg
    result = response.result
    parts = [result.output_token_ids, result.log_probs, result.cum_log_probs, result.context_logits]
    if result.encoder_output is not None:
        parts.append(result.encoder_output)
    return [np.asarray(part).tobytes() for part in parts]


@pytest.fixture(scope="module", params=["t5", "bart"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(request.param, tmp_path_factory.mktemp(request.param))
    with made.quiet:
        yield made


guests = st.builds(
    Guest,
    st.integers(0, len(INPUTS) - 1),
    st.integers(0, len(STARTS) - 1),
    st.none() | st.integers(0, len(ADAPTERS) - 1),
    st.booleans(),
    st.sampled_from([False, False, True]),
)


@settings(max_examples=examples(20, 100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    crowd=st.lists(guests, min_size=1, max_size=16),
    policy=st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]),
    kv_tokens=st.sampled_from([80, 160, 2048]),
    reuse=st.booleans(),
    num_threads=st.integers(1, 3),
)
def test_a_crowd_changes_no_bit(
    service: Service, crowd: list[Guest], policy: str, kv_tokens: int, reuse: bool, num_threads: int
) -> None:
    with service.executor(
        num_threads=num_threads,
        scheduler_config=adaptrt.SchedulerConfig(getattr(adaptrt.CapacitySchedulerPolicy, policy)),
        kv_cache_config=adaptrt.KvCacheConfig(max_tokens=kv_tokens, enable_block_reuse=reuse),
    ) as executor:
        ids = executor.enqueue_requests([service.request(guest) for guest in crowd])
        found = [bits(executor, request_id) for request_id in ids]
        stats = executor.get_latest_iteration_stats()[-1].cross_kv_cache_stats
    assert found == [service.alone(guest) for guest in crowd]
    assert stats is not None
    assert stats.used_num_blocks == 0
    assert reuse or stats.reused_blocks == 0
    inputs = {(guest.encoder, guest.adapter) for guest in crowd if not guest.wants_output}
    if reuse and kv_tokens == 2048 and len(inputs) < sum(not guest.wants_output for guest in crowd):
        assert stats.reused_blocks > 0
