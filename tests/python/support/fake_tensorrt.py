"""TensorRT for RTX with a runtime that needs no GPU: plans "deserialise" to the tensors that config.json lists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaptrt.formats.engine.tensorrt.plan_config import TensorRtPlans

trt = pytest.importorskip("tensorrt_rtx", reason="pip install adaptrt[tensorrt-rtx]")


class FakeRuntimeConfig:
    """TensorRT for RTX's settings of execution contexts."""

    takes_caches = True

    def __init__(self) -> None:
        self.allocation: Any = None
        self.dynamic_shapes_kernel_specialization_strategy: Any = None
        self.cuda_graph_strategy: Any = None
        self.cache: object = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.allocation = strategy

    def create_runtime_cache(self) -> object:
        return object()

    def set_runtime_cache(self, cache: object) -> bool:
        self.cache = cache
        return self.takes_caches


class FakeContext:
    """An execution context that records its calls."""

    def __init__(self, settings: Any, refused_profile: int | None) -> None:
        self.settings = settings
        self.refused_profile = refused_profile
        self.memory: tuple[int, int] | None = None
        self.profile: int | None = None
        self.runs: list[int] = []
        self.succeeds = True

    def set_device_memory(self, address: int, num_bytes: int) -> None:
        self.memory = address, num_bytes

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        if profile == self.refused_profile:
            raise RuntimeError("Error in set optimization profile async.")  # as the binding does
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        return self.succeeds

    def set_tensor_address(self, name: str, address: int) -> bool:
        return self.succeeds

    def execute_async_v3(self, stream: int) -> bool:
        self.runs.append(stream)
        return self.succeeds


class FakeEngine:
    """A deserialised plan with the tensors of config.json."""

    def __init__(self, plans: TensorRtPlans) -> None:
        self._rows = {row.name: row for row in plans.tensors}
        self.num_io_tensors = len(self._rows)
        self.num_optimization_profiles = len(plans.profiles)
        self.contexts: list[FakeContext] = []
        self.makes_contexts = True
        self.refused_profile: int | None = None
        self.streamable_weights_size = 0
        self.largest_budget: int | None = None
        self._budget = 0

    @property
    def device_memory_size_v2(self) -> int:
        """Device memory in bytes. It is larger if weights are streamed, because they are copied to a buffer."""
        return 1000 if self._budget == self.streamable_weights_size else 1500

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self._budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, budget: int) -> None:
        if self.contexts:
            raise RuntimeError("there are contexts")
        if self.largest_budget is None or budget <= self.largest_budget:
            self._budget = budget

    def get_tensor_name(self, index: int) -> str:
        return list(self._rows)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return trt.TensorIOMode.INPUT if self._rows[name].mode == "input" else trt.TensorIOMode.OUTPUT

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._rows[name].shape

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(
            name={"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int32": "INT32", "int64": "INT64"}[
                self._rows[name].dtype
            ]
        )

    def create_runtime_config(self) -> FakeRuntimeConfig:
        return FakeRuntimeConfig()

    def create_execution_context(self, settings: Any) -> FakeContext | None:
        if not self.makes_contexts:
            return None
        self.contexts.append(FakeContext(settings, self.refused_profile))
        return self.contexts[-1]


class FakeRegistry:
    """A registry of creators."""

    def __init__(self) -> None:
        self.creators: list[Any] = []

    def register_creator(self, creator: Any, namespace: str) -> bool:
        self.creators.append(creator)
        return True

    def deregister_creator(self, creator: Any) -> bool:
        self.creators.remove(creator)
        return True


class FakeRuntime:
    """Deserialises to `engine`; if that is None, logs the reason."""

    engine_header_size = 64
    validity = trt.EngineValidity.INVALID
    diagnostics = trt.EngineInvalidityDiagnostics.UNSUPPORTED_CC.value

    def __init__(self, logger: Any, engine: FakeEngine | None) -> None:
        self._logger = logger
        self._engine = engine
        self.registry = FakeRegistry()
        self.plans: list[bytes] = []

    def get_plugin_registry(self) -> FakeRegistry:
        return self.registry

    def deserialize_cuda_engine(self, plan: Any) -> FakeEngine | None:
        self.plans.append(bytes(plan))
        if self._engine is None:
            self._logger.log(trt.ILogger.ERROR, "deserializeCudaEngine: Error Code 6:\n no such GPU")
        return self._engine

    def get_engine_validity(self, header: bytes) -> tuple[Any, int]:
        assert len(header) == self.engine_header_size
        return self.validity, self.diagnostics


def fake_tensorrt(engine: FakeEngine | None) -> Any:
    """Returns the module tensorrt_rtx with a FakeRuntime. `module.runtimes` lists the runtimes that were made."""
    runtimes: list[FakeRuntime] = []

    def make_runtime(logger: Any) -> FakeRuntime:
        runtimes.append(FakeRuntime(logger, engine))
        return runtimes[-1]

    return SimpleNamespace(**{**vars(trt), "Runtime": make_runtime, "runtimes": runtimes})


class FakeStream:
    handle = 77

    def synchronize(self) -> None: ...


class FakeDevice:
    """Replaces _core.Device; has only what the Python code uses."""

    def __init__(self, major: int, minor: int) -> None:
        self.info = SimpleNamespace(name="NVIDIA Test GPU", compute_capability=(major, minor))
        self.allocated: list[SimpleNamespace] = []

    def allocate(self, num_bytes: int) -> SimpleNamespace:
        self.allocated.append(SimpleNamespace(address=256 * (1 + len(self.allocated)), num_bytes=num_bytes))
        return self.allocated[-1]

    def make_stream(self) -> FakeStream:
        return FakeStream()
