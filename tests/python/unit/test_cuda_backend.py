"""Engines of backend cuda: what their files hold, what a build refuses by name, and how they are loaded."""

from __future__ import annotations

import copy
import dataclasses
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers

import adaptrt
from adaptrt._core import (
    AdapterError,
    ConfigError,
    DType,
    EngineError,
    LinearEpilogue,
    MatrixLayout,
    QuantAlgo,
    WeightCode,
    lora_modules,
)
from adaptrt.builder.build import build
from adaptrt.builder.cli import main as command_line
from adaptrt.builder.compile import cuda_support, emit_linear
from adaptrt.builder.compile.cuda_support import problems_of_network
from adaptrt.builder.compile.emit_linear import sparse_pairs
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.common.safetensors_stream import SafetensorsReader
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.checkpoint.activation import Activation
from adaptrt.formats.checkpoint.casting import to_float32
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.formats.engine.engine_config import EngineConfig
from adaptrt.formats.engine.engine_file import EngineFile
from adaptrt.formats.engine.plan import AttentionOp, KeepLogitRowsOp, LinearOp, Program, RmsNormOp
from adaptrt.formats.engine.weight_usage import usage_names
from adaptrt.formats.models.registry import FAMILIES, specimen
from adaptrt.formats.network.network import Network
from adaptrt.formats.network.operands import DeltaShape, LatentShape, ScanShape
from adaptrt.formats.network.ops import (
    Attention,
    CausalConvolution,
    Embedding,
    GatedColumns,
    GatedConvolution,
    GatedDelta,
    LatentQueries,
    Linear,
    Op,
    RmsNorm,
    Scale,
    SelectiveScan,
)
from adaptrt.formats.network.weights import Tensor, TensorName
from adaptrt.runtime import cuda_engine
from adaptrt.runtime.cuda_engine import CudaEngine
from adaptrt.runtime.engine import load_engine, load_engine_bytes
from adaptrt.runtime.engine_weights import EngineBase
from support.engines import make_checkpoint
from support.families import Family, save_family
from support.models import ModelSpec, save_adapter, save_model
from support.prompts import save_virtual_tokens
from support.serving import run_command

SPEC = ModelSpec(
    vocab_size=72, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=40
)
SIZES = BuildConfig(max_batch_size=4, max_num_tokens=24, max_seq_len=64, tokens_per_block=16, backend="cuda")
WITH_LORA = replace(
    SIZES,
    lora_config=LoraBuildConfig(max_lora_rank=8),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
LAYERS = ("attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a model, its checkpoint in bfloat16, and an engine of backend cuda and a native one."""
    directory = tmp_path_factory.mktemp("cuda")
    checkpoint = make_checkpoint(SPEC, directory, DType.BFLOAT16)
    build(checkpoint, WITH_LORA, directory / "cuda")
    build(checkpoint, replace(WITH_LORA, backend="native"), directory / "native")
    return directory


def program_of(engine: Path) -> Program:
    config = EngineConfig.load(engine)
    return EngineFile(engine / "rank0.engine", config.engine_checksums[0]).program


def test_the_engine_has_a_format_version_of_its_own(root: Path) -> None:
    config = EngineConfig.load(root / "cuda")
    assert config.build_config.backend == "cuda"
    assert config.to_dict()["format_version"] == 3
    assert sorted(path.name for path in (root / "cuda").iterdir()) == [
        "config.json",
        "generation_config.json",
        "rank0.engine",
    ]


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("tied", [False, True])
def test_matrices_are_the_checkpoints_rows(dtype: DType, tied: bool, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(replace(SPEC, tie_word_embeddings=tied), tmp_path, dtype)
    build(checkpoint, SIZES, tmp_path / "engine")
    file = EngineFile(tmp_path / "engine" / "rank0.engine", EngineConfig.load(tmp_path / "engine").engine_checksums[0])
    source = SafetensorsReader(checkpoint / "rank0.safetensors")
    matrices = [name for name, array in file.tensors.items() if array.dtype != np.float32]
    compared = set()
    for name in matrices:
        weight, _, rows = name.partition("[")
        first, last = map(int, rows.rstrip("]").split(":")) if rows else (0, source.specs[weight].shape[0])
        expected = np.concatenate(list(source.rows(weight, first, last)))
        np.testing.assert_array_equal(
            file.tensors[name].view(np.uint16), expected.reshape(-1).view(np.uint16), err_msg=name
        )
        compared.add(weight)
    two_dimensional = {name for name, spec in source.specs.items() if len(spec.shape) == 2}
    assert compared == two_dimensional


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_activations_are_of_the_checkpoints_type(dtype: DType, tmp_path: Path) -> None:
    build(make_checkpoint(SPEC, tmp_path, dtype), WITH_LORA, tmp_path / "engine")
    program = program_of(tmp_path / "engine")
    assert program.matrix_layout is MatrixLayout.ROWS
    assert program.dtype is dtype
    buffers = {buffer.name: buffer for buffer in program.buffers}
    for op in program.ops:
        assert not isinstance(op, KeepLogitRowsOp)
        if isinstance(op, LinearOp):
            is_sum = op.epilogue is LinearEpilogue.ADD or op.output == program.logits
            assert buffers[op.output].dtype is (DType.FLOAT32 if is_sum else dtype)
            assert buffers[op.input].dtype is dtype
            assert (op.neurons, op.scores, op.has_sparse_input) == (None, None, False)
            for part in op.parts:
                weight = part.weight
                stored_otherwise = (weight.quantization, weight.outliers, weight.has_rows, weight.has_columns)
                assert stored_otherwise == (None, None, False, False)
        elif isinstance(op, (RmsNormOp, AttentionOp)):
            assert buffers[op.output].dtype is dtype
    assert load_engine(tmp_path / "engine").program.validate() == []


def test_a_relu_model_has_no_second_copies_of_its_weights(tmp_path: Path) -> None:
    spec = replace(SPEC, intermediate_size=64, hidden_size=64, head_dim=16, extra=(("hidden_act", "relu"),))
    build(make_checkpoint(spec, tmp_path, DType.BFLOAT16), SIZES, tmp_path / "engine")
    program = program_of(tmp_path / "engine")
    linears = [op for op in program.ops if isinstance(op, LinearOp)]
    assert any(op.epilogue is LinearEpilogue.RELU_MUL for op in linears)
    assert not any(part.weight.is_stored_twice for op in linears for part in op.parts)


RELU = replace(SPEC, extra=(("hidden_act", "relu"),))


@pytest.mark.parametrize(("sparse_mlp", "is_sparse"), [("auto", True), ("enable", True), ("disable", False)])
def test_the_reader_of_a_relu_gate_may_skip_its_zeros(sparse_mlp: str, is_sparse: bool, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(RELU, tmp_path, DType.FLOAT16)
    build(checkpoint, replace(SIZES, sparse_mlp=sparse_mlp), tmp_path / "engine")
    program = program_of(tmp_path / "engine")
    gated = [at for at, op in enumerate(program.body) if getattr(op, "epilogue", None) is LinearEpilogue.RELU_MUL]
    sparse = [at for at, op in enumerate(program.body) if getattr(op, "has_sparse_input", False)]
    assert len(gated) == SPEC.num_hidden_layers
    assert sparse == [at + 1 for at in gated if is_sparse]
    names = [f"transformer.layers.{layer}.mlp.gate.neurons" for layer in range(SPEC.num_hidden_layers)]
    assert list(usage_names(program).values()) == [(name, 40) for name in names if is_sparse]
    assert load_engine(tmp_path / "engine").program.validate() == []


def test_a_scaled_gate_and_a_relu_without_a_gate_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = specimen(FAMILIES["LlamaForCausalLM"]).ops

    def pairs_with(**fields: Any) -> int:
        """Number of pairs if gated layers have these fields."""
        changed = [replace(op, **fields) if is_gated(op) else op for op in ops]
        return len(sparse_pairs(cast(Network, SimpleNamespace(ops=changed))))

    assert pairs_with() == 0
    assert pairs_with(activation=Activation.RELU) == pairs_with(activation=Activation.RELU_BOTH) == 1
    assert pairs_with(activation=Activation.RELU, scale=0.5) == 0
    assert pairs_with(activation=Activation.RELU, softcap=3.0) == 0
    relu = [replace(op, activation=Activation.RELU) if is_gated(op) else op for op in ops]
    apart = [op for op in relu if is_gated(op)] + [op for op in relu if not is_gated(op)]
    assert not sparse_pairs(cast(Network, SimpleNamespace(ops=apart)))
    monkeypatch.setattr(emit_linear, "MOST_NEURONS", 15)  # It has 16.
    assert pairs_with(activation=Activation.RELU) == 0


def is_gated(op: Op) -> bool:
    return isinstance(op, Linear) and len(op.weights) == 2


# The second build quantises gate and up, and not down.
@pytest.mark.parametrize("excluded", [(), tuple(f"transformer.layers.{layer}.mlp.proj" for layer in range(2))])
def test_quantised_weights_of_a_relu_model_are_read_whole(excluded: tuple[str, ...], tmp_path: Path) -> None:
    spec = replace(RELU, hidden_size=64, intermediate_size=64, head_dim=16)
    checkpoint = Checkpoint.of_model(save_model(spec, tmp_path / "model", dtype=torch.float16))
    quantization = QuantConfig(quant_algo=QuantAlgo.W8A16, exclude_modules=excluded)
    build(checkpoint, SIZES, tmp_path / "engine", quantization=quantization)
    assert not any(getattr(op, "has_sparse_input", False) for op in program_of(tmp_path / "engine").body)
    found = refusal(replace(SIZES, sparse_mlp="enable"), checkpoint, tmp_path, quantization=quantization)
    assert "sparse_mlp and quantization: quantised weights are read whole; choose one" in found


def test_a_model_without_gates_is_refused_by_name(tmp_path: Path) -> None:
    fields = {
        "vocab_size": 72, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 40,
        "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
    }  # fmt: skip
    family = Family(transformers.OPTConfig, [], fields)
    checkpoint = Checkpoint.of_model(save_family(family, tmp_path / "model", dtype=torch.float16))
    found = refusal(replace(SIZES, sparse_mlp="enable"), checkpoint, tmp_path)
    assert "sparse_mlp needs a model with ReLU-gated MLPs for backend cuda; OPTForCausalLM has none" in found


def test_adapters_act_on_layers_and_the_vocabulary(root: Path) -> None:
    ids = {info.id: info.name for info in lora_modules()}
    lora = load_engine(root / "cuda").lora
    assert {ids[part.module] for site in lora.sites for part in site.parts} == {*LAYERS, "lm_head", "embedding"}
    assert {ids[module] for module in lora.target_modules} == {*LAYERS, "lm_head", "embedding"}
    native = load_engine(root / "native").lora
    assert [(site.layer, site.in_size) for site in lora.sites] == [(site.layer, site.in_size) for site in native.sites]


def refusal(config: BuildConfig, checkpoint: Path | Checkpoint, tmp_path: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        build(checkpoint, config, tmp_path / "refused", **options)
    assert not (tmp_path / "refused").exists()
    return str(raised.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"weight_memory": 0}, "weight_memory is 0; it must be at least 1"),
        ({"compress_weights": True}, "compress_weights needs backend native"),
        ({"sparse_predictors": Path("predictors")}, "sparse_predictors needs backend native"),
        ({"sparse_mlp": "enable"}, "sparse_mlp needs a model whose MLP has a ReLU; LlamaForCausalLM has silu"),
        (
            {"lora_config": LoraBuildConfig(long_lora_scaling_factors=(2,))},
            "long_lora_scaling_factors need backend native",
        ),
        ({"lora_config": LoraBuildConfig(fully_sharded_loras=True)}, "fully_sharded_loras needs a checkpoint"),
    ],
)
def test_an_option_is_refused_by_name(root: Path, tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    assert complaint in refusal(replace(WITH_LORA, **change), root / "checkpoint", tmp_path)


def test_all_problems_are_listed_at_once(root: Path, tmp_path: Path) -> None:
    config = replace(WITH_LORA, compress_weights=True)
    usage = SimpleNamespace(problems=lambda config: ["usage_text is too short"])
    found = refusal(config, root / "checkpoint", tmp_path, quality=object(), usage=usage)
    assert "usage_text is too short" in found
    for name in ("compress_weights", "quality_text"):
        assert f"{name} needs backend native" in found


def test_float32_checkpoints_are_refused(tmp_path: Path) -> None:
    found = refusal(SIZES, make_checkpoint(SPEC, tmp_path, DType.FLOAT32), tmp_path)
    assert "a float32 checkpoint cannot be built with backend cuda, whose kernels multiply 16-bit numbers" in found


def test_other_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    model, w8a8 = save_model(SPEC, tmp_path / "model"), QuantConfig(quant_algo=QuantAlgo.W8A8)
    convert_checkpoint(model, tmp_path / "checkpoint", dtype=DType.BFLOAT16, quantization=w8a8)
    found = refusal(SIZES, tmp_path / "checkpoint", tmp_path)
    assert "LlamaForCausalLM has weights of W8A8; accepted with backend cuda: integers of W8A16 and of four" in found


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        (
            {"code": WeightCode.NF4, "value_dtype": DType.BFLOAT16, "group_size": 64},
            "weights of W4A16 of NF4 in groups of 64; accepted",
        ),
        ({"group_size": 32, "has_minimum": True}, "weights of W4A16 in groups of 32 with minimums; accepted"),
        ({"group_size": 32, "act_order": True}, "weights of W4A16 in groups of 32, reordered; accepted"),
        ({"group_size": 32, "bits": 3}, "weights of W4A16 of 3 bits in groups of 32; accepted"),
        ({"group_size": 32}, "a linear layer of 40 inputs with weights of W4A16; expected a multiple of 32"),
    ],
)
def test_a_quantisation_without_a_kernel_is_refused_by_name(root: Path, how: dict[str, Any], complaint: str) -> None:
    checkpoint = Checkpoint.open(root / "checkpoint")
    config = replace(checkpoint.config, quantization=QuantConfig(quant_algo=QuantAlgo.W4A16, **how))
    network = checkpoint.with_config(config).network
    assert any(complaint in problem for problem in problems_of_network(network))


@pytest.mark.parametrize(
    "how",
    [
        QuantConfig(quant_algo=QuantAlgo.W8A16),
        QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=32),
        QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=16, has_zero_point=True),
    ],
    ids=QuantConfig.describe,
)
def test_quantised_weights_have_the_values_of_the_native_engine(how: QuantConfig, tmp_path: Path) -> None:
    spec = replace(SPEC, intermediate_size=96)
    checkpoint = make_checkpoint(spec, tmp_path, DType.BFLOAT16)
    build(checkpoint, WITH_LORA, tmp_path / "cuda", quantization=how)
    build(checkpoint, replace(WITH_LORA, backend="native"), tmp_path / "native", quantization=how)
    engine, native = (load_engine(tmp_path / name) for name in ("cuda", "native"))
    assert isinstance(engine, CudaEngine)
    assert engine.program.validate() == []
    weights = cuda_engine.RowMajorWeights(engine.storage)
    compared = 0
    ours, theirs = (
        [op for op in (*each.program.body, *each.program.head) if hasattr(op, "parts")] for each in (engine, native)
    )
    for ours_op, native_op in zip(ours, theirs, strict=True):
        for part, other in zip(ours_op.parts, native_op.parts, strict=True):
            assert part.weight.quantization.algo is not QuantAlgo.NONE
            expected = other.weight.rows(1, other.weight.n)
            np.testing.assert_array_equal(weights.rows(part.weight, 1, part.weight.n), expected)
            compared += 1
    assert compared == 7 * spec.num_hidden_layers + 1


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    save_model(SPEC, tmp_path / "model")
    convert_checkpoint(tmp_path / "model", tmp_path / "checkpoint", dtype=DType.BFLOAT16, tp_size=2)
    found = refusal(SIZES, tmp_path / "checkpoint", tmp_path)
    assert "backend cuda needs a checkpoint of one rank, not of 2" in found


def test_sizes_that_the_kernels_cannot_read_are_refused(tmp_path: Path) -> None:
    spec = replace(SPEC, vocab_size=61, intermediate_size=52, head_dim=12, num_attention_heads=8, num_key_value_heads=8)
    found = refusal(SIZES, make_checkpoint(spec, tmp_path, DType.FLOAT16), tmp_path)
    assert "LlamaForCausalLM has a head_dim of 12; expected a multiple of 8 up to 512 with backend cuda" in found
    assert "LlamaForCausalLM has a linear layer of 52 outputs; expected a multiple of 8 with backend cuda" in found
    assert found.count("of 52 outputs") == 1
    assert "of 61 outputs" not in found


RUNNING = {
    "ApertusForCausalLM": True,
    "LlamaForCausalLM": True,
    "MistralForCausalLM": True,
    "Qwen2ForCausalLM": True,
    "Phi3ForCausalLM": True,
    "CohereForCausalLM": True,
    "GlmForCausalLM": True,
    "HunYuanDenseV1ForCausalLM": True,
    "Gemma2ForCausalLM": True,
    "Gemma3ForCausalLM": True,
    "MixtralForCausalLM": True,
    "GptOssForCausalLM": True,
    "Qwen2MoeForCausalLM": True,
    "DeepseekV2ForCausalLM": True,
    "DeepseekV3ForCausalLM": True,
    "Gemma4ForCausalLM": True,
    "Olmo2ForCausalLM": True,
    "Qwen3ForCausalLM": True,
    "Qwen3_5ForCausalLM": True,
    "Lfm2ForCausalLM": True,
    "Mamba2ForCausalLM": True,
    "FalconH1ForCausalLM": True,
    "StableLmForCausalLM": True,
}


@pytest.mark.parametrize("architecture", [name for name in RUNNING if name in FAMILIES])
def test_families_run_or_are_refused_by_name(architecture: str) -> None:
    problems = [text for text in problems_of_network(specimen(FAMILIES[architecture])) if "needs the op" in text]
    assert (not problems) == RUNNING[architecture], problems
    for problem in problems:
        assert problem.startswith(f"{architecture} needs the op ")
        assert problem.endswith("which backend cuda does not have; use backend native")


def with_changed(network: Network, kind: type[Op], **fields: Any) -> Network:
    """Returns the network with the first op of a kind changed."""
    changed = copy.copy(network)
    at = next(at for at, op in enumerate(network.ops) if isinstance(op, kind))
    changed.ops = list(network.ops)
    changed.ops[at] = dataclasses.replace(network.ops[at], **fields)
    return changed


@pytest.mark.parametrize(
    ("kind", "fields", "missing"),
    [
        (
            Attention,
            {"values_from_keys": True, "normalizes_values": True},
            "the op Attention with values_from_keys, and without norms of keys and values",
        ),
        (Attention, {"joint_column": 3}, "the op Attention with joint_column"),
        (RmsNorm, {"weight": Tensor(TensorName("norm"), "norm", (8,))}, "the op RmsNorm of groups without add_to"),
        (Attention, {"position_bias": object()}, "the op Attention with position_bias"),
        (Embedding, {"types": object()}, "the op Embedding with types"),
        (Linear, {"scores": object()}, "the op Linear with scores"),
        (Linear, {"activation": Activation.SILU}, "the op Linear with the activation silu and no gate"),
    ],
)
def test_a_field_without_a_kernel_is_refused_by_name(
    root: Path, kind: type[Op], fields: dict[str, Any], missing: str
) -> None:
    network = Checkpoint.open(root / "checkpoint").network
    assert problems_of_network(network) == []
    assert problems_of_network(with_changed(network, kind, **fields)) == [
        f"LlamaForCausalLM needs {missing}, which backend cuda does not have; use backend native"
    ]


def test_values_have_no_norms_if_heads_have_them_after_rotation(root: Path) -> None:
    network = Checkpoint.open(root / "checkpoint").network
    changed = with_changed(network, Attention, normalizes_values=True, norms_after_rotation=True)
    assert "the op Attention with normalizes_values and norms_after_rotation" in problems_of_network(changed)[0]


def test_a_warp_normalises_a_rotated_head(root: Path) -> None:
    network = Checkpoint.open(root / "checkpoint").network
    attention = next(op for op in network.ops if isinstance(op, Attention))
    large = dataclasses.replace(attention.shape, head_dim=264)
    assert problems_of_network(with_changed(network, Attention, shape=large)) == []
    changed = with_changed(network, Attention, shape=large, norms_after_rotation=True)
    assert "a head_dim of 264 with norms after the rotation; expected up to 256" in problems_of_network(changed)[0]


def test_gates_of_columns_have_a_kernel_of_their_activation() -> None:
    network = specimen(FAMILIES["Gemma4ForCausalLM"])
    assert any(isinstance(op, GatedColumns) for op in network.ops)
    changed = with_changed(network, GatedColumns, activation=Activation.RELU)
    assert any("the op GatedColumns with activation relu" in problem for problem in problems_of_network(changed))


def test_a_rotation_before_norms_has_whole_vectors(root: Path) -> None:
    network = with_changed(Checkpoint.open(root / "checkpoint").network, Attention, norms_after_rotation=True)
    assert problems_of_network(network) == [
        "LlamaForCausalLM has 8 rotated elements of a head with norms after the rotation; expected a multiple of 16 "
        "with backend cuda; use backend native"
    ]


@pytest.mark.parametrize(
    ("architecture", "kind", "fields", "complaint"),
    [
        (
            "Qwen3_5ForCausalLM",
            CausalConvolution,
            {"weight": Tensor(TensorName("conv"), "conv", (8, 1, 5))},
            "convolutions over 5 tokens; expected at most 4",
        ),
        (
            "Lfm2ForCausalLM",
            GatedConvolution,
            {"weight": Tensor(TensorName("conv"), "conv", (8, 1, 6))},
            "convolutions over 6 tokens; expected at most 4",
        ),
        (
            "Qwen3_5ForCausalLM",
            GatedDelta,
            {"shape": DeltaShape(num_key_heads=1, num_value_heads=1, key_dim=257, value_dim=8)},
            "states of 257 rows; expected at most 256",
        ),
        (
            "Mamba2ForCausalLM",
            SelectiveScan,
            {"shape": ScanShape(num_heads=1, head_dim=8, num_groups=1, state_dim=300)},
            "states of 300 rows; expected at most 256",
        ),
    ],
)
def test_states_that_the_kernels_cannot_hold_are_refused(
    architecture: str, kind: type[Op], fields: dict[str, Any], complaint: str
) -> None:
    network = specimen(FAMILIES[architecture])
    said = f"{architecture} has {complaint} with backend cuda; use backend native"
    assert said not in problems_of_network(network)
    assert said in problems_of_network(with_changed(network, kind, **fields))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"latent_dim": 44}, "compressed rows of 44 elements; expected a multiple of 8"),
        ({"plain_dim": 20}, "queries without their rotated elements of 20 elements; expected a multiple of 8"),
        ({"value_dim": 12}, "values of 12 elements; expected a multiple of 8"),
        ({"rotary_dim": 24}, "24 rotated elements of a compressed row; expected a multiple of 16"),
        ({"latent_dim": 568}, "compressed rows of 584 elements with the rotated ones; expected at most 576"),
        ({"num_heads": 1025}, "1025 heads of latent attention; expected at most 1024"),
    ],
)
def test_sizes_of_latent_attention_without_a_kernel_are_refused(changes: dict[str, int], complaint: str) -> None:
    network = specimen(FAMILIES["DeepseekV3ForCausalLM"])
    shape = LatentShape(num_heads=4, latent_dim=560, rotary_dim=16, plain_dim=24, value_dim=8)
    fits = with_changed(network, LatentQueries, shape=shape)
    said = f"DeepseekV3ForCausalLM has {complaint} with backend cuda; use backend native"
    assert said not in problems_of_network(fits)
    assert said in problems_of_network(
        with_changed(network, LatentQueries, shape=dataclasses.replace(shape, **changes))
    )


@pytest.mark.parametrize(
    "field", ["softcap", "sinks", "query_norm", "key_norm", "chunk", "plain_norm_epsilon", "query_scaling"]
)
def test_attention_to_compressed_rows_has_none_of_these(field: str) -> None:
    network = specimen(FAMILIES["DeepseekV3ForCausalLM"])
    said = f"DeepseekV3ForCausalLM needs the op Attention with {field} and keys as values"
    assert not any(said in problem for problem in problems_of_network(network))
    found = problems_of_network(with_changed(network, Attention, **{field: object()}))
    assert any(said in problem for problem in found)


def test_scaled_values_have_whole_vectors() -> None:
    network = specimen(FAMILIES["FalconH1ForCausalLM"])
    value = next(op for op in network.ops if isinstance(op, Scale)).input
    said = "FalconH1ForCausalLM has 36 scaled values; expected a multiple of 8 with backend cuda; use backend native"
    for width, refuses in ((36, True), (40, False)):
        changed = with_changed(network, Scale, input=dataclasses.replace(value, width=width))
        assert (said in problems_of_network(changed)) == refuses


def test_a_field_that_is_not_in_the_list_is_refused_once_it_is_set(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a field that ops get later is not ignored."""
    known = dict(cuda_support._ACCEPTED[Attention])
    del known["scale"]
    monkeypatch.setitem(cuda_support._ACCEPTED, Attention, known)  # type: ignore[arg-type]
    network = Checkpoint.open(root / "checkpoint").network
    assert ["the op Attention with scale" in problem for problem in problems_of_network(network)] == [True]


def test_virtual_tokens_are_refused_by_the_build(root: Path, tmp_path: Path) -> None:
    virtual = save_virtual_tokens(root / "model", tmp_path / "virtual", 3, 1)
    config = replace(WITH_LORA, lora_config=LoraBuildConfig(lora_dir=(virtual,), max_lora_rank=8))
    with pytest.raises(AdapterError) as raised:
        build(root / "checkpoint", config, tmp_path / "engine")
    assert "virtual: the adapter has virtual tokens; expected an engine with backend native" in str(raised.value)


def test_the_command_builds_and_names_the_backend(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command(
        "build", "--backend", "cuda", "--checkpoint_dir", root / "checkpoint", "--output_dir", tmp_path / "engine",
        "--max_seq_len", 64,
    )  # fmt: skip
    assert re.search(r"backend\s+cuda, for NVIDIA GPUs", capsys.readouterr().out)
    run_command("inspect", tmp_path / "engine")
    described = capsys.readouterr().out
    assert "engine of backend cuda" in described
    assert "on this machine" not in described


def test_prompt_tables_are_refused_by_the_command(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["build", "--backend", "cuda", "--checkpoint_dir", str(root / "checkpoint")]
    arguments += ["--output_dir", str(tmp_path / "engine"), "--max_prompt_embedding_table_size", "8"]
    assert command_line(arguments) != 0
    assert "max_prompt_embedding_table_size is 8; expected 0 with backend cuda" in capsys.readouterr().err


def test_the_base_weights_are_the_native_engines(root: Path, tmp_path: Path) -> None:
    ours, native = (load_engine(root / name).base_weights() for name in ("cuda", "native"))
    assert isinstance(ours, EngineBase)
    assert isinstance(native, EngineBase)
    adapter = save_adapter(root / "model", tmp_path / "dora", 5, r=3, use_dora=True)
    converted = [convert_adapter(adapter, storage_dtype="bfloat16", base=base) for base in (ours, native)]
    np.testing.assert_array_equal(converted[0].weights.view(np.uint16), converted[1].weights.view(np.uint16))


def test_the_base_weights_are_the_checkpoints(root: Path) -> None:
    engine = load_engine(root / "cuda")
    assert isinstance(engine, CudaEngine)
    source = SafetensorsReader(root / "checkpoint" / "rank0.safetensors")
    weights = cuda_engine.RowMajorWeights(engine.storage)
    down = engine.program.body[-1].parts[0].weight
    expected = to_float32(np.concatenate(list(source.rows("transformer.layers.1.mlp.proj.weight", 3, 9))))
    np.testing.assert_array_equal(weights.rows(down, 3, 9), expected)


def test_an_engine_in_memory_is_loaded(root: Path) -> None:
    content, config = (root / "cuda" / "rank0.engine").read_bytes(), (root / "cuda" / "config.json").read_text()
    engine = load_engine_bytes(content, config)
    assert isinstance(engine, CudaEngine)
    assert engine.program.matrix_layout is MatrixLayout.ROWS


def test_a_file_of_another_layout_is_refused(root: Path, tmp_path: Path) -> None:
    config = EngineConfig.load(root / "cuda")
    checksums = EngineConfig.load(root / "native").engine_checksums
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    replace(config, engine_checksums=checksums).save(mixed)
    (mixed / "rank0.engine").write_bytes((root / "native" / "rank0.engine").read_bytes())
    with pytest.raises(EngineError, match=r"matrix_layout is MatrixLayout\.ROWS in config\.json and .*PANELS"):
        load_engine(mixed)


class Started:
    """Stands in for _cuda, and records how the engine is started."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def CudaDevice(self, index: int) -> str:
        return f"device {index}"

    def CudaEngine(self, *arguments: Any, weight_memory: int, neuron_usage: Any) -> Any:
        assert neuron_usage == []
        self.calls.append((*arguments, weight_memory))
        return SimpleNamespace()


def test_the_engine_starts_on_the_gpu_that_is_chosen(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started()
    monkeypatch.setattr(cuda_engine, "import_cuda", lambda subject: started)
    engine = load_engine(root / "cuda")
    assert isinstance(engine, CudaEngine)
    engine.start(adaptrt.ExecutorConfig())
    engine.with_device(2).start(adaptrt.ExecutorConfig())
    assert started.calls == [(engine.program, "device 0", 0), (engine.program, "device 2", 0)]


def test_the_engine_starts_with_a_limit_of_its_weights(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started()
    monkeypatch.setattr(cuda_engine, "import_cuda", lambda subject: started)
    engine = load_engine(root / "cuda", weight_memory=1000)
    engine.start(adaptrt.ExecutorConfig())
    engine.with_weight_memory(None).start(adaptrt.ExecutorConfig())
    engine.with_weight_memory(0).start(adaptrt.ExecutorConfig())
    build(root / "checkpoint", replace(WITH_LORA, weight_memory=500), tmp_path / "limited")
    for weight_memory in (None, 700):
        load_engine(tmp_path / "limited", weight_memory=weight_memory).start(adaptrt.ExecutorConfig())
    assert [call[-1] for call in started.calls] == [1000, 1000, 0, 500, 700]


@pytest.mark.parametrize(
    ("backend", "ids", "complaint"),
    [
        ("cuda", [0, 1], r"parallel_config.device_ids is \[0, 1\]; accepted: None, or a list of one GPU"),
        ("cuda", [], r"parallel_config.device_ids is \[\]; accepted: None, or a list of one GPU"),
        ("native", [0], r"device_ids is \[0\]; accepted: None, .*native is an engine for CPUs"),
    ],
)
def test_other_choices_of_gpus_are_refused(root: Path, backend: str, ids: list[int], complaint: str) -> None:
    config = adaptrt.ExecutorConfig(parallel_config=adaptrt.ParallelConfig(device_ids=ids))
    with pytest.raises(ConfigError, match=complaint):
        adaptrt.Executor(root / backend, adaptrt.ModelType.DECODER_ONLY, config)


def test_kernels_of_the_cpu_are_refused(root: Path) -> None:
    engine = load_engine(root / "cuda")
    with pytest.raises(ConfigError, match="kernels is 'portable'; expected '': a CUDA engine runs on a GPU"):
        engine.start(adaptrt.ExecutorConfig(kernels="portable"))


def test_an_install_without_the_kernels_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = cuda_engine.import_cuda.__globals__["importlib"].util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "adaptrt._cuda" else find_spec(name, *rest)
    )
    with pytest.raises(ConfigError, match=r"cuda: .* not installed: adaptrt\._cuda is missing.*nvcc"):
        adaptrt.Executor(root / "cuda")


def test_virtual_tokens_are_refused(root: Path, tmp_path: Path) -> None:
    virtual = save_virtual_tokens(root / "model", tmp_path / "virtual", 3, 1)
    with pytest.raises(AdapterError, match="is an engine of backend cuda; accepted: native engines of one rank"):
        adaptrt.PromptTuningConfig.from_peft(virtual, root / "cuda")
