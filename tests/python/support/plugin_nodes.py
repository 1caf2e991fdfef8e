"""Plugin nodes of small sizes, and TensorRT's descriptions for creators and nodes. Needs TensorRT for RTX."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from adaptrt.plugins import PLUGINS, Plugin, Tensor
from adaptrt.plugins.tensorrt.creator import Creator, make_creator

trt = pytest.importorskip("tensorrt_rtx", reason="pip install adaptrt[tensorrt-rtx]")

LORA_ATTRIBUTES = {"layer": 1, "module_ids": [1, 2], "out_sizes": [4, 3], "max_rank": 8}
HEADS = {
    "layer": 0,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 6,
    "scale": 0.5,
    "sliding_window": 7,
    "softcap": 0.0,
}
LORA_SIZES = {"tokens": 9, "in": 5, "out": 7, "offsets": 4, "sequences": 3, "slots": 2, "layers": 2}
ATTENTION_SIZES = {
    "tokens": 9, "query": 12, "key": 6, "blocks": 10, "kv_heads": 1, "tokens_per_block": 4, "head_dim": 6,
    "sequences": 3, "max_blocks": 8, "offsets": 4, "half": 3,
}  # fmt: skip
EXAMPLES = {
    "Lora": (LORA_ATTRIBUTES, LORA_SIZES),
    "Dora": (LORA_ATTRIBUTES, LORA_SIZES),
    "PagedAttention": (HEADS, ATTENTION_SIZES),
}
TYPES = {
    "tensor(float)": (TensorProto.FLOAT, trt.float32),
    "tensor(int32)": (TensorProto.INT32, trt.int32),
    "tensor(int64)": (TensorProto.INT64, trt.int64),
    "T": (TensorProto.FLOAT16, trt.float16),
}
FIELD_TYPES = {
    "int": trt.PluginFieldType.INT32,
    "ints": trt.PluginFieldType.INT32,
    "float": trt.PluginFieldType.FLOAT32,
}
plugins = pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)


class Expressions:
    """Expressions of known or unknown sizes. TensorRT's own exist only during a build."""

    @staticmethod
    def constant(size: int) -> Any:
        return SimpleNamespace(is_constant=lambda: size >= 0, get_constant_value=lambda: size)


class Shape(list):
    """Replaces DimsExprs, which tests cannot make with their own expressions."""

    def __init__(self, rank: int) -> None:
        super().__init__([None] * rank)


def fields(attributes: dict[str, Any]) -> list[Any]:
    """Returns PluginFields. A PluginFieldCollection would not keep their arrays alive."""
    made = []
    for name, value in attributes.items():
        dtype = np.float32 if isinstance(value, float) else np.int32
        type_ = trt.PluginFieldType.FLOAT32 if isinstance(value, float) else trt.PluginFieldType.INT32
        made.append(trt.PluginField(name, np.atleast_1d(np.asarray(value, dtype)), type_))
    return made


def creator_of(plugin: Plugin, kernels: Any = None) -> Creator:
    return make_creator(trt, plugin, [], kernels)


def node_of(plugin: Plugin) -> Any:
    return creator_of(plugin).create_plugin("node", fields(EXAMPLES[plugin.name][0]), trt.TensorRTPhase.BUILD)


def shapes_of(tensors: tuple[Tensor, ...], sizes: dict[str, int]) -> list[list[int]]:
    return [[dim if isinstance(dim, int) else sizes[dim] for dim in tensor.shape] for tensor in tensors]


def descriptions(plugin: Plugin, sizes: dict[str, int], engine_type: Any = trt.float16) -> tuple[list, list]:
    """Returns the builder's descriptions of a node's inputs and outputs."""
    return tuple(
        [
            SimpleNamespace(
                desc=SimpleNamespace(
                    dims=[-1] * len(shape),
                    format=trt.TensorFormat.LINEAR,
                    type=engine_type if tensor.type == "T" else TYPES[tensor.type][1],
                ),
                max=shape,
            )
            for tensor, shape in zip(tensors, shapes_of(tensors, sizes), strict=True)
        ]
        for tensors in (plugin.inputs, plugin.outputs)
    )
