"""Execution contexts without TensorRT: onnx.reference evaluates the network on the device's memory.

Its plugin nodes run the CUDA kernels, compiled for the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import adaptrt_cuda_emulated
import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from adaptrt import _core
from adaptrt.plugins import PLUGINS
from adaptrt.plugins.adapter_tables import array_at
from adaptrt.plugins.definition import DOMAIN, ENGINE_TYPE, Plugin
from adaptrt.plugins.kernel_node import KernelNode
from adaptrt.plugins.sizes import bind_sizes
from support.kernel_launch import launch, workspace_bytes

DTYPES = {
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    TensorProto.INT32: np.dtype(np.int32),
    TensorProto.INT64: np.dtype(np.int64),
}
ENGINE_TYPES = {"float16": _core.DType.FLOAT16, "bfloat16": _core.DType.BFLOAT16}
# What the kernels may ask of addresses.
ALIGNMENT = 256

Profile = Mapping[str, tuple[Sequence[int], Sequence[int], Sequence[int]]]
"""Smallest, usual and largest shape by input."""


class EmulatedContext:
    """An execution context for one profile, with TensorRT's methods. Refuses shapes outside the profile."""

    def __init__(self, network: onnx.ModelProto, profile: Profile, device: adaptrt_cuda_emulated.CudaDevice) -> None:
        self._network = network
        self._evaluator = ReferenceEvaluator(network, new_ops=[_kernel_op(plugin) for plugin in PLUGINS])
        self._types = {value.name: value.type.tensor_type for value in (*network.graph.input, *network.graph.output)}
        self._inputs = [value.name for value in network.graph.input]
        self._profile = profile
        self._device = device
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self.num_runs = 0
        self.num_enqueues = 0
        self.others: list[EmulatedContext] = []

    def another(self) -> EmulatedContext:
        """One more for the same profile."""
        self.others.append(EmulatedContext(self._network, self._profile, self._device))
        return self.others[-1]

    def set_input_shape(self, name: str, dims: tuple[int, ...]) -> bool:
        """False when the network or its profile does not take the shape."""
        expected = self._types[name].shape.dim
        if len(dims) != len(expected) or any(
            dim.HasField("dim_value") and dim.dim_value != size for dim, size in zip(expected, dims, strict=True)
        ):
            return False
        if name in self._profile:
            low, _, high = self._profile[name]
            if not all(least <= size <= most for least, size, most in zip(low, dims, high, strict=True)):
                return False
        self._shapes[name] = dims
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        """False for a tensor that there is not."""
        if name not in self._types or address % ALIGNMENT != 0:
            return False
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        """Puts a run over the tensors as they are now into the stream."""
        self.num_enqueues += 1
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        adaptrt_cuda_emulated.submit(stream, lambda: self._run(shapes, addresses))
        return True

    def _run(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        self.num_runs += 1
        feeds = {name: self._tensor(name, shapes[name], addresses) for name in self._inputs}
        for name, output in zip(self._evaluator.output_names, self._evaluator.run(None, feeds), strict=True):
            if output.ctypes.data == addresses[name]:
                continue  # written in place
            assert not name.startswith("kv_pool"), f"{name} is a copy"
            self._tensor(name, output.shape, addresses)[...] = output

    def _tensor(self, name: str, shape: tuple[int, ...], addresses: Mapping[str, int]) -> np.ndarray:
        dtype = DTYPES[self._types[name].elem_type]
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        assert self._device.owns(addresses[name], num_bytes), f"{name}{shape} is not in one allocation of the device"
        return array_at(addresses[name], shape, dtype)


def _kernel_op(plugin: Plugin) -> type[OpRun]:
    """An op that runs the plugin's kernel; outputs that alias an input are that input."""
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
        launch(  # at once: the whole run is in the stream already
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
    """Aligned memory full of NaNs, or of bytes that are no sensible number."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.full(num_bytes + ALIGNMENT, 0xFF, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    array: np.ndarray = memory[first : first + num_bytes].view(dtype).reshape(shape)
    return array


def _aligned(array: np.ndarray) -> np.ndarray:
    """A contiguous array at an aligned address, itself where it is one."""
    if array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0:
        return array
    result = _poisoned(array.shape, array.dtype)
    result[...] = array
    return result
