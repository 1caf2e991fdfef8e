"""Real plans, built without a GPU: their contents, their entries in config.json, and the cost of the build."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptrt._core import NUM_TABLE_MODULES, DType, dtype_from_name
from adaptrt.builder.build import BuildReport, build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.network.onnx_graph import NetworkOptions
from adaptrt.common.safetensors_stream import SafetensorsReader
from adaptrt.formats.engine.engine_config import EngineConfig
from adaptrt.formats.engine.tensorrt.plan_config import TensorRtPlans
from support.engines import make_graph
from support.tensorrt_plans import (
    CAPABILITIES,
    adapter_nodes,
    attention_layers,
    needs_tensorrt_rtx,
    save_random_checkpoint,
    tensorrt_config,
)

pytestmark = needs_tensorrt_rtx

DEMO_MODEL = Path(__file__).parents[4] / "examples" / "demo" / "model"
DTYPES = ("float16", "bfloat16")
SIZES = {"max_batch_size": 16, "max_num_tokens": 256, "max_seq_len": 200}
# Documented limit of a build's memory, without Python, the packages and their libraries.
MAX_MEMORY_OVER_WEIGHTS = 3.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes checkpoints of demo and m125 in both types."""
    directory = tmp_path_factory.mktemp("tensorrt")
    for name in DTYPES:
        dtype = dtype_from_name(name)
        convert_checkpoint(DEMO_MODEL, directory / f"demo-{name}", dtype=dtype)
        save_random_checkpoint(directory / f"m125-{name}", dtype)
    return directory


def check_plans(report: BuildReport, checkpoint: Path) -> None:
    """Checks that the plans have exactly the network's plugin nodes, inputs, outputs and profiles."""
    opened, config = Checkpoint.open(checkpoint), report.config
    options = NetworkOptions(
        tokens_per_block=config.tokens_per_block,
        max_lora_rank=config.lora_config.max_lora_rank if config.lora_enabled else None,
        dora=config.dora_enabled,
    )
    network = make_graph(opened, options)
    nodes = {node.name: node.op_type for node in network.graph.node if node.domain == "adaptrt"}
    kind = "Dora" if config.dora_enabled else "Lora"
    adapted = {name for name, operator in nodes.items() if operator == kind}
    attention = [name for name, operator in nodes.items() if operator == "PagedAttention"]
    layers = opened.config.num_hidden_layers
    assert len(attention) == layers
    assert len(adapted) == (5 * layers if config.lora_enabled else 0)
    assert len(nodes) == len(attention) + len(adapted)
    loaded = EngineConfig.load(report.directory)
    assert loaded.tensorrt == report.compiled.plans
    loaded.tensorrt.check_files(report.directory)
    for plan, built in zip(loaded.tensorrt.files, report.compiled.built, strict=True):
        assert adapter_nodes(report.directory / plan.stored.file) == adapted
        for profile in (0, 1):
            found = attention_layers(built.layers, profile=profile)
            assert list(found) == attention
            for layer, (inputs, outputs) in enumerate(found.values()):
                # The pool is input and output in place: no layer copies it.
                assert f" kv_pool.{layer} (" in inputs
                assert f", kv_pool_out.{layer} (" in outputs
        assert built.layers.count("kv_pool.0 ") == 2  # once in each profile
    check_tensors(loaded.tensorrt, opened, report)


def check_tensors(plans: TensorRtPlans, checkpoint: Checkpoint, report: BuildReport) -> None:
    model, build_config = checkpoint.config, report.config
    engine_type = "bfloat16" if model.dtype == DType.BFLOAT16 else "float16"
    pool = (-1, 2, model.num_key_value_heads, 32, model.head_size)
    table = (-1, model.num_hidden_layers, NUM_TABLE_MODULES)
    lora = {
        "adapter_slots": ("input", "int32", (-1,)),
        "lora_ranks": ("input", "int32", table),
        "lora_pointers": ("input", "int64", (*table, 3)),
    }
    expected = {
        "input_ids": ("input", "int32", (-1,)),
        "positions": ("input", "int32", (-1,)),
        "sequence_offsets": ("input", "int32", (-1,)),
        "block_tables": ("input", "int32", (-1, -1)),
        "logit_rows": ("input", "int32", (-1,)),
        **{f"kv_pool.{layer}": ("input", engine_type, pool) for layer in range(model.num_hidden_layers)},
        **(lora if build_config.lora_enabled else {}),
        **{f"kv_pool_out.{layer}": ("output", engine_type, pool) for layer in range(model.num_hidden_layers)},
        "logits": ("output", "float32", (-1, model.vocab_size)),
    }
    if plans.weights is not None:
        specs = checkpoint.ranks[0].reader.specs
        expected |= {name: ("input", engine_type, spec.shape) for name, spec in specs.items()}
    assert {tensor.name: (tensor.mode, tensor.dtype, tensor.shape) for tensor in plans.tensors} == expected
    aliases = {tensor.name: tensor.alias for tensor in plans.tensors if tensor.alias is not None}
    assert aliases == {f"kv_pool_out.{layer}": f"kv_pool.{layer}" for layer in range(model.num_hidden_layers)}
    assert plans.profiles == ("prefill", "decode")
    profiles = {tensor.name: tensor.profiles for tensor in plans.tensors if tensor.profiles}
    blocks = -(-build_config.max_seq_len // 32)
    assert profiles["input_ids"] == (((1,), (256,), (256,)), ((1,), (16,), (16,)))
    assert profiles["sequence_offsets"] == (((2,), (17,), (17,)),) * 2
    assert profiles["block_tables"] == (((1, 1), (16, blocks), (16, blocks)),) * 2
    assert profiles["logit_rows"] == (((1,), (16,), (16,)),) * 2
    assert {smallest for (smallest, _, _) in profiles["kv_pool.0"]} == {(1, *pool[1:])}
    if build_config.lora_enabled:
        assert profiles["lora_ranks"] == (((1, *table[1:]), (8, *table[1:]), (16, *table[1:])),) * 2


# Each build takes a second per capability. The larger model covers the other pairs of type and adapters.
@pytest.mark.parametrize(
    ("dtype", "adapters", "capabilities"),
    [
        pytest.param("bfloat16", "none", ("8.0", "12.1"), marks=pytest.mark.nightly),
        ("float16", "lora", ("8.6", "12.0")),
        pytest.param("bfloat16", "dora", CAPABILITIES, marks=pytest.mark.nightly),
    ],
)
def test_the_demo_model(root: Path, tmp_path: Path, dtype: str, adapters: str, capabilities: tuple[str, ...]) -> None:
    checkpoint = root / f"demo-{dtype}"
    config = tensorrt_config(*capabilities, adapters=adapters, **SIZES)
    report = build(checkpoint, config, tmp_path / "engine", workers=2)
    assert [plan.compute_capability for plan in report.compiled.plans.files] == list(capabilities)
    check_plans(report, checkpoint)


@pytest.mark.parametrize(
    ("dtype", "adapters", "weights", "capabilities"),
    [
        pytest.param("float16", "none", "constants", ("8.0", "12.1"), marks=pytest.mark.nightly),
        ("float16", "dora", "constants", ("8.9",)),
        ("bfloat16", "lora", "external", ("8.6", "12.0")),
    ],
)
def test_a_125m_shape(
    root: Path, tmp_path: Path, dtype: str, adapters: str, weights: str, capabilities: tuple[str, ...]
) -> None:
    checkpoint = root / f"m125-{dtype}"
    weight_bytes = sum(spec.num_bytes for spec in SafetensorsReader(checkpoint / "rank0.safetensors").specs.values())
    config = tensorrt_config(*capabilities, adapters=adapters, weights=weights, **SIZES)
    report = build(checkpoint, config, tmp_path / "engine")
    check_plans(report, checkpoint)
    for plan, built in zip(report.compiled.plans.files, report.compiled.built, strict=True):
        assert built.peak_bytes - built.base_bytes < MAX_MEMORY_OVER_WEIGHTS * weight_bytes
        held = plan.stored.num_bytes > weight_bytes
        assert held == (weights == "constants")


def test_weights_beside_the_plans_are_the_checkpoints(root: Path, tmp_path: Path) -> None:
    checkpoint = root / "demo-bfloat16"
    config = tensorrt_config("8.0", "8.9", adapters="dora", weights="external", **SIZES)
    report = build(checkpoint, config, tmp_path / "engine", workers=2)
    check_plans(report, checkpoint)
    theirs = SafetensorsReader(checkpoint / "rank0.safetensors")
    ours = SafetensorsReader(report.directory / "weights.safetensors")
    assert list(ours.specs.values()) == list(theirs.specs.values())
    for name in theirs.specs:
        assert ours.array(name).tobytes() == theirs.array(name).tobytes()
        assert ours.offset(name) % 256 == 0
