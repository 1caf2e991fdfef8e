"""An ONNX graph as the lowering reads it: who makes and who reads each value, shapes, constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..._core import EngineError
from ...plugins import DOMAIN, NAMESPACE, PLUGINS, VERSION, register_schemas

_FLOAT_TYPES: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Node:
    """A node; its inputs are resolved (see GraphIndex)."""

    position: int
    op_type: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    def describe(self) -> str:
        """How an error names this node."""
        return f"node '{self.name}' ({self.op_type})"


class GraphIndex:
    """The nodes of a graph without casts between float types.

    Such a cast is another name for its input: the native kernels keep float32 wherever the graph does, and round
    to the engine's type no more often than the graph does.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        """Raises EngineError for a graph that shape inference refuses."""
        register_schemas(PLUGINS)
        try:
            inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        except Exception as reason:  # onnx raises several unrelated types here
            raise EngineError(f"the network's shapes cannot be inferred: {reason}") from None
        graph = inferred.graph
        self._types = {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info, *graph.output)}
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        self._aliases: dict[str, str] = {}
        self.inputs = frozenset(value.name for value in graph.input) - self._initializers.keys()
        self.nodes: list[Node] = []
        self._producers: dict[str, Node] = {}
        self._consumers: dict[str, list[Node]] = {}
        for position, proto in enumerate(graph.node):
            self._add(position, proto)
        self.outputs = {value.name: self.resolve(value.name) for value in graph.output}

    def resolve(self, name: str) -> str:
        """The value that a name stands for, without casts between float types."""
        return self._aliases.get(name, name)

    def producer(self, value: str) -> Node | None:
        """The node that makes a value; None for inputs and weights."""
        return self._producers.get(value)

    def consumers(self, value: str) -> Sequence[Node]:
        """The nodes that read a value."""
        return self._consumers.get(value, ())

    def is_weight(self, value: str) -> bool:
        """Whether the value is a tensor of the checkpoint."""
        tensor = self._initializers.get(value)
        return tensor is not None and tensor.data_location == TensorProto.EXTERNAL

    def constant(self, value: str) -> Array | None:
        """A constant that is part of the graph."""
        tensor = self._initializers.get(value)
        if tensor is None or self.is_weight(value):
            return None
        value_array: Array = numpy_helper.to_array(tensor)
        return value_array

    def shape(self, value: str) -> tuple[int | None, ...]:
        """The sizes of a value; None for one that is known at run time only."""
        if value in self._initializers:
            return tuple(self._initializers[value].dims)
        dims = self._types[value].shape.dim
        return tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in dims)

    def width(self, value: str) -> int:
        """The last size of a value. Raises EngineError where it isn't known."""
        shape = self.shape(value)
        if not shape or shape[-1] is None:
            raise EngineError(f"the width of value '{value}' is not known at build time")
        return shape[-1]

    def _add(self, position: int, proto: onnx.NodeProto) -> None:
        inputs = tuple(self.resolve(name) for name in proto.input)
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in proto.attribute}
        if proto.op_type == "Cast" and {self.element_type(inputs[0]), attributes["to"]} <= _FLOAT_TYPES:
            self._aliases[proto.output[0]] = inputs[0]
            return
        node = Node(position, proto.op_type, proto.name, inputs, tuple(proto.output), attributes)
        _check_operator(proto, node)
        self.nodes.append(node)
        for output in node.outputs:
            self._producers[output] = node
        for value in dict.fromkeys(inputs):
            self._consumers.setdefault(value, []).append(node)

    def element_type(self, value: str) -> int:
        """ONNX's type of a value's elements."""
        if value in self._initializers:
            return int(self._initializers[value].data_type)
        return int(self._types[value].elem_type)


def _check_operator(proto: onnx.NodeProto, node: Node) -> None:
    if proto.domain == DOMAIN:
        version = (_text(node, "plugin_version"), _text(node, "plugin_namespace"))
        if version != (VERSION, NAMESPACE):
            raise EngineError(f"{node.describe()}: its version and namespace are {version}, not {(VERSION, NAMESPACE)}")
    elif proto.domain not in ("", "ai.onnx"):
        raise EngineError(f"{node.describe()}: nothing is known of the domain '{proto.domain}'")


def _text(node: Node, name: str) -> str:
    """A string attribute; empty when it is missing."""
    value = node.attributes.get(name, b"")
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
