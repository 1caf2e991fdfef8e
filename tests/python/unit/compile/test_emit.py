"""How a network's ops appear in the native program and in the ONNX graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaptrt._core import ConfigError, LinearEpilogue, QuantAlgo, RopeKind, RowKind
from adaptrt.builder.compile.emit import emit
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.network.onnx_graph import onnx_graph
from adaptrt.builder.network.stored_tensors import stored_tensors
from adaptrt.formats.checkpoint.activation import Activation
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.checkpoint.rotary import LinearScaling
from adaptrt.formats.engine.plan import AttentionOp, EmbeddingOp, KeepLogitRowsOp, LinearOp, RmsNormOp, RopeTableOp
from adaptrt.formats.models.registry import declare
from adaptrt.formats.network.network import Network
from adaptrt.formats.network.operands import HeadNorm, RotaryTable, Value
from adaptrt.formats.network.ops import Linear
from adaptrt.formats.network.weights import Split, whole
from support.engines import ADAPTABLE, SMALL, compile_model, make_checkpoint
from support.models import ModelSpec, save_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    spec = ModelSpec(family="qwen3", extra=(("attention_bias", True),))
    return Checkpoint.open(make_checkpoint(spec, tmp_path_factory.mktemp("emit")))


def test_a_layer_becomes_seven_ops(checkpoint: Checkpoint) -> None:
    program = compile_model(checkpoint).program
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


def test_rows_of_logits_are_kept_of_what_the_last_layer_still_reads(checkpoint: Checkpoint) -> None:
    program = compile_model(checkpoint).program
    at = next(at for at, op in enumerate(program.body) if isinstance(op, KeepLogitRowsOp))
    attention, dense = program.body[at - 1], program.body[at + 1]
    assert set(program.body[at].buffers) == {attention.output, dense.output}
    assert dense.output == program.head[0].input


def test_sites_are_in_the_order_of_execution_with_the_modules_as_parts(checkpoint: Checkpoint) -> None:
    program = compile_model(checkpoint).program
    assert program.lora is not None
    layers = [[1, 2, 3], [4], [5, 7], [6]] * 2
    embedding, lm_head = [27], [26]
    assert [[part.module for part in site.parts] for site in program.lora.sites] == [embedding, *layers, lm_head]
    assert [site.layer for site in program.lora.sites] == [0, *[0] * 4, *[1] * 4, 0]
    assert program.body[0].lora_site == 0
    assert [op.lora_site for op in program.body if isinstance(op, LinearOp)] == list(range(1, 9))
    assert program.head[1].lora_site == 9


def test_an_engine_without_adapters_has_no_sites(checkpoint: Checkpoint) -> None:
    program = compile_model(checkpoint, SMALL).program
    assert program.lora is None
    assert {op.lora_site for op in program.body if isinstance(op, LinearOp)} == {-1}
    with_adapters = compile_model(checkpoint).program
    assert len(program.body) == len(with_adapters.body)


def test_live_buffers_are_disjoint_and_sharing_saves_most_of_the_arena(checkpoint: Checkpoint) -> None:
    compiled = compile_model(checkpoint)
    assert compiled.arena.num_bytes < 0.5 * compiled.arena.unshared_bytes
    program = compiled.program
    logits = [buffer for buffer in program.buffers if buffer.rows is RowKind.LOGITS]
    assert {buffer.width for buffer in logits} == {36, 61}
    assert program.arena_bytes == compiled.arena.num_bytes


def test_dynamic_rotary_scaling(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    spec = ModelSpec(max_position_embeddings=96, extra=(("rope_parameters", rope),))
    table = compile_model(Checkpoint.open(make_checkpoint(spec, tmp_path))).program.body[1]
    assert isinstance(table, RopeTableOp)
    assert (table.kind, table.base, table.factor, table.original_max_position) == (RopeKind.DYNAMIC, 1e4, 2.0, 96)


def test_quantised_weights_keep_how_they_were_made(tmp_path: Path) -> None:
    save_model(ModelSpec(intermediate_size=38), tmp_path / "model")
    how = QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=32, has_zero_point=True)
    convert_checkpoint(tmp_path / "model", tmp_path / "checkpoint", quantization=how)
    program = compile_model(Checkpoint.open(tmp_path / "checkpoint")).program
    found = [part.weight.quantization for op in program.body if isinstance(op, LinearOp) for part in op.parts]
    assert all(quantization is not None for quantization in found)
    assert {(q.algo, q.group_size, q.zero_points) for q in found if q} == {(QuantAlgo.W4A16, 32, True)}
    head = program.head[1].parts[0].weight.quantization
    assert (head.algo, head.group_size, head.zero_points) == (QuantAlgo.W8A16, 0, False)


def other_values(value: Any) -> list[Any]:
    """Returns other values that the field could have."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * 1.5 or 0.5]
    if value is None:
        return [LinearScaling(factor=4.0), 3]
    if isinstance(value, HeadNorm):
        return [None, dataclasses.replace(value, epsilon=0.5)]
    if isinstance(value, Value):
        return [dataclasses.replace(value, name="stranger")]
    if isinstance(value, RotaryTable):
        return [RotaryTable(value.sine, value.cosine)]
    return []


# Fields that only the program or only the graph uses: scopes name the graph's nodes, and the program takes attention's
# head counts from the model's shape.
ONE_ALONE = {"scope", "num_heads", "num_kv_heads", "head_size", "layer"}
# Used only with dynamic scaling (test_dynamic_rotary_scaling), only with adapters (test_prompt_embeddings.py), and only
# in 16 bits (test_graphs_of_newer_ops.py).
NEITHER = {"max_position_embeddings", "inputs_embeds_scale", "is_stream"}


def mutants(network: Network) -> Iterator[tuple[str, Network]]:
    for at, op in enumerate(network.ops):
        for field in dataclasses.fields(op):
            for value in () if field.name in NEITHER else other_values(getattr(op, field.name)):
                changed = Network(network.config)
                changed.ops.extend(network.ops)
                changed.ops[at] = dataclasses.replace(op, **{field.name: value})
                changed.logits = network.logits
                yield f"{type(op).__name__}.{field.name} = {value}", changed


def test_every_field_of_every_op_reaches_the_program_and_the_graph(checkpoint: Checkpoint) -> None:
    """A field that no emitter reads would make a wrong engine without an error."""

    def program(network: Network) -> Any:
        emitted = emit(network, lora=True)
        constants = {
            name: source.tolist()
            for name, (_, source) in emitted.weights.vectors.items()
            if isinstance(source, np.ndarray)
        }
        return emitted.body, emitted.head, emitted.sites, constants

    stored = stored_tensors(checkpoint.ranks[0].reader, checkpoint.config.quantization)

    def graph(network: Network) -> bytes:
        return bytes(onnx_graph(network, stored, ADAPTABLE).SerializeToString())

    before = program(checkpoint.network), graph(checkpoint.network)
    tried = set()
    for name, changed in mutants(checkpoint.network):
        found = []
        for make, was in zip((program, graph), before, strict=True):
            try:
                found.append(make(changed) != was)
            except (LookupError, AttributeError, TypeError, ValueError, AssertionError, ConfigError):
                found.append(True)  # a refusal counts as a difference
        field = name.partition(" ")[0]
        tried.add(field)
        assert any(found) if field.partition(".")[2] in ONE_ALONE else all(found), name
    assert {"Linear.add_to", "Attention.window", "RmsNorm.epsilon", "Rotary.base", "Embedding.output"} <= tried


def with_activation(network: Network, activation: Activation, *, num_weights: int) -> Network:
    """Gives the activation to the first layer with that number of weights."""
    changed = Network(network.config)
    changed.ops.extend(network.ops)
    changed.logits = network.logits
    layers = (
        (at, op) for at, op in enumerate(network.ops) if isinstance(op, Linear) and len(op.weights) == num_weights
    )
    at, layer = next(layers)
    changed.ops[at] = dataclasses.replace(layer, activation=activation, add_to=None)
    return changed


def test_every_activation_of_a_gate_has_its_own_epilogue(checkpoint: Checkpoint) -> None:
    epilogues = []
    without_gate = (Activation.RELU_SQUARED, Activation.XIELU, Activation.QUICK_GELU)
    gates = [activation for activation in Activation if activation not in without_gate]
    for activation in gates:
        body = emit(with_activation(checkpoint.network, activation, num_weights=2), lora=True).body
        epilogues.append(next(op.op.epilogue for op in body if isinstance(op.op, LinearOp) and len(op.op.parts) == 2))
    assert len(set(epilogues)) == len(gates)


def test_an_activation_that_needs_a_gate_is_refused_without_one(checkpoint: Checkpoint) -> None:
    network = with_activation(checkpoint.network, Activation.SILU, num_weights=1)
    message = "activation of a layer with no gate is silu; expected one of gelu, gelu_tanh, relu, relu_squared$"
    with pytest.raises(ValueError, match=message):
        emit(network, lora=True)


def test_every_activation_has_its_own_nodes_in_the_graph_or_is_refused(checkpoint: Checkpoint) -> None:
    stored = stored_tensors(checkpoint.ranks[0].reader, checkpoint.config.quantization)
    refused = {
        Activation.CLAMPED_SILU: "two inputs",
        Activation.XIELU: "parameters",
        Activation.QUICK_GELU: "several ops",
    }
    graphs = {}
    for activation in Activation:
        network = with_activation(checkpoint.network, activation, num_weights=2)
        if activation in refused:
            message = f"activation {activation.value} has {refused[activation]}; it cannot be written as ONNX"
            with pytest.raises(ValueError, match=message):
                onnx_graph(network, stored, ADAPTABLE)
        else:
            graphs[bytes(onnx_graph(network, stored, ADAPTABLE).SerializeToString())] = activation
    assert len(graphs) == len(Activation) - len(refused)


def test_a_value_that_was_added_to_cannot_be_read_again(checkpoint: Checkpoint) -> None:
    network = Network(checkpoint.config)
    x = network.embedding("model.embed_tokens")
    for layer in network.layers():
        h = network.rms_norm(x, f"model.layers.{layer}.norm", "input_layernorm")
        part = whole("model.layers.0.proj", "attn_dense", checkpoint.config.hidden_size)
        network.linear(h, "attention.dense", [part], split=Split.ROW, add_to=x)
        with pytest.raises(ValueError, match="is read after something was added to it"):
            network.rms_norm(x, f"model.layers.{layer}.norm", "post_layernorm")
        break


def test_a_familys_network_depends_only_on_its_config(checkpoint: Checkpoint) -> None:
    assert declare(checkpoint.config).ops == declare(checkpoint.config).ops
