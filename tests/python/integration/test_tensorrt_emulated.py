"""TensorRT engine directories served by the ordinary executor without a GPU: emulated execution contexts and kernels,
against the native engine of the same checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import adaptrt_cuda_emulated
import numpy as np
import pytest

import adaptrt
from support.adapter_crowds import SMALL, SMALL_CROWD, TOLERANCE, Served, answers_of, make_served
from support.emulated_engine import emulated_engine
from support.prompts import save_virtual_tokens
from support.serving import collect, make_request
from support.stand_in_engine import StandInEngine, check_answer
from support.tensorrt_plans import needs_tensorrt_rtx

pytestmark = needs_tensorrt_rtx


@pytest.fixture(scope="module")
def float16(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(SMALL, "float16", tmp_path_factory.mktemp("float16"), "8.0")


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(SMALL, "bfloat16", tmp_path_factory.mktemp("bfloat16"), "8.0")


def emulated(served: Served) -> StandInEngine:
    return emulated_engine(served.directory / "tensorrt", served.checkpoint)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_a_crowd_of_adapters_gets_the_native_engines_tokens(dtype: str, request: pytest.FixtureRequest) -> None:
    served: Served = request.getfixturevalue(dtype)
    expected, _ = answers_of(served.native(), served.adapters, SMALL.executor_config(), SMALL_CROWD)
    engine = emulated(served)
    actual, cache = answers_of(engine, served.adapters, SMALL.executor_config(num_copy_streams=2), SMALL_CROWD)
    compared = sum(check_answer(*pair, TOLERANCE[dtype]) for pair in zip(actual, expected, strict=True))
    # Few answers reach a choice within the tolerance, after which they are not compared.
    assert compared >= 0.8 * sum(len(answer.tokens) for answer in expected)
    # The cache had room for only a few adapters at a time, so it evicted some.
    assert cache.device_evictions > 0
    prefill, decode = engine.contexts
    assert prefill.num_runs > 0
    captures, launches = engine.device.calls("capture"), engine.device.calls("launch")
    assert captures > 0
    assert launches > 0
    # Every decode ran once, either directly or from a graph. Each graph has its own context, and capturing runs
    # nothing.
    assert len(decode.others) == captures
    assert decode.num_enqueues == 0
    assert all(context.num_enqueues == 2 for context in decode.others)
    assert sum(context.num_runs for context in decode.others) == captures + launches


def ask(executor: adaptrt.Executor, prompt: list[int]) -> adaptrt.Response:
    """Returns the last response to a greedy request of a few tokens."""
    request = adaptrt.Request(prompt, 3, output_config=adaptrt.OutputConfig(exclude_input_from_output=True))
    return executor.await_responses(executor.enqueue_request(request))[-1]


def fail_copies(engine: StandInEngine, _: pytest.MonkeyPatch) -> None:
    engine.device.fail("copy_to_device")


def raise_in_a_plugin(engine: StandInEngine, patch: pytest.MonkeyPatch) -> None:
    def execute(stream: int) -> bool:
        patch.undo()
        raise RuntimeError("the kernel's launch failed")

    patch.setattr(engine.contexts[0], "execute_async_v3", execute)


def refuse_a_shape(engine: StandInEngine, patch: pytest.MonkeyPatch) -> None:
    def set_input_shape(name: str, dims: tuple[int, ...]) -> bool:
        patch.undo()
        return False

    patch.setattr(engine.contexts[0], "set_input_shape", set_input_shape)


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (fail_copies, "copy_to_device: an injected failure"),
        (raise_in_a_plugin, "execute_async_v3: RuntimeError: the kernel's launch failed"),
        (refuse_a_shape, "TensorRT refuses set_input_shape('input_ids', (7,))"),
    ],
)
def test_a_failed_step_ends_its_requests_and_no_others(
    float16: Served,
    fail: Callable[[StandInEngine, pytest.MonkeyPatch], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = emulated(float16)
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, SMALL.executor_config()) as executor:
        expected = ask(executor, [5, 6, 7, 8]).result.output_token_ids
        fail(engine, monkeypatch)
        failed = ask(executor, [9, 8, 7, 6, 5, 4, 3])
        assert failed.error_msg == reason
        assert ask(executor, [5, 6, 7, 8]).result.output_token_ids == expected


def test_virtual_tokens_are_refused_by_name(float16: Served) -> None:
    virtual = save_virtual_tokens(float16.directory / "model", float16.directory / "virtual", 3, 1)
    engine = emulated(float16)
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, SMALL.executor_config()) as executor:
        with pytest.raises(adaptrt.AdapterError, match="is an engine of TensorRT; accepted: native engines"):
            executor.add_adapter("virtual", virtual)
        tuning = adaptrt.PromptTuningConfig(np.zeros((1, SMALL.spec.hidden_size), np.float32))
        with pytest.raises(adaptrt.RequestError, match="prompt_tuning_config is given; accepted: None"):
            executor.enqueue_request(adaptrt.Request([3], 1, prompt_tuning_config=tuning))


def test_a_lost_device_ends_the_executor_with_its_reason(float16: Served) -> None:
    engine = emulated(float16)
    executor = adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, SMALL.executor_config())
    engine.device.fail("synchronize", for_good=True)
    failed = ask(executor, [5, 6, 7])
    assert failed.has_error()
    assert "the device cannot be used any more" in failed.error_msg
    with pytest.raises(adaptrt.ExecutorClosedError, match="the device cannot be used any more"):
        ask(executor, [5, 6, 7])


def test_a_device_without_the_memory_is_refused_with_both_figures(float16: Served) -> None:
    engine = dataclasses.replace(emulated(float16), device=adaptrt_cuda_emulated.CudaDevice(total_bytes=100_000))
    with pytest.raises(adaptrt.ConfigError, match=r"gives no \d+ bytes; \d+ of 100000 bytes are free"):
        adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, SMALL.executor_config())


def test_an_executors_memory_is_given_back(float16: Served) -> None:
    engine = emulated(float16)
    free = engine.device.memory().free_bytes
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, SMALL.executor_config()) as executor:
        lora = adaptrt.LoraConfig.from_peft(1, float16.adapters[0], engine)
        collect(executor, executor.enqueue_request(make_request([5, 6, 7], 2, lora)))
        assert engine.device.memory().free_bytes < free
    del executor
    assert engine.device.memory().free_bytes == free
