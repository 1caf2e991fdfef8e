"""Lowering: what the graph's nodes become, and graphs that are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from adaptrt._core import EngineError, LinearEpilogue, QuantAlgo, RopeKind, RowKind
from adaptrt.builder.checkpoint.convert import convert_checkpoint
from adaptrt.builder.checkpoint.quantization import QuantConfig
from adaptrt.builder.compile.assemble import LoraOptions
from adaptrt.builder.compile.checkpoint import Checkpoint
from adaptrt.builder.compile.plan import AttentionOp, EmbeddingOp, KeepLogitRowsOp, LinearOp, RmsNormOp, RopeTableOp
from adaptrt.builder.network.decoder import NetworkOptions
from adaptrt.plugins import DOMAIN, PLUGINS, Plugin, register_schemas
from adaptrt.plugins import LORA as LORA_PLUGIN
from support.engines import ADAPTABLE, LORA, compile_model, make_checkpoint, make_network
from support.models import ModelSpec, save_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = ModelSpec(family="qwen3", extra=(("attention_bias", True),))
    return make_checkpoint(spec, tmp_path_factory.mktemp("lowering"))


@pytest.fixture
def network(checkpoint: Path) -> tuple[Checkpoint, onnx.ModelProto]:
    return make_network(checkpoint)


def node_of(model: onnx.ModelProto, op_type: str, number: int = 0) -> onnx.NodeProto:
    return [node for node in model.graph.node if node.op_type == op_type][number]


def test_a_layer_becomes_seven_ops(network) -> None:
    program = compile_model(*network).program
    to_attention, after = [RmsNormOp, LinearOp, AttentionOp], [LinearOp, RmsNormOp, LinearOp, LinearOp]
    assert [type(op) for op in program.body] == [
        EmbeddingOp,
        RopeTableOp,
        *to_attention,
        *after,
        *to_attention,
        KeepLogitRowsOp,
        *after,
    ]
    assert [type(op) for op in program.head] == [RmsNormOp, LinearOp]
    linears = [op for op in program.body if isinstance(op, LinearOp)][:4]
    store, add, silu_mul = LinearEpilogue.STORE, LinearEpilogue.ADD, LinearEpilogue.SILU_MUL
    assert [op.epilogue for op in linears] == [store, add, silu_mul, add]
    assert [len(op.parts) for op in linears] == [3, 1, 2, 1]
    assert all(part.bias is not None for op in linears[:2] for part in op.parts)
    assert program.head[0].gather_logit_rows
    attention = program.body[4]
    assert attention.query_norm.tensor == "transformer.layers.0.attention.q_layernorm.weight"


def test_rows_of_logits_are_kept_of_what_the_last_layer_still_reads(network) -> None:
    program = compile_model(*network).program
    at = next(at for at, op in enumerate(program.body) if isinstance(op, KeepLogitRowsOp))
    attention, dense = program.body[at - 1], program.body[at + 1]
    assert set(program.body[at].buffers) == {attention.output, dense.output}
    assert dense.output == program.head[0].input


def test_sites_are_in_the_order_of_execution_with_the_modules_as_parts(network) -> None:
    program = compile_model(*network).program
    assert program.lora is not None
    assert [[part.module for part in site.parts] for site in program.lora.sites] == [[1, 2, 3], [4], [5, 7], [6]] * 2
    assert [site.layer for site in program.lora.sites] == [0] * 4 + [1] * 4
    assert [op.lora_site for op in program.body if isinstance(op, LinearOp)] == list(range(8))
    assert program.head[1].lora_site == -1


def test_a_graph_without_adapters_has_no_sites(checkpoint: Path) -> None:
    opened, model = make_network(checkpoint, NetworkOptions(tokens_per_block=4))
    program = compile_model(opened, model, lora=None).program
    assert program.lora is None
    assert {op.lora_site for op in program.body if isinstance(op, LinearOp)} == {-1}
    with_adapters = compile_model(*make_network(checkpoint)).program
    assert len(program.body) == len(with_adapters.body)


def test_live_buffers_are_disjoint_and_sharing_saves_most_of_the_arena(network) -> None:
    compiled = compile_model(*network)
    assert compiled.arena.num_bytes < 0.5 * compiled.arena.unshared_bytes
    program = compiled.program
    logits = [buffer for buffer in program.buffers if buffer.rows is RowKind.LOGITS]
    assert {buffer.width for buffer in logits} == {36, 61}
    assert program.arena_bytes == compiled.arena.num_bytes


def test_dynamic_rotary_scaling_is_recognised(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    spec = ModelSpec(max_position_embeddings=96, extra=(("rope_parameters", rope),))
    opened, model = make_network(make_checkpoint(spec, tmp_path))
    table = compile_model(opened, model).program.body[1]
    assert isinstance(table, RopeTableOp)
    assert (table.kind, table.base, table.factor, table.original_max_position) == (RopeKind.DYNAMIC, 1e4, 2.0, 96)
    for tensor in model.graph.initializer:
        if tensor.name == "base_exponent":
            tensor.CopyFrom(numpy_helper.from_array(np.asarray([1.5], np.float32), "base_exponent"))
    with pytest.raises(EngineError, match="base_exponent"):
        compile_model(opened, model)


def network_with(plugin: Plugin, path: Path) -> tuple[Checkpoint, onnx.ModelProto, LoraOptions]:
    """A network that has nodes of this plugin."""
    dora = plugin is not LORA_PLUGIN
    return *make_network(path, replace(ADAPTABLE, dora=dora)), replace(LORA, dora_enabled=dora)


def test_lowering_reads_every_attribute_of_every_plugin(checkpoint: Path) -> None:
    """An attribute that the definition has and the lowering overlooks would make a wrong engine in silence."""
    for plugin in PLUGINS:
        opened, model, lora = network_with(plugin, checkpoint)
        before = compile_model(opened, model, lora).program
        for attribute in plugin.attributes:
            changed = onnx.ModelProto()
            changed.CopyFrom(model)
            node = node_of(changed, plugin.name)
            proto = next(item for item in node.attribute if item.name == attribute.name)
            value = helper.get_attribute_value(proto)
            other = {
                "int": lambda value: value + 1,
                "ints": lambda value: [*value[:-1], value[-1] + 10],
                "float": lambda value: value * 2,
                "string": lambda value: value + b"x",
            }[attribute.kind](value)
            node.attribute.remove(proto)
            node.attribute.append(helper.make_attribute(attribute.name, other))
            with contextlib.suppress(EngineError):  # refused is as good
                assert compile_model(opened, changed, lora).program != before, (plugin.name, attribute.name)


def test_lowering_reads_every_input_of_every_plugin(checkpoint: Path) -> None:
    register_schemas(PLUGINS)
    for plugin in PLUGINS:
        opened, model, lora = network_with(plugin, checkpoint)
        inferred = onnx.shape_inference.infer_shapes(model).graph
        types = {value.name: value for value in (*inferred.input, *inferred.value_info)}
        before = compile_model(opened, model, lora).program
        for at, tensor in enumerate(plugin.inputs):
            changed = onnx.ModelProto()
            changed.CopyFrom(model)
            node = node_of(changed, plugin.name)
            stranger = changed.graph.input.add()
            stranger.CopyFrom(types[node.input[at]])
            stranger.name = "stranger"
            node.input[at] = "stranger"
            with contextlib.suppress(EngineError):
                assert compile_model(opened, changed, lora).program != before, (plugin.name, tensor.name)


def set_attribute(node: onnx.NodeProto, name: str, value: object) -> None:
    for attribute in [item for item in node.attribute if item.name == name]:
        node.attribute.remove(attribute)
    node.attribute.append(helper.make_attribute(name, value))


def replace_op(op_type: str, other: str, number: int = 0) -> Callable[[onnx.ModelProto], str]:
    def change(model: onnx.ModelProto) -> str:
        node = node_of(model, op_type, number)
        node.op_type = other
        return node.name

    return change


def read_elsewhere(op_type: str) -> Callable[[onnx.ModelProto], str]:
    """Makes a value that fusing would hide an output of the graph."""

    def change(model: onnx.ModelProto) -> str:
        node = node_of(model, op_type)
        model.graph.output.append(helper.make_empty_tensor_value_info(node.output[0]))
        model.graph.output[-1].type.tensor_type.elem_type = TensorProto.FLOAT
        return node.name

    return change


def change_attribute(op_type: str, name: str, value: object) -> Callable[[onnx.ModelProto], str]:
    def change(model: onnx.ModelProto) -> str:
        node = node_of(model, op_type)
        set_attribute(node, name, value)
        return node.name

    return change


def unknown_domain(model: onnx.ModelProto) -> str:
    model.graph.node.append(helper.make_node("Mystery", ["input_ids"], ["m"], name="stranger", domain="elsewhere"))
    model.opset_import.append(helper.make_opsetid("elsewhere", 1))
    return "stranger|elsewhere|Mystery"


def unused_node(model: onnx.ModelProto) -> str:
    model.graph.node.append(helper.make_node("Neg", ["positions"], ["negated"], name="stranger"))
    return "stranger"


@pytest.mark.parametrize(
    "change",
    [
        replace_op("Sigmoid", "Tanh"),
        replace_op("Cos", "Sinh"),
        replace_op("Add", "Sub", -1),
        read_elsewhere("Gemm"),
        read_elsewhere("Sigmoid"),
        read_elsewhere("Split"),
        read_elsewhere("Cos"),
        change_attribute("Gemm", "alpha", 2.0),
        change_attribute("Gemm", "transA", 1),
        change_attribute("RMSNormalization", "stash_type", 10),
        unknown_domain,
        unused_node,
    ],
)
def test_a_graph_with_something_unknown_is_refused_by_the_nodes_name(network, change) -> None:
    checkpoint, model = network
    name = change(model)
    with pytest.raises(EngineError, match=f"({name})|shapes cannot be inferred"):
        compile_model(checkpoint, model)


def test_a_table_that_is_no_weight_is_refused(network) -> None:
    checkpoint, model = network
    table = next(item for item in model.graph.initializer if item.name == "transformer.vocab_embedding.weight")
    (node,) = (node for node in model.graph.node if node.input[:1] == [table.name])
    node.input[0] = "stranger"
    model.graph.input.append(helper.make_tensor_value_info("stranger", table.data_type, table.dims))
    with pytest.raises(EngineError, match="'stranger' is no two-dimensional weight"):
        compile_model(checkpoint, model)


def test_adapter_nodes_and_options_must_agree(checkpoint: Path) -> None:
    opened, model = make_network(checkpoint)
    with pytest.raises(EngineError, match="built with LoRA"):
        compile_model(opened, model, lora=None)
    with pytest.raises(EngineError, match="built with DoRA"):
        compile_model(opened, model, lora=replace(LORA, dora_enabled=False))
    with pytest.raises(EngineError, match="network's max_rank is 8, the engine's 9"):
        compile_model(opened, model, lora=replace(LORA, max_rank=9))
    second = node_of(model, "Dora", 1)
    second.op_type = "Lora"
    with pytest.raises(EngineError, match=f"{second.name}.* is of another type"):
        compile_model(opened, model)
    second.op_type = "Dora"
    set_attribute(second, "max_rank", 9)
    with pytest.raises(EngineError, match=f"{second.name}.*its max_rank is 9"):
        compile_model(opened, model)


def test_a_node_of_another_plugin_version_is_refused(network) -> None:
    checkpoint, model = network
    node = next(node for node in model.graph.node if node.domain == DOMAIN)
    set_attribute(node, "plugin_version", "2")
    with pytest.raises(EngineError, match=node.name):
        compile_model(checkpoint, model)


@pytest.fixture(scope="module")
def quantized_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quantized")
    save_model(ModelSpec(intermediate_size=38), directory / "model")
    how = QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=32, has_zero_point=True)
    convert_checkpoint(directory / "model", directory / "checkpoint", quantization=how)
    return directory / "checkpoint"


def forget_zero_points(model: onnx.ModelProto) -> str:
    node = node_of(model, "DequantizeLinear")
    del node.input[2]
    return node.name


def dequantize_a_constant(model: onnx.ModelProto) -> str:
    node = node_of(model, "DequantizeLinear", -1)
    scales = next(tensor for tensor in model.graph.initializer if tensor.name == node.input[1])
    constant = numpy_helper.from_array(np.ones(tuple(scales.dims), np.float32), scales.name)
    scales.CopyFrom(constant)
    return node.name


@pytest.mark.parametrize(
    "change",
    [change_attribute("DequantizeLinear", "axis", 0), forget_zero_points, dequantize_a_constant],
)
def test_a_quantised_weight_that_the_kernels_do_not_have_is_refused(quantized_checkpoint: Path, change) -> None:
    checkpoint, model = make_network(quantized_checkpoint)
    assert compile_model(checkpoint, model).num_ops > 0
    name = change(model)
    with pytest.raises(EngineError, match=f"({name})|shapes cannot be inferred"):
        compile_model(checkpoint, model)
