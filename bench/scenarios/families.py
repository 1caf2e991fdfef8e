"""Models of each family with random weights: about half a billion parameters, or a billion with experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from adaptrt._core import DType
from adaptrt.builder.network.checkpoint_tensors import hf_tensor_shapes
from adaptrt.common.safetensors_stream import SafetensorsWriter, TensorSpec
from adaptrt.formats.checkpoint.config import ParallelMapping
from adaptrt.formats.checkpoint.heads_apart import VALUES
from adaptrt.formats.hugging_face.hf_config import load_hf_config
from adaptrt.formats.models.registry import declare
from adaptrt.formats.network.network import Network

SEED: Final = 20

_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 4096, "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_LAYER_NORM: Final = {"rms_norm_eps": None, "layer_norm_eps": 1e-5}
_NO_GATE: Final = {**_LAYER_NORM, "intermediate_size": 6144, "head_dim": None}
_WINDOWS: Final = {"hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 1024}
_LONGROPE: Final = {
    "rope_type": "longrope", "short_factor": [1.0] * 24, "long_factor": [2.0] * 24, "rope_theta": 10000.0,
    "original_max_position_embeddings": 2048, "partial_rotary_factor": 0.75,
}  # fmt: skip

_LINEAR_ATTENTION: Final = {
    "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6, "linear_num_key_heads": 16,
    "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
    },
}  # fmt: skip

FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "head_dim": None},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "granite": {
        "architectures": ["GraniteForCausalLM"], "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625, "logits_scaling": 8.0, "head_dim": None,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "head_dim": None},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 1, 1, 0] * 7, "head_dim": None},
    "phi2": {"architectures": ["PhiForCausalLM"], **_NO_GATE, "num_key_value_heads": 16, "hidden_act": "gelu_new"},
    "phi4-mini": {
        "architectures": ["Phi3ForCausalLM"], "sliding_window": None, "rope_parameters": _LONGROPE, "head_dim": None,
        "original_max_position_embeddings": 2048,
    },
    "stablelm": {
        "architectures": ["StableLmForCausalLM"], **_LAYER_NORM, "head_dim": None, "partial_rotary_factor": 0.25,
        "use_qkv_bias": False, "use_parallel_residual": False,
    },
    "gemma": {"architectures": ["GemmaForCausalLM"], "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], **_WINDOWS, "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], **_WINDOWS, "query_pre_attn_scalar": 64},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "vocab_size": 32000, "n_embd": 1024, "n_layer": 36, "n_head": 16,
        "n_positions": 4096, "n_inner": None, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
        "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
    },
    "gpt-neox": {
        "architectures": ["GPTNeoXForCausalLM"], **_NO_GATE, "num_key_value_heads": None, "hidden_act": "gelu",
        "rotary_pct": 0.25, "use_parallel_residual": True,
    },
    "cohere": {"architectures": ["CohereForCausalLM"], **_LAYER_NORM, "logit_scale": 0.0625, "head_dim": None},
    "cohere2": {
        "architectures": ["Cohere2ForCausalLM"], **_LAYER_NORM, "logit_scale": 0.0625, "sliding_window": 1024,
    },
    "starcoder2": {
        "architectures": ["Starcoder2ForCausalLM"], **_NO_GATE, "rms_norm_eps": None, "layer_norm_eps": None,
        "norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "sliding_window": None, "use_bias": True,
    },
    "exaone4": {"architectures": ["Exaone4ForCausalLM"], "sliding_window": None},
    "helium": {"architectures": ["HeliumForCausalLM"]},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "attention_bias": True},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_hidden_layers": 12,
        "intermediate_size": 3584, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 24,
        "moe_intermediate_size": 224, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **_LINEAR_ATTENTION,
        "intermediate_size": 3584,
    },
    "qwen3.5-moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", **_LINEAR_ATTENTION,
        "intermediate_size": None, "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 192,
        "shared_expert_intermediate_size": 192,
    },
    "granite4-h": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "head_dim": None,
        "num_hidden_layers": 24, "intermediate_size": 3072, "shared_intermediate_size": 3072, "num_local_experts": 0,
        "num_experts_per_tok": 0, "layer_types": (["mamba"] * 5 + ["attention"]) * 4, "mamba_n_heads": 32,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
        "position_embedding_type": "nope", "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625, "logits_scaling": 8.0,
    },
    "deepseek-v2": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "head_dim": None,
        "num_hidden_layers": 16, "num_key_value_heads": 16, "first_k_dense_replace": 16, "kv_lora_rank": 512,
        "q_lora_rank": 768, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
        "n_group": 1, "topk_group": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0, "norm_topk_prob": False,
    },
}  # fmt: skip
"""Fields of config.json in addition to _SIZES; None: the family does not have the field."""


def config_of(family: str) -> dict[str, Any]:
    """The config.json of a family's model."""
    own = FAMILIES[family]
    fields = own if family == "gpt2" else {**_SIZES, **own}
    return {name: value for name, value in fields.items() if value is not None or name == "sliding_window"}


def _shapes_in_files(network: Network) -> dict[str, tuple[int, ...]]:
    """The tensors of a Hugging Face directory, in which a layer that networks use for each head is one tensor."""
    shapes, layer = hf_tensor_shapes(network), network.config.layer_of_heads
    if layer is None:
        return shapes
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        path, is_of_head, _ = name.partition(f".{layer.name}.")
        if not is_of_head:
            found[name] = shape
        elif name.endswith(f"{VALUES}.weight"):
            found[f"{path}.{layer.name}.weight"] = (layer.outputs, shape[1])
    return found


def write_family(family: str, directory: Path) -> None:
    """Writes a Hugging Face directory with random bfloat16 weights."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config_of(family), indent=2))
    network = declare(load_hf_config(directory, dtype=DType.BFLOAT16, mapping=ParallelMapping()))
    shapes = _shapes_in_files(network)
    generator = np.random.default_rng(SEED)
    specs = [TensorSpec(name, np.dtype(ml_dtypes.bfloat16), shape) for name, shape in shapes.items()]
    with SafetensorsWriter(directory / "model.safetensors", specs) as writer:
        for name, shape in shapes.items():
            noise = generator.standard_normal(shape, dtype=np.float32)
            values = noise * np.float32(shape[-1] ** -0.5) if len(shape) > 1 else 1 + np.float32(0.1) * noise
            writer.write(name, values.astype(ml_dtypes.bfloat16))
