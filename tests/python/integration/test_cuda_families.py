"""Families on backend cuda, on an emulated device, against transformers + PEFT in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from support.emulated_cuda import emulate
from support.families import (
    EXPERTS,
    FALCON_TARGETS,
    HALF_ROTATED,
    LATENT_TARGETS,
    LINEAR_TARGETS,
    LLAMA,
    WINDOWS,
    Family,
    rope,
    save_family,
)
from support.models import Reference, save_adapter
from support.serving import collect, make_request

# Maximum difference of logits relative to their range. The reference has the engine's weights, in float32; the engine
# rounds adapters, and activations after every kernel. float16 has 11 bits, of which each of some ten roundings in a row
# may lose one half, and soft caps and norms amplify the errors.
TOLERANCE = 0.006
# A norm of each head amplifies the errors of heads whose values are small. transformers in float16 differs by 0.01 at
# the same token.
HEAD_TOLERANCE = 0.012
CONFIG = BuildConfig(
    max_batch_size=4,
    max_num_tokens=48,
    max_seq_len=96,
    tokens_per_block=16,
    backend="cuda",
    lora_config=LoraBuildConfig(max_lora_rank=8),
    plugin_config=PluginConfig(lora_plugin="auto", dora_plugin="enable"),
)
# All widths are multiples of 8, which the kernels need; they differ. The vocabulary may have any size.
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 56, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
HEADS = {**SIZES, "head_dim": 16}
# hidden_size / num_attention_heads is the head's size.
WIDE = {**SIZES, "hidden_size": 64}
NEOX = {name: value for name, value in WIDE.items() if name != "num_key_value_heads"}
NEOX_TARGETS = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
TWO_WINDOWS = {**WINDOWS, "sliding_window": 10, "layer_types": WINDOWS["layer_types"][:2]}
GEMMA = {**HEADS, **TWO_WINDOWS, "query_pre_attn_scalar": 24}
GEMMA4 = {
    **HEADS, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 96,
    "sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 4.0,
    "rope_parameters": {
        "full_attention": rope("proportional", 5000.0, partial_rotary_factor=0.5),
        "sliding_attention": rope(theta=300.0),
    },
}  # fmt: skip
OPT = {
    "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 72,
    "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
OPT_TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
GPT2 = {
    "vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 128, "n_inner": 72, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
FALCON = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 72,
    "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# Two of the families' layers, one of which keeps states. Sizes of states are odd.
LINEAR = {
    **HEADS, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 10, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
    "attention_bias": True,
}  # fmt: skip
LINEAR_ROTARY = {"rope_parameters": rope(theta=300.0, partial_rotary_factor=0.5, mrope_section=[2, 1, 1])}
LINEAR_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                  "shared_expert_intermediate_size": 40}  # fmt: skip
MAMBA = {
    **WIDE, "layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8, "mamba_n_groups": 2,
    "mamba_d_state": 10, "mamba_chunk_size": 16,
}  # fmt: skip
LATENT = {
    **SIZES, "num_key_value_heads": 4, "kv_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
# One of two layers has rotated queries, chunks and an MLP; the other one has scaled queries and experts.
LLAMA4 = {
    **HEADS, "intermediate_size": 24, "intermediate_size_mlp": 40, "num_local_experts": 6, "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2, "attention_chunk_size": 20, "no_rope_layer_interval": 2, "floor_scale": 12,
    "attn_scale": 0.7, "rope_parameters": rope(theta=500.0),
}  # fmt: skip
GLM_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]
FAMILIES = {
    # Norms of each head, and of all heads.
    "qwen3": Family(transformers.Qwen3Config, LLAMA, HEADS),
    "olmo2": Family(transformers.Olmo2Config, LLAMA, WIDE),
    "olmo3": Family(
        transformers.Olmo3Config, LLAMA,
        {**WIDE, **TWO_WINDOWS, "rope_parameters": {
            "full_attention": rope("yarn", 5000.0, factor=4.0, original_max_position_embeddings=16),
            "sliding_attention": rope(theta=300.0)}},
    ),
    "exaone4": Family(
        transformers.Exaone4Config, LLAMA,
        {**HEADS, "sliding_window": 20, "sliding_window_pattern": 2, "layer_types": TWO_WINDOWS["layer_types"]},
    ),
    # Norms after sublayers.
    "gemma2": Family(
        transformers.Gemma2Config, LLAMA,
        {**GEMMA, "vocab_size": 101, "head_dim": 256, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "gemma3": Family(
        transformers.Gemma3TextConfig, LLAMA,
        {**GEMMA, "rope_parameters": {
            "full_attention": rope("linear", 5000.0, factor=8.0), "sliding_attention": rope(theta=300.0)}},
    ),
    # Layer norms; learned positions; attention and MLP in parallel; biases of lm_head.
    "gpt2": Family(transformers.GPT2Config, ["c_attn", "c_proj", "c_fc"], GPT2),
    "gpt-neox": Family(transformers.GPTNeoXConfig, NEOX_TARGETS, {**NEOX, "rope_parameters": HALF_ROTATED}),
    "falcon": Family(transformers.FalconConfig, FALCON_TARGETS, FALCON),
    "falcon-of-groups": Family(
        transformers.FalconConfig, FALCON_TARGETS,
        {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True},
    ),
    "opt": Family(transformers.OPTConfig, OPT_TARGETS, OPT),
    "opt-norms-behind": Family(
        transformers.OPTConfig, OPT_TARGETS, {**OPT, "do_layer_norm_before": False, "enable_bias": False}
    ),
    "starcoder2": Family(
        transformers.Starcoder2Config, ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"],
        {**WIDE, "sliding_window": 20},
    ),
    "phi2": Family(
        transformers.PhiConfig, ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"],
        {**WIDE, "vocab_size": 103, "num_key_value_heads": 4},
    ),
    "stablelm-parallel": Family(
        transformers.StableLmConfig, LLAMA,
        {**WIDE, "use_parallel_residual": True, "use_qkv_bias": True, "rope_parameters": HALF_ROTATED},
    ),
    # Neighbouring elements rotate together; in GLM, half of each head.
    "glm": Family(transformers.GlmConfig, GLM_TARGETS, {**HEADS, "head_dim": 32}),
    "glm4": Family(transformers.Glm4Config, GLM_TARGETS, {**HEADS, "head_dim": 32}),
    "cohere": Family(transformers.CohereConfig, LLAMA, {**WIDE, "logit_scale": 0.7}),
    "cohere2": Family(transformers.Cohere2Config, LLAMA, {**WIDE, **TWO_WINDOWS}),
    "ernie4.5": Family(transformers.Ernie4_5Config, LLAMA, {**HEADS, "use_bias": True}),
    "helium": Family(transformers.HeliumConfig, LLAMA, {**WIDE, "head_dim": 16, "attention_bias": True}),
    # Norms of each head after its rotation.
    "hunyuan": Family(
        transformers.HunYuanDenseV1Config, LLAMA,
        {**HEADS, "attention_bias": True, "rope_parameters": rope("dynamic", factor=1.0, alpha=50.0)},
    ),
    # Experts, which adapters change. gpt-oss has biases, sinks and windows.
    "mixtral": Family(
        transformers.MixtralConfig, ATTENTION, {**HEADS, "num_local_experts": 8, "num_experts_per_tok": 2}, EXPERTS
    ),
    # A shared expert with a gate, both adapted.
    "qwen2-moe": Family(
        transformers.Qwen2MoeConfig,
        [*ATTENTION, "gate_proj", "up_proj", "down_proj", "shared_expert_gate"],
        {**WIDE, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
        EXPERTS,
    ),
    "qwen3-moe": Family(
        transformers.Qwen3MoeConfig, ATTENTION,
        {**HEADS, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 40, "norm_topk_prob": True},
        EXPERTS,
    ),
    "glm4-moe": Family(
        transformers.Glm4MoeConfig, ATTENTION,
        {**HEADS, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
         "n_shared_experts": 2, "moe_intermediate_size": 24, "use_qk_norm": True, "routed_scaling_factor": 1.5},
    ),
    "gpt-oss": Family(
        transformers.GptOssConfig, ATTENTION,
        {**HEADS, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 20, "rope_parameters": rope(
            "yarn", 300.0, factor=8.0, truncate=False, original_max_position_embeddings=16)},
        ("experts.gate_up_proj", "experts.down_proj", "mlp.router.weight"),
    ),
    "llama4": Family(
        transformers.Llama4TextConfig, LLAMA, {**LLAMA4, "attention_bias": True},
        ("experts.gate_up_proj", "experts.down_proj"),
    ),
    "llama4-plain": Family(
        transformers.Llama4TextConfig, LLAMA,
        {**LLAMA4, "num_experts_per_tok": 2, "use_qk_norm": False, "attention_chunk_size": None,
         "interleave_moe_layer_step": 1, "attn_temperature_tuning": False},
    ),
    # Queries are scaled from position 16 on.
    "ministral3": Family(
        transformers.Ministral3Config, LLAMA,
        {**HEADS, "rope_parameters": rope(
            "yarn", 300.0, factor=8.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.2)},
    ),
    # Latent attention, in experts' layers and others. Queries of the second model are compressed too.
    "deepseek-v2": Family(
        transformers.DeepseekV2Config, ["q_proj", *LATENT_TARGETS],
        {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_shared_experts": 2}, EXPERTS,
    ),
    "deepseek-v3": Family(
        transformers.DeepseekV3Config, ["q_a_proj", "q_b_proj", *LATENT_TARGETS],
        {**LATENT, "q_lora_rank": 24, "attention_bias": True, "rope_parameters": rope(
            "yarn", 300.0, factor=8.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.0)},
        EXPERTS,
    ),
    # Heads of two sizes, norms of values, and a factor for each layer. Values come from keys; in the second model,
    # layers share keys and have embeddings of their own; in the third, experts are added to MLPs.
    "gemma4": Family(
        transformers.Gemma4TextConfig, LLAMA,
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "attention_bias": True},
    ),
    "gemma4-shared": Family(
        transformers.Gemma4TextConfig,
        [*LLAMA, "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"],
        {**GEMMA4, "num_hidden_layers": 4, "layer_types": GEMMA4["layer_types"] * 2, "vocab_size_per_layer_input": 96,
         "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
         "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4-moe": Family(
        transformers.Gemma4TextConfig, LLAMA,
        {**GEMMA4, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24},
        ("experts.gate_up_proj", "experts.down_proj", "router.proj.weight"),
    ),
    "gemma4-unified": Family(
        transformers.Gemma4UnifiedTextConfig, LLAMA,
        {name: value for name, value in GEMMA4.items() if "per_layer_input" not in name},
    ),
    # States: the gated delta rule, short convolutions, and Mamba 2's scan.
    "qwen3.5": Family(transformers.Qwen3_5TextConfig, LLAMA + LINEAR_TARGETS, {**LINEAR, **LINEAR_ROTARY}),
    "qwen3.5-moe": Family(
        transformers.Qwen3_5MoeTextConfig, [*ATTENTION, *LINEAR_TARGETS, "shared_expert_gate"],
        {**LINEAR, **LINEAR_ROTARY, **LINEAR_EXPERTS}, EXPERTS,
    ),
    "qwen3-next": Family(
        transformers.Qwen3NextConfig, [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"],
        {**LINEAR, **LINEAR_EXPERTS, "mlp_only_layers": [1], "attention_bias": False,
         "rope_parameters": rope(theta=300.0, partial_rotary_factor=0.5)},
        EXPERTS,
    ),
    "olmo-hybrid": Family(
        transformers.OlmoHybridConfig, [*LLAMA, "g_proj", "b_proj", "a_proj"],
        {**{name: value for name, value in LINEAR.items() if name != "head_dim"}, "hidden_size": 64,
         "linear_num_key_heads": 6, "rope_parameters": rope(theta=300.0)},
    ),
    "lfm2": Family(
        transformers.Lfm2Config, ["q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"],
        {**WIDE, "block_multiple_of": 8, "layer_types": ["conv", "full_attention"], "conv_bias": True,
         "tie_word_embeddings": False},
    ),
    "granite4-mamba": Family(
        transformers.GraniteMoeHybridConfig, [*ATTENTION, "in_proj", "out_proj", "input_linear", "output_linear"],
        {**MAMBA, "shared_intermediate_size": 56, "num_local_experts": 0, "num_experts_per_tok": 0,
         "time_step_limit": (0.4, 0.9), "residual_multiplier": 0.6},
    ),
    "mamba2": Family(
        transformers.Mamba2Config, ["in_proj"],
        {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 1,
         "num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 10, "chunk_size": 16, "use_bias": True},
    ),
    "bamba": Family(
        transformers.BambaConfig, [*ATTENTION, "in_proj", "gate_proj", "up_proj", "down_proj"],
        {**{name: value for name, value in MAMBA.items() if name != "layer_types"}, "attn_layer_indices": [1],
         "mamba_proj_bias": True},
    ),
    # Each factor is another one.
    "falcon-h1": Family(
        transformers.FalconH1Config,
        [*LLAMA, "in_proj"],
        {**HEADS, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 10,
         "mamba_chunk_size": 16, "embedding_multiplier": 5.5, "lm_head_multiplier": 0.6, "key_multiplier": 0.4,
         "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.3,
         "ssm_out_multiplier": 0.7, "ssm_multipliers": [0.35, 0.8, 0.5, 1.4, 0.3], "mlp_multipliers": [0.88, 1.6]},
    ),
    "apertus": Family(
        transformers.ApertusConfig, [name for name in LLAMA if name != "gate_proj"],
        {**HEADS, "attention_bias": True, "rope_parameters": rope(
            "llama3", factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=64)},
    ),
}  # fmt: skip


SMALL_HEADS = {"qwen3.5", "qwen3.5-moe", "qwen3-next"}
# Their ops are those of other families in the list.
REPEATED = {
    "olmo3", "exaone4", "falcon-of-groups", "gpt2", "starcoder2", "stablelm-parallel", "glm4", "cohere2", "ernie4.5",
    "helium", "cohere", "mixtral", "qwen3-moe", "gemma4", "gemma4-moe", "gemma4-unified", "qwen3.5-moe", "qwen3-next",
    "olmo-hybrid", "mamba2", "bamba", "deepseek-v2", "falcon-h1", "llama4-plain",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in REPEATED else name for name in FAMILIES]
)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one batch of a prompt in chunks, and a request with an adapter on every layer."""
    emulate(monkeypatch)
    family = FAMILIES[name]
    model = save_family(family, tmp_path / "model", dtype=torch.float16)
    adapter = save_adapter(
        model,
        tmp_path / "adapter",
        seed=1,
        r=4,
        target_modules=family.targets,
        target_parameters=family.parameters or None,
    )
    build(Checkpoint.of_model(model), CONFIG, tmp_path / "engine")
    rng = np.random.default_rng(7)
    cases = [(rng.integers(2, 96, length).tolist(), path) for length, path in ((50, None), (19, adapter))]
    config = adaptrt.ExecutorConfig(enable_chunked_context=True)
    with adaptrt.Executor(tmp_path / "engine", adaptrt.ModelType.DECODER_ONLY, config) as executor:
        loras = [None if path is None else adaptrt.LoraConfig.from_peft(1, path, executor.engine) for _, path in cases]
        ids = [
            executor.enqueue_request(make_request(prompt, 2, lora))  # one decode step: emulation is slow
            for (prompt, _), lora in zip(cases, loras, strict=True)
        ]
        answers = [collect(executor, request_id) for request_id in ids]
    base = Reference(model, None)
    for (prompt, path), answer in zip(cases, answers, strict=True):
        expected = (base if path is None else Reference(model, path)).logits(prompt, answer.tokens).numpy()
        actual = np.concatenate([answer.context_logits, answer.generation_logits[1:]])
        assert actual.shape == expected.shape
        tolerance = HEAD_TOLERANCE if name in SMALL_HEADS else TOLERANCE
        assert difference(actual, expected) <= tolerance
        if path is not None:
            # So the comparison would notice if the adapter had no effect.
            assert difference(base.logits(prompt, answer.tokens).numpy(), expected) > 2 * tolerance


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns the maximum difference relative to the range of the expected values."""
    return float(np.abs(actual - expected).max() / (expected.max() - expected.min()))
