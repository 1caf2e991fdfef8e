"""Configs, checkpoints and adapters of families with latent attention."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adaptrt import _core
from adaptrt.builder.build import build
from adaptrt.builder.conversion.convert import convert_checkpoint
from adaptrt.builder.network.checkpoint_tensors import plan_rank
from adaptrt.formats.adapter import convert_adapter
from adaptrt.formats.engine.build_config import CUDA, TENSORRT, BuildConfig, TensorRtBuildConfig
from adaptrt.formats.models.deepseek import DeepseekConfig
from adaptrt.formats.models.registry import declare
from support.families import LATENT, save_family
from support.hf_configs import read_config
from support.models import save_adapter

_COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "num_hidden_layers": 3,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}
# Fields of DeepSeek-V2-Lite and DeepSeek-V3, with fewer layers.
V2 = {
    **_COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV2Config",
        "AutoModel": "modeling_deepseek.DeepseekV2Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
    },
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
V3 = {
    **_COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {**V2["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


@pytest.fixture
def load(tmp_path: Path) -> Any:
    return partial(read_config, tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(LATENT["deepseek-v3"], tmp_path_factory.mktemp("deepseek-v3") / "model")


def test_published_configs_are_read(load: Any) -> None:
    small, large = load(V2), load(V3)
    assert isinstance(small, DeepseekConfig)
    assert (small.q_lora_rank, small.moe_num_groups, small.moe_normalised) == (None, 1, False)
    assert small.dense_layers == (0,)
    assert small.describe_heads() == "16 heads of 192, latent, with rows of 576"
    assert small.latent_shape.key_dim == large.latent_shape.key_dim == 576
    # transformers' yarn_apply_mscale, by hand: 192^-0.5 * (0.1 * 0.707 * ln(40) + 1)^2.
    assert small.score_scale == pytest.approx(0.0721688 * 1.2608037**2, rel=1e-5)
    assert (large.q_lora_rank, large.moe_num_groups, large.moe_groups_taken, large.moe_scale) == (1536, 8, 4, 2.5)
    grouped = load(V2, topk_method="group_limited_greedy", n_group=8, topk_group=3, routed_scaling_factor=16.0)
    assert (grouped.moe_num_groups, grouped.moe_groups_taken, grouped.moe_scale) == (8, 3, 16.0)


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        (V2, {"norm_topk_prob": True}, "norm_topk_prob is true; only false is supported"),
        (V2, {"scoring_func": "sigmoid"}, 'scoring_func is "sigmoid"; only "softmax" is supported'),
        (V2, {"topk_method": "noaux_tc"}, 'topk_method is "noaux_tc"'),
        (V2, {"topk_method": "group_limited_greedy", "n_group": None}, "n_group or topk_group is missing"),
        (V2, {"kv_lora_rank": 511}, "kv_lora_rank 511 is odd; expected an even number"),
        (V2, {"num_key_value_heads": 4}, "num_key_value_heads is 4; expected num_attention_heads 16"),
        (V3, {"rope_interleave": False}, "rope_interleave is false; only true is supported"),
        (V3, {"topk_method": "greedy"}, 'topk_method is "greedy"; only "noaux_tc" is supported'),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1 is supported"),
        (V3, {"topk_group": 9}, "moe_groups_taken 9 of moe_num_groups 8"),
    ],
)
def test_fields_that_cannot_be_served_are_named(
    load: Any, base: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(_core.CheckpointError, match=complaint):
        load(base, **changes)


def test_queries_must_say_whether_they_are_compressed(load: Any) -> None:
    with pytest.raises(_core.CheckpointError, match="q_lora_rank is missing; expected an integer, or null"):
        load({name: value for name, value in V2.items() if name != "q_lora_rank"})


def test_a_rank_has_its_own_heads(load: Any) -> None:
    config = load(V3, tp_size=4)
    network = declare(config)
    heads = config.num_attention_heads // 4
    for rank in range(4):
        shapes = {tensor.name: tensor.shape for tensor in plan_rank(network, rank)}
        found = {int(name.split(".")[5]) for name in shapes if ".layers.0.attention.kv_b." in name}
        assert found == set(range(heads * rank, heads * (rank + 1)))
        prefix = "transformer.layers.0.attention"
        assert shapes[f"{prefix}.q_b.weight"] == (heads * 192, config.q_lora_rank)
        assert shapes[f"{prefix}.kv_a.weight"] == (576, config.hidden_size)
        assert shapes[f"{prefix}.dense.weight"] == (config.hidden_size, heads * 128)
    with pytest.raises(_core.ConfigError, match="tp_size 3 does not divide num_attention_heads 128"):
        load(V3, tp_size=3)


def test_other_backends_and_int8_kv_caches_are_refused(model: Path, tmp_path: Path) -> None:
    convert_checkpoint(model, tmp_path / "checkpoint", dtype=_core.DType.BFLOAT16)
    tensorrt = BuildConfig(max_seq_len=64, backend=TENSORRT, tensorrt_config=TensorRtBuildConfig())
    with pytest.raises(_core.ConfigError, match="has latent attention, which needs backend native"):
        build(tmp_path / "checkpoint", tensorrt, tmp_path / "engine")
    with pytest.raises(_core.ConfigError, match="compressed rows of 26 elements; expected a multiple of 8"):
        build(tmp_path / "checkpoint", BuildConfig(max_seq_len=64, backend=CUDA), tmp_path / "engine")
    with pytest.raises(_core.ConfigError, match="keeps compressed rows, in the checkpoint's dtype"):
        convert_checkpoint(model, tmp_path / "int8", int8_kv_cache=True)


def test_checkpoints_have_keys_and_values_of_each_head(model: Path, tmp_path: Path) -> None:
    """The layer after the last one, which predicts more tokens, is left out."""
    tensors = load_file(model / "model.safetensors")
    convert_checkpoint(model, tmp_path / "checkpoint")
    made = load_file(tmp_path / "checkpoint" / "rank0.safetensors")
    whole = tensors["model.layers.1.self_attn.kv_b_proj.weight"].reshape(3, 20, 26)
    for head in range(3):
        name = f"transformer.layers.1.attention.kv_b.{head}"
        np.testing.assert_array_equal(made[f"{name}.keys.weight"], whole[head, :11].T)
        np.testing.assert_array_equal(made[f"{name}.values.weight"], whole[head, 11:])

    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "config.json").write_bytes((model / "config.json").read_bytes())
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    save_file({**tensors, name: tensors[name][:-1]}, changed / "model.safetensors")
    with pytest.raises(_core.CheckpointError, match=r"kv_b_proj\.weight.* is \[59, 26\]; expected \[60, in\]"):
        convert_checkpoint(changed, tmp_path / "wrong")
    save_file({**tensors, "model.layers.61.x.weight": np.zeros((2, 2), np.float32)}, changed / "model.safetensors")
    convert_checkpoint(changed, tmp_path / "same")
    same = tmp_path / "same" / "rank0.safetensors"
    assert same.read_bytes() == (tmp_path / "checkpoint" / "rank0.safetensors").read_bytes()


def test_rows_of_adapters_have_the_transposes_of_keys(model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(model, tmp_path / "adapter", 0, r=3, lora_alpha=3, target_modules=["kv_b_proj"])
    made = convert_adapter(adapter, storage_dtype="float32", base=model)
    ids = {info.name: info.id for info in _core.lora_modules()}
    assert {module for module, _, _, _ in made.config[0]} == {ids["attn_kv_b_key"], ids["attn_kv_b_value"]}
    assert set(made.paths) == {f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(3)}
    of_file = load_file(adapter / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.2.self_attn.kv_b_proj"
    a, b = of_file[f"{prefix}.lora_A.weight"], of_file[f"{prefix}.lora_B.weight"].reshape(3, 20, 3)
    rows = {int(config[0]): row for config, row in zip(made.config[0], made.weights[0], strict=True) if config[1] == 2}
    expected = {
        "attn_kv_b_key": (b[:, :11].transpose(0, 2, 1), np.tile(a.T, (3, 1, 1))),
        "attn_kv_b_value": (np.tile(a, (3, 1, 1)), b[:, 11:]),
    }
    for name, matrices in expected.items():
        flat = np.concatenate([matrix.reshape(-1) for matrix in matrices])
        np.testing.assert_array_equal(rows[ids[name]][: flat.size], flat)
    with pytest.raises(_core.AdapterError, match=r"the order of the outputs of self_attn\.kv_b_proj depends on"):
        convert_adapter(adapter, storage_dtype="float32")
