"""Configurations, requests and statistics: TensorRT-LLM's names and defaults, in-place changes, pickling, refusals."""

from __future__ import annotations

import copy
import datetime
import json
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch

import adaptrt

# TensorRT-LLM's constructors, in their order; ours may have more parameters, after these.
REFERENCE: dict[type, dict[str, Any]] = {
    adaptrt.ExecutorConfig: {
        "max_beam_width": 1, "scheduler_config": adaptrt.SchedulerConfig(), "kv_cache_config": adaptrt.KvCacheConfig(),
        "enable_chunked_context": False, "normalize_log_probs": True, "iter_stats_max_iterations": 1000,
        "request_stats_max_iterations": 0, "batching_type": adaptrt.BatchingType.INFLIGHT, "max_batch_size": None,
        "max_num_tokens": None, "parallel_config": None, "peft_cache_config": adaptrt.PeftCacheConfig(),
        "logits_post_processor_config": None, "decoding_config": None, "use_gpu_direct_storage": False,
        "gpu_weights_percent": 1.0, "max_queue_size": None,
        "extended_runtime_perf_knob_config": adaptrt.ExtendedRuntimePerfKnobConfig(), "debug_config": None,
        "recv_poll_period_ms": 0, "max_seq_idle_microseconds": 180000000, "spec_dec_config": None,
        "guided_decoding_config": None, "additional_model_outputs": None, "cache_transceiver_config": None,
        "gather_generation_logits": False, "mm_embedding_offloading": False, "enable_trt_overlap": False,
    },
    adaptrt.Request: {
        "input_token_ids": ..., "max_tokens": ..., "streaming": False, "sampling_config": adaptrt.SamplingConfig(),
        "output_config": adaptrt.OutputConfig(), "end_id": None, "pad_id": None, "position_ids": None,
        "bad_words": None, "stop_words": None, "embedding_bias": None, "external_draft_tokens_config": None,
        "prompt_tuning_config": None, "lora_config": None, "lookahead_config": None, "kv_cache_retention_config": None,
        "logits_post_processor_name": None, "logits_post_processor": None, "encoder_input_token_ids": None,
        "client_id": None, "return_all_generated_tokens": False, "priority": 0.5, "num_return_sequences": 1,
        "eagle_config": None, "guided_decoding_params": None, "allotted_time_ms": None, "cache_salt_id": None,
    },
    adaptrt.PeftCacheConfig: {
        "num_host_module_layer": 0, "num_device_module_layer": 0, "optimal_adapter_size": 8, "max_adapter_size": 64,
        "num_put_workers": 1, "num_ensure_workers": 1, "num_copy_streams": 1, "max_pages_per_block_host": 24,
        "max_pages_per_block_device": 8, "device_cache_percent": None, "host_cache_size": None,
        "lora_prefetch_dir": None, "lora_storage": "exact",
    },
    adaptrt.SamplingConfig: {
        "beam_width": 1, **dict.fromkeys([
            "top_k", "top_p", "top_p_min", "top_p_reset_ids", "top_p_decay", "seed", "temperature", "min_tokens",
            "beam_search_diversity_rate", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "length_penalty", "early_stopping", "no_repeat_ngram_size", "num_return_sequences", "min_p",
            "beam_width_array",
        ]),
    },
    adaptrt.OutputConfig: {
        **dict.fromkeys([
            "return_log_probs", "return_context_logits", "return_generation_logits", "exclude_input_from_output",
            "return_encoder_output", "return_perf_metrics",
        ], False),
        "additional_model_outputs": None,
    },
    adaptrt.KvCacheConfig: {
        "enable_block_reuse": True, "max_tokens": None, "max_attention_window": None, "sink_token_length": None,
        "free_gpu_memory_fraction": None, "host_cache_size": None, "onboard_blocks": True,
        "cross_kv_cache_fraction": None, "secondary_offload_min_priority": None, "event_buffer_max_size": 0,
        "enable_partial_reuse": True, "copy_on_partial_reuse": True, "use_uvm": False,
    },
    adaptrt.SchedulerConfig: {
        "capacity_scheduler_policy": adaptrt.CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
        "context_chunking_policy": None, "dynamic_batch_config": None,
    },
    adaptrt.LoraConfig: {"task_id": ..., "weights": None, "config": None},
    adaptrt.DynamicBatchConfig: {
        "enable_batch_size_tuning": False, "enable_max_num_tokens_tuning": False,
        "dynamic_batch_moving_average_window": 128,
    },
    adaptrt.ExtendedRuntimePerfKnobConfig: {
        "multi_block_mode": True, "enable_context_fmha_fp32_acc": False, "cuda_graph_mode": False,
        "cuda_graph_cache_size": 0,
    },
}  # fmt: skip

ENUMS = {
    adaptrt.ModelType: ["DECODER_ONLY", "ENCODER_ONLY", "ENCODER_DECODER"],
    adaptrt.BatchingType: ["STATIC", "INFLIGHT"],
    adaptrt.CapacitySchedulerPolicy: ["MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"],
    adaptrt.ContextChunkingPolicy: ["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"],
    adaptrt.FinishReason: ["NOT_FINISHED", "END_ID", "STOP_WORDS", "LENGTH", "TIMED_OUT", "CANCELLED"],
    adaptrt.RequestStage: [
        "QUEUED", "CONTEXT_IN_PROGRESS", "GENERATION_IN_PROGRESS", "GENERATION_COMPLETE", "ENCODER_IN_PROGRESS",
    ],
}  # fmt: skip

REQUIRED = {adaptrt.Request: {"input_token_ids": [1, 2], "max_tokens": 3}, adaptrt.LoraConfig: {"task_id": 7}}


def test_names_of_perf_metrics_are_tensorrt_llms() -> None:
    assert set(properties(adaptrt.TimingMetrics)) == {
        "arrival_time", "first_scheduled_time", "first_token_time", "last_token_time", "kv_cache_transfer_start",
        "kv_cache_transfer_end", "kv_cache_size",
    }  # fmt: skip
    assert set(properties(adaptrt.KvCacheMetrics)) == {
        "num_total_allocated_blocks", "num_new_allocated_blocks", "num_reused_blocks", "num_missed_blocks",
        "kv_cache_hit_rate",
    }  # fmt: skip
    assert set(properties(adaptrt.SpeculativeDecodingMetrics)) == {
        "acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens",
    }  # fmt: skip
    assert set(properties(adaptrt.RequestPerfMetrics)) == {
        "timing_metrics", "kv_cache_metrics", "speculative_decoding", "first_iter", "last_iter", "iter",
    }  # fmt: skip


def test_times_are_kept_to_the_microsecond() -> None:
    times = adaptrt.TimingMetrics(arrival_time=datetime.timedelta(days=12, microseconds=5))
    assert times.arrival_time == datetime.timedelta(days=12, microseconds=5)
    assert times.first_token_time == datetime.timedelta(0)
    assert pickle.loads(pickle.dumps(times)) == times
    with pytest.raises(TypeError, match=r"TimingMetrics.arrival_time is 3 \(int\); accepted: timedelta"):
        times.arrival_time = 3  # type: ignore[assignment]


def properties(cls: type) -> list[str]:
    return [name for name, value in vars(cls).items() if isinstance(value, property)]


@pytest.mark.parametrize("cls", REFERENCE, ids=lambda cls: cls.__name__)
def test_names_order_and_defaults_are_tensorrt_llms(cls: type) -> None:
    instance = cls(**REQUIRED.get(cls, {}))
    for name, default in REFERENCE[cls].items():
        if default is not ...:
            assert getattr(instance, name) == default, name
    signature = cls.__init__.__doc__ or ""
    parameters = [name for name in re.findall(r"[(,] (?:\*, )?(\w+): ", signature) if name in REFERENCE[cls]]
    positions = [signature.index(f" {name}: ") for name in REFERENCE[cls]]
    assert positions == sorted(positions)
    assert set(parameters) >= set(list(REFERENCE[cls])[1:]) - {"self"}


@pytest.mark.parametrize("enum", ENUMS, ids=lambda enum: enum.__name__)
def test_enums_have_tensorrt_llms_members(enum: type) -> None:
    assert [member.name for member in enum] == ENUMS[enum]
    assert all(pickle.loads(pickle.dumps(member)) is member for member in enum)


def test_positional_forms() -> None:
    request = adaptrt.Request([1, 2], 5, streaming=True)
    assert (request.input_token_ids, request.max_tokens, request.streaming) == ([1, 2], 5, True)
    assert adaptrt.SamplingConfig(1).beam_width == 1
    assert adaptrt.LoraConfig(3, None, None).task_id == 3
    # TensorRT-LLM's seven fields, then ours.
    output = adaptrt.OutputConfig(False, False, False, False, False, False, None, 7, True)
    assert (output.top_log_probs, output.return_prompt_log_probs) == (7, True)
    assert (adaptrt.OutputConfig().top_log_probs, adaptrt.OutputConfig().return_prompt_log_probs) == (0, False)
    assert adaptrt.SchedulerConfig().adapter_fairness
    with pytest.raises(TypeError):
        adaptrt.Request([1], 2, True)
    with pytest.raises(TypeError):
        adaptrt.SamplingConfig(1, 50)
    with pytest.raises(TypeError):
        adaptrt.Request([1])
    with pytest.raises(TypeError):
        adaptrt.ExecutorConfig(max_batchsize=3)


def test_a_set_is_no_list() -> None:
    """Its order is not the caller's."""
    with pytest.raises(
        TypeError, match=r"Result\.cum_log_probs is \{1\.0\} \(set\); accepted: None, list of \(float\)"
    ):
        adaptrt.Result(cum_log_probs={1.0})
    result = adaptrt.Result(output_token_ids=[[5]])
    with pytest.raises(TypeError, match=r"Result\.output_token_ids is frozenset"):
        result.output_token_ids = frozenset()
    assert result.output_token_ids == [[5]]


def test_structs_inside_are_changed_in_place() -> None:
    config = adaptrt.ExecutorConfig()
    config.kv_cache_config.max_tokens = 512
    config.peft_cache_config = adaptrt.PeftCacheConfig()
    config.peft_cache_config.max_adapter_size = 8
    assert config.kv_cache_config.max_tokens == 512
    assert config.peft_cache_config.max_adapter_size == 8
    assert adaptrt.ExecutorConfig().kv_cache_config.max_tokens is None
    cache = config.peft_cache_config
    cache.lora_prefetch_dir = "somewhere" * 20
    config.peft_cache_config = None
    assert cache == adaptrt.PeftCacheConfig()


@pytest.mark.parametrize(
    "value",
    [
        adaptrt.ExecutorConfig(
            max_batch_size=3,
            peft_cache_config=adaptrt.PeftCacheConfig(host_cache_size=1 << 20),
            kv_cache_config=adaptrt.KvCacheConfig(max_tokens=99),
        ),
        adaptrt.SamplingConfig(top_k=5, seed=2**64 - 1, temperature=0.5),
        adaptrt.OutputConfig(return_log_probs=True),
        adaptrt.OutputConfig(top_log_probs=5, return_prompt_log_probs=True),
        adaptrt.SchedulerConfig(adaptrt.CapacitySchedulerPolicy.MAX_UTILIZATION),
        adaptrt.PeftCacheConfig(lora_prefetch_dir="a"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_pickling_copying_and_equality(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value
    assert copy.deepcopy(value) == value
    assert value != type(value)()
    assert type(value).__name__ in repr(value)


def test_requests_are_pickled_with_their_adapter() -> None:
    lora = adaptrt.LoraConfig(4, np.ones((1, 2), np.float16), np.ones((1, 3), np.int32))
    request = adaptrt.Request([1, 2], 3, lora_config=lora, allotted_time_ms=1500, stop_words=[[5]])
    again = pickle.loads(pickle.dumps(request))
    assert again.input_token_ids == [1, 2]
    assert again.stop_words == [[5]]
    assert again.allotted_time_ms == datetime.timedelta(milliseconds=1500)
    np.testing.assert_array_equal(again.lora_config.weights, lora.weights)


def test_times_are_timedeltas_or_milliseconds() -> None:
    for time in (250, 250.0, datetime.timedelta(seconds=0.25)):
        assert adaptrt.Request([1], 1, allotted_time_ms=time).allotted_time_ms == datetime.timedelta(milliseconds=250)
    for wrong in (float("nan"), "1", True):
        with pytest.raises(TypeError):
            adaptrt.Request([1], 1, allotted_time_ms=wrong)


def test_arrays_are_taken_for_tokens_and_bias() -> None:
    request = adaptrt.Request(np.array([4, 5]), np.int64(3), embedding_bias=np.array([0.5, 1.0], np.float32))
    assert request.input_token_ids == [4, 5]
    assert isinstance(request.embedding_bias, np.ndarray)
    assert request.embedding_bias.tolist() == [0.5, 1.0]
    assert request.embedding_bias.dtype == np.float32
    request.embedding_bias = torch.tensor([0.25, float("-inf")], dtype=torch.float64)
    assert request.embedding_bias.tolist() == [0.25, float("-inf")]
    assert pickle.loads(pickle.dumps(request)).embedding_bias.tolist() == [0.25, float("-inf")]
    assert not request.embedding_bias.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        request.embedding_bias[0] = 1.0


def test_a_config_tells_all_that_is_wrong() -> None:
    config = adaptrt.ExecutorConfig(
        max_beam_width=0,
        parallel_config=object(),
        kv_cache_config=adaptrt.KvCacheConfig(onboard_blocks=False, use_uvm=True),
        mm_embedding_offloading=True,
        enable_trt_overlap=True,
        backend="pytorch",
        num_threads=0,
        max_queue_size=0,
    )
    problems = "; ".join(config.validate())
    for part in ("max_beam_width is 0", "parallel_config is given (object)", "kv_cache_config.onboard_blocks",
                 "kv_cache_config.use_uvm is True; accepted: False", "backend is given (str)",
                 "mm_embedding_offloading is True; accepted: False", "num_threads is 0",
                 "max_queue_size is 0"):  # fmt: skip
        assert part in problems
    assert "enable_trt_overlap" not in problems
    assert adaptrt.ExecutorConfig().validate() == []
    assert adaptrt.ExecutorConfig(enable_trt_overlap=True).validate() == []


def test_equal_progress_needs_chunks() -> None:
    scheduler = adaptrt.SchedulerConfig(context_chunking_policy=adaptrt.ContextChunkingPolicy.EQUAL_PROGRESS)
    (problem,) = adaptrt.ExecutorConfig(scheduler_config=scheduler).validate()
    assert problem.startswith("scheduler_config.context_chunking_policy is EQUAL_PROGRESS, but enable_chunked_context")
    assert adaptrt.ExecutorConfig(scheduler_config=scheduler, enable_chunked_context=True).validate() == []


def test_statistics_are_json() -> None:
    stats = adaptrt.IterationStats(
        timestamp='say "hi"\n', iter=3, kv_cache_stats=adaptrt.KvCacheStats(max_num_blocks=8)
    )
    decoded = json.loads(stats.to_json_str())
    assert decoded["timestamp"] == 'say "hi"\n'
    assert decoded["iter"] == 3
    assert decoded["iterLatencyMS"] == 0
    assert decoded["kvCacheStats"]["maxNumBlocks"] == 8
    assert decoded["inflightBatchingStats"] is None
    request = adaptrt.RequestStats(stage=adaptrt.RequestStage.CONTEXT_IN_PROGRESS)
    assert json.loads(request.to_json_str())["stage"] == "CONTEXT_IN_PROGRESS"


def test_lists_of_structs_outlive_what_they_came_from() -> None:
    stats = adaptrt.RequestStatsPerIteration(iter=1, request_stats=[adaptrt.RequestStats(id=i) for i in range(100)])
    first = stats.request_stats
    stats.request_stats = [adaptrt.RequestStats(id=7)] * 1000
    del stats
    assert [each.id for each in first] == list(range(100))


def test_every_exported_name_exists() -> None:
    for name in adaptrt.__all__:
        assert getattr(adaptrt, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = adaptrt.nonsense


def test_guides_are_whole_when_they_are_constructed() -> None:
    kind = adaptrt.GuidedDecodingParams.GuideType
    for guide_type in (kind.JSON_SCHEMA, kind.REGEX, kind.EBNF_GRAMMAR, kind.STRUCTURAL_TAG):
        with pytest.raises(
            adaptrt.RequestError, match="GuidedDecodingParams: guide is None; expected a guide, because only"
        ):
            adaptrt.GuidedDecodingParams(guide_type)
    with pytest.raises(adaptrt.RequestError, match="guide is given, but guide_type is JSON"):
        adaptrt.GuidedDecodingParams(kind.JSON, "{}")
    assert adaptrt.GuidedDecodingParams(kind.JSON).guide is None


def test_fields_of_newer_requests_keep_their_objects() -> None:
    values = {
        "multimodal_embedding": [1.0],
        "multimodal_input": adaptrt.MultimodalInput([[1]], [1], [1]),
        "mrope_config": adaptrt.MropeConfig(np.ones(2), -1),
        "context_phase_params": adaptrt.ContextPhaseParams([1], 2),
    }
    request = adaptrt.Request([1], 1, **values)
    again = pickle.loads(pickle.dumps(request))
    assert adaptrt.Request([1], 1).multimodal_embedding is None
    both, context = adaptrt.RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION, adaptrt.RequestType(1)
    assert adaptrt.Request([1], 1).request_type == both
    assert pickle.loads(pickle.dumps(adaptrt.Request([1], 1, request_type=context))).request_type == context
    for name, value in values.items():
        assert getattr(request, name) is value
        assert getattr(again, name) == value
    result = adaptrt.Result()
    result.additional_outputs = [adaptrt.AdditionalOutput("topKLogits", np.ones(2))]
    assert pickle.loads(pickle.dumps(result)).additional_outputs == result.additional_outputs
