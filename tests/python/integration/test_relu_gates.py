"""MLPs with a ReLU gate: the tokens and logits of transformers + PEFT, and the same bits as reading every weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.activations import ACT2FN
from transformers.models.mistral.modeling_mistral import MistralMLP

import adaptrt
from adaptrt._core import CheckpointError, ConfigError, DType
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.network.onnx_graph import NetworkOptions
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.engine.build_config import AUTO, DISABLE, ENABLE, BuildConfig
from support.families import SIZES, save_family
from support.models import Reference
from support.oracle import NetworkOracle, SequenceChunk
from support.relu_gates import (
    BAMBOO_CODE,
    CONFIG,
    FIELDS,
    FLOAT32_TOLERANCE,
    GATES,
    THRESHOLD,
    FatRelu,
    Gate,
    adapters_of,
    answers_of,
    check_answers,
    double_relu,
    engine_of,
    layers_of,
    make_model,
    prompt_of,
    published,
)

# The last model's sizes are whole panels, so the layer that reads its ReLU can be stored in columns.
MODELS = {
    **GATES,
    "wide": Gate(
        dataclasses.replace(GATES["relu"].family, fields={**GATES["relu"].family.fields, "hidden_size": 192}),
        GATES["relu"].epilogue,
    ),
}


@pytest.fixture(autouse=True)
def oracle_code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives transformers the activations that the published models' own code uses."""
    monkeypatch.setitem(ACT2FN, "fatrelu", FatRelu)
    if "drelu" in request.node.name:
        monkeypatch.setattr(MistralMLP, "forward", double_relu)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_tokens_and_logits(name: str, tmp_path: Path) -> None:
    gate = MODELS[name]
    engine = engine_of(make_model(gate, tmp_path), tmp_path)
    check_answers(engine, gate, tmp_path)


@pytest.mark.parametrize("name", GATES)
def test_the_graph_computes_the_same(name: str, tmp_path: Path) -> None:
    convert_checkpoint(make_model(GATES[name], tmp_path), tmp_path / "checkpoint")
    oracle = NetworkOracle(tmp_path / "checkpoint", tmp_path, NetworkOptions(tokens_per_block=8))
    prompt = prompt_of(17)
    logits = oracle.step([SequenceChunk(prompt, 0, len(prompt), [5, 3, 9])])
    expected = Reference(tmp_path / "model").logits(prompt).numpy()
    assert np.abs(logits - expected).max() <= FLOAT32_TOLERANCE * (expected.max() - expected.min())


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("name", MODELS)
def test_neither_reading_everything_nor_a_crowd_changes_a_bit(name: str, dtype: DType, tmp_path: Path) -> None:
    gate = MODELS[name]
    model = make_model(gate, tmp_path)
    sparse = engine_of(model, tmp_path / "sparse", dtype)
    dense = engine_of(model, tmp_path / "dense", dtype, sparse_mlp=DISABLE)
    adapters = adapters_of(gate, tmp_path)
    alone = answers_of(sparse, adapters, 1, num_threads=1)
    chunks = {"enable_chunked_context": True, "max_num_tokens": 16}
    for others in (
        answers_of(sparse, adapters, 2, num_threads=3),
        answers_of(sparse, adapters, 4, num_threads=2, **chunks),
        answers_of(dense, adapters, 1, num_threads=2),
        answers_of(dense, adapters, 4, num_threads=3),
    ):
        assert all(one.same_bits(other) for one, other in zip(alone, others, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_the_build_chooses_how_weights_are_stored(name: str, tmp_path: Path) -> None:
    model = make_model(MODELS[name], tmp_path)
    for sparse_mlp, is_sparse in ((AUTO, True), (ENABLE, True), (DISABLE, False)):
        layers = layers_of(engine_of(model, tmp_path / sparse_mlp, sparse_mlp=sparse_mlp))
        gated = [op for op in layers if op.epilogue is MODELS[name].epilogue]
        assert len(gated) == FIELDS["num_hidden_layers"]
        assert all([part.weight.has_rows for part in op.parts] == [False, is_sparse] for op in gated)
        assert sum(op.has_sparse_input for op in layers) == (len(gated) if is_sparse else 0)
        outputs = {op.output for op in gated}
        readers = [op for op in layers if op.has_sparse_input]
        assert all(op.input in outputs for op in readers)
        has_columns = MODELS[name].family.fields["hidden_size"] % 64 == 0
        assert all([part.weight.has_columns for part in op.parts] == [has_columns] for op in readers)
        assert sum(part.weight.has_columns for op in layers for part in op.parts) == len(readers) * has_columns
        # FatReLU keeps x >= its parameter, compared in float32.
        least = np.nextafter(np.float32(THRESHOLD), np.float32(0)) if name == "fatrelu" else 0.0
        assert {op.threshold for op in gated} == {float(least)}


def test_sizes_that_are_no_panels_leave_the_gated_layer_as_it_is(tmp_path: Path) -> None:
    odd = dataclasses.replace(GATES["relu"].family, fields={**GATES["relu"].family.fields, "intermediate_size": 190})
    model = save_family(odd, tmp_path / "model")
    layers = layers_of(engine_of(model, tmp_path))
    assert not any(part.weight.has_rows or part.weight.has_columns for op in layers for part in op.parts)
    assert sum(op.has_sparse_input for op in layers) == FIELDS["num_hidden_layers"]


def test_compressed_and_quantised_weights_are_read_whole(tmp_path: Path) -> None:
    model = make_model(GATES["relu"], tmp_path)
    convert_checkpoint(model, tmp_path / "compressed", dtype=DType.BFLOAT16)
    compressed = dataclasses.replace(CONFIG, compress_weights=True)
    build(tmp_path / "compressed", compressed, tmp_path / "compressed-engine")
    convert_checkpoint(
        model, tmp_path / "quantised", quantization=QuantConfig(quant_algo=adaptrt._core.QuantAlgo.W8A16)
    )
    build(tmp_path / "quantised", CONFIG, tmp_path / "quantised-engine")
    for name in ("compressed", "quantised"):
        layers = layers_of(tmp_path / f"{name}-engine")
        assert not any(op.has_sparse_input for op in layers)
        assert not any(part.weight.has_rows or part.weight.has_columns for op in layers for part in op.parts)


def change(**fields: Any) -> Callable[[BuildConfig], BuildConfig]:
    return lambda config: dataclasses.replace(config, **fields)


@pytest.mark.parametrize(
    ("how", "gate", "message"),
    [
        (change(compress_weights=True), "relu", "sparse_mlp and compress_weights"),
        (change(backend="tensorrt"), "relu", "sparse_mlp needs backend native"),
        (change(sparse_mlp="yes"), "relu", "sparse_mlp is yes; accepted: auto, enable, disable"),
        (change(), "silu", "sparse_mlp needs a model whose MLP has a ReLU; LlamaForCausalLM has silu"),
    ],
)
def test_models_without_relu_gates_are_refused(
    how: Callable[[BuildConfig], BuildConfig], gate: str, message: str, tmp_path: Path
) -> None:
    model = save_family(GATES["relu"].family, tmp_path / "model")
    if gate == "silu":
        model = published(model, tmp_path / "published", hidden_act="silu")
    convert_checkpoint(model, tmp_path / "checkpoint", dtype=DType.BFLOAT16)
    with pytest.raises(ConfigError, match=message):
        build(tmp_path / "checkpoint", how(dataclasses.replace(CONFIG, sparse_mlp=ENABLE)), tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("gate", "fields", "message"),
    [
        ("fatrelu", {"hidden_act_param": None}, "hidden_act_param is missing"),
        ("fatrelu", {"hidden_act_param": -0.1}, "hidden_act_param is -0.1"),
        ("relu", {"hidden_act_param": 0.01}, "hidden_act_param is 0.01: an unknown field"),
        ("relu", {"hidden_act": "shiftrelu"}, 'hidden_act is "shiftrelu"; accepted: silu, relu, fatrelu'),
        ("drelu", {"hidden_act": "silu"}, 'hidden_act is "silu"; accepted: relu'),
        ("drelu", {"hidden_act": None}, 'hidden_act is "silu"; accepted: relu'),
        ("drelu", {"auto_map": {"AutoModelForCausalLM": "mine.BambooForCausalLM"}}, "custom code.*mine.Bamboo"),
        ("relu", {"auto_map": BAMBOO_CODE}, "auto_map names custom code"),
    ],
)
def test_other_kinds_of_gates_are_refused(gate: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = published(make_model(GATES[gate], tmp_path), tmp_path / "other", **fields)
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(model, tmp_path / "checkpoint")


def test_projected_embeddings_of_opt_are_refused(tmp_path: Path) -> None:
    fields = {**SIZES, "ffn_dim": 38, "word_embed_proj_dim": 12}
    for name in ("num_key_value_heads", "intermediate_size"):
        del fields[name]
    transformers.OPTForCausalLM(transformers.OPTConfig(**fields)).save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match="word_embed_proj_dim is 12; only hidden_size 36 is supported"):
        convert_checkpoint(tmp_path / "model", tmp_path / "checkpoint")
