"""Small random models of each family, and the linear layers that PEFT can target in them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import transformers

FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = LLAMA[:4]
UNGATED = [*ATTENTION, "up_proj", "down_proj"]
EXPERTS = ("experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight")
# Odd sizes: no width is a multiple of a panel's 64 columns, and widths differ.
SIZES = {
    "vocab_size": 61, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1,
    "intermediate_size": 38, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
WITHOUT_KV_HEADS = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}


@dataclasses.dataclass(frozen=True)
class Family:
    """Configuration of a family's random model."""

    config_class: type[Any]
    targets: list[str] | str
    fields: dict[str, Any]
    parameters: tuple[str, ...] = ()
    """Parameters that LoRA can target in addition to linear layers."""

    @property
    def vocab_size(self) -> int:
        return 61

    def config(self) -> Any:
        return self.config_class(**self.fields, attn_implementation="eager")

    def random_model(self) -> Any:
        config = self.config()
        sees = hasattr(config, "vision_config")
        kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
        return kind.from_config(config)


def rope(kind: str = "default", theta: float = 10000.0, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **parameters}


WINDOWS = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
HALF_ROTATED = rope(partial_rotary_factor=0.5)
LONGROPE = rope(
    "longrope",
    short_factor=[1.0, 1.1, 1.2, 1.25, 1.5, 2.0],
    long_factor=[1.0, 2.0, 4.0, 5.0, 8.0, 16.0],
    original_max_position_embeddings=24,
    partial_rotary_factor=0.75,
)
GEMMA = {
    **SIZES, "head_dim": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 24,
    "sliding_window": 10, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
# For vision-language models: only linear layers of the language model.
TEXT_LAYERS = r"(.*\.)?language_model\.layers\..*_proj"
MROPE = rope(mrope_section=[1, 3, 2])
QWEN_VL_TOKENS = {"image_token_id": 57, "video_token_id": 58, "vision_start_token_id": 59, "vision_end_token_id": 60}
QWEN2_VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 36, "num_heads": 2}
QWEN2_5_VISION = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 36,
    "fullatt_block_indexes": [0],
}  # fmt: skip
QWEN3_VISION = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 36,
    "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
}  # fmt: skip
QWEN3_5_VISION = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 40,
    "num_position_embeddings": 16,
}  # fmt: skip
CLIP_VISION = {
    "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
SIGLIP_VISION = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
GPT2 = {
    "vocab_size": 61, "n_embd": 36, "n_layer": 3, "n_head": 3, "n_positions": 512, "n_inner": 70, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip

OPT = {
    "vocab_size": 61, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3, "ffn_dim": 70,
    "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip

FALCON = {
    "vocab_size": 61, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3, "ffn_hidden_size": 70,
    "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
FALCON_TARGETS = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]

# Each of these models has a kind of op, or an order of ops, that no other model has.
FAMILIES = {
    "granite": Family(
        transformers.GraniteConfig, LLAMA,
        {**SIZES, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
         "logits_scaling": 2.5, "attention_bias": True},
    ),
    "olmo2": Family(transformers.Olmo2Config, LLAMA, {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "smollm3": Family(transformers.SmolLM3Config, LLAMA, {**SIZES, "no_rope_layers": [1, 0, 1]}),
    "phi3": Family(transformers.Phi3Config, FUSED, {**SIZES, "sliding_window": 30}),
    "phi4-mini-longrope": Family(
        transformers.Phi3Config, FUSED,
        {**SIZES, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": LONGROPE,
         "tie_word_embeddings": True},
    ),
    "gemma2": Family(
        transformers.Gemma2Config, LLAMA,
        {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "gemma3": Family(
        transformers.Gemma3TextConfig, LLAMA,
        {**GEMMA, "rope_parameters": {
            "full_attention": rope("linear", 5000.0, factor=8.0), "sliding_attention": rope(theta=300.0)}},
    ),
    "gpt2": Family(transformers.GPT2Config, ["c_attn", "c_proj", "c_fc"], GPT2),
    "gpt2-layer-scales": Family(
        transformers.GPT2Config, ["c_attn", "c_proj", "c_fc"],
        {**GPT2, "scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu", "n_inner": None},
    ),
    "gpt-neox": Family(
        transformers.GPTNeoXConfig, ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
        {**WITHOUT_KV_HEADS, "rope_parameters": HALF_ROTATED},
    ),
    "gpt-neox-in-turn": Family(
        transformers.GPTNeoXConfig, ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
        {**WITHOUT_KV_HEADS, "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new",
         "rope_parameters": HALF_ROTATED},
    ),
    "falcon": Family(transformers.FalconConfig, FALCON_TARGETS, {**FALCON, "activation": "relu"}),
    "falcon-of-groups": Family(
        transformers.FalconConfig, FALCON_TARGETS,
        {**FALCON, "num_attention_heads": 6, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True},
    ),
    "falcon-in-turn": Family(
        transformers.FalconConfig, FALCON_TARGETS,
        {**FALCON, "multi_query": False, "parallel_attn": False, "ffn_hidden_size": None, "tie_word_embeddings": False},
    ),
    "opt": Family(transformers.OPTConfig, ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"], OPT),
    "opt-norms-behind": Family(
        transformers.OPTConfig, ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
        {**OPT, "do_layer_norm_before": False, "enable_bias": False, "activation_function": "gelu"},
    ),
    "llama-relu": Family(transformers.LlamaConfig, LLAMA, {**SIZES, "hidden_act": "relu", "intermediate_size": 128}),
    "cohere": Family(transformers.CohereConfig, LLAMA, {**SIZES, "logit_scale": 0.7}),
    "starcoder2": Family(
        transformers.Starcoder2Config, ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"],
        {**SIZES, "sliding_window": 20},
    ),
    "arcee": Family(transformers.ArceeConfig, UNGATED, {**SIZES, "mlp_bias": True, "intermediate_size": 128}),
    "nemotron": Family(transformers.NemotronConfig, UNGATED, {**SIZES, "rope_parameters": HALF_ROTATED}),
    "jais2": Family(transformers.Jais2Config, UNGATED, SIZES),
    "glm": Family(
        transformers.GlmConfig, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"],
        {**SIZES, "head_dim": 12},
    ),
    "glm4": Family(
        transformers.Glm4Config, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"],
        {**SIZES, "head_dim": 20},
    ),
    "phi2": Family(
        transformers.PhiConfig, ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"],
        {**SIZES, "num_key_value_heads": 3},
    ),
    "mixtral": Family(
        transformers.MixtralConfig, ATTENTION, {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2}, EXPERTS
    ),
    "qwen2-moe": Family(
        transformers.Qwen2MoeConfig, [*ATTENTION, "shared_expert_gate"],
        {**SIZES, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 22,
         "shared_expert_intermediate_size": 26, "mlp_only_layers": [1]}, EXPERTS,
    ),
    "qwen3-moe": Family(
        transformers.Qwen3MoeConfig, ATTENTION,
        {**SIZES, "head_dim": 20, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 22,
         "norm_topk_prob": True, "decoder_sparse_step": 2}, EXPERTS,
    ),
    "olmoe": Family(
        transformers.OlmoeConfig, ATTENTION,
        {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 3, "num_experts": 6, "num_experts_per_tok": 2},
        EXPERTS,
    ),
    "glm4-moe": Family(
        transformers.Glm4MoeConfig, ATTENTION,
        {**SIZES, "head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
         "n_shared_experts": 2, "moe_intermediate_size": 22, "use_qk_norm": True, "routed_scaling_factor": 1.5},
        EXPERTS,
    ),
}  # fmt: skip

# Models with the same kinds of ops as those above or as Llama, under other names.
LLAMA4_SIZES = {
    **SIZES, "num_hidden_layers": 4, "head_dim": 20, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 22, "intermediate_size_mlp": 38, "num_local_experts": 6, "attention_chunk_size": 20,
    "no_rope_layer_interval": 3, "floor_scale": 12, "attn_scale": 0.7, "rope_parameters": rope(theta=500.0),
}  # fmt: skip
RELATIVES = {
    "llama4": Family(
        transformers.Llama4TextConfig,
        LLAMA,
        {**LLAMA4_SIZES, "interleave_moe_layer_step": 2, "attention_bias": True},
        ("experts.gate_up_proj", "experts.down_proj"),
    ),
    "llama4-plain": Family(
        transformers.Llama4TextConfig,
        LLAMA,
        {
            **LLAMA4_SIZES,
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "attention_chunk_size": None,
            "attn_temperature_tuning": False,
        },
    ),
    "olmo": Family(transformers.OlmoConfig, LLAMA, {**SIZES, "attention_bias": True}),
    "qwen2-vl": Family(
        transformers.Qwen2VLConfig, TEXT_LAYERS,
        {"text_config": {**SIZES, "rope_parameters": MROPE}, "vision_config": QWEN2_VISION, **QWEN_VL_TOKENS},
    ),
    "qwen2.5-vl": Family(
        transformers.Qwen2_5_VLConfig, TEXT_LAYERS,
        {"text_config": {**SIZES, "rope_parameters": MROPE, "use_sliding_window": True, "sliding_window": 20,
                         "max_window_layers": 1}, "vision_config": QWEN2_5_VISION, **QWEN_VL_TOKENS},
    ),
    "qwen3-vl": Family(
        transformers.Qwen3VLConfig, TEXT_LAYERS,
        {"text_config": {**SIZES, "head_dim": 20, "rope_parameters": rope(mrope_section=[4, 3, 3])},
         "vision_config": QWEN3_VISION, **QWEN_VL_TOKENS},
    ),
    "qwen3-vl-moe": Family(
        transformers.Qwen3VLMoeConfig, TEXT_LAYERS,
        {"text_config": {
            **SIZES, "head_dim": 20, "rope_parameters": rope(mrope_section=[4, 3, 3]), "num_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 22, "decoder_sparse_step": 2,
            "tie_word_embeddings": False},
         "vision_config": QWEN3_VISION, **QWEN_VL_TOKENS},
        ("experts.gate_up_proj", "experts.down_proj"),
    ),
    "gemma3-vision": Family(
        transformers.Gemma3Config, TEXT_LAYERS,
        {"text_config": {**GEMMA, "rope_parameters": {
            "full_attention": rope("linear", 5000.0, factor=8.0), "sliding_attention": rope(theta=300.0)}},
         "vision_config": CLIP_VISION, "mm_tokens_per_image": 4, "image_token_index": 57, "boi_token_index": 58,
         "eoi_token_index": 59},
    ),
    "mistral3": Family(
        transformers.Mistral3Config, TEXT_LAYERS,
        {"text_config": {**SIZES, "model_type": "mistral", "head_dim": 20, "sliding_window": 20},
         "vision_config": {**CLIP_VISION, "model_type": "pixtral"}, "image_token_index": 57,
         "tie_word_embeddings": False},
    ),
    "smolvlm": Family(
        transformers.SmolVLMConfig, r"(.*\.)?text_model\.layers\..*_proj",
        {"text_config": {**SIZES, "model_type": "llama", "head_dim": 12}, "vision_config": SIGLIP_VISION,
         "image_token_id": 57, "scale_factor": 2},
    ),
    "idefics3": Family(
        transformers.Idefics3Config, r"(.*\.)?text_model\.layers\..*_proj",
        {"text_config": {**SIZES, "model_type": "llama", "head_dim": 12}, "vision_config": SIGLIP_VISION,
         "image_token_id": 57, "scale_factor": 2},
    ),
    "llava": Family(
        transformers.LlavaConfig, TEXT_LAYERS,
        {"text_config": {**SIZES, "model_type": "llama", "head_dim": 12},
         "vision_config": {**SIGLIP_VISION, "num_hidden_layers": 3, "model_type": "clip_vision_model"},
         "image_token_index": 57},
    ),
    "gemma": Family(transformers.GemmaConfig, LLAMA, {**SIZES, "head_dim": 20}),
    "cohere2": Family(
        transformers.Cohere2Config, LLAMA,
        {**SIZES, **WINDOWS},
    ),
    "olmo3": Family(
        transformers.Olmo3Config, LLAMA,
        {**SIZES, **WINDOWS,
         "rope_parameters": {
             "full_attention": rope("yarn", 5000.0, factor=4.0, original_max_position_embeddings=16),
             "sliding_attention": rope(theta=300.0)}},
    ),
    "exaone4": Family(
        transformers.Exaone4Config, LLAMA,
        {**SIZES, "sliding_window": 20, "sliding_window_pattern": 2},
    ),
    "exaone4-rotated": Family(
        transformers.Exaone4Config, LLAMA,
        {**SIZES, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "seed-oss": Family(
        transformers.SeedOssConfig, LLAMA, {**SIZES, "head_dim": 20, "attention_out_bias": True, "mlp_bias": True}
    ),
    "ernie4.5": Family(transformers.Ernie4_5Config, LLAMA, {**SIZES, "head_dim": 20, "use_bias": True}),
    "helium": Family(transformers.HeliumConfig, LLAMA, {**SIZES, "head_dim": 12, "attention_bias": True}),
    "ministral": Family(
        transformers.MinistralConfig, LLAMA,
        {**SIZES, "head_dim": 20, **WINDOWS},
    ),
    "ministral3": Family(
        transformers.Ministral3Config, LLAMA,
        {**SIZES, "head_dim": 20, "rope_parameters": rope(
            "yarn", 3000.0, factor=16.0, original_max_position_embeddings=24, mscale=0.5, mscale_all_dim=1.0,
            beta_fast=4.0, llama_4_scaling_beta=0.5)},
    ),
    "apertus": Family(
        transformers.ApertusConfig, UNGATED, {**SIZES, "head_dim": 20, "attention_bias": True, "rope_parameters": rope(
            "llama3", factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=64)},
    ),
    "hunyuan": Family(
        transformers.HunYuanDenseV1Config, LLAMA,
        {**SIZES, "head_dim": 20, "attention_bias": True, "rope_parameters": rope("dynamic", factor=1.0, alpha=50.0)},
    ),
    "hunyuan-moe": Family(
        transformers.HunYuanMoEV1Config, [*ATTENTION, "wg"],
        {**SIZES, "head_dim": 20, "num_experts": 6, "moe_topk": 2},
        ("experts.gate_up_proj", "experts.down_proj"),
    ),
    "cwm": Family(
        transformers.CwmConfig, LLAMA, {**SIZES, "head_dim": 12, "sliding_window": 20, "rope_parameters": rope(
            "llama3", factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=64)},
    ),
    "gpt-oss": Family(
        transformers.GptOssConfig, ATTENTION,
        {**SIZES, "head_dim": 20, "num_attention_heads": 6, "num_key_value_heads": 3, "num_local_experts": 6,
         "num_experts_per_tok": 3, "sliding_window": 20, "rope_parameters": rope(
             "yarn", 300.0, factor=8.0, truncate=False, original_max_position_embeddings=16)},
        ("experts.gate_up_proj", "experts.down_proj", "mlp.router.weight"),
    ),
    "granite4": Family(
        transformers.GraniteMoeHybridConfig, [*ATTENTION, "input_linear", "output_linear"],
        {**SIZES, "shared_intermediate_size": 38, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 1,
         "layer_types": ["full_attention"] * 3, "position_embedding_type": "rope", "embedding_multiplier": 3.0,
         "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.5},
    ),
    "granite-swa": Family(
        transformers.GraniteSWAConfig, LLAMA,
        {**SIZES, **WINDOWS, "layer_rope_theta": [300.0, 0, 10000.0], "embedding_multiplier": 3.0,
         "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.5, "mlp_bias": True},
    ),
    "granite-moe-swa": Family(
        transformers.GraniteMoeSWAConfig, ATTENTION,
        {**SIZES, **WINDOWS, "num_local_experts": 5, "num_experts_per_tok": 2, "residual_multiplier": 0.3},
        ("experts.gate_up_proj", "experts.down_proj", "block_sparse_moe.router.weight"),
    ),
    "granite-moe": Family(
        transformers.GraniteMoeSharedConfig, [*ATTENTION, "input_linear", "output_linear"],
        {**SIZES, "shared_intermediate_size": 26, "num_local_experts": 5, "num_experts_per_tok": 2,
         "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.5},
        ("experts.gate_up_proj", "experts.down_proj", "block_sparse_moe.router.weight"),
    ),
    "stablelm": Family(transformers.StableLmConfig, LLAMA, {**SIZES, "rope_parameters": HALF_ROTATED}),
    "stablelm-parallel": Family(
        transformers.StableLmConfig, LLAMA,
        {**SIZES, "use_parallel_residual": True, "use_qkv_bias": True, "rope_parameters": HALF_ROTATED},
    ),
}  # fmt: skip


LINEAR_ATTENTION = {
    **SIZES, "hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 10, "linear_value_head_dim": 18, "linear_conv_kernel_dim": 4,
    "rope_parameters": rope(theta=300.0, partial_rotary_factor=0.4, mrope_section=[2, 1, 1]), "attention_bias": True,
}  # fmt: skip
LINEAR_TARGETS = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
LINEAR_TEXT_LAYERS = r"(.*\.)?language_model\.layers\..*_proj(_qkv|_z|_b|_a)?"
LINEAR_EXPERTS = {
    **{name: value for name, value in LINEAR_ATTENTION.items() if name != "intermediate_size"}, "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 14, "shared_expert_intermediate_size": 22,
}  # fmt: skip

MAMBA = {
    **SIZES, "shared_intermediate_size": 38, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_chunk_size": 16, "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.5,
}  # fmt: skip

# Each factor is another one.
FALCON_H1 = {
    **SIZES, "head_dim": 20, "mamba_d_ssm": 60, "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 10,
    "mamba_chunk_size": 16, "embedding_multiplier": 5.5, "lm_head_multiplier": 0.6, "key_multiplier": 0.4,
    "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.7, "ssm_multipliers": [0.35, 0.8, 0.5, 1.4, 0.3], "mlp_multipliers": [0.88, 1.6],
}  # fmt: skip

RECURRENT = {
    "qwen3.5": Family(transformers.Qwen3_5TextConfig, LLAMA + LINEAR_TARGETS, LINEAR_ATTENTION),
    "qwen3.5-vl": Family(
        transformers.Qwen3_5Config,
        LINEAR_TEXT_LAYERS,
        {"text_config": LINEAR_ATTENTION, "vision_config": QWEN3_5_VISION, **QWEN_VL_TOKENS},
    ),
    "qwen3.5-moe": Family(
        transformers.Qwen3_5MoeTextConfig, [*ATTENTION, *LINEAR_TARGETS, "shared_expert_gate"], LINEAR_EXPERTS, EXPERTS
    ),
    "qwen3.5-moe-vl": Family(
        transformers.Qwen3_5MoeConfig,
        LINEAR_TEXT_LAYERS,
        {"text_config": LINEAR_EXPERTS, "vision_config": QWEN3_5_VISION, **QWEN_VL_TOKENS},
    ),
    "qwen3-next": Family(
        transformers.Qwen3NextConfig,
        [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"],
        {
            **LINEAR_EXPERTS,
            "intermediate_size": 38,
            "mlp_only_layers": [1],
            "attention_bias": False,
            "rope_parameters": rope(theta=300.0, partial_rotary_factor=0.4),
        },
        EXPERTS,
    ),
    "olmo-hybrid": Family(
        transformers.OlmoHybridConfig,
        [*LLAMA, "g_proj", "b_proj", "a_proj"],
        {
            **{name: value for name, value in LINEAR_ATTENTION.items() if name != "head_dim"},
            "linear_num_key_heads": 6,
            "attention_bias": True,
            "rope_parameters": rope(theta=300.0),
        },
    ),
    "olmo-hybrid-without-positions": Family(
        transformers.OlmoHybridConfig,
        [*LLAMA, "g_proj"],
        {
            **{name: value for name, value in LINEAR_ATTENTION.items() if name != "head_dim"},
            "linear_allow_neg_eigval": False,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "lfm2": Family(
        transformers.Lfm2Config,
        ["q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"],
        {
            **SIZES,
            "intermediate_size": 54,
            "block_multiple_of": 10,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-moe": Family(
        transformers.Lfm2MoeConfig,
        ["q_proj", "k_proj", "v_proj", "out_proj", "in_proj"],
        {
            **SIZES,
            "layer_types": ["conv", "full_attention", "conv"],
            "moe_intermediate_size": 22,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
        },
        ("experts.gate_up_proj", "experts.down_proj", "feed_forward.gate.weight"),
    ),
    "mamba2": Family(
        transformers.Mamba2Config,
        ["in_proj"],
        {
            **{
                name: SIZES[name]
                for name in ("vocab_size", "hidden_size", "num_hidden_layers", "bos_token_id", "eos_token_id")
            },
            "num_heads": 6,
            "head_dim": 12,
            "n_groups": 2,
            "state_size": 10,
            "chunk_size": 16,
            "use_bias": True,
        },
    ),
    "granite4-mamba": Family(
        transformers.GraniteMoeHybridConfig,
        [*ATTENTION, "in_proj", "out_proj", "input_linear", "output_linear"],
        {**MAMBA, "num_local_experts": 0, "num_experts_per_tok": 0, "time_step_limit": (0.4, 0.9)},
    ),
    "granite4-mamba-moe": Family(
        transformers.GraniteMoeHybridConfig,
        [*ATTENTION, "in_proj", "out_proj"],
        {**MAMBA, "intermediate_size": 22, "num_local_experts": 5, "num_experts_per_tok": 2, "mamba_conv_bias": False},
        ("experts.gate_up_proj", "experts.down_proj", "block_sparse_moe.router.weight"),
    ),
    "bamba": Family(
        transformers.BambaConfig,
        [*ATTENTION, "in_proj", "gate_proj", "up_proj", "down_proj"],
        {
            **{name: value for name, value in MAMBA.items() if name.startswith("mamba_") or name in SIZES},
            "head_dim": 12,
            "attn_layer_indices": [1],
            "mamba_proj_bias": True,
        },
    ),
    "falcon-h1": Family(
        transformers.FalconH1Config,
        [*LLAMA, "in_proj"],
        {**FALCON_H1, "mamba_rms_norm": False, "time_step_limit": (0.4, 0.9)},
    ),
    "falcon-h1-norm": Family(
        transformers.FalconH1Config,
        [*LLAMA, "in_proj"],
        {
            **FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_bias": True,
            "mlp_bias": True,
            "projectors_bias": True,
            "mamba_proj_bias": True,
        },
    ),
    "nemotron-h": Family(
        transformers.NemotronHConfig,
        [*ATTENTION, "in_proj", "up_proj", "down_proj"],
        {
            **{name: value for name, value in SIZES.items() if name != "num_hidden_layers"},
            "layers_block_type": ["linear_attention", "mlp", "full_attention"],
            "head_dim": 20,
            "mamba_num_heads": 6,
            "mamba_head_dim": 10,
            "n_groups": 3,
            "ssm_state_size": 10,
            "chunk_size": 16,
            "time_step_min": 0.3,
        },
    ),
}
"""Families with states."""


LATENT_ATTENTION = {
    **SIZES, "num_key_value_heads": 3, "kv_lora_rank": 26,
    "qk_nope_head_dim": 11, "qk_rope_head_dim": 6, "v_head_dim": 9, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_group": 4, "topk_group": 2, "moe_intermediate_size": 22, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
LATENT_TARGETS = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
LATENT = {
    "deepseek-v2": Family(
        transformers.DeepseekV2Config,
        ["q_proj", *LATENT_TARGETS],
        # transformers rotates pairs as complex numbers, which need even widths.
        {
            **LATENT_ATTENTION,
            "qk_nope_head_dim": 10,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
        },
        EXPERTS,
    ),
    "deepseek-v3": Family(
        transformers.DeepseekV3Config,
        ["q_a_proj", "q_b_proj", *LATENT_TARGETS],
        {
            **LATENT_ATTENTION,
            "q_lora_rank": 14,
            "attention_bias": True,
            "rope_parameters": rope(
                "yarn", 300.0, factor=8.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.0
            ),
        },
        EXPERTS,
    ),
}
"""Families with latent attention."""


LLAMA4_VISION = Family(
    transformers.Llama4Config,
    r"language_model\.model\.layers\..*_proj",
    {
        "text_config": {**LLAMA4_SIZES, "moe_layers": [0, 3]},
        "vision_config": {
            "hidden_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 96,
            "vision_output_dim": 24,
            "image_size": 28,
            "patch_size": 14,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
        },
        "boi_token_index": 58,
        "eoi_token_index": 59,
        "image_token_index": 60,
    },
    ("experts.gate_up_proj", "experts.down_proj"),
)


GEMMA4_SIZES = {
    **SIZES, "num_hidden_layers": 5, "head_dim": 10, "global_head_dim": 22, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 61,
    "sliding_window": 10, "final_logit_softcapping": 4.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
    "rope_parameters": {
        "full_attention": rope("proportional", 5000.0, partial_rotary_factor=0.4),
        "sliding_attention": rope(theta=300.0),
    },
}  # fmt: skip
GEMMA4_SIZES["layer_types"] = [*GEMMA4_SIZES["layer_types"][:4], "full_attention"]
GEMMA4 = {
    "gemma4": Family(
        transformers.Gemma4TextConfig,
        LLAMA,
        {**GEMMA4_SIZES, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "attention_bias": True},
    ),
    "gemma4-unified": Family(
        transformers.Gemma4UnifiedTextConfig,
        LLAMA,
        {
            **{name: value for name, value in GEMMA4_SIZES.items() if "per_layer_input" not in name},
            "num_kv_shared_layers": 1,
        },
    ),
    "gemma4-shared": Family(
        transformers.Gemma4TextConfig,
        [*LLAMA, "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"],
        {**GEMMA4_SIZES, "hidden_size_per_layer_input": 7, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "gemma4-moe": Family(
        transformers.Gemma4TextConfig,
        LLAMA,
        {
            **GEMMA4_SIZES,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 22,
            "tie_word_embeddings": False,
        },
        ("experts.gate_up_proj", "experts.down_proj", "router.proj.weight"),
    ),
}
"""Families with heads of two sizes."""


def save_family(family: Family, directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a random model as a Hugging Face directory; norms, biases and routers are random too."""
    generator = torch.Generator().manual_seed(seed)
    model = family.random_model()
    kind = family.config().model_type
    one_based = "gemma" in kind and "gemma4" not in kind
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.copy_((0.0 if one_based else 1.0) + 0.2 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            elif any(part in name for part in ("embed", "lm_head", "wte", "wpe")):
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise / family_inputs(name, parameter) ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "e_score_correction_bias")):  # zeros in a new model
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("layer_scalar"):  # ones in a new model
                buffer.copy_(1.0 + 0.3 * torch.randn(buffer.shape, generator=generator))
    model.to(dtype).save_pretrained(directory)
    return directory


def family_inputs(name: str, parameter: torch.Tensor) -> int:
    """Returns the number of inputs of a linear layer's weight: GPT-2 stores [in, out], experts [experts, out, in]."""
    return parameter.shape[0 if ".h." in name else -1]
