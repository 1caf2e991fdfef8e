"""Execution contexts without TensorRT: onnx.reference evaluates the network in the device's memory.

Plugin nodes run the CUDA kernels, compiled for the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import adaptrt_cuda_emulated
import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from adaptrt.plugins import PLUGINS
from adaptrt.plugins.adapter_tables import array_at
from adaptrt.plugins.definition import DOMAIN, ENGINE_TYPE, Plugin
from adaptrt.plugins.kernel_node import KernelNode
from adaptrt.plugins.sizes import bind_sizes
from support.kernel_launch import launch, workspace_bytes
from support.stand_in_plan import ALIGNMENT, DTYPES, ENGINE_TYPES, Profile, StandInContext


class EmulatedContext(StandInContext):
    """An execution context that runs as a call in a stream of the emulated device."""

    def __init__(self, network: onnx.ModelProto, profile: Profile, device: adaptrt_cuda_emulated.CudaDevice) -> None:
        super().__init__(network, profile)
        self._evaluator = ReferenceEvaluator(network, new_ops=[_kernel_op(plugin) for plugin in PLUGINS])
        self._device = device

    def alike(self) -> EmulatedContext:
        return EmulatedContext(self.network, self.profile, self._device)

    def enqueue(self, stream: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        adaptrt_cuda_emulated.submit(stream, lambda: self._run(shapes, addresses))

    def _run(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        self.num_runs += 1
        feeds = {name: self._tensor(name, shapes[name], addresses) for name in self.inputs}
        for name, output in zip(self._evaluator.output_names, self._evaluator.run(None, feeds), strict=True):
            if output.ctypes.data == addresses[name]:
                continue  # written in place
            assert not name.startswith("kv_pool"), f"{name} is a copy"
            self._tensor(name, output.shape, addresses)[...] = output

    def _tensor(self, name: str, shape: tuple[int, ...], addresses: Mapping[str, int]) -> np.ndarray:
        dtype = DTYPES[self.types[name].elem_type]
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        assert self._device.owns(addresses[name], num_bytes), f"{name}{shape} is not in one allocation of the device"
        return array_at(addresses[name], shape, dtype)


def _kernel_op(plugin: Plugin) -> type[OpRun]:
    """Returns an op that runs the plugin's kernel. If an output aliases an input, the op returns that input."""
    inputs_by_name = {tensor.name: index for index, tensor in enumerate(plugin.inputs)}
    engine_type = next(index for index, tensor in enumerate(plugin.inputs) if tensor.type == ENGINE_TYPE)

    def run(self: OpRun, *given: np.ndarray, **_: Any) -> tuple[np.ndarray, ...]:
        attributes = {a.name: getattr(self, a.name, a.default) for a in plugin.own_attributes}
        aliased = {inputs_by_name[name] for name in plugin.aliases.values()}
        inputs = [array if index in aliased else _aligned(array) for index, array in enumerate(given)]
        sizes, problems = bind_sizes(plugin, [array.shape for array in inputs])
        assert not problems, problems
        outputs = []
        for tensor in plugin.outputs:
            if tensor.name in plugin.aliases:
                outputs.append(inputs[inputs_by_name[plugin.aliases[tensor.name]]])
            else:
                shape = [size if isinstance(size, int) else sizes[size] for size in tensor.shape]
                outputs.append(_poisoned(shape, inputs[engine_type].dtype))
        node = self.__dict__.setdefault("kernel_node", None) or KernelNode(plugin, attributes, adaptrt_cuda_emulated)
        self.__dict__["kernel_node"] = node
        dtype = ENGINE_TYPES[inputs[engine_type].dtype.name]
        workspace = _poisoned([max(1, workspace_bytes(node, plugin, dtype, sizes))], np.dtype(np.uint8))
        launch(  # runs at once, because the whole evaluation is one call in the stream
            node,
            dtype,
            [array.shape for array in inputs],
            [array.ctypes.data for array in inputs],
            [array.ctypes.data for array in outputs],
            workspace.ctypes.data,
        )
        return tuple(outputs)

    return type(plugin.name, (OpRun,), {"op_domain": DOMAIN, "_run": run})


def _poisoned(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """Returns aligned memory filled with NaNs, or with bytes that make wrong numbers of other types."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.full(num_bytes + ALIGNMENT, 0xFF, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    array: np.ndarray = memory[first : first + num_bytes].view(dtype).reshape(shape)
    return array


def _aligned(array: np.ndarray) -> np.ndarray:
    """Returns a contiguous array at an aligned address; the same array if it is one."""
    if array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0:
        return array
    result = _poisoned(array.shape, array.dtype)
    result[...] = array
    return result
