"""Schemas, reference ops and TensorRT's creators match the definitions, and these tests notice each difference."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.defs import OpSchema
from onnx.reference import ReferenceEvaluator

from adaptrt._core import EngineError
from adaptrt.plugins import DOMAIN, Attribute, Plugin
from adaptrt.plugins.reference import make_reference_op
from adaptrt.plugins.schema import make_schema
from adaptrt.plugins.tensorrt.creator import Creator
from support.plugin_nodes import (
    EXAMPLES,
    FIELD_TYPES,
    TYPES,
    Expressions,
    Shape,
    creator_of,
    descriptions,
    fields,
    plugins,
    shapes_of,
    trt,
)

ONNX_KINDS = {
    OpSchema.AttrType.INT: "int",
    OpSchema.AttrType.INTS: "ints",
    OpSchema.AttrType.FLOAT: "float",
    OpSchema.AttrType.STRING: "string",
}


@pytest.fixture
def expressions(monkeypatch: pytest.MonkeyPatch) -> type[Expressions]:
    monkeypatch.setattr(trt, "DimsExprs", Shape)
    return Expressions


def inferred(schema: OpSchema, plugin: Plugin) -> list[tuple[int, list[int]]]:
    """Returns (type, shape) of the outputs as onnx infers them from a schema."""
    attributes, sizes = EXAMPLES[plugin.name]
    node = helper.make_node(
        plugin.name, [t.name for t in plugin.inputs], [t.name for t in plugin.outputs], domain=DOMAIN, **attributes
    )
    inputs = {
        tensor.name: helper.make_tensor_type_proto(TYPES[tensor.type][0], shape)
        for tensor, shape in zip(plugin.inputs, shapes_of(plugin.inputs, sizes), strict=True)
    }
    outputs = onnx.shape_inference.infer_node_outputs(
        schema, node, inputs, opset_imports=[helper.make_opsetid(DOMAIN, 1)]
    )
    return [
        (found.tensor_type.elem_type, [dim.dim_value for dim in found.tensor_type.shape.dim])
        for found in (outputs[tensor.name] for tensor in plugin.outputs)
    ]


def schema_differences(plugin: Plugin, schema: OpSchema) -> list[str]:
    """Returns the parts of a schema that differ from the definition."""
    found = []
    for kind, tensors, parameters in (
        ("inputs", plugin.inputs, schema.inputs),
        ("outputs", plugin.outputs, schema.outputs),
    ):
        if [(t.name, t.type) for t in tensors] != [(p.name, p.type_str) for p in parameters]:
            found.append(kind)
    if schema.name != plugin.name:
        found.append("name")
    attributes = {
        name: (ONNX_KINDS[item.type], None if item.required else helper.get_attribute_value(item.default_value))
        for name, item in schema.attributes.items()
    }
    expected = {
        item.name: (item.kind, item.default.encode() if isinstance(item.default, str) else item.default)
        for item in plugin.attributes
    }
    return found if attributes == expected else [*found, "attributes"]


def reference_differences(plugin: Plugin, op: Any) -> list[str]:
    """Returns the parts of a reference op that differ from the definition's maths."""
    attributes, sizes = EXAMPLES[plugin.name]
    numpy_types = {"T": np.float32, "tensor(float)": np.float32, "tensor(int32)": np.int32, "tensor(int64)": np.int64}
    inputs = {
        tensor.name: np.full(shape, 0.25, np.float32).astype(numpy_types[tensor.type])
        for tensor, shape in zip(plugin.inputs, shapes_of(plugin.inputs, sizes), strict=True)
    }
    inputs["sequence_offsets"][:] = [0, 2, 3, 9]
    outputs = [tensor.name for tensor in plugin.outputs]
    node = helper.make_node(plugin.name, list(inputs), outputs, domain=DOMAIN, **attributes)
    values = [[helper.make_empty_tensor_value_info(name) for name in names] for names in (inputs, outputs)]
    model = helper.make_model(
        helper.make_graph([node], "one", *values), opset_imports=[helper.make_opsetid(DOMAIN, 1)], ir_version=11
    )
    if (op.op_domain, op.__name__) != (DOMAIN, plugin.name):
        return ["name"]
    actual = ReferenceEvaluator(model, new_ops=[op]).run(None, inputs)
    expected = plugin.evaluate(list(inputs.values()), attributes)
    same = len(actual) == len(expected) and all(np.array_equal(a, b) for a, b in zip(actual, expected, strict=True))
    return [] if same else ["outputs"]


def creator_differences(plugin: Plugin, creator: Creator, expressions: type[Expressions]) -> list[str]:
    """Returns the parts of a creator, and of the nodes it makes, that differ from the definition."""
    found = []
    if (creator.name, creator.plugin_version, creator.plugin_namespace) != (plugin.name, "1", "adaptrt"):
        found.append("name")
    asked = [(field.name, field.type) for field in creator.field_names]
    if asked != [(attribute.name, FIELD_TYPES[attribute.kind]) for attribute in plugin.own_attributes]:
        return [*found, "fields"]
    attributes, sizes = EXAMPLES[plugin.name]
    node = creator.create_plugin("node", fields(attributes), trt.TensorRTPhase.BUILD)
    if node.attributes != attributes:
        found.append("attributes")
    if node.num_outputs != len(plugin.outputs):
        return [*found, "outputs"]
    inputs, outputs = plugin.inputs, plugin.outputs
    if node.get_output_data_types([TYPES[t.type][1] for t in inputs]) != [TYPES[t.type][1] for t in outputs]:
        found.append("output types")
    shapes = [[expressions.constant(size) for size in shape] for shape in shapes_of(inputs, sizes)]
    try:
        made = node.get_output_shapes(shapes, [], expressions)
    except EngineError as error:
        return [*found, str(error)]
    if [[size.get_constant_value() for size in shape] for shape in made] != shapes_of(outputs, sizes):
        found.append("output shapes")
    aliases = {t.name: node.get_aliased_input(index) for index, t in enumerate(outputs)}
    expected = {t.name: -1 for t in outputs} | {
        output: [t.name for t in inputs].index(name) for output, name in plugin.aliases.items()
    }
    if aliases != expected:
        found.append("aliases")
    if node.get_workspace_size(*descriptions(plugin, sizes)) != plugin.workspace_bytes(sizes, attributes):
        found.append("workspace")
    return found


@plugins
def test_all_that_is_derived_from_a_definition_says_the_same(plugin: Plugin, expressions) -> None:
    assert schema_differences(plugin, make_schema(plugin)) == []
    assert reference_differences(plugin, make_reference_op(plugin)) == []
    assert creator_differences(plugin, creator_of(plugin), expressions) == []
    sizes = EXAMPLES[plugin.name][1]
    expected = [TYPES[tensor.type][0] for tensor in plugin.outputs]
    assert inferred(make_schema(plugin), plugin) == list(zip(expected, shapes_of(plugin.outputs, sizes), strict=True))


def without_an_attribute(plugin: Plugin) -> Plugin:
    return dataclasses.replace(plugin, own_attributes=plugin.own_attributes[:-1])


def with_another_attribute(plugin: Plugin) -> Plugin:
    return dataclasses.replace(plugin, own_attributes=(*plugin.own_attributes, Attribute("more", "int", "", 3)))


def with_another_kind(plugin: Plugin) -> Plugin:
    first, *rest = plugin.own_attributes
    return dataclasses.replace(plugin, own_attributes=(dataclasses.replace(first, kind="float"), *rest))


def with_another_name(plugin: Plugin) -> Plugin:
    return dataclasses.replace(plugin, name=plugin.name + "2")


def with_another_input_type(plugin: Plugin) -> Plugin:
    *rest, last = plugin.inputs
    return dataclasses.replace(plugin, inputs=(*rest, dataclasses.replace(last, type="tensor(int32)")))


def with_another_output_type(plugin: Plugin) -> Plugin:
    first, *rest = plugin.outputs
    return dataclasses.replace(plugin, outputs=(dataclasses.replace(first, type="tensor(float)"), *rest))


def with_another_output_shape(plugin: Plugin) -> Plugin:
    first, *rest = plugin.outputs
    return dataclasses.replace(plugin, outputs=(dataclasses.replace(first, shape=("tokens", 1)), *rest))


def with_another_alias(plugin: Plugin) -> Plugin:
    return dataclasses.replace(plugin, aliases={plugin.outputs[0].name: plugin.inputs[1].name})


def with_another_workspace(plugin: Plugin) -> Plugin:
    return dataclasses.replace(plugin, workspace_bytes=lambda sizes, attributes: 1)


def with_other_maths(plugin: Plugin) -> Plugin:
    return dataclasses.replace(
        plugin, evaluate=lambda *arguments: tuple(output + 1 for output in plugin.evaluate(*arguments))
    )


@plugins
@pytest.mark.parametrize(
    "drift",
    [
        without_an_attribute, with_another_attribute, with_another_kind, with_another_name,
        with_another_output_type, with_another_output_shape, with_another_alias, with_another_workspace,
    ],
)  # fmt: skip
def test_a_creator_of_another_definition_is_noticed(plugin: Plugin, drift, expressions) -> None:
    assert creator_differences(plugin, creator_of(drift(plugin)), expressions)


@plugins
@pytest.mark.parametrize(
    "drift",
    [
        without_an_attribute, with_another_attribute, with_another_kind, with_another_name,
        with_another_input_type, with_another_output_type,
    ],
)  # fmt: skip
def test_a_schema_of_another_definition_is_noticed(plugin: Plugin, drift) -> None:
    assert schema_differences(plugin, make_schema(drift(plugin)))


@plugins
@pytest.mark.parametrize("drift", [with_another_name, with_other_maths])
def test_a_reference_op_of_another_definition_is_noticed(plugin: Plugin, drift) -> None:
    assert reference_differences(plugin, make_reference_op(drift(plugin)))
