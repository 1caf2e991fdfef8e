"""Adapters are checked against the serving engine's weights, which also normalise DoRA magnitudes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adaptrt import _core
from adaptrt.formats.adapter import ModuleKey, convert_adapter
from adaptrt.formats.checkpoint.config import ParallelMapping
from adaptrt.formats.hugging_face.hf_config import load_hf_config
from adaptrt.formats.models.registry import declare
from adaptrt.formats.network.adapter_sites import AdaptedModules
from adaptrt.runtime.engine_weights import EngineBase
from support.adapters import TENSORS, edit_config, edit_tensors
from support.models import ModelSpec, save_adapter, save_model

SPEC = ModelSpec(intermediate_size=70)
# Layers that an engine fuses: the parts of one linear layer share their input.
FUSED = (("attn_q", "attn_k", "attn_v"), ("attn_dense",), ("mlp_h_to_4h", "mlp_gate"), ("mlp_4h_to_h",))
HF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_dense": "self_attn.o_proj",
    "mlp_h_to_4h": "mlp.gate_proj",
    "mlp_gate": "mlp.up_proj",
    "mlp_4h_to_h": "mlp.down_proj",
}
FLOAT32_TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(SPEC, tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def engine(model: Path) -> EngineBase:
    """Makes the linear layers of an engine, without the rest of its program."""
    weights = load_file(model / "model.safetensors")
    ids = {info.name: info.id for info in _core.lora_modules()}
    storage, ops, sites = [], [], []
    for layer in range(SPEC.num_hidden_layers):
        for modules in FUSED:
            parts, site_parts = [], []
            for module in modules:
                weight = weights[f"model.layers.{layer}.{HF_NAMES[module]}.weight"]
                panels = np.zeros(_core.panel_bytes(_core.DType.FLOAT32, *weight.shape), np.uint8)
                _core.pack_panels(panels, _core.DType.FLOAT32, *weight.shape, 0, weight, _core.DType.FLOAT32)
                storage.append(panels)
                matrix = _core.PanelMatrix(data=panels, dtype=_core.DType.FLOAT32, n=weight.shape[0], k=weight.shape[1])
                parts.append(_core.LinearPart(weight=matrix))
                site_parts.append(_core.LoraPart(module=ids[module], out_size=weight.shape[0]))
            ops.append(_core.LinearOp(input=0, output=0, parts=parts, lora_site=len(sites)))
            sites.append(_core.LoraSite(layer=layer, in_size=weight.shape[1], parts=site_parts))
    layout = _core.LoraLayout(
        dtype=_core.DType.FLOAT32, num_layers=SPEC.num_hidden_layers, max_rank=8, dora_enabled=True,
        target_modules=list(range(1, 8)), sites=sites,
    )  # fmt: skip
    program = _core.Program(
        dtype=_core.DType.FLOAT32, vocab_size=61, num_layers=SPEC.num_hidden_layers, max_batch_size=1,
        max_num_tokens=1, max_input_len=1, max_seq_len=1, tokens_per_block=1, arena_bytes=0, buffers=[], body=ops,
        head=[], logits=0, lora=layout,
    )  # fmt: skip
    return EngineBase([(program, storage)], Path("engine"))


def modules_of(model: Path) -> AdaptedModules:
    return AdaptedModules(declare(load_hf_config(model, dtype=_core.DType.FLOAT32, mapping=ParallelMapping())))


def test_magnitudes_as_by_the_original_model(model: Path, engine: EngineBase, tmp_path: Path) -> None:
    directory = save_adapter(model, tmp_path / "dora", 0, r=3, use_dora=True)
    expected = convert_adapter(directory, storage_dtype="float32", base=model)
    adapter = convert_adapter(directory, storage_dtype="float32", base=engine, modules=modules_of(model))
    np.testing.assert_allclose(adapter.weights, expected.weights, rtol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize(
    ("fused", "parts"),
    [
        ("self_attn.qkv_proj", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        ("mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"]),
    ],
)
def test_fused_modules(fused: str, parts: list[str], model: Path, engine: EngineBase, tmp_path: Path) -> None:
    base = load_file(model / "model.safetensors")
    for layer in range(SPEC.num_hidden_layers):
        base[f"model.layers.{layer}.{fused}.weight"] = np.concatenate(
            [base.pop(f"model.layers.{layer}.{part}.weight") for part in parts]
        )
    (tmp_path / "base").mkdir()
    save_file(base, tmp_path / "base" / "model.safetensors")
    directory = save_adapter(model, tmp_path / "dora", 0, r=3, use_dora=True, target_modules=["down_proj"])
    rng = np.random.default_rng(0)

    def move(tensors):
        outputs = len(base[f"model.layers.0.{fused}.weight"])
        shapes = {"lora_A.weight": (3, SPEC.hidden_size), "lora_B.weight": (outputs, 3)}
        return {
            name.replace("mlp.down_proj", fused): rng.random(shapes.get(name[-13:], (outputs,)), np.float32)
            for name in tensors
        }

    edit_tensors(directory, move)
    edit_config(directory, target_modules=[fused.rpartition(".")[2]])
    assert len(load_file(directory / TENSORS)) == 6
    expected = convert_adapter(directory, storage_dtype="float32", base=tmp_path / "base")
    adapter = convert_adapter(directory, storage_dtype="float32", base=engine, modules=modules_of(model))
    np.testing.assert_allclose(adapter.weights, expected.weights, rtol=FLOAT32_TOLERANCE)


def test_missing_weights_are_named(model: Path, engine: EngineBase, tmp_path: Path) -> None:
    other = save_model(ModelSpec(intermediate_size=37, num_hidden_layers=3), tmp_path / "other")
    directory = save_adapter(other, tmp_path / "lora", 0, r=3)
    with pytest.raises(_core.AdapterError) as error:
        convert_adapter(directory, storage_dtype="float32", base=engine)
    assert "'model.layers.2.self_attn.q_proj' does not exist in engine" in str(error.value)
    assert "'model.layers.0.mlp.up_proj'" in str(error.value)
    assert "layers.0.self_attn" not in str(error.value)


def test_ranks_with_several_ranges_of_a_module() -> None:
    """Rank 0 has outputs 0, 1 and 4, rank 1 has 2, 3 and 5."""
    weight = np.arange(24, dtype=np.float32).reshape(6, 4)
    bias = 0.5 + np.arange(6, dtype=np.float32)
    module = next(info.id for info in _core.lora_modules() if info.name == "mamba_in_proj")
    ranks = []
    for ranges in ((0, 2, 4, 1), (2, 2, 5, 1)):
        outputs = [*range(ranges[0], ranges[0] + 2), ranges[2]]
        panels = np.zeros(_core.panel_bytes(_core.DType.FLOAT32, 3, 4), np.uint8)
        _core.pack_panels(panels, _core.DType.FLOAT32, 3, 4, 0, weight[outputs], _core.DType.FLOAT32)
        matrix = _core.PanelMatrix(data=panels, dtype=_core.DType.FLOAT32, n=3, k=4)
        vector = _core.VectorView(data=bias[outputs])
        part = _core.LoraPart(module=module, out_size=3, num_remote_outputs=3, output_ranges=list(ranges))
        layout = _core.LoraLayout(
            dtype=_core.DType.FLOAT32, num_layers=1, max_rank=8, dora_enabled=True, target_modules=[module],
            sites=[_core.LoraSite(layer=0, in_size=4, parts=[part])],
        )  # fmt: skip
        op = _core.LinearOp(input=0, output=0, parts=[_core.LinearPart(weight=matrix, bias=vector)], lora_site=0)
        program = _core.Program(
            dtype=_core.DType.FLOAT32, vocab_size=61, num_layers=1, max_batch_size=1, max_num_tokens=1,
            max_input_len=1, max_seq_len=1, tokens_per_block=1, arena_bytes=0, buffers=[], body=[op], head=[],
            logits=0, lora=layout,
        )  # fmt: skip
        ranks.append((program, (panels, vector)))
    base = EngineBase(ranks, Path("engine"))
    key = ModuleKey(0, module, "mixer.in_proj", rows=(range(6),))
    assert base.shape(key) == (6, 4)
    np.testing.assert_array_equal(np.concatenate(list(base.row_blocks(key))), weight)
    np.testing.assert_array_equal(base.bias(key), bias)
