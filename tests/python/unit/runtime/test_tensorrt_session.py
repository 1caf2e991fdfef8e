"""Starting a loaded TensorRT engine: the chosen plan, the memory, and errors."""

from __future__ import annotations

import gc
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaptrt._core import ConfigError, DType, EngineError, StepError
from adaptrt.formats.engine.build_config import PluginConfig, TensorRtBuildConfig
from adaptrt.formats.engine.tensorrt.capability import current_capability
from adaptrt.runtime.engine import load_engine
from adaptrt.runtime.tensorrt import session
from adaptrt.runtime.tensorrt.engine import TensorRtEngine
from adaptrt.runtime.tensorrt.session import Plan
from support.engines import SMALL, make_engine
from support.fake_kernels import FakeKernels
from support.fake_tensorrt import FakeDevice, FakeEngine, FakeRuntimeConfig, fake_tensorrt, trt
from support.models import ModelSpec


def has_gpu() -> bool:
    try:
        current_capability()
    except ConfigError:
        return False
    return True


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TensorRtEngine:
    directory = tmp_path_factory.mktemp("session")
    config = replace(
        SMALL,
        backend="tensorrt",
        plugin_config=PluginConfig(lora_plugin="auto"),
        tensorrt_config=TensorRtBuildConfig(compute_capability=("8.0", "8.9")),
    )
    make_engine(ModelSpec(num_hidden_layers=1), directory, config, DType.FLOAT16)
    loaded = load_engine(directory / "engine")
    assert isinstance(loaded, TensorRtEngine)
    return loaded


def plan_of(engine: TensorRtEngine, module: Any, device: FakeDevice) -> Plan:
    return Plan(engine.plans, engine.directory, module, FakeKernels(), device)  # type: ignore[arg-type]


def test_the_plan_for_the_gpu_is_read_with_our_plugins(engine: TensorRtEngine) -> None:
    module = fake_tensorrt(FakeEngine(engine.plans))
    plan_of(engine, module, FakeDevice(8, 9))
    (runtime,) = module.runtimes
    assert runtime.plans == [(engine.directory / "rank0.sm89.plan").read_bytes()]
    assert [creator.name for creator in runtime.registry.creators] == ["Lora", "Dora", "PagedAttention"]


def test_contexts_share_one_memory_and_have_a_profile_each(engine: TensorRtEngine) -> None:
    plan_engine, device = FakeEngine(engine.plans), FakeDevice(8, 0)
    plan = plan_of(engine, fake_tensorrt(plan_engine), device)
    for profile in range(2):
        plan.context(profile)
    assert [context.profile for context in plan_engine.contexts] == [0, 1]
    assert {context.memory for context in plan_engine.contexts} == {(256, 1000)}
    assert {context.settings.allocation for context in plan_engine.contexts} == {
        trt.ExecutionContextAllocationStrategy.USER_MANAGED
    }
    assert len(device.allocated) == 1


def test_kernels_that_tensorrt_for_rtx_compiles_for_a_profile(engine: TensorRtEngine) -> None:
    plan_engine = FakeEngine(engine.plans)
    plan = plan_of(engine, fake_tensorrt(plan_engine), FakeDevice(8, 0))
    decode = plan.context(1)
    decode.another().another()
    plan.context(0)
    assert [context.profile for context in plan_engine.contexts] == [1, 1, 1, 0]
    assert {context.memory for context in plan_engine.contexts} == {(256, 1000)}
    *decodes, prefill = (context.settings for context in plan_engine.contexts)
    strategies = trt.DynamicShapesKernelSpecializationStrategy
    assert {config.dynamic_shapes_kernel_specialization_strategy for config in decodes} == {strategies.EAGER}
    assert prefill.dynamic_shapes_kernel_specialization_strategy == strategies.NONE
    assert {config.cuda_graph_strategy for config in (prefill, *decodes)} == {trt.CudaGraphStrategy.DISABLED}
    assert len({config.cache for config in decodes}) == 1
    assert decodes[0].cache is not None


def test_tensorrt_itself_has_no_such_settings(engine: TensorRtEngine) -> None:
    plan_engine = FakeEngine(engine.plans)
    module = fake_tensorrt(plan_engine)
    del module.DynamicShapesKernelSpecializationStrategy
    del module.CudaGraphStrategy
    plan_of(engine, module, FakeDevice(8, 0)).context(1)
    (context,) = plan_engine.contexts
    assert context.settings == trt.ExecutionContextAllocationStrategy.USER_MANAGED


def test_tensorrt_refuses_a_context(engine: TensorRtEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_engine = FakeEngine(engine.plans)
    plan = plan_of(engine, fake_tensorrt(plan_engine), FakeDevice(8, 0))
    plan_engine.refused_profile = 1
    assert plan.context(0) is not None
    with pytest.raises(EngineError, match="does not accept optimization profile 1: it gives no reason"):
        plan.context(1)
    plan_engine.makes_contexts = False
    with pytest.raises(EngineError, match="makes no execution context: it gives no reason"):
        plan.context(0)
    monkeypatch.setattr(FakeRuntimeConfig, "takes_caches", False)
    with pytest.raises(EngineError, match="rejects its own runtime cache"):
        plan_of(engine, fake_tensorrt(plan_engine), FakeDevice(8, 0))


def test_a_run_that_fails_is_a_step_error_with_tensorrts_reason(engine: TensorRtEngine) -> None:
    plan_engine, module = FakeEngine(engine.plans), fake_tensorrt(None)
    module.Runtime = lambda logger: fake_runtime(logger, plan_engine, module)
    plan = plan_of(engine, module, FakeDevice(8, 0))
    context = plan.context(0)
    assert context.set_input_shape("input_ids", (3,))
    assert context.set_tensor_address("input_ids", 256)
    assert context.execute_async_v3(5)
    assert plan_engine.contexts[0].runs == [5]
    plan_engine.contexts[0].succeeds = False
    module.loggers[0].log(trt.ILogger.ERROR, "enqueueV3:\n out of memory")
    module.loggers[0].log(trt.ILogger.WARNING, "this is slow")
    with pytest.raises(StepError, match=r"cannot run the plan: enqueueV3: out of memory$"):
        context.execute_async_v3(5)
    with pytest.raises(StepError, match="it gives no reason"):
        context.execute_async_v3(5)
    with pytest.raises(StepError, match=r"rejects input_ids of shape \(3,\): it gives no reason"):
        context.set_input_shape("input_ids", (3,))
    with pytest.raises(StepError, match="rejects input_ids at 0x100: it gives no reason"):
        context.set_tensor_address("input_ids", 256)


def fake_runtime(logger: Any, plan_engine: FakeEngine, module: Any) -> Any:
    """Makes a FakeRuntime whose logger the test can use."""
    module.loggers = [*getattr(module, "loggers", []), logger]
    return fake_tensorrt(plan_engine).Runtime(logger)


def test_the_plan_lives_as_long_as_its_contexts(engine: TensorRtEngine) -> None:
    plan = plan_of(engine, fake_tensorrt(FakeEngine(engine.plans)), FakeDevice(8, 0))
    context, alive = plan.context(0), weakref.ref(plan)
    del plan
    gc.collect()
    assert alive() is not None
    del context
    gc.collect()
    assert alive() is None


def test_a_gpu_that_no_plan_is_for(engine: TensorRtEngine) -> None:
    with pytest.raises(
        EngineError,
        match=r"engine has no plan for compute capability 9\.0, only for 8\.0, 8\.9; build .* NVIDIA Test GPU",
    ):
        plan_of(engine, fake_tensorrt(None), FakeDevice(9, 0))


def test_tensorrt_refuses_the_plan(engine: TensorRtEngine) -> None:
    with pytest.raises(
        EngineError,
        match=rf"rank0\.sm80\.plan: TensorRT {trt.__version__} does not deserialise the plan: its validity here is "
        r"INVALID: UNSUPPORTED_CC; deserializeCudaEngine: Error Code 6: no such GPU",
    ):
        plan_of(engine, fake_tensorrt(None), FakeDevice(8, 0))


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_tensorrt_for_rtx_deserialises_nothing_without_a_gpu(engine: TensorRtEngine) -> None:
    """Uses the real TensorRT for RTX: cudaError 35 is an insufficient driver, 100 is no device."""
    with pytest.raises(EngineError, match=r"its validity here is INVALID; .*cudaError (35|100)"):
        plan_of(engine, trt, FakeDevice(8, 0))


def test_a_plan_with_other_tensors_than_config_json(engine: TensorRtEngine) -> None:
    rows = engine.plans.tensors
    for changed in (
        replace(engine.plans, tensors=rows[1:]),
        replace(engine.plans, tensors=(replace(rows[0], shape=(3,)), *rows[1:])),
        replace(engine.plans, tensors=(replace(rows[0], dtype="int64"), *rows[1:])),
    ):
        with pytest.raises(EngineError, match=rf"disagrees with config\.json in its tensors {rows[0].name}$"):
            plan_of(engine, fake_tensorrt(FakeEngine(changed)), FakeDevice(8, 0))
    fewer = replace(engine.plans, profiles=("prefill",))
    with pytest.raises(EngineError, match=r"has 1 optimization profiles; config\.json has 2"):
        plan_of(engine, fake_tensorrt(FakeEngine(fewer)), FakeDevice(8, 0))


def streaming_plan(engine: TensorRtEngine) -> tuple[FakeEngine, FakeDevice, Plan]:
    plan_engine, device = FakeEngine(engine.plans), FakeDevice(8, 0)
    plan_engine.streamable_weights_size = 5000
    return plan_engine, device, plan_of(engine, fake_tensorrt(plan_engine), device)


@pytest.mark.parametrize(("memory", "budget"), [(3000, 3000), (5000, 5000), (9000, 5000), (0, 5000)])
def test_weights_keep_to_their_memory_before_contexts_are_made(
    engine: TensorRtEngine, memory: int, budget: int
) -> None:
    plan_engine, device, plan = streaming_plan(engine)
    plan.set_weight_memory(memory)
    for profile in range(2):
        plan.context(profile)
    assert plan_engine.weight_streaming_budget_v2 == budget
    # Includes the room that streamed weights are copied to.
    assert [allocation.num_bytes for allocation in device.allocated] == [1000 if budget == 5000 else 1500]
    assert {context.memory for context in plan_engine.contexts} == {(256, device.allocated[0].num_bytes)}


def test_a_plan_whose_weights_keep_to_nothing(engine: TensorRtEngine) -> None:
    plan_engine, _, plan = streaming_plan(engine)
    plan_engine.largest_budget = 2000
    with pytest.raises(EngineError, match=r"does not keep 3000 of 5000 bytes of weights on the GPU: it gives no"):
        plan.set_weight_memory(3000)
    plan.set_weight_memory(1000)
    plan.context(0)
    with pytest.raises(EngineError, match=r"does not keep 2000 of 5000 bytes of weights on the GPU"):
        plan.set_weight_memory(2000)
    plan_engine.streamable_weights_size = 0
    with pytest.raises(EngineError, match=r"rank0\.sm80\.plan: has no weights that can be streamed"):
        plan.set_weight_memory(1000)


def test_engines_that_were_built_for_a_weight_memory_take_one(engine: TensorRtEngine) -> None:
    with pytest.raises(ConfigError, match=r"weight_memory is 4096; accepted: None and 0, .* was built without"):
        engine.with_weight_memory(4096)
    assert engine.with_weight_memory(0) is engine
    streaming = replace(
        engine, config=replace(engine.config, build_config=replace(engine.config.build_config, weight_memory=8192))
    )
    assert streaming.with_weight_memory(4096).weight_memory == 4096
    assert streaming.with_weight_memory(None).weight_memory == streaming.weight_memory


@pytest.mark.parametrize("built_with", [None, 70000])
def test_a_session_asks_for_what_the_engine_was_given(
    engine: TensorRtEngine, built_with: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    captured: list[bool] = []
    monkeypatch.setattr(Plan, "set_weight_memory", lambda self, num_bytes: asked.append(num_bytes))
    monkeypatch.setattr(session, "make_program", lambda engine: None)
    monkeypatch.setattr(
        session._core, "TensorRtEngine", lambda program, device, *contexts, cuda_graphs: captured.append(cuda_graphs)
    )
    given = replace(
        engine,
        config=replace(engine.config, build_config=replace(engine.config.build_config, weight_memory=built_with)),
    )
    if built_with is not None:
        given = given.with_weight_memory(3000)
    module = fake_tensorrt(FakeEngine(engine.plans))
    session.start_session(given, module, FakeKernels(), FakeDevice(8, 0))  # type: ignore[arg-type]
    assert asked == ([] if built_with is None else [3000])
    assert captured == [built_with is None]  # plans that stream weights allocate memory while they run


def test_a_build_with_a_weight_memory_makes_a_plan_that_streams(tmp_path: Path) -> None:
    config = replace(
        SMALL,
        backend="tensorrt",
        weight_memory=70000,
        plugin_config=PluginConfig(lora_plugin="auto"),
        tensorrt_config=TensorRtBuildConfig(compute_capability=("8.0",)),
    )
    make_engine(ModelSpec(num_hidden_layers=1), tmp_path, config, DType.FLOAT16)
    loaded = load_engine(tmp_path / "engine")
    assert isinstance(loaded, TensorRtEngine)
    assert loaded.streams_weights
    assert loaded.weight_memory == 70000
    with pytest.raises(ConfigError, match="weight_memory needs weights constants: TensorRT streams the constants"):
        make_engine(
            ModelSpec(num_hidden_layers=1), tmp_path / "external",
            replace(config, tensorrt_config=TensorRtBuildConfig(compute_capability=("8.0",), weights="external")),
            DType.FLOAT16,
        )  # fmt: skip


def test_a_damaged_plan(engine: TensorRtEngine, tmp_path: Path) -> None:
    directory = shutil.copytree(engine.directory, tmp_path / "engine")
    path = directory / "rank0.sm80.plan"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    module = fake_tensorrt(FakeEngine(engine.plans))
    with pytest.raises(EngineError, match=r"rank0\.sm80\.plan: does not have its checksum"):
        plan_of(replace(engine, directory=directory), module, FakeDevice(8, 0))
    assert module.runtimes[0].plans == []  # TensorRT is not called
