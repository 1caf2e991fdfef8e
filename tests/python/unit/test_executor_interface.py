"""Forms that scripts for TensorRT-LLM's executor use: older names, tensors of other libraries, engines in memory."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import adaptrt
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine

SPEC = ModelSpec()


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("interface")
    model = save_model(SPEC, root / "model")
    adapter = save_adapter(model, root / "adapter", 1, r=4)
    return {"adapter": adapter, "engine": build_engine(model, root, lora_dir=adapter)}


@pytest.fixture
def executor(directories: dict[str, Path]) -> Iterator[adaptrt.Executor]:
    with adaptrt.Executor(directories["engine"]) as made:
        yield made


def answer(executor: adaptrt.Executor, request: adaptrt.Request) -> adaptrt.Result:
    return executor.await_responses(executor.enqueue_request(request))[-1].result


def test_older_names_of_sampling_fields() -> None:
    for old, new in (("random_seed", "seed"), ("min_length", "min_tokens")):
        assert getattr(adaptrt.SamplingConfig(**{old: 2}), new) == 2
        assert getattr(adaptrt.SamplingConfig(**{new: 2}), old) == 2
        both = adaptrt.SamplingConfig(**{old: 4, new: 3})
        assert (getattr(both, old), getattr(both, new)) == (3, 3)
        setattr(both, old, 5)
        assert getattr(both, new) == 5
        with pytest.raises(TypeError, match=rf"^SamplingConfig\.{new} is 'x'"):
            adaptrt.SamplingConfig(**{old: "x"})


def test_older_names_of_request_fields() -> None:
    assert adaptrt.Request([1, 2, 3], 10).max_new_tokens == 10
    request = adaptrt.Request([1, 2, 3], max_new_tokens=20)
    assert (request.max_tokens, request.max_new_tokens) == (20, 20)
    request = adaptrt.Request([1, 2, 3], max_tokens=30, max_new_tokens=40)
    assert (request.max_tokens, request.max_new_tokens) == (30, 30)
    assert pickle.loads(pickle.dumps(request)).max_tokens == 30
    with pytest.raises(TypeError):
        adaptrt.Request([1, 2, 3])
    assert adaptrt.Request.BATCHED_POST_PROCESSOR_NAME == "batched"


def test_the_second_of_two_parameters_was_the_window() -> None:
    old = adaptrt.DynamicBatchConfig(True, 64)
    assert (old.enable_batch_size_tuning, old.enable_max_num_tokens_tuning) == (True, False)
    assert old.dynamic_batch_moving_average_window == 64
    new = adaptrt.DynamicBatchConfig(False, True, 32)
    assert (new.enable_batch_size_tuning, new.enable_max_num_tokens_tuning) == (False, True)
    assert new.dynamic_batch_moving_average_window == 32
    assert adaptrt.DynamicBatchConfig(False, True).enable_max_num_tokens_tuning
    with pytest.raises(TypeError, match=r"^DynamicBatchConfig\.enable_max_num_tokens_tuning is 64"):
        adaptrt.DynamicBatchConfig(True, 64, 32)


@pytest.mark.parametrize("value", [1, 0, 2, 1.0, "True", None, [True]])
def test_only_bools_are_bools(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^KvCacheConfig\.enable_block_reuse is .*; accepted: bool"):
        adaptrt.KvCacheConfig(value)
    assert adaptrt.KvCacheConfig(np.bool_(False)).enable_block_reuse is False


def test_a_requests_adapter_is_a_lora_config(directories: dict[str, Path], executor: adaptrt.Executor) -> None:
    lora = adaptrt.LoraConfig.from_peft(1, directories["adapter"], executor.engine)
    request = adaptrt.Request([1], 1, lora_config=lora)
    for made in (lora, request.lora_config, pickle.loads(pickle.dumps(request)).lora_config):
        assert type(made) is adaptrt.LoraConfig
    with pytest.raises(TypeError, match=r"^LoraConfig\.task_id is 'one'"):
        adaptrt.LoraConfig.from_peft("one", directories["adapter"], executor.engine)


class Exported:
    """An array of a library that supports only __array__."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self._values, dtype)


class ByDLPack:
    """An array of a library that supports only __dlpack__."""

    def __init__(self, values: Any) -> None:
        self._array = np.asarray(values)

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("made_by", [torch.tensor, np.array, Exported, ByDLPack, list])
def test_tokens_and_bias_as_tensors(executor: adaptrt.Executor, made_by: Any) -> None:
    prompt, bias = [3, 4, 5], [0.0] * SPEC.vocab_size
    bias[7] = 1e9
    request = adaptrt.Request(
        made_by(prompt), 3, embedding_bias=made_by(bias), stop_words=[made_by([1, 2])], bad_words=[made_by([8])]
    )
    assert request.input_token_ids == prompt
    assert (request.stop_words, request.bad_words) == ([[1, 2]], [[8]])
    assert isinstance(request.embedding_bias, np.ndarray)
    assert request.embedding_bias.dtype == np.float32
    assert answer(executor, request).output_token_ids == [[3, 4, 5, 7, 7, 7]]
    assert (request.embedding_bias == np.asarray(bias, np.float32)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_a_bias_of_any_real_type(dtype: torch.dtype) -> None:
    request = adaptrt.Request([1], 1, embedding_bias=torch.ones(4, dtype=dtype))
    assert request.embedding_bias is not None
    assert request.embedding_bias.tolist() == [1.0] * 4


@pytest.mark.parametrize("tokens", [torch.tensor([0.5]), torch.tensor([[1]]), torch.tensor([True]), np.array([1.0])])
def test_tensors_that_are_no_tokens(tokens: Any) -> None:
    with pytest.raises(TypeError, match=r"^Request\.input_token_ids is (.|\n)*; accepted: list"):
        adaptrt.Request(tokens, 1)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_logits_go_to_torch_without_a_copy(executor: adaptrt.Executor) -> None:
    output = adaptrt.OutputConfig(return_context_logits=True)
    logits = answer(executor, adaptrt.Request([3, 4, 5], 1, output_config=output)).context_logits
    assert logits is not None
    for make in (torch.from_dlpack, torch.from_numpy):
        tensor = make(logits)
        assert tensor.data_ptr() == logits.ctypes.data
    assert torch.argmax(tensor, -1).tolist() == logits.argmax(-1).tolist()


def test_results_can_be_made_and_set() -> None:
    result = adaptrt.Result()
    assert (result.is_final, result.output_token_ids, result.encoder_output) == (False, [], None)
    result.is_final = result.is_sequence_final = True
    result.output_token_ids = [[1, 2, 3]]
    result.cum_log_probs, result.log_probs = [6.0], [[1.0, 2.0, 3.0]]
    result.context_logits, result.generation_logits = torch.ones(3, 5), np.ones((1, 3, 5))
    result.encoder_output = torch.ones(1, 1)
    result.finish_reasons = [adaptrt.FinishReason.LENGTH]
    result.sequence_index = 1
    for same in (result, pickle.loads(pickle.dumps(result)), adaptrt.Response(1, result).result):
        assert same.is_final
        assert same.is_sequence_final
        assert same.output_token_ids == [[1, 2, 3]]
        assert (same.cum_log_probs, same.log_probs) == ([6.0], [[1.0, 2.0, 3.0]])
        for array, shape in (
            (same.context_logits, (3, 5)), (same.generation_logits, (1, 3, 5)), (same.encoder_output, (1, 1)),
        ):  # fmt: skip
            assert array is not None
            assert (array == np.ones(shape)).all()
        assert same.finish_reasons == [adaptrt.FinishReason.LENGTH]
        assert same.sequence_index == 1
    with pytest.raises(TypeError, match=r"^Result\.log_probs is "):
        result.log_probs = 1


def test_responses_can_be_made() -> None:
    failed = adaptrt.Response(3, "reason", client_id=9)
    assert (failed.request_id, failed.client_id, failed.has_error(), failed.error_msg) == (3, 9, True, "reason")
    with pytest.raises(adaptrt.RequestError, match="reason"):
        _ = failed.result
    response = adaptrt.Response(4, adaptrt.Result(is_final=True))
    assert not response.has_error()
    assert response.result.is_final
    assert response.client_id is None
    with pytest.raises(ValueError, match="error_msg is empty"):
        adaptrt.Response(4, "")


def test_an_engine_in_memory(directories: dict[str, Path], executor: adaptrt.Executor) -> None:
    engine = directories["engine"]
    content, config = (engine / "rank0.engine").read_bytes(), (engine / "config.json").read_text()
    lora = adaptrt.LoraConfig.from_peft(1, directories["adapter"], executor.engine)
    expected = [
        answer(executor, adaptrt.Request([3, 4, 5], 8)).output_token_ids,
        answer(executor, adaptrt.Request([3, 4, 5], 8, lora_config=lora)).output_token_ids,
    ]
    for buffer in (content, bytearray(content), memoryview(content)):
        with adaptrt.Executor(buffer, config, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(1)) as other:
            if isinstance(buffer, bytearray):
                buffer[:] = bytes(len(buffer))  # the executor must have copied it
            assert answer(other, adaptrt.Request([3, 4, 5], 8)).output_token_ids == expected[0]
            again = adaptrt.LoraConfig.from_peft(1, directories["adapter"], other.engine)
            request = adaptrt.Request([3, 4, 5], 8, lora_config=again)
            assert answer(other, request).output_token_ids == expected[1]
            assert other.adapters.names == ()
    with adaptrt.Executor(engine_buffer=content, json_config_str=config) as other:
        assert other.is_alive


def test_an_engine_in_memory_that_is_damaged(directories: dict[str, Path]) -> None:
    engine = directories["engine"]
    content, config = (engine / "rank0.engine").read_bytes(), (engine / "config.json").read_text()
    changed = bytearray(content)
    changed[-1] ^= 1
    for damaged in (changed, content[:-1], b"", content[:4]):
        with pytest.raises(adaptrt.EngineError, match="engine in memory"):
            adaptrt.Executor(damaged, config)
    for text in ("{}", "", json.dumps({**json.loads(config), "version": "0"})):
        with pytest.raises(adaptrt.EngineError, match="engine in memory"):
            adaptrt.Executor(content, text)
    with pytest.raises(TypeError, match="json_config_str is bytes; accepted: str"):
        adaptrt.Executor(content, config.encode())
    with pytest.raises(TypeError):
        adaptrt.Executor(content)


def test_an_engine_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(adaptrt.EngineError, match="Bla: File does not exist"):
        adaptrt.Executor("Bla", adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig(1))
    (tmp_path / "file").touch()
    with pytest.raises(adaptrt.EngineError, match="file: is not a directory"):
        adaptrt.Executor(tmp_path / "file")


def test_hints_that_only_tune_are_taken(directories: dict[str, Path], executor: adaptrt.Executor) -> None:
    request = adaptrt.Request([3, 4, 5], 8)
    expected = answer(executor, request).output_token_ids
    config = adaptrt.ExecutorConfig(
        kv_cache_config=adaptrt.KvCacheConfig(max_attention_window=[704]),
        scheduler_config=adaptrt.SchedulerConfig(dynamic_batch_config=adaptrt.DynamicBatchConfig(True, 128)),
        peft_cache_config=adaptrt.PeftCacheConfig(
            num_put_workers=4, num_ensure_workers=4, num_copy_streams=4, max_pages_per_block_host=1,
            max_pages_per_block_device=1,
        ),
        extended_runtime_perf_knob_config=adaptrt.ExtendedRuntimePerfKnobConfig(multi_block_mode=False),
        recv_poll_period_ms=50, max_seq_idle_microseconds=1, use_gpu_direct_storage=True,
    )  # fmt: skip
    request.sampling_config = adaptrt.SamplingConfig(
        length_penalty=0.5, early_stopping=1, beam_search_diversity_rate=0.5
    )
    request.pad_id = 2
    with adaptrt.Executor(directories["engine"], executor_config=config) as other:
        assert answer(other, request).output_token_ids == expected


def test_statistics_have_all_of_tensorrt_llms_keys(executor: adaptrt.Executor) -> None:
    answer(executor, adaptrt.Request([3], 2))
    first = executor.get_latest_iteration_stats()[0]
    assert first.new_active_requests_queue_latency_ms > 0
    stats = json.loads(first.to_json_str())
    assert stats["newActiveRequestsQueueLatencyMS"] == first.new_active_requests_queue_latency_ms
    assert stats["staticBatchingStats"] is None
    assert json.loads(adaptrt.RequestStats().to_json_str())["disServingStats"] is None
    static = adaptrt.IterationStats(static_batching_stats=adaptrt.StaticBatchingStats(num_gen_tokens=3))
    assert json.loads(static.to_json_str())["staticBatchingStats"]["numGenTokens"] == 3
    assert stats["specDecodingStats"] is None
    drafts = adaptrt.IterationStats(spec_decoding_stats=adaptrt.SpecDecodingStats(4, 3, 1, 4.0, 0.5, 0.25))
    assert json.loads(drafts.to_json_str())["specDecodingStats"] == {
        "numDraftTokens": 4, "numAcceptedTokens": 3, "numRequestsWithDraftTokens": 1, "acceptanceLength": 4.0,
        "iterLatencyMS": 0.5, "draftOverhead": 0.25,
    }  # fmt: skip
    request = adaptrt.RequestStats(dis_serving_stats=adaptrt.DisServingRequestStats(kv_cache_transfer_ms=0.5))
    assert json.loads(request.to_json_str())["disServingStats"]["kvCacheTransferMS"] == 0.5
    assert executor.get_latest_debug_tensors() == []
