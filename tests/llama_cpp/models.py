"""Random models of the architectures that AdaptRT reads from GGUF files, in sizes that llama.cpp can quantise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import transformers

from support.families import FUSED, LLAMA, UNGATED, Family, rope

_SIZES: Final = {
    "vocab_size": 1056, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None,
}  # fmt: skip
"""K types need rows of multiples of 256. The tokenizers have 1024 tokens; llama.cpp's converter adds others to some."""
_SIX_LAYERS: Final = {**_SIZES, "num_hidden_layers": 6, "sliding_window": 24}
_GEMMA: Final = {**_SIX_LAYERS, "head_dim": 64, "query_pre_attn_scalar": 64, "bos_token_id": 2, "pad_token_id": 0}
_EXPERTS: Final = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
_LLAMA3: Final = rope(
    "llama3", 500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
_YARN: Final = rope("yarn", factor=4.0, original_max_position_embeddings=128)


EXACT: Final = 2e-3
"""Largest difference of log probs of models whose values are all float32: the order of sums differs."""
ROUNDED_GELU: Final = 0.1
"""The same for models with GELU, whose values llama.cpp takes from a table of float16."""


@dataclass(frozen=True)
class Model:
    """A model that is converted by llama.cpp."""

    family: Family
    is_sentencepiece: bool = False
    """True if llama.cpp's converter needs a SentencePiece tokenizer; False: the tokenizer is the demo's."""
    has_lora: bool = False
    """True if llama.cpp's converter of adapters is tried as well."""
    tolerance: float = EXACT


def _model(
    config: type[Any], targets: list[str] | str = LLAMA, *, lora: bool = False, tolerance: float = EXACT, **fields: Any
) -> Model:
    return Model(Family(config, targets, {**_SIZES, **fields}), has_lora=lora, tolerance=tolerance)


def _gemma(config: type[Any], **fields: Any) -> Model:
    return Model(Family(config, LLAMA, {**_GEMMA, **fields}), is_sentencepiece=True, tolerance=ROUNDED_GELU)


MODELS: Final[dict[str, Model]] = {
    "llama": _model(transformers.LlamaConfig, lora=True),
    "llama-biases": _model(transformers.LlamaConfig, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama3": _model(transformers.LlamaConfig, rope_parameters=_LLAMA3),
    "llama-sentencepiece": Model(Family(transformers.LlamaConfig, LLAMA, _SIZES), is_sentencepiece=True),
    "mixtral": _model(transformers.MixtralConfig, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen2": _model(transformers.Qwen2Config, lora=True, tie_word_embeddings=True),
    "qwen2-yarn": _model(transformers.Qwen2Config, rope_parameters=_YARN),
    "qwen3": _model(transformers.Qwen3Config, lora=True, head_dim=128),
    "qwen3moe": _model(transformers.Qwen3MoeConfig, head_dim=64, norm_topk_prob=True, **_EXPERTS),
    "qwen2moe": _model(transformers.Qwen2MoeConfig, shared_expert_intermediate_size=512, **_EXPERTS),
    "olmoe": _model(
        transformers.OlmoeConfig, num_key_value_heads=4, intermediate_size=256, num_experts=8, num_experts_per_tok=2
    ),
    "olmo2": _model(transformers.Olmo2Config),
    "olmo3": _model(transformers.Olmo3Config, num_hidden_layers=6, sliding_window=24),
    "granite": _model(
        transformers.GraniteConfig, lora=True, embedding_multiplier=3.0, residual_multiplier=0.3,
        attention_multiplier=0.2, logits_scaling=2.5,
    ),
    "smollm3": _model(transformers.SmolLM3Config, num_hidden_layers=5),
    "starcoder2": _model(transformers.Starcoder2Config, UNGATED, sliding_window=None, tolerance=ROUNDED_GELU),
    "gpt2": Model(Family(transformers.GPT2Config, ["c_attn", "c_proj", "c_fc"], {
        "vocab_size": 1056, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 512,
        "bos_token_id": 0, "eos_token_id": 1, "n_ctx": 512,
    }), tolerance=ROUNDED_GELU),
    # llama.cpp ignores Phi's window.
    "phi3": Model(Family(transformers.Phi3Config, FUSED, {**_SIZES, "sliding_window": None}), is_sentencepiece=True),
    "gemma": _gemma(transformers.GemmaConfig),
    "gemma2": _gemma(transformers.Gemma2Config, attn_logit_softcapping=3.0, final_logit_softcapping=4.0),
    "gemma3": _gemma(transformers.Gemma3TextConfig, rope_parameters={
        "full_attention": rope("linear", 5000.0, factor=8.0), "sliding_attention": rope(theta=10000.0)}),
    "command-r": _model(transformers.CohereConfig, logit_scale=0.3),
    "cohere2": _model(transformers.Cohere2Config, logit_scale=0.3, sliding_window=24, rotary_pct=1.0),
    "glm4": _model(transformers.Glm4Config, FUSED, head_dim=64),
    # Published models have YaRN. llama.cpp rounds the range of its interpolation to whole dimensions, AdaptRT does not.
    "gpt-oss": _model(
        transformers.GptOssConfig, head_dim=64, intermediate_size=256, num_local_experts=8, num_experts_per_tok=2,
        sliding_window=24, rope_parameters=rope(),
    ),
}  # fmt: skip
