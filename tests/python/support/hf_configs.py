"""config.json of Hugging Face models: small ones to change, and some published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adaptrt import _core
from adaptrt.formats.checkpoint.config import CheckpointConfig, ParallelMapping
from adaptrt.formats.hugging_face.hf_config import load_hf_config

HF = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 36,
    "intermediate_size": 37,
    "max_position_embeddings": 128,
    "num_attention_heads": 3,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "vocab_size": 61,
}
QWEN = {**HF, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 1, "head_dim": 12}
MISTRAL = {**QWEN, "architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN3 = {**QWEN, "architectures": ["Qwen3ForCausalLM"]}
QWEN_VL = {
    **QWEN,
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]},
}
QWEN_VL_TEXT = {name: value for name, value in QWEN_VL.items() if name != "architectures"}
PHI3 = {**MISTRAL, "architectures": ["Phi3ForCausalLM"]}
PHI3_CODE = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
# Fields of tiiuae/falcon-7b with smaller sizes.
FALCON = {
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_falcon.FalconConfig",
        "AutoModel": "modeling_falcon.FalconModel",
        "AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM",
    },
    "bias": False,
    "bos_token_id": 11,
    "eos_token_id": 11,
    "hidden_dropout": 0.0,
    "hidden_size": 96,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "parallel_attn": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 61,
}
COMMAND_R7B = {
    **HF, "architectures": ["Cohere2ForCausalLM"], "layer_norm_eps": 1e-5, "rms_norm_eps": ..., "head_dim": 12,
    "cache_implementation": "hybrid", "layer_switch": 4, "logit_scale": 0.25, "num_key_value_heads": 1,
    "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rope_theta": 50000,
    "rotary_pct": 1.0, "sliding_window": 20, "sliding_window_pattern": 4, "use_embedding_sharing": True,
    "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True,
}  # fmt: skip
QWEN2_5_VL_7B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
    "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu", "hidden_size": 3584,
    "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
    "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.41.2", "use_cache": True, "use_sliding_window": False,
    "vision_config": {"depth": 32, "model_type": "qwen2_5_vl"}, "vocab_size": 152064,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip
QWEN3_VL_4B = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02,
        "intermediate_size": 9728, "max_position_embeddings": 262144, "model_type": "qwen3_vl_text",
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 151936,
    },
    "tie_word_embeddings": True, "transformers_version": "4.57.0.dev0", "video_token_id": 151656,
    "vision_config": {"depth": 24, "model_type": "qwen3_vl"}, "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}  # fmt: skip
# Fields of Qwen/Qwen3.5-0.8B with fewer layers.
QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3584,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 8,
        "num_hidden_layers": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "tie_word_embeddings": True,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
        "use_cache": True, "vocab_size": 248320,
    },
    "tie_word_embeddings": True, "transformers_version": "4.57.0.dev0", "video_token_id": 248057,
    "vision_config": {"depth": 12, "model_type": "qwen3_5"}, "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}  # fmt: skip
# Fields of ibm-granite/granite-4.0-micro with fewer layers.
GRANITE4 = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attention_multiplier": 0.015625, "bos_token_id": 100257, "embedding_multiplier": 12, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 2560, "init_method": "mup", "initializer_range": 0.1,
    "intermediate_size": 8192, "layer_types": ["attention"] * 3, "logits_scaling": 10, "mamba_chunk_size": 256,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 256, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_n_heads": 80, "mamba_proj_bias": False, "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid", "normalization_function": "rmsnorm", "num_attention_heads": 40,
    "num_experts_per_tok": 0, "num_hidden_layers": 3, "num_key_value_heads": 8, "num_local_experts": 0,
    "output_router_logits": False, "pad_token_id": 100256, "position_embedding_type": "rope",
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000,
    "router_aux_loss_coef": 0.01, "shared_intermediate_size": 8190, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.56.0", "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
# Fields of mistralai/Ministral-3-3B-Instruct-2512 with fewer layers.
MINISTRAL3 = {
    "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
    "model_type": "mistral3", "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
    "spatial_merge_size": 2, "transformers_version": "5.0.0.dev0", "vision_feature_layer": -1,
    "text_config": {
        "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "bfloat16", "eos_token_id": 2, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 9216,
        "max_position_embeddings": 262144, "model_type": "ministral3", "num_attention_heads": 32,
        "num_hidden_layers": 2, "num_key_value_heads": 8, "pad_token_id": 11, "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
            "rope_type": "yarn", "type": "yarn",
        },
        "sliding_window": None, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 131072,
    },
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral", "num_hidden_layers": 24},
}  # fmt: skip
# Fields of google/embeddinggemma-300m with fewer layers.
EMBEDDING_GEMMA = {
    "_sliding_window_pattern": 6, "architectures": ["Gemma3TextModel"], "attention_bias": False,
    "attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2, "dtype": "float32", "eos_token_id": 1,
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 1152, "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "max_position_embeddings": 2048, "model_type": "gemma3_text", "num_attention_heads": 3, "num_hidden_layers": 6,
    "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512,
    "transformers_version": "4.57.0.dev0", "use_bidirectional_attention": True, "use_cache": True, "vocab_size": 262144,
}  # fmt: skip
EXAONE4 = {
    **HF, "architectures": ["Exaone4ForCausalLM"], "num_key_value_heads": 1, "sliding_window": 20,
    "sliding_window_pattern": "LLLG", "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}  # fmt: skip
GEMMA = {
    **HF, "architectures": ["GemmaForCausalLM"], "num_key_value_heads": 1, "head_dim": 12, "hidden_act": "gelu",
    "hidden_activation": None,
}  # fmt: skip


def read_config(
    directory: Path,
    base: dict[str, Any],
    *,
    stated: _core.DType | None = None,
    tp_size: int = 1,
    pp_size: int = 1,
    **changes: Any,
) -> CheckpointConfig:
    """Reads a Hugging Face config given as a dictionary; a value of ... leaves the field out."""
    fields = {name: value for name, value in {**base, **changes}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(fields))
    mapping = ParallelMapping(tp_size=tp_size, pp_size=pp_size)
    return load_hf_config(directory, dtype=stated, mapping=mapping)
