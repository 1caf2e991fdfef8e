"""A real plan stores every attribute of the plugins' definitions, so it can create them again."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from adaptrt._core import DType
from adaptrt.builder.build import build
from adaptrt.builder.network.onnx_graph import NetworkOptions
from adaptrt.formats.engine.build_config import LoraBuildConfig, PluginConfig, TensorRtBuildConfig
from adaptrt.plugins import DOMAIN, PLUGINS, Plugin
from support.engines import SMALL, make_checkpoint, make_network
from support.fake_kernels import FakeKernels
from support.models import ModelSpec
from support.plugin_nodes import creator_of, trt

# Byte patterns of strings, counts and buffers in plans of TensorRT for RTX 1.7.
TEXT = rb"\x13\x80\x01\x00.{8}\x01\x80\x0c\x80\x01\x00.{8}"
COUNT = rb"\x07\x80\x01\x00"
FIELD = re.compile(
    TEXT + rb"([a-z_]+)" + COUNT + rb".{4}" + TEXT + rb"(INT32|FP32)\x01\x80\x03\x80\x01\x00(.{8})", re.S
)
TYPES = {
    b"INT32": (np.int32, trt.PluginFieldType.INT32),
    b"FP32": (np.float32, trt.PluginFieldType.FLOAT32),
}


def stored_nodes(plan: bytes, plugin: Plugin) -> list[list[Any]]:
    """Returns the fields of each of a plugin's nodes."""
    head = re.compile(plugin.name.encode() + TEXT + b"1" + TEXT + b"adaptrt" + COUNT + rb"(.{4})", re.S)
    found = []
    for node in head.finditer(plan):
        position, fields = node.end(), []
        for _ in range(int.from_bytes(node[1], "little")):
            field = FIELD.match(plan, position)
            assert field is not None, f"{plugin.name}: no field at {position}"
            dtype, field_type = TYPES[field[2]]
            position = field.end() + int.from_bytes(field[3], "little")
            data = np.frombuffer(plan[field.end() : position], dtype)
            fields.append(trt.PluginField(field[1].decode(), data, field_type))
        found.append(fields)
    return found


def network_nodes(model: onnx.ModelProto, plugin: Plugin) -> list[dict[str, Any]]:
    own = {attribute.name for attribute in plugin.own_attributes}
    return [
        {item.name: helper.get_attribute_value(item) for item in node.attribute if item.name in own}
        for node in model.graph.node
        if (node.domain, node.op_type) == (DOMAIN, plugin.name)
    ]


def ordered(nodes: list[dict[str, Any]]) -> list[str]:
    """Returns each node once, because TensorRT stores a node for each profile."""
    return sorted({repr(sorted(node.items())) for node in nodes})


@pytest.mark.parametrize("dora", [False, True])
def test_a_plan_keeps_every_attribute(tmp_path: Path, dora: bool) -> None:
    spec = ModelSpec(family="mistral", extra=(("sliding_window", 17),))
    checkpoint = make_checkpoint(spec, tmp_path, DType.BFLOAT16)
    _, network = make_network(checkpoint, NetworkOptions(tokens_per_block=4, max_lora_rank=24, dora=dora))
    config = replace(
        SMALL,
        backend="tensorrt",
        plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable" if dora else "disable"),
        lora_config=LoraBuildConfig(max_lora_rank=24),
        tensorrt_config=TensorRtBuildConfig(compute_capability=("8.9",)),
    )
    build(checkpoint, config, tmp_path / "engine")
    plan = (tmp_path / "engine" / "rank0.sm89.plan").read_bytes()
    for plugin in PLUGINS:
        creator = creator_of(plugin, FakeKernels())
        stored = [
            creator.create_plugin("node", fields, trt.TensorRTPhase.RUNTIME).attributes
            for fields in stored_nodes(plan, plugin)
        ]
        assert ordered(stored) == ordered(network_nodes(network, plugin)), plugin.name
        assert bool(stored) == (plugin.name == "PagedAttention" or (plugin.name == "Dora") == dora)
