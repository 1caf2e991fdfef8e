"""Configs, checkpoints and adapters of Gemma 4."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adaptrt import _core
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.network.rotary_frequencies import inverse_frequencies
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.checkpoint.rotary import ProportionalScaling
from adaptrt.formats.engine.build_config import CUDA, TENSORRT, BuildConfig, LoraBuildConfig, TensorRtBuildConfig
from adaptrt.formats.models.gemma4 import Gemma4Config
from adaptrt.formats.models.registry import declare
from adaptrt.formats.network.ops import Attention
from support.families import GEMMA4, save_family
from support.hf_configs import read_config
from support.models import save_adapter

_TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": False,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "max_position_embeddings": 131072,
    "model_type": "gemma4_text",
    "moe_intermediate_size": None,
    "num_attention_heads": 8,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": None,
    "use_cache": True,
    "use_double_wide_mlp": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
# Fields of a model of E2B's shape, and of one of 26B-A4B's.
SMALL = {**_TEXT, "architectures": ["Gemma4ForCausalLM"]}
EXPERTS = {
    **SMALL,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 2112,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "num_kv_shared_layers": 0,
    "top_k_experts": 8,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}
VISION = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "audio_config": {},
    "audio_token_id": 258881,
    "boa_token_id": 256000,
    "boi_token_id": 255999,
    "dtype": "bfloat16",
    "eoa_token_index": 258883,
    "eoi_token_id": 258882,
    "image_token_id": 258880,
    "model_type": "gemma4",
    "text_config": _TEXT,
    "tie_word_embeddings": True,
    "video_token_id": 258884,
    "vision_config": {},
}


# A model of 12B's shape.
UNIFIED = {
    name: value for name, value in _TEXT.items() if not name.startswith(("moe_", "num_experts", "top_k", "enable_moe"))
} | {
    "architectures": ["Gemma4UnifiedForCausalLM"],
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    "model_type": "gemma4_unified_text",
    "num_hidden_layers": 48,
    "num_kv_shared_layers": 0,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}
del UNIFIED["hidden_size_per_layer_input"], UNIFIED["vocab_size_per_layer_input"]


@pytest.fixture
def load(tmp_path: Path) -> Any:
    return partial(read_config, tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(GEMMA4["gemma4-shared"], tmp_path_factory.mktemp("gemma4") / "model")


def test_configs_are_read(load: Any) -> None:
    small, mixture = load(SMALL), load(EXPERTS)
    assert isinstance(small, Gemma4Config)
    assert small.describe_heads() == "8 heads of 256, 1 for k and v; without a window 8 heads of 512, 1 for k and v"
    assert (small.num_experts, small.num_token_tables) == (0, 2)
    assert (small.first_shared_layer, small.mlp_size(14), small.mlp_size(15)) == (15, 6144, 12288)
    assert [small.source_of_keys(layer) for layer in (14, 15, 19, 34)] == [None, 13, 14, 14]
    assert (mixture.num_experts, mixture.num_token_tables, mixture.num_global_key_value_heads) == (128, 1, 2)
    assert mixture.describe_layers() == "30 of hidden size 2816, mlp 2112, 128 experts of 704, 8 a token"
    assert load(VISION) == load(SMALL, architectures=["Gemma4ForConditionalGeneration"])


def test_a_model_without_towers_has_neither_own_embeddings_nor_experts(load: Any) -> None:
    found = load(UNIFIED)
    assert (found.num_experts, found.num_token_tables, found.per_layer_input_size) == (0, 1, None)
    assert found.describe_layers() == "48 of hidden size 3840, mlp 15360"
    name = "Gemma4UnifiedForConditionalGeneration"
    text = {key: value for key, value in UNIFIED.items() if key != "architectures"}
    vision = {**VISION, "model_type": "gemma4_unified", "architectures": [name], "text_config": text}
    assert load(vision) == load(UNIFIED, architectures=[name])
    assert load(UNIFIED, enable_moe_block=False, hidden_size_per_layer_input=0) == found
    with pytest.raises(_core.CheckpointError, match="hidden_size_per_layer_input is 7; only 0 is supported"):
        load(UNIFIED, hidden_size_per_layer_input=7)
    with pytest.raises(_core.CheckpointError, match="enable_moe_block is true; only false is supported"):
        load(UNIFIED, enable_moe_block=True)


def test_transformers_own_form_of_the_heads_is_read(load: Any) -> None:
    heads = {"head_dim": 64, "num_key_value_heads": 4}
    layers = {str(layer): heads for layer, kind in enumerate(SMALL["layer_types"]) if kind == "full_attention"}
    given = {name: value for name, value in SMALL.items() if "global" not in name}
    found = load({**given, "per_layer_config": layers})
    assert (found.global_head_size, found.num_global_key_value_heads) == (64, 4)
    plain = load({**given, "per_layer_config": {}})
    assert (plain.global_head_size, plain.num_global_key_value_heads) == (256, 1)
    with pytest.raises(_core.CheckpointError, match="per_layer_config differs between layers"):
        load({**given, "per_layer_config": {**layers, "4": {"head_dim": 32}}})
    with pytest.raises(_core.CheckpointError, match=r"per_layer_config\.3"):
        load({**given, "per_layer_config": {**layers, "3": heads}})
    with pytest.raises(_core.CheckpointError, match=r"per_layer_config\.4\.sliding_window"):
        load({**given, "per_layer_config": {**layers, "4": {**heads, "sliding_window": 3}}})


def test_the_last_layer_has_no_window(load: Any) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    found = load(SMALL, num_hidden_layers=3, layer_types=kinds, num_kv_shared_layers=1)
    assert found.sliding_window_layers == (0,)
    assert [op.shared_layer for op in declare(found).ops if isinstance(op, Attention)] == [None, None, 1]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"use_bidirectional_attention": "all"}, 'use_bidirectional_attention is "all"; accepted: vision'),
        ({"vocab_size_per_layer_input": 5}, "vocab_size_per_layer_input is 5; expected vocab_size, 262144"),
        ({"num_kv_shared_layers": 31}, "num_kv_shared_layers is 31, but layer 4 has no earlier layer of its kind"),
        ({"enable_moe_block": True}, "num_experts is null; expected an integer"),
        ({"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3, "moe_intermediate_size": 4}, "moe_top_k 3"),
        ({"global_head_dim": 511}, "global_head_size 511 is odd"),
        ({"num_attention_heads": 6, "attention_k_eq_v": True, "num_global_key_value_heads": 4}, "num_global_key_value"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1.0}}}, 'rope_type is "yarn"'),
        ({"altup_num_inputs": 4}, "altup_num_inputs is 4: an unknown field"),
    ],
)
def test_fields_that_cannot_be_served_are_named(load: Any, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(_core.CheckpointError, match=complaint):
        load(SMALL, **changes)


def test_proportional_rotation() -> None:
    found, factor = inverse_frequencies(20, 100.0, ProportionalScaling(share=0.5, factor=2.0))
    expected = [100.0 ** (-2 * pair / 20) / 2 if pair < 5 else 0.0 for pair in range(10)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert factor == 1.0


def test_ranks_share_heads_of_both_sizes_and_stages_have_the_layers_that_share(load: Any) -> None:
    assert load(SMALL, tp_size=8).mapping.tp_size == 8
    with pytest.raises(_core.ConfigError, match="tp_size 16 does not divide num_attention_heads 8"):
        load(SMALL, tp_size=16)
    with pytest.raises(
        _core.ConfigError,
        match="tp_size 2 neither divides num_global_key_value_heads 3 nor is a multiple of it",
    ):
        load({**SMALL, "num_attention_heads": 12, "attention_k_eq_v": True, "num_global_key_value_heads": 3}, tp_size=2)
    with pytest.raises(
        _core.ConfigError,
        match="pp_size is 2, but layer 18 uses the keys and values of layer 13, which is on an earlier stage",
    ):
        load(SMALL, pp_size=2)
    assert load({**SMALL, "num_kv_shared_layers": 0}, pp_size=2).mapping.pp_size == 2


def test_other_backends_and_new_tokens_are_refused(load: Any, model: Path, tmp_path: Path) -> None:
    convert_checkpoint(model, tmp_path / "checkpoint", dtype=_core.DType.BFLOAT16)
    tensorrt = BuildConfig(max_seq_len=64, backend=TENSORRT, tensorrt_config=TensorRtBuildConfig())
    with pytest.raises(
        _core.ConfigError, match="has heads of two sizes and norms of values, which need backend native"
    ):
        build(tmp_path / "checkpoint", tensorrt, tmp_path / "engine")
    with pytest.raises(_core.ConfigError, match="has a head_dim of 10; expected a multiple of 8 up to 512 with"):
        build(tmp_path / "checkpoint", BuildConfig(max_seq_len=64, backend=CUDA), tmp_path / "engine")
    tokens = BuildConfig(max_seq_len=64, lora_config=LoraBuildConfig(max_extra_tokens=2))
    with pytest.raises(_core.ConfigError, match="has embeddings of each layer, in which new tokens have no rows"):
        build(tmp_path / "checkpoint", tokens, tmp_path / "engine")


def test_tensors_of_shared_keys_are_ignored(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    assert "model.layers.3.self_attn.k_proj.weight" not in tensors
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes((model / "config.json").read_bytes())
    unused = {f"model.layers.3.self_attn.{name}.weight": np.ones(2, np.float32) for name in ("k_norm", "v_proj")}
    save_file({**tensors, **unused}, tmp_path / "model" / "model.safetensors")
    convert_checkpoint(tmp_path / "model", tmp_path / "checkpoint")
    convert_checkpoint(model, tmp_path / "same")
    rank = "rank0.safetensors"
    assert (tmp_path / "checkpoint" / rank).read_bytes() == (tmp_path / "same" / rank).read_bytes()
    save_file({**tensors, "model.layers.0.self_attn.x": np.ones(2, np.float32)}, tmp_path / "model/model.safetensors")
    with pytest.raises(_core.CheckpointError, match=r"unexpected tensors: model\.layers\.0\.self_attn\.x"):
        convert_checkpoint(tmp_path / "model", tmp_path / "wrong")


def test_rows_of_adapters(model: Path, tmp_path: Path) -> None:
    targets = ["q_proj", "per_layer_projection", "per_layer_model_projection"]
    adapter = save_adapter(model, tmp_path / "adapter", 0, r=3, target_modules=targets)
    made = convert_adapter(adapter, storage_dtype="float32", base=model)
    rows = {(int(row[0]), int(row[1])) for row in made.config[0]}
    assert rows == {(1, layer) for layer in range(5)} | {(50, layer) for layer in range(5)} | {(51, 0)}
    # A layer that shares keys and values has no k_proj.
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.3.self_attn.{}_proj.lora_{}.weight"
    save_file({**tensors, **{name.format("k", part): tensors[name.format("q", part)] for part in "AB"}}, file)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "target_modules": [*targets, "k_proj"]}))
    with pytest.raises(_core.AdapterError, match=r"layers\.3\.self_attn\.k_proj"):
        convert_adapter(adapter, storage_dtype="float32", base=model)
