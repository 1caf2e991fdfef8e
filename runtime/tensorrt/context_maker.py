"""Makes execution contexts in the session's memory, and sets how TensorRT for RTX compiles kernels for them."""

from __future__ import annotations

from typing import Any, Final

from ..._core import EngineError
from ...formats.engine.tensorrt.plan_config import DECODE, PREFILL

# A graph keeps the kernels that it was captured with. Decode has few shapes, so its kernels are compiled before the
# first run. Shapes of prefill steps hardly ever repeat, and compiling for each would never end.
_SPECIALIZATION: Final = {PREFILL: "NONE", DECODE: "EAGER"}


class ContextMaker:
    """Makes the execution contexts for one profile of an engine."""

    def __init__(self, trt: Any, engine: Any, profile: str) -> None:
        """Raises EngineError when TensorRT refuses the settings."""
        # Members are deleted in this order: objects that the engine made must not outlive it.
        self._settings: Any = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        strategies = getattr(trt, "DynamicShapesKernelSpecializationStrategy", None)
        if strategies is not None:  # TensorRT for RTX, which compiles kernels while it runs
            config = engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(self._settings)
            config.dynamic_shapes_kernel_specialization_strategy = getattr(strategies, _SPECIALIZATION[profile])
            # The session captures its graphs itself.
            config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
            # A shared cache: the next context reuses the kernels that were compiled for this one.
            self._cache = config.create_runtime_cache()
            if not config.set_runtime_cache(self._cache):
                raise EngineError("TensorRT for RTX rejects its own runtime cache")
            self._settings = config
        self._engine = engine

    def make(self) -> Any:
        """Returns a new context; None if TensorRT fails. The caller sets its memory and profile."""
        return self._engine.create_execution_context(self._settings)
