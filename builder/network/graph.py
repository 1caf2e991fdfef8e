"""Builds an ONNX graph node by node. Weights stay in the checkpoint's file; the graph refers to their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..._core import DType
from ..._version import __version__
from ...formats.checkpoint.quantization import QuantConfig
from ...plugins import DOMAIN, VERSION, Plugin

OPSET: Final = 23
# First version of the file format that supports opset 23.
IR_VERSION: Final = 11

ELEMENT_TYPES: Final[dict[DType, int]] = {
    DType.FLOAT32: TensorProto.FLOAT,
    DType.FLOAT16: TensorProto.FLOAT16,
    DType.BFLOAT16: TensorProto.BFLOAT16,
}

Array = np.ndarray[Any, np.dtype[Any]]
Shape = Sequence[int | str]


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: its name and ONNX element type."""

    name: str
    element_type: int


@dataclass(frozen=True)
class StoredTensor:
    """Location of a weight's bytes."""

    element_type: int  # ONNX element type.
    shape: tuple[int, ...]
    location: str  # File name.
    offset: int
    num_bytes: int


class GraphBuilder:
    """Collects nodes, inputs, outputs and weights of one graph."""

    def __init__(
        self, weights: Mapping[str, StoredTensor], dtype: DType, quantization: QuantConfig | None = None
    ) -> None:
        """dtype: the engine's type, used for weights, their inputs, and the KV pool.
        quantization: of the weights that are quantised.
        """
        self.engine_type: Final = ELEMENT_TYPES[dtype]
        self.quantization: Final = quantization
        self._stored = weights
        self._nodes: list[onnx.NodeProto] = []
        self._num_nodes = 0
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._scopes: list[str] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Nodes created within the with statement get names that begin with `name`."""
        self._scopes.append(name)
        yield
        self._scopes.pop()

    def input(self, name: str, element_type: int, shape: Shape) -> Value:
        """Adds an input of the graph. Strings in the shape are dynamic sizes."""
        self._inputs.append(helper.make_tensor_value_info(name, element_type, list(shape)))
        return Value(name, element_type)

    def output(self, value: Value, name: str, shape: Shape) -> None:
        """Makes a value that no node reads an output of the graph, under another name."""
        for node in self._nodes:
            for index, output in enumerate(node.output):
                if output == value.name:
                    node.output[index] = name
        self._outputs.append(helper.make_tensor_value_info(name, value.element_type, list(shape)))

    def weight(self, name: str) -> Value:
        """A weight of the checkpoint, by its name there."""
        stored = self._stored[name]
        element_type = stored.element_type
        if name not in self._initializers:
            tensor = TensorProto(name=name, data_type=element_type, dims=stored.shape)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (
                ("location", stored.location),
                ("offset", stored.offset),
                ("length", stored.num_bytes),
            ):
                tensor.external_data.add(key=key, value=str(value))
            self._initializers[name] = tensor
        return Value(name, element_type)

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a checkpoint's weight."""
        return self._stored[name].shape

    def constant(self, name: str, value: Array) -> Value:
        """A small tensor stored in the graph itself; equal ones are stored once."""
        tensor = numpy_helper.from_array(value, name)
        known = self._initializers.setdefault(name, tensor)
        if known != tensor:
            raise ValueError(f"constant '{name}' has two values")
        return Value(name, tensor.data_type)

    def node(
        self, op_type: str, inputs: Sequence[Value], *, element_type: int | None = None, **attributes: Any
    ) -> Value:
        """Adds a node with one output, of the first input's type unless `element_type` is given."""
        element_type = inputs[0].element_type if element_type is None else element_type
        return self._add(op_type, inputs, [element_type], attributes)[0]

    def split(self, value: Value, sizes: Sequence[int], *, axis: int) -> list[Value]:
        """Splits a value along an axis."""
        lengths = self.constant(f"sizes_{'_'.join(map(str, sizes))}", np.asarray(sizes, np.int64))
        return self._add("Split", [value, lengths], [value.element_type] * len(sizes), {"axis": axis})

    def top_k(self, value: Value, count: int) -> tuple[Value, Value]:
        """The `count` largest values along the last axis, and their indices."""
        counts = self.constant(f"count_{count}", np.asarray([count], np.int64))
        types = [value.element_type, int(TensorProto.INT64)]
        largest, places = self._add("TopK", [value, counts], types, {"axis": -1})
        return largest, places

    def scan(
        self,
        state: Value,
        rows: Sequence[Value],
        body: Callable[[Value, Sequence[Value]], tuple[Value, Value]],
    ) -> tuple[Value, Value]:
        """Calls `body` once to write the body of a Scan over the first axis of `rows`.

        From the state before and one element of each of `rows`, it makes the state after and an output. Returns the
        last state and all outputs. The body may read values from outside.
        """
        name = self._next_name("Scan")
        outside, self._nodes = self._nodes, []
        inputs = [Value(f"{name}/in:{i}", value.element_type) for i, value in enumerate([state, *rows])]
        with self.scope(name.rpartition("/")[2]):
            outputs = body(inputs[0], inputs[1:])
        of_body = helper.make_graph(self._nodes, name, *(list(map(_without_shape, ends)) for ends in (inputs, outputs)))
        self._nodes = outside
        made = [Value(f"{name}:{i}", output.element_type) for i, output in enumerate(outputs)]
        names = [value.name for value in (state, *rows)], [value.name for value in made]
        self._nodes.append(helper.make_node("Scan", *names, name=name, body=of_body, num_scan_inputs=len(rows)))
        return made[0], made[1]

    def cast(self, value: Value, element_type: int) -> Value:
        """The value in another type; unchanged if it has that type."""
        if value.element_type == element_type:
            return value
        return self.node("Cast", [value], element_type=element_type, to=element_type)

    def plugin(self, plugin: Plugin, inputs: Sequence[Value], **attributes: Any) -> list[Value]:
        """Adds a plugin node with the attributes that TensorRT's parser needs."""
        defaults = {attr.name: attr.default for attr in plugin.attributes if attr.default is not None}
        types = [self.engine_type] * len(plugin.outputs)
        return self._add(plugin.name, inputs, types, {**defaults, **attributes}, domain=DOMAIN)

    def model(self, name: str) -> onnx.ModelProto:
        """The finished graph. Its weights refer to the bytes of StoredTensor."""
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, list(self._initializers.values()))
        opsets = [helper.make_opsetid("", OPSET)]
        if any(node.domain == DOMAIN for node in self._nodes):
            opsets.append(helper.make_opsetid(DOMAIN, int(VERSION)))
        return helper.make_model(
            graph,
            opset_imports=opsets,
            ir_version=IR_VERSION,
            producer_name="adaptrt",
            producer_version=__version__,
        )

    def _add(
        self,
        op_type: str,
        inputs: Sequence[Value],
        element_types: Sequence[int],
        attributes: Mapping[str, Any],
        domain: str = "",
    ) -> list[Value]:
        name = self._next_name(op_type)
        outputs = [name] if len(element_types) == 1 else [f"{name}:{i}" for i in range(len(element_types))]
        self._nodes.append(
            helper.make_node(op_type, [value.name for value in inputs], outputs, name=name, domain=domain, **attributes)
        )
        return [Value(output, type_) for output, type_ in zip(outputs, element_types, strict=True)]

    def _next_name(self, op_type: str) -> str:
        """A name for the next node."""
        self._num_nodes += 1
        return "/".join([*self._scopes, f"{op_type}_{self._num_nodes - 1}"])


def _without_shape(value: Value) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(value.name, value.element_type, None)
