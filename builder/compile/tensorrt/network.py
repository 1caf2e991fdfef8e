"""The ONNX graph for TensorRT, and the properties that the builder reads from it."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto, helper

from ....plugins import PLUGINS
from ....plugins.definition import DOMAIN


def stored_weights(model: onnx.ModelProto) -> list[TensorProto]:
    """Initializers whose bytes are in the checkpoint."""
    return [tensor for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]


def with_weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """The network with each stored weight as an input of the same name and shape, after the other inputs."""
    weights = stored_weights(model)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.initializer[:]
    result.graph.initializer.extend(
        tensor for tensor in model.graph.initializer if tensor.data_location != TensorProto.EXTERNAL
    )
    result.graph.input.extend(
        helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in weights
    )
    return result


def aliases(model: onnx.ModelProto) -> dict[str, str]:
    """Inputs that the network's outputs overwrite, by output name. The plugins alias them."""
    definitions = {plugin.name: plugin for plugin in PLUGINS}
    outputs = {output.name for output in model.graph.output}
    found = {}
    for node in model.graph.node:
        if node.domain != DOMAIN:
            continue
        plugin = definitions[node.op_type]
        inputs = dict(zip((tensor.name for tensor in plugin.inputs), node.input, strict=True))
        for tensor, name in zip(plugin.outputs, node.output, strict=True):
            if tensor.name in plugin.aliases and name in outputs:
                found[name] = inputs[plugin.aliases[tensor.name]]
    return found


def operators(model: onnx.ModelProto) -> Mapping[str, str]:
    """Operator of each node, by node name."""
    return {node.name: node.op_type for node in model.graph.node}
