"""TensorRT engine directories served by the ordinary executor without a GPU: emulated execution contexts and kernels,
against the native engine of the same checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import adaptrt_cuda_emulated
import numpy as np
import pytest

import adaptrt
from adaptrt import _core
from adaptrt.builder.build import build
from adaptrt.builder.config import BuildConfig, LoraBuildConfig, PluginConfig, TensorRtBuildConfig
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.runtime.engine import LoadedEngine, load_engine
from support.emulated_engine import EmulatedEngine, check_answer, emulated_engine
from support.models import ATTENTION_MODULES, ModelSpec, save_adapter, save_model
from support.prompts import save_virtual_tokens
from support.serving import Answer, collect, make_request
from support.tensorrt_plans import needs_tensorrt_rtx

pytestmark = needs_tensorrt_rtx

SPEC = ModelSpec(
    vocab_size=97, hidden_size=64, num_attention_heads=2, head_dim=64, intermediate_size=80, num_hidden_layers=2
)
SIZES = BuildConfig(
    max_batch_size=6,
    max_num_tokens=24,
    max_seq_len=96,
    tokens_per_block=16,
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
    lora_config=LoraBuildConfig(max_lora_rank=16),
)
ADAPTERS = (
    {"r": 4, "target_modules": ATTENTION_MODULES},
    {"r": 16, "use_rslora": True},
    {"r": 3, "use_dora": True},
    {"r": 8},
    {"r": 12, "use_dora": True, "target_modules": ["o_proj", "gate_proj", "up_proj", "down_proj"]},
)
# Device pages for two adapters of the largest rank: rank * layers * modules, in PeftCacheConfig's unit.
PAGES_FOR_TWO = 2 * 16 * 2 * 7
# (prompt length, adapter or None, tokens to generate): several chunks, one token, and everything between.
CROWD = (40, 0, 6), (1, None, 9), (17, 1, 5), (9, 2, 8), (33, None, 4), (5, 3, 9), (12, 4, 6), (3, 1, 7), (26, 2, 5)
# Behind them: its decodes are alone, step after step.
LAST = (6, 3, 8)
# Largest difference of logits relative to their range. Both engines round weights and adapters alike; the native one
# keeps activations of float16 models in float32, where the network rounds them after every operator.
TOLERANCE = {"float16": 0.004, "bfloat16": 0.03}


@dataclasses.dataclass
class Served:
    """A checkpoint's two engines and its adapters."""

    directory: Path
    adapters: list[Path]

    def native(self) -> LoadedEngine:
        return load_engine(self.directory / "native")

    def emulated(self) -> EmulatedEngine:
        return emulated_engine(self.directory / "tensorrt", self.directory / "checkpoint")


def make_served(dtype: str, directory: Path) -> Served:
    model = save_model(SPEC, directory / "model")
    convert_checkpoint(model, directory / "checkpoint", dtype=_core.dtype_from_name(dtype))
    build(directory / "checkpoint", SIZES, directory / "native")
    options = TensorRtBuildConfig(compute_capability=("8.0",), weights="external")
    tensorrt = dataclasses.replace(SIZES, backend="tensorrt", tensorrt_config=options)
    build(directory / "checkpoint", tensorrt, directory / "tensorrt")
    adapters = [
        save_adapter(model, directory / f"adapter-{number}", seed=number, **lora)
        for number, lora in enumerate(ADAPTERS)
    ]
    return Served(directory, adapters)


@pytest.fixture(scope="module")
def float16(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served("float16", tmp_path_factory.mktemp("float16"))


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served("bfloat16", tmp_path_factory.mktemp("bfloat16"))


def executor_config(**cache: int) -> adaptrt.ExecutorConfig:
    return adaptrt.ExecutorConfig(
        enable_chunked_context=True,
        num_threads=1,
        peft_cache_config=adaptrt.PeftCacheConfig(
            num_device_module_layer=PAGES_FOR_TWO, max_adapter_size=16, optimal_adapter_size=4, **cache
        ),
    )


def answers_of(
    engine: LoadedEngine, adapters: list[Path], config: adaptrt.ExecutorConfig
) -> tuple[list[Answer], adaptrt.LoraCacheStats]:
    """All of CROWD at once, then LAST, and the cache's counters behind them."""
    rng = np.random.default_rng(11)
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, config) as executor:

        def enqueue(length: int, adapter: int | None, max_tokens: int) -> int:
            prompt = rng.integers(2, SPEC.vocab_size, length).tolist()
            lora = None if adapter is None else adaptrt.LoraConfig.from_peft(adapter, adapters[adapter], engine)
            return executor.enqueue_request(make_request(prompt, max_tokens, lora))

        ids = [enqueue(*request) for request in CROWD]
        answers = [collect(executor, request_id) for request_id in ids]
        answers.append(collect(executor, enqueue(*LAST)))
        return answers, executor.lora_cache_stats()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_crowd_of_adapters_gets_the_native_engines_tokens(dtype: str, request: pytest.FixtureRequest) -> None:
    served: Served = request.getfixturevalue(dtype)
    expected, _ = answers_of(served.native(), served.adapters, executor_config())
    engine = served.emulated()
    actual, cache = answers_of(engine, served.adapters, executor_config(num_copy_streams=2))
    compared = sum(check_answer(*pair, TOLERANCE[dtype]) for pair in zip(actual, expected, strict=True))
    # Few answers come to a choice that is left open.
    assert compared >= 0.8 * sum(len(answer.tokens) for answer in expected)
    # There was room for a few adapters at a time: they went, and others came in their place.
    assert cache.device_evictions > 0
    prefill, decode = engine.contexts
    assert prefill.num_runs > 0
    captures, launches = engine.device.calls("capture"), engine.device.calls("launch")
    assert captures > 0
    assert launches > 0
    # Every decode ran once, as itself or from a graph, each of which has a context; what is captured does not run.
    assert len(decode.others) == captures
    assert decode.num_enqueues == 0
    assert all(context.num_enqueues == 2 for context in decode.others)
    assert sum(context.num_runs for context in decode.others) == captures + launches


def ask(executor: adaptrt.Executor, prompt: list[int]) -> adaptrt.Response:
    """The last response to a greedy request of a few tokens."""
    request = adaptrt.Request(prompt, 3, output_config=adaptrt.OutputConfig(exclude_input_from_output=True))
    return executor.await_responses(executor.enqueue_request(request))[-1]


def fail_copies(engine: EmulatedEngine, _: pytest.MonkeyPatch) -> None:
    engine.device.fail("copy_to_device")


def raise_in_a_plugin(engine: EmulatedEngine, patch: pytest.MonkeyPatch) -> None:
    def execute(stream: int) -> bool:
        patch.undo()
        raise RuntimeError("the kernel's launch failed")

    patch.setattr(engine.contexts[0], "execute_async_v3", execute)


def refuse_a_shape(engine: EmulatedEngine, patch: pytest.MonkeyPatch) -> None:
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
    fail: Callable[[EmulatedEngine, pytest.MonkeyPatch], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = float16.emulated()
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, executor_config()) as executor:
        expected = ask(executor, [5, 6, 7, 8]).result.output_token_ids
        fail(engine, monkeypatch)
        failed = ask(executor, [9, 8, 7, 6, 5, 4, 3])
        assert failed.error_msg == reason
        assert ask(executor, [5, 6, 7, 8]).result.output_token_ids == expected


def test_virtual_tokens_are_refused_by_name(float16: Served) -> None:
    virtual = save_virtual_tokens(float16.directory / "model", float16.directory / "virtual", 3, 1)
    engine = float16.emulated()
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, executor_config()) as executor:
        with pytest.raises(adaptrt.AdapterError, match="does not take: it is of TensorRT; accepted: native engines"):
            executor.add_adapter("virtual", virtual)
        tuning = adaptrt.PromptTuningConfig(np.zeros((1, SPEC.hidden_size), np.float32))
        with pytest.raises(adaptrt.RequestError, match="prompt_tuning_config is given; accepted: None"):
            executor.enqueue_request(adaptrt.Request([3], 1, prompt_tuning_config=tuning))


def test_a_lost_device_ends_the_executor_with_its_reason(float16: Served) -> None:
    engine = float16.emulated()
    executor = adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, executor_config())
    engine.device.fail("synchronize", for_good=True)
    failed = ask(executor, [5, 6, 7])
    assert failed.has_error()
    assert "the device cannot be used any more" in failed.error_msg
    with pytest.raises(adaptrt.ExecutorClosedError, match="the device cannot be used any more"):
        ask(executor, [5, 6, 7])


def test_a_device_without_the_memory_is_refused_with_both_figures(float16: Served) -> None:
    engine = dataclasses.replace(float16.emulated(), device=adaptrt_cuda_emulated.CudaDevice(total_bytes=100_000))
    with pytest.raises(adaptrt.ConfigError, match=r"gives no \d+ bytes; \d+ of 100000 bytes are free"):
        adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, executor_config())


def test_an_executors_memory_is_given_back(float16: Served) -> None:
    engine = float16.emulated()
    free = engine.device.memory().free_bytes
    with adaptrt.Executor(engine, adaptrt.ModelType.DECODER_ONLY, executor_config()) as executor:
        lora = adaptrt.LoraConfig.from_peft(1, float16.adapters[0], engine)
        collect(executor, executor.enqueue_request(make_request([5, 6, 7], 2, lora)))
        assert engine.device.memory().free_bytes < free
    del executor
    assert engine.device.memory().free_bytes == free
