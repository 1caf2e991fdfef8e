"""Configs of families whose sequences keep states: LFM 2, OLMo Hybrid, Mamba 2, Granite 4, Falcon-H1; and HunYuan's."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from adaptrt._core import CheckpointError, ConfigError
from adaptrt.formats.models.granite_hybrid import GraniteHybridConfig
from adaptrt.formats.models.mamba import NO_TIME_LIMIT
from support.families import RECURRENT
from support.hf_configs import GRANITE4, HF, read_config

LFM2 = {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 1024, "block_ff_dim": 6656,
    "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "conv_L_cache": 3, "conv_bias": False,
    "eos_token_id": 7, "hidden_size": 1024, "max_position_embeddings": 128000, "num_attention_heads": 16,
    "norm_eps": 1e-5, "num_hidden_layers": 4, "num_key_value_heads": 8, "full_attn_idxs": [2], "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16", "vocab_size": 65536, "use_pos_enc": True,
}  # fmt: skip
OLMO = {**HF, "architectures": ["OlmoHybridForCausalLM"], "hidden_size": 64, "num_attention_heads": 4}
MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"], "eos_token_id": 2, "hidden_size": 64, "layer_norm_epsilon": 1e-5,
    "num_heads": 8, "head_dim": 16, "num_hidden_layers": 3, "n_groups": 2, "state_size": 10,
    "time_step_limit": [0.0, {"__float__": "Infinity"}], "torch_dtype": "bfloat16", "vocab_size": 61,
}  # fmt: skip
FALCON_H1 = {
    "architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "attn_layer_indices": None, "bos_token_id": 1,
    "embedding_multiplier": 5.656854249492381, "eos_token_id": 11, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 2048, "key_multiplier": 0.390625,
    "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_d_conv": 4,
    "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_n_heads": 24, "mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_rms_norm": False,
    "mamba_use_mlp": True, "max_position_embeddings": 16384, "mlp_bias": False, "mlp_expansion_factor": 8,
    "mlp_multipliers": [0.8838834764831844, 0.5859375], "model_type": "falcon_h1", "num_attention_heads": 8,
    "num_hidden_layers": 3, "num_key_value_heads": 2, "num_logits_to_keep": 1, "pad_token_id": 0,
    "projectors_bias": False, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.32], "ssm_out_multiplier": 0.25,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32784,
}  # fmt: skip
NEMOTRON_H = {**RECURRENT["nemotron-h"].config().to_dict(), "architectures": ["NemotronHForCausalLM"],
              "dtype": "float32", "layers_block_type": ["mamba", "attention", "mlp", "mlp"]}  # fmt: skip
HUNYUAN = {
    **HF, "architectures": ["HunYuanDenseV1ForCausalLM"], "head_dim": 12, "rope_theta": 10000.0,
    "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                     "mscale_all_dim": 0.0, "type": "dynamic"},
}  # fmt: skip


@pytest.fixture
def load(tmp_path: Path) -> Any:
    return partial(read_config, tmp_path)


def test_lfm2(load: Any) -> None:
    config = load(LFM2)
    # 2 / 3 of block_ff_dim, rounded up to a multiple of 256
    assert (config.intermediate_size, config.conv_layers, config.conv_kernel_dim) == (4608, (0, 1, 3), 3)
    assert config.share_embedding_table
    assert config.has_states
    assert load(LFM2, block_auto_adjust_ff_dim=False).intermediate_size == 6656
    assert load(LFM2, block_ffn_dim_multiplier=None).intermediate_size == 4437
    assert not load(LFM2, full_attn_idxs=...).has_states
    assert not load(LFM2, tie_embedding=False).share_embedding_table


def test_olmo_hybrid(load: Any) -> None:
    config = load(OLMO, num_hidden_layers=4)
    assert (config.linear_layers, config.linear_update_scale, config.has_positions) == ((0, 1, 2), 2.0, True)
    assert (config.delta_shape.key_dim, config.delta_shape.value_dim, config.delta_shape.num_value_heads) == (12, 24, 4)
    nowhere = {"rope_type": "default", "rope_theta": None}
    assert not load(OLMO, rope_parameters=nowhere, rope_theta=..., rope_scaling=...).has_positions
    assert load(OLMO, linear_allow_neg_eigval=False).linear_update_scale == 1.0


def test_mamba2(load: Any) -> None:
    config = load(MAMBA2)
    assert config.mamba_layers == (0, 1, 2)
    assert (config.mamba_time_min, config.mamba_time_max) == (0.0, NO_TIME_LIMIT)
    assert (config.scan_shape.value_size, config.scan_shape.group_size) == (128, 20)
    limits = load(MAMBA2, time_step_limit=[0.1, 0.5])
    assert (limits.mamba_time_min, limits.mamba_time_max) == (0.1, 0.5)
    assert type(config).from_dict(json.loads(config.to_json()), subject="again") == config


def test_granite4_with_mamba_layers_and_experts(load: Any) -> None:
    changes = {"layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 5, "num_experts_per_tok": 2}
    sizes = {
        "hidden_size": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": "auto",
        "intermediate_size": 22,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = load(GRANITE4, **changes, **sizes)
    assert isinstance(config, GraniteHybridConfig)
    assert (config.mamba_layers, config.mamba_head_dim, config.num_experts) == ((0, 2), 16, 5)
    assert GraniteHybridConfig.from_dict(json.loads(config.to_json()), subject="again") == config


def test_older_checkpoints_of_granite4_lack_those_fields(load: Any) -> None:
    config = load(GRANITE4)
    assert (config.has_states, config.num_experts) == (False, 0)
    added = ("mamba_", "moe_", "shared_expert", "dense_layers", "has_experts")
    older = {name: value for name, value in json.loads(config.to_json()).items() if not name.startswith(added)}
    assert GraniteHybridConfig.from_dict(older, subject="older") == config


def test_falcon_h1(load: Any) -> None:
    config = load(FALCON_H1)
    assert (config.mamba_layers, config.scan_shape.value_size, config.rotary_base) == ((0, 1, 2), 1536, 1e11)
    assert (config.mlp_multipliers, config.ssm_in_multiplier) == ((0.8838834764831844, 0.5859375), 1.25)
    assert not config.mamba_has_norm
    assert type(config).from_dict(json.loads(config.to_json()), subject="again") == config
    ones = load(FALCON_H1, ssm_multipliers=None, mlp_multipliers=...)
    assert (ones.ssm_multipliers, ones.mlp_multipliers) == ((1.0,) * 5, (1.0,) * 2)
    assert not load(FALCON_H1, mamba_rms_norm=...).mamba_has_norm
    # Without mamba_d_ssm, transformers has 1024; null means mamba_expand times hidden_size.
    assert load(FALCON_H1, mamba_d_ssm=..., mamba_d_head=..., mamba_n_heads=16).scan_shape.head_dim == 64
    assert load(FALCON_H1, mamba_d_ssm=None, mamba_n_heads=32).scan_shape.value_size == 2048
    damaged = {**json.loads(config.to_json()), "ssm_multipliers": [1.0], "mlp_multipliers": [1.0]}
    with pytest.raises(
        CheckpointError, match=r"ssm_multipliers has 1 numbers; expected 5.*mlp_.* 1 numbers; expected 2"
    ):
        type(config).from_dict(damaged, subject="damaged")


def test_alpha_makes_the_rotary_base_larger(load: Any) -> None:
    config = load(HUNYUAN)
    assert config.rotary_base == pytest.approx(10000.0 * 1000.0 ** (12 / 10))
    assert config.rotary_scaling is None


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        (LFM2, {"layer_types": ["conv"]}, "expected 4 times conv or full_attention"),
        (LFM2, {"tie_embedding": True, "tie_word_embeddings": False}, "tie_embedding is true, but"),
        (LFM2, {"block_use_magic": True}, "block_use_magic is true: an unknown field"),
        (OLMO, {"layer_types": ["sliding_attention"] * 3}, "times linear_attention or full_attention"),
        (MAMBA2, {"num_heads": 7}, "num_heads times head_dim is 112; expected expand times hidden_size"),
        (MAMBA2, {"n_groups": 3}, "mamba_num_heads 8 is not a multiple of mamba_num_groups 3"),
        (MAMBA2, {"time_step_limit": [1.0, 0.5]}, "expected two numbers, at least 0 and ascending"),
        (MAMBA2, {"time_step_limit": "0"}, "expected two numbers, at least 0 and ascending"),
        (FALCON_H1, {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers is .*; expected 5 numbers"),
        (FALCON_H1, {"mamba_use_mlp": False}, "mamba_use_mlp is false; only true is supported"),
        (FALCON_H1, {"mamba_n_heads": 25}, "mamba_n_heads times mamba_d_head is 1600; expected 1536"),
        (FALCON_H1, {"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        (HUNYUAN, {"rope_scaling": {"type": "linear", "alpha": 2.0}}, 'type is "linear"; accepted: dynamic'),
        (HUNYUAN, {"head_dim": 2}, "alpha needs a head_dim above 2, which is 2"),
        (HUNYUAN, {"use_qk_norm": False}, "use_qk_norm is false; only true is supported"),
    ],
)
def test_fields_that_cannot_be_served_are_named(
    load: Any, base: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        load(base, **changes)


def test_ranks_share_groups_of_heads(load: Any) -> None:
    assert load(MAMBA2, tp_size=4).mapping.tp_size == 4
    assert (
        load(GRANITE4, tp_size=4, shared_intermediate_size=8192).mapping.tp_size == 4
    )  # without states, sizes of Mamba layers mean nothing


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        (MAMBA2, {"tp_size": 3}, "tp_size 3 does not divide mamba_num_heads 8"),
        (
            MAMBA2,
            {"hidden_size": 96, "num_heads": 12, "n_groups": 4, "tp_size": 6},
            "tp_size 6 neither divides mamba_num_groups 4 nor is a multiple of it",
        ),
        (OLMO, {"linear_num_value_heads": 5, "linear_num_key_heads": 5, "tp_size": 2}, "linear_num_value_heads 5;"),
        (
            OLMO,
            {"linear_num_value_heads": 12, "linear_num_key_heads": 3, "tp_size": 2},
            "tp_size 2 neither divides linear_num_key_heads 3 nor is a multiple of it",
        ),
        (LFM2, {"hidden_size": 1031, "head_dim": 64, "tp_size": 2}, "tp_size 2 does not divide hidden_size 1031"),
        (NEMOTRON_H, {"pp_size": 2}, r"pp_size 2 gives stage 1 only MLPs \(layers 2 to 3\)"),
    ],
)
def test_ranks_that_cannot_share_states_are_refused(
    load: Any, base: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(base, **changes)
