"""ONNX schemas with type and shape inference, made from the plugins' definitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import onnx
from onnx.defs import OpSchema
from onnx.helper import get_attribute_value, make_attribute
from onnx.shape_inference import InferenceContext, InferenceError

from .definition import DOMAIN, ENGINE_TYPE, ENGINE_TYPES, VERSION, Plugin, Tensor

_ATTRIBUTE_TYPES: Final = {
    "int": OpSchema.AttrType.INT,
    "ints": OpSchema.AttrType.INTS,
    "float": OpSchema.AttrType.FLOAT,
    "string": OpSchema.AttrType.STRING,
}
_ELEMENT_TYPES: Final = {
    "tensor(float)": onnx.TensorProto.FLOAT,
    "tensor(int32)": onnx.TensorProto.INT32,
    "tensor(int64)": onnx.TensorProto.INT64,
}


def make_schema(plugin: Plugin) -> OpSchema:
    """The schema of a plugin."""
    schema = OpSchema(
        plugin.name,
        DOMAIN,
        int(VERSION),
        plugin.doc,
        inputs=[_parameter(tensor) for tensor in plugin.inputs],
        outputs=[_parameter(tensor) for tensor in plugin.outputs],
        type_constraints=[(ENGINE_TYPE, list(ENGINE_TYPES), "The engine's type.")],
        attributes=[
            OpSchema.Attribute(attribute.name, _ATTRIBUTE_TYPES[attribute.kind], attribute.doc)
            if attribute.default is None
            else OpSchema.Attribute(attribute.name, make_attribute(attribute.name, attribute.default), attribute.doc)
            for attribute in plugin.attributes
        ],
    )
    schema.set_type_and_shape_inference_function(lambda context: _infer(plugin, context))
    return schema


def register_schemas(plugins: Iterable[Plugin]) -> None:
    """Registers the plugins with onnx.checker and onnx.shape_inference of this process, once."""
    for plugin in plugins:
        if not onnx.defs.has(plugin.name, DOMAIN):
            onnx.defs.register_schema(make_schema(plugin))


def _parameter(tensor: Tensor) -> OpSchema.FormalParameter:
    shape = ", ".join(map(str, tensor.shape))
    return OpSchema.FormalParameter(tensor.name, tensor.type, f"[{shape}] {tensor.doc}")


def _infer(plugin: Plugin, context: InferenceContext) -> None:
    """Binds the named sizes to the inputs' sizes and sets those of the outputs. Raises an error if sizes disagree."""
    dims: dict[str, Any] = {}  # TensorShapeProto.Dimension by name.
    engine_type = 0
    for index, tensor in enumerate(plugin.inputs):
        found = context.get_input_type(index).tensor_type
        if tensor.type == ENGINE_TYPE:
            engine_type = engine_type or found.elem_type
        elif found.elem_type != _ELEMENT_TYPES[tensor.type]:
            raise InferenceError(f"{plugin.name}: input {tensor.name} must be {tensor.type}")
        if found.HasField("shape"):
            _bind(plugin, tensor, found.shape.dim, dims)
    sizes = {name: dim.dim_value for name, dim in dims.items() if dim.HasField("dim_value")}
    problems = plugin.check(sizes, _attributes(plugin, context))
    if problems:
        raise InferenceError(f"{plugin.name}: " + "; ".join(problems))
    for index, tensor in enumerate(plugin.outputs):
        result = onnx.TypeProto()
        result.tensor_type.elem_type = engine_type if tensor.type == ENGINE_TYPE else _ELEMENT_TYPES[tensor.type]
        shape = result.tensor_type.shape  # Reading the field creates it, which makes the rank known.
        for dim in tensor.shape:
            added = shape.dim.add()
            if isinstance(dim, int):
                added.dim_value = dim
            elif dim in dims:
                added.CopyFrom(dims[dim])
        context.set_output_type(index, result)


def _bind(plugin: Plugin, tensor: Tensor, found: Any, dims: dict[str, Any]) -> None:
    if len(found) != len(tensor.shape):
        raise InferenceError(
            f"{plugin.name}: input {tensor.name} has {len(found)} dimensions; expected {len(tensor.shape)}"
        )
    for name, dim in zip(tensor.shape, found, strict=True):
        if not dim.HasField("dim_value"):
            if isinstance(name, str) and dim.HasField("dim_param"):
                dims.setdefault(name, dim)
            continue
        known = name if isinstance(name, int) else dims[name].dim_value if _has_size(dims, name) else None
        if known is not None and known != dim.dim_value:
            raise InferenceError(f"{plugin.name}: input {tensor.name} has {dim.dim_value} where '{name}' is {known}")
        if isinstance(name, str):
            dims[name] = dim


def _has_size(dims: Mapping[str, Any], name: str) -> bool:
    return name in dims and dims[name].HasField("dim_value")


def _attributes(plugin: Plugin, context: InferenceContext) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for attribute in plugin.attributes:
        found = context.get_attribute(attribute.name)
        values[attribute.name] = attribute.default if found is None else get_attribute_value(found)
    return values
