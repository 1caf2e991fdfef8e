"""Starts a session of a loaded engine: the plan for the GPU, its execution contexts and their memory."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path
from typing import Any

from ... import _core
from ..._core import Allocation, Device, EngineError, StepError
from ...formats.engine.tensorrt.plan_config import INPUT, OUTPUT, TensorRtPlans
from ...plugins.tensorrt import register_plugins
from ...plugins.tensorrt.element_types import numpy_name
from .context_maker import ContextMaker
from .loaded_plans import LoadedPlans
from .messages import Messages, make_logger
from .program import PROFILES, make_program


def start_session(engine: LoadedPlans, trt: Any, cuda: Any, device: Device) -> _core.TensorRtEngine:
    """Starts the engine on a device.

    trt: the package that compiled the plans.
    cuda: the module with the plugins' kernels.

    Raises EngineError if there is no plan for the device or TensorRT rejects it; ConfigError if the device has too
    little memory.
    """
    plan = Plan(engine.plans, engine.directory, trt, cuda, device)
    if engine.streams_weights:
        plan.set_weight_memory(engine.weight_memory)
    contexts = [plan.context(number) for number in range(len(PROFILES))]
    # A plan that streams weights allocates memory while it runs, which a graph cannot capture.
    return _core.TensorRtEngine(make_program(engine), device, *contexts, cuda_graphs=not engine.streams_weights)


class Plan:
    """A deserialised plan, and the objects that it needs."""

    def __init__(self, plans: TensorRtPlans, directory: Path, trt: Any, cuda: Any, device: Device) -> None:
        """Reads the plan for the device's compute capability."""
        self._trt = trt
        self._device = device
        self._messages = Messages()
        self._logger = make_logger(trt, self._messages)
        self._runtime = trt.Runtime(self._logger)
        self._messages.registration = register_plugins(trt, self._runtime.get_plugin_registry(), cuda)
        major, minor = device.info.compute_capability
        try:
            chosen = plans.plan_for(f"{major}.{minor}")
        except EngineError as error:
            raise EngineError(f"{directory}: {error}. The GPU is a {device.info.name}") from None
        self._path = chosen.stored.check(directory)
        self._engine = self._deserialised()
        self._check_tensors(plans)
        self._memory: Allocation | None = None
        self._makers = [ContextMaker(trt, self._engine, name) for name in PROFILES]

    def set_weight_memory(self, num_bytes: int) -> None:
        """Keeps this many bytes of the streamable weights on the device; 0: all of them.

        Must precede the first context, whose memory depends on it. Raises EngineError for a plan without streamable
        weights, and if TensorRT rejects the size.
        """
        engine = self._engine
        streamable = engine.streamable_weights_size
        if streamable == 0:
            raise EngineError(
                f"{self._path}: has no weights that can be streamed, and was built with weight_memory; build the "
                "engine again"
            )
        budget = min(num_bytes, streamable) if num_bytes else streamable
        with contextlib.suppress(RuntimeError):  # its message only repeats the remaining budget
            engine.weight_streaming_budget_v2 = budget
        if engine.weight_streaming_budget_v2 != budget:
            raise self._refused(f"does not keep {budget} of {streamable} bytes of weights on the GPU")

    def context(self, profile: int) -> PlanContext:
        """Makes an execution context for one profile. All contexts share one memory, so only one may run at a time."""
        context = self._makers[profile].make()
        if context is None:
            raise self._refused("makes no execution context")
        if self._memory is None:
            self._memory = self._device.allocate(max(1, self._engine.device_memory_size_v2))
        context.set_device_memory(self._memory.address, self._memory.num_bytes)
        stream = self._device.make_stream()
        try:
            accepted = context.set_optimization_profile_async(profile, stream.handle)
        except RuntimeError:  # TensorRT's binding raises this where other functions return False
            accepted = False
        if not accepted:
            raise self._refused(f"does not accept optimization profile {profile}")
        stream.synchronize()
        return PlanContext(context, profile, self._messages, self)

    def _deserialised(self) -> Any:
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            engine = self._runtime.deserialize_cuda_engine(mapped)
            if engine is None:
                raise self._refused("does not deserialise the plan", self._validity(mapped))
        return engine

    def _validity(self, mapped: mmap.mmap) -> list[str]:
        """Returns TensorRT for RTX's verdict on a plan's header."""
        if not hasattr(self._runtime, "get_engine_validity"):
            return []
        validity, found = self._runtime.get_engine_validity(mapped[: self._runtime.engine_header_size])
        names = [name for name, bit in self._trt.EngineInvalidityDiagnostics.__members__.items() if found & bit.value]
        return [f"its validity here is {validity.name}{': ' if names else ''}{', '.join(names)}"]

    def _check_tensors(self, plans: TensorRtPlans) -> None:
        """Raises EngineError unless the plan has the inputs and outputs in config.json."""
        engine, trt = self._engine, self._trt
        found = {}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            mode = INPUT if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT else OUTPUT
            found[name] = (mode, numpy_name(engine.get_tensor_dtype(name)), tuple(engine.get_tensor_shape(name)))
        expected = {tensor.name: (tensor.mode, tensor.dtype, tensor.shape) for tensor in plans.tensors}
        if found != expected:
            differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            raise EngineError(f"{self._path}: disagrees with config.json in its tensors {', '.join(differing)}")
        if engine.num_optimization_profiles != len(plans.profiles):
            raise EngineError(
                f"{self._path}: has {engine.num_optimization_profiles} optimization profiles; config.json has "
                f"{len(plans.profiles)}"
            )

    def _refused(self, what: str, details: list[str] | None = None) -> EngineError:
        reasons = [*(details or []), self._messages.take()]
        return EngineError(f"{self._path}: TensorRT {self._trt.__version__} {what}: {'; '.join(reasons)}")


class PlanContext:
    """The functions of an execution context that the session calls. Failures raise StepError with TensorRT's reason."""

    def __init__(self, context: Any, profile: int, messages: Messages, plan: Plan) -> None:
        """Keeps the plan alive."""
        self._context = context
        self._profile = profile
        self._messages = messages
        self._plan = plan

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Sets the shape of an input for the next run."""
        if not self._context.set_input_shape(name, shape):
            raise StepError(f"TensorRT rejects {name} of shape {shape}: {self._messages.take()}")
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        """Sets the device address of an input or output."""
        if not self._context.set_tensor_address(name, address):
            raise StepError(f"TensorRT rejects {name} at {address:#x}: {self._messages.take()}")
        return True

    def execute_async_v3(self, stream: int) -> bool:
        """Enqueues one run of the plan in a stream."""
        if not self._context.execute_async_v3(stream):
            raise StepError(f"TensorRT cannot run the plan: {self._messages.take()}")
        return True

    def another(self) -> PlanContext:
        """Makes another context for the same profile, without any settings."""
        return self._plan.context(self._profile)
