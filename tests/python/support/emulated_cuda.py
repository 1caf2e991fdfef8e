"""Engines of backend cuda, started on an emulated device."""

from __future__ import annotations

from typing import Any

import adaptrt_cuda_emulated
import pytest

from adaptrt import _core
from adaptrt.runtime import cuda_engine


class EmulatedCuda:
    """Stands in for adaptrt._cuda. Every engine gets a new device."""

    __file__ = adaptrt_cuda_emulated.__file__

    def __init__(self, *, cuda_graphs: bool = True, look_ahead: bool = True, total_bytes: int = 1 << 32) -> None:
        self._cuda_graphs = cuda_graphs
        self._look_ahead = look_ahead
        self._total_bytes = total_bytes
        self.devices: list[Any] = []
        """Devices in the order in which engines asked for them."""
        self.indices: list[int] = []
        """Their numbers."""
        self.neuron_usage: Any = ()
        """Usage of neurons that the newest engine got."""

    def CudaDevice(self, index: int) -> Any:
        self.indices.append(index)
        self.devices.append(adaptrt_cuda_emulated.CudaDevice(0, total_bytes=self._total_bytes))
        return self.devices[-1]

    def CudaEngine(
        self, program: _core.Program, device: Any, *, weight_memory: int = 0, neuron_usage: Any = ()
    ) -> _core.Engine:
        self.neuron_usage = neuron_usage
        engine: _core.Engine = adaptrt_cuda_emulated.CudaEngine(
            program,
            device,
            cuda_graphs=self._cuda_graphs,
            look_ahead=self._look_ahead,
            weight_memory=weight_memory,
            neuron_usage=neuron_usage,
        )
        return engine

    def measure_device_limits(self, device: Any, **arguments: int) -> tuple[float, float]:
        found: tuple[float, float] = adaptrt_cuda_emulated.measure_device_limits(device, **arguments)
        return found


def emulate(patch: pytest.MonkeyPatch, **settings: Any) -> EmulatedCuda:
    """From now on, engines of backend cuda start on emulated devices. settings: for EmulatedCuda."""
    emulated = EmulatedCuda(**settings)
    patch.setattr(cuda_engine, "import_cuda", lambda subject: emulated)
    return emulated
