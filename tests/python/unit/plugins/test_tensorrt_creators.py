"""The plugins' interface to TensorRT: creators, fields, formats, launches, the registry."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from adaptrt._core import DType, EngineError
from adaptrt.plugins import DORA, LORA, PAGED_ATTENTION, Plugin
from adaptrt.plugins.adapter_tables import NUM_MODULES
from adaptrt.plugins.tensorrt import register_plugins
from adaptrt.plugins.tensorrt.creator import make_creator
from support.fake_kernels import FakeKernels
from support.plugin_nodes import (
    EXAMPLES,
    HEADS,
    LORA_ATTRIBUTES,
    LORA_SIZES,
    Expressions,
    Shape,
    creator_of,
    descriptions,
    fields,
    node_of,
    plugins,
    shapes_of,
    trt,
)


@pytest.fixture
def expressions(monkeypatch: pytest.MonkeyPatch) -> type[Expressions]:
    monkeypatch.setattr(trt, "DimsExprs", Shape)
    return Expressions


@plugins
def test_fields_come_back_as_they_were_serialised(plugin: Plugin) -> None:
    creator = creator_of(plugin)
    node = creator.create_plugin("node", fields(EXAMPLES[plugin.name][0]), trt.TensorRTPhase.BUILD)
    serialised = node.clone().get_fields_to_serialize()
    again = creator.create_plugin("node", serialised, trt.TensorRTPhase.BUILD)
    assert again.attributes == node.attributes == EXAMPLES[plugin.name][0]
    assert [(f.name, f.type) for f in serialised] == [(f.name, f.type) for f in creator.field_names]


def test_missing_fields_take_the_definitions_default() -> None:
    given = {name: value for name, value in HEADS.items() if name != "sliding_window"}
    node = creator_of(PAGED_ATTENTION).create_plugin("node", fields(given), trt.TensorRTPhase.BUILD)
    assert node.attributes == {**HEADS, "sliding_window": 0}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"max_rank": None}, "field max_rank is missing"),
        ({"layer": [1, 2]}, "field layer has 2 elements; expected 1"),
        ({"layer": 1.0}, "field layer is FLOAT32; expected INT32"),
        ({"rank": 1}, "field rank is not known; its fields are layer, module_ids, out_sizes, max_rank"),
        ({"max_rank": 0}, "max_rank 0 must be at least 1"),
        ({"module_ids": [1, 1]}, "each module once"),
        ({"module_ids": [1, NUM_MODULES]}, "must be within 0"),
    ],
)
def test_bad_fields_are_refused_by_name(change: dict[str, Any], complaint: str) -> None:
    given = {name: value for name, value in {**LORA_ATTRIBUTES, **change}.items() if value is not None}
    problems: list[str] = []
    creator = make_creator(trt, LORA, problems, None)
    with pytest.raises(EngineError, match=f"Lora node 'layers.0/q': .*{complaint}"):
        creator.create_plugin("layers.0/q", fields(given), trt.TensorRTPhase.BUILD)
    assert len(problems) == 1  # TensorRT would hide the exception


def test_every_bad_field_is_named() -> None:
    given = fields({**LORA_ATTRIBUTES, "rank": 1, "layer": [1, 2]})
    with pytest.raises(EngineError, match=r"layer has 2 elements.*field rank is not known"):
        creator_of(LORA).create_plugin("node", given, trt.TensorRTPhase.BUILD)


def test_shapes_that_do_not_fit_are_refused_while_a_plan_is_built(expressions) -> None:
    node = node_of(LORA)
    sizes = {**LORA_SIZES, "out": 8, "tokens": -1}
    shapes = [[expressions.constant(size) for size in shape] for shape in shapes_of(LORA.inputs, sizes)]
    with pytest.raises(EngineError, match=r"Lora node 'node': out_sizes .* add up to 7"):
        node.get_output_shapes(shapes, [], expressions)


@plugins
def test_formats_are_the_definitions_types_in_linear_order(plugin: Plugin) -> None:
    node = node_of(plugin)
    for engine_type in (trt.float16, trt.bfloat16):
        inputs, outputs = descriptions(plugin, EXAMPLES[plugin.name][1], engine_type)
        tensors = [*inputs, *outputs]
        for position, tensor in enumerate(tensors):
            assert node.supports_format_combination(position, tensors, len(inputs))
            right = tensor.desc.type
            for wrong in {trt.float32, trt.float16, trt.bfloat16, trt.int32, trt.int64, trt.int8} - {right}:
                tensor.desc.type = wrong
                free = position == 0 and wrong in (trt.float16, trt.bfloat16)
                assert node.supports_format_combination(position, tensors, len(inputs)) == free
            tensor.desc.type = right
            tensor.desc.format = trt.TensorFormat.CHW32
            assert not node.supports_format_combination(position, tensors, len(inputs))
            tensor.desc.format = trt.TensorFormat.LINEAR


@plugins
def test_a_node_forwards_sizes_addresses_and_stream_to_one_kernel(plugin: Plugin) -> None:
    kernels = FakeKernels()
    attributes, sizes = EXAMPLES[plugin.name]
    node = creator_of(plugin, kernels).create_plugin("node", fields(attributes), trt.TensorRTPhase.RUNTIME)
    inputs, outputs = list(range(100, 100 + len(plugin.inputs))), list(range(200, 200 + len(plugin.outputs)))
    contexts = [node.attach_to_context(None), node.attach_to_context(None)]
    for context in contexts:
        found, _ = descriptions(plugin, sizes, trt.bfloat16)
        for item, shape in zip(found, shapes_of(plugin.inputs, sizes), strict=True):
            item.desc.dims = shape
        context.enqueue([item.desc for item in found], [], inputs, outputs, 7, 8)
    (kernel,) = kernels.lora + kernels.attention
    if plugin is PAGED_ATTENTION:
        assert kernel.made_with == (DType.BFLOAT16.value, 2, 1, 6, 0.5, 7, 0.0)
        assert kernel.launches == [(9, 3, 8, 4, 3, inputs, outputs, 7, 8)] * 2
    else:
        assert kernel.made_with == (DType.BFLOAT16.value, 1, [1, 2], [4, 3], 8, plugin is DORA)
        assert kernel.launches == [(9, 5, 3, 2, inputs, outputs, 7, 8)] * 2


def test_without_kernels_a_plan_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(EngineError, match="Dora node 'node': there are no CUDA kernels"):
        creator_of(DORA).create_plugin("node", fields(LORA_ATTRIBUTES), trt.TensorRTPhase.RUNTIME)


class Registry:
    """A stand-in for TensorRT's registry that needs neither a Builder nor a GPU."""

    def __init__(self, *taken: str) -> None:
        self.names = list(taken)

    def register_creator(self, creator: Any, namespace: str) -> bool:
        assert namespace == "adaptrt"
        if creator.name in self.names:
            return False
        self.names.append(creator.name)
        return True

    def deregister_creator(self, creator: Any) -> bool:
        self.names.remove(creator.name)
        return True


def test_registering_is_all_or_nothing() -> None:
    registry = Registry()
    registration = register_plugins(trt, registry)
    assert registry.names == ["Lora", "Dora", "PagedAttention"]
    with pytest.raises(EngineError, match="adaptrt::Lora version 1: it has one already"):
        register_plugins(trt, registry)
    assert registry.names == ["Lora", "Dora", "PagedAttention"]
    registration.close()
    assert registry.names == []
    taken = Registry("PagedAttention")
    with pytest.raises(EngineError, match="PagedAttention"):
        register_plugins(trt, taken)
    assert taken.names == ["PagedAttention"]


def test_problems_are_taken_once() -> None:
    registration = register_plugins(trt, Registry())
    with pytest.raises(EngineError):
        registration.creators[0].create_plugin("node", fields({}), trt.TensorRTPhase.BUILD)
    (problem,) = registration.take_problems()
    assert problem.startswith("Lora node 'node': field layer is missing")
    assert registration.take_problems() == []


@plugins
def test_serialised_fields_keep_their_values(plugin: Plugin) -> None:
    """TensorRT reads the fields only after the call that returned them."""
    node = node_of(plugin)
    serialised = node.get_fields_to_serialize()
    gc.collect()
    noise = [np.full(size, 77, np.int32) for size in range(1, 9) for _ in range(200)]
    values = {field.name: np.asarray(field.data).tolist() for field in serialised}
    del noise
    expected = {name: np.atleast_1d(value).tolist() for name, value in EXAMPLES[plugin.name][0].items()}
    assert values == expected
