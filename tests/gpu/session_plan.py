"""An execution context without TensorRT: torch evaluates the network in the session's memory and stream.

Its plugin nodes run the real kernels, so a served request uses all of the real code except TensorRT.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from machine import Machine
from onnx import TensorProto, numpy_helper

from adaptrt.plugins import PLUGINS
from adaptrt.plugins.definition import DOMAIN, ENGINE_TYPE, Plugin
from adaptrt.plugins.kernel_node import KernelNode
from adaptrt.plugins.sizes import bind_sizes
from support.kernel_launch import launch, workspace_bytes
from support.stand_in_plan import ALIGNMENT, ENGINE_TYPES, Profile, StandInContext

TORCH_DTYPES = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
}


@dataclass(frozen=True)
class Evaluation:
    """Settings for evaluating operators."""

    machine: Machine
    rows: int
    """Matrices are padded with zeros to this number of rows, so that it is the same in all steps: torch chooses an
    algorithm, and with it the order of each sum, by the number of rows."""

    def padded(self, work: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Applies `work` to `x`, padded to `rows` rows. Returns the rows of `x`."""
        return work(torch.nn.functional.pad(x, (0, 0, 0, self.rows - x.shape[0])))[: x.shape[0]]

    def operator(self, node: onnx.NodeProto, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Returns the outputs of a node."""
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        match node.op_type, inputs:
            case "Gather", [table, index]:
                return [table.index_select(attributes["axis"], index)]
            case "Cast", [x]:
                return [x.to(TORCH_DTYPES[attributes["to"]])]
            case "Unsqueeze", [x, [axis]]:
                return [x.unsqueeze(axis)]
            case "Split", [x, sizes]:
                return list(x.split(sizes, attributes["axis"]))
            case "Gemm", [x, weight] if attributes["transB"] == 1:
                return [self.padded(lambda rows: rows @ weight.T, x)]
            case "RMSNormalization", [x, scale] if attributes["axis"] == -1:
                squares = self.padded(lambda rows: rows.square().mean(-1, keepdim=True), x)
                return [x * torch.rsqrt(squares + attributes["epsilon"]) * scale]
            case ("Mul" | "Add" | "Sigmoid" | "Cos" | "Sin") as name, _:
                return [getattr(torch, name.lower())(*inputs)]
        raise NotImplementedError(f"{node.op_type} with {attributes}")


class TorchContext(StandInContext):
    """An execution context that torch evaluates."""

    def __init__(self, network: onnx.ModelProto, profile: Profile, evaluation: Evaluation) -> None:
        super().__init__(network, profile)
        self._evaluation = evaluation
        self.machine = evaluation.machine
        self._constants = {tensor.name: self._constant(tensor) for tensor in network.graph.initializer}
        definitions = {plugin.name: plugin for plugin in PLUGINS}
        self._plugins = {
            node.name: _PluginNode(definitions[node.op_type], node, self.machine)
            for node in network.graph.node
            if node.domain == DOMAIN
        }
        # Views are created before a capture begins.
        self._views: dict[tuple[str, tuple[int, ...], int], torch.Tensor] = {}

    def alike(self) -> TorchContext:
        return TorchContext(self.network, self.profile, self._evaluation)

    def enqueue(self, stream: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        if self.machine.is_gpu:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, self.machine.device)):
                self._run(shapes, addresses, stream)
        else:
            # Stream 0 means that kernels run at once: the whole evaluation is one call in the stream.
            self.machine.kernels.submit(stream, lambda: self._run(shapes, addresses, 0))

    @torch.inference_mode()
    def _run(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int], stream: int) -> None:
        self.num_runs += 1
        values: dict[str, Any] = dict(self._constants)
        values |= {name: self._view(name, shapes[name], addresses) for name in self.inputs}
        for node in self.network.graph.node:
            inputs = [values[name] for name in node.input]
            if node.domain == DOMAIN:
                outputs = self._plugins[node.name].run(inputs, stream)
            else:
                outputs = self._evaluation.operator(node, inputs)
            values.update(zip(node.output, outputs, strict=True))
        for name in self.outputs:
            if values[name].data_ptr() == addresses[name]:
                continue  # Written in place.
            assert not name.startswith("kv_pool"), f"{name} is a copy"
            self._view(name, tuple(values[name].shape), addresses).copy_(values[name])

    def _view(self, name: str, shape: tuple[int, ...], addresses: Mapping[str, int]) -> torch.Tensor:
        key = name, shape, addresses[name]
        if key not in self._views:
            dtype = TORCH_DTYPES[self.types[name].elem_type]
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            self._views[key] = _bytes_at(self.machine, addresses[name], num_bytes).view(dtype).view(shape)
        return self._views[key]

    def _constant(self, tensor: TensorProto) -> list[int] | torch.Tensor:
        """Returns a constant. Integers stay on the host, because they are parameters of operators."""
        array = numpy_helper.to_array(tensor)
        return array.tolist() if array.dtype.kind == "i" else torch.tensor(array).to(self.machine.device)


class _PluginNode:
    """A plugin node; all of its runs share the kernel."""

    def __init__(self, plugin: Plugin, node: onnx.NodeProto, machine: Machine) -> None:
        given = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        attributes = {own.name: given.get(own.name, own.default) for own in plugin.own_attributes}
        self._plugin = plugin
        self._machine = machine
        self._kernel = KernelNode(plugin, attributes, machine.kernels)
        places = {tensor.name: index for index, tensor in enumerate(plugin.inputs)}
        self._aliased = {output: places[name] for output, name in plugin.aliases.items()}
        self._engine_type = next(index for index, tensor in enumerate(plugin.inputs) if tensor.type == ENGINE_TYPE)

    def run(self, given: Sequence[torch.Tensor], stream: int) -> list[torch.Tensor]:
        """Launches the kernel. Returns an aliased input as the output; other outputs are first filled with NaN."""
        inputs = [
            tensor if index in self._aliased.values() else self._aligned(tensor) for index, tensor in enumerate(given)
        ]
        sizes, problems = bind_sizes(self._plugin, [tensor.shape for tensor in inputs])
        assert not problems, problems
        torch_dtype = inputs[self._engine_type].dtype
        outputs = [
            inputs[self._aliased[tensor.name]]
            if tensor.name in self._aliased
            else self._poisoned([dim if isinstance(dim, int) else sizes[dim] for dim in tensor.shape], torch_dtype)
            for tensor in self._plugin.outputs
        ]
        dtype = ENGINE_TYPES[str(torch_dtype).removeprefix("torch.")]
        workspace = self._poisoned([max(1, workspace_bytes(self._kernel, self._plugin, dtype, sizes))], torch.uint8)
        launch(
            self._kernel,
            dtype,
            [tensor.shape for tensor in inputs],
            [tensor.data_ptr() for tensor in inputs],
            [tensor.data_ptr() for tensor in outputs],
            workspace.data_ptr(),
            stream,
        )
        return outputs

    def _aligned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor if it is contiguous at an aligned address, otherwise a copy that is."""
        if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
            return tensor
        return self._poisoned(tensor.shape, tensor.dtype).copy_(tensor)

    def _poisoned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        memory = self._machine.poisoned((num_bytes + ALIGNMENT,), torch.uint8)
        first = -memory.data_ptr() % ALIGNMENT
        return memory[first : first + num_bytes].view(dtype).view(*shape)


def _bytes_at(machine: Machine, address: int, num_bytes: int) -> torch.Tensor:
    """Returns a view of memory that the caller keeps alive."""
    if not machine.is_gpu:
        return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)
    view = torch.as_tensor(_DeviceBytes(address, num_bytes), device=machine.device)
    assert view.data_ptr() == address
    return view


class _DeviceBytes:
    """Bytes on a GPU with the interface by which Python packages share them."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
