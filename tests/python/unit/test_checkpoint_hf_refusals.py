"""Refused fields of Hugging Face's config.json, and the texts of the errors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers

from adaptrt import _core
from adaptrt.formats.checkpoint.config import ParallelMapping
from adaptrt.formats.hugging_face.hf_config import load_hf_config
from adaptrt.formats.models.missing_ops import MISSING_OPS
from adaptrt.formats.models.registry import FAMILIES
from support.encoder_decoders import T5_FIELDS
from support.hf_configs import (
    COMMAND_R7B,
    EXAONE4,
    FALCON,
    GEMMA,
    HF,
    MISTRAL,
    PHI3,
    PHI3_CODE,
    QWEN,
    QWEN3,
    read_config,
)

T5 = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "dtype": "float32", **T5_FIELDS}


QWEN3_VL_MOE = {
    **QWEN3,
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


@pytest.fixture
def load(tmp_path: Path) -> Any:
    return partial(read_config, tmp_path)


REFUSED = [
    # shapes and types
    (HF, {"hidden_size": ...}, "hidden_size is missing; expected an integer"),
    (HF, {"hidden_size": "36"}, 'hidden_size is "36"; expected an integer'),
    (HF, {"hidden_size": True}, "hidden_size is true; expected an integer"),
    (HF, {"hidden_size": 0}, "hidden_size is 0; it must be at least 1"),
    (HF, {"vocab_size": -5}, "vocab_size is -5; it must be at least 1"),
    (HF, {"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN; expected a finite number"),
    (HF, {"rms_norm_eps": 10**400}, "expected a finite number"),
    (HF, {"hidden_size": 37}, "hidden_size 37 is not a multiple of num_attention_heads 3; state head_dim"),
    (HF, {"head_dim": 13}, "head_size 13 is odd"),
    (HF, {"num_key_value_heads": 2}, "num_attention_heads 3 is not a multiple of num_key_value_heads 2"),
    (HF, {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most 10000"),
    (HF, {"vocab_size": 2**31}, "vocab_size is 2147483648; it must be at most 2147483647"),
    (HF, {"hidden_size": 10**4000}, "hidden_size is 1000.*; it must be at most 2147483647"),
    (HF, {"eos_token_id": [2**31]}, "eos_token_id is .2147483648.; expected"),
    (QWEN, {"num_key_value_heads": ...}, "num_key_value_heads is missing"),
    (QWEN3_VL_MOE, {"norm_topk_prob": False}, "norm_topk_prob is false; only true is supported"),
    (QWEN3_VL_MOE, {"num_experts_per_tok": 5}, "moe_top_k 5 is more than moe_num_experts 4"),
    (QWEN3, {"head_dim": ...}, "head_dim is missing"),
    (HF, {"eos_token_id": "x"}, "eos_token_id is .x.; expected an integer or a list of integers"),
    ({**HF, "architectures": ["OlmoForCausalLM"]}, {"clip_qkv": 8.0}, "clip_qkv is 8.0; bounds on q, k and v"),
    # kind of model
    (
        HF,
        {"architectures": ["BloomForCausalLM"]},
        "accepted: one of LlamaForCausalLM, MistralForCausalLM, Qwen2",
    ),
    (HF, {"architectures": [[]]}, r"architectures is \[\[\]\]; accepted: one of"),
    (HF, {"architectures": ...}, "architectures is null"),
    (HF, {"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "accepted: one of"),
    (HF, {"auto_map": {"AutoModel": "x.Y"}}, r"auto_map names custom code.*\{'AutoModel': 'x.Y'\}"),
    (HF, {"auto_map": PHI3_CODE}, "auto_map names custom code"),
    (HF, {"auto_map": "x.Y"}, "auto_map names custom code.*'x.Y'"),
    (PHI3, {"auto_map": {**PHI3_CODE, "AutoModelForCausalLM": "mine.Phi3ForCausalLM"}}, "custom code.*mine.Phi3"),
    (
        HF,
        {"quantization_config": {"bits": 4}},
        "quantization_config.quant_method is null; accepted: compressed-tensors, bitsandbytes, gptq, awq, fp8, mxfp4",
    ),
    (HF, {"torch_dtype": ...}, "dtype is missing; state --dtype float32, float16 or bfloat16"),
    (HF, {"dtype": "float32"}, "dtype says bfloat16 and float32"),
    (HF, {"torch_dtype": "float8_e4m3fn"}, "dtype cannot be used.*accepted: float32, float16, bfloat16"),
    # unsupported maths
    (HF, {"hidden_act": "gelu"}, 'hidden_act is "gelu"; accepted: silu'),
    (HF, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1.0 is supported"),
    (HF, {"attention_multiplier": 0.1}, "attention_multiplier is 0.1: an unknown field, which may change"),
    (HF, {"logits_scaling": 8.0}, "logits_scaling is 8.0; only 1.0 is supported"),
    (HF, {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0: an unknown field"),
    (HF, {"sliding_window": 16}, "sliding_window is 16: an unknown field"),
    (HF, {"is_encoder_decoder": True}, "is_encoder_decoder is true; only false is supported"),
    (MISTRAL, {"attention_bias": True}, "attention_bias is true; only false is supported"),
    (QWEN, {"use_mrope": True}, "use_mrope is true; only false is supported"),
    (FALCON, {"alibi": True}, "alibi is true; only false is supported"),
    (FALCON, {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2; accepted: 1, or 2 with new_decoder"),
    (
        FALCON,
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "parallel_attn": False},
        "parallel_attn is false; with new_decoder_architecture and one norm it must be true",
    ),
    (FALCON, {"new_decoder_architecture": True, "num_kv_heads": 4}, "num_attention_heads 6 is not a multiple of"),
    (
        FALCON,
        {"new_decoder_architecture": "yes"},
        r"^(?!.*new_decoder_architecture.*new_decoder_architecture).*new_decoder_architecture is .yes.; expected true",
    ),
    (FALCON, {"auto_map": {"AutoModel": "mine.FalconModel"}}, "auto_map names custom code"),
    # rope
    (
        HF,
        {"rope_scaling": {"rope_type": "proportional", "factor": 2}},
        'rope_type is "proportional"; accepted: default',
    ),
    (
        HF,
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, -1.0], "long_factor": 3}},
        "short_factor is .*; expected a list of numbers above 0; .*long_factor is 3",
    ),
    (HF, {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
    (HF, {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor is 0.5; it must be at least 1.0"),
    (
        HF,
        {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}},
        "and type disagree: linear and yarn",
    ),
    (
        HF,
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2, "alpha": 1}},
        "rope_scaling.alpha is unknown",
    ),
    (
        HF,
        {"rope_scaling": {"rope_type": "llama3", "factor": 2}},
        "low_freq_factor is missing.*high_freq_factor is",
    ),
    (
        HF,
        {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 3}},
        "high_freq_factor is 3.0; it must be at least low_freq_factor 4.0",
    ),
    (
        HF,
        {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2}},
        "beta_fast is 1.0; it must not be below beta_slow 2.0",
    ),
    (HF, {"rope_scaling": "linear"}, 'rope_scaling is "linear"; expected an object'),
    (
        HF,
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5; only rotation of the",
    ),
    (
        HF,
        {"rope_parameters": {"rope_theta": 2.0}, "rope_theta": 3.0},
        "rope_theta is 2.0, but rope_theta is 3.0",
    ),
    (
        HF,
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "default"}},
        "rope_scaling is given together with rope_parameters",
    ),
    (HF, {"rope_theta": 0}, "rope_theta is 0.0; it must be above 0.0"),
    # sliding windows
    (MISTRAL, {"sliding_window": ...}, "sliding_window is missing; expected an integer, or null"),
    (QWEN, {"use_sliding_window": True}, "sliding_window is missing, but use_sliding_window is true"),
    (QWEN, {"layer_types": ["full_attention"]}, "expected 4 times full_attention or sliding_attention"),
    (
        QWEN,
        {"layer_types": ["sliding_attention"] * 4},
        "has sliding_attention, but there is no sliding_window in use",
    ),
]


@pytest.mark.parametrize(("base", "changes", "complaint"), REFUSED, ids=[f"{i}" for i in range(len(REFUSED))])
def test_refused_fields_are_named(load: Any, base: dict[str, Any], changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(_core.CheckpointError, match=complaint) as caught:
        load(base, **changes)
    assert "config.json: " in str(caught.value)


def test_all_problems_are_reported_at_once(load: Any) -> None:
    with pytest.raises(_core.CheckpointError) as caught:
        load(
            HF,
            hidden_size=None,
            vocab_size="x",
            hidden_act="tanh",
            strange=1,
            rope_scaling={"rope_type": "su"},
        )
    for name in ("hidden_size", "vocab_size", "hidden_act", "strange", "rope_scaling.rope_type"):
        assert name in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a":1,"a":2}', "\x00", "1" * 5000])
def test_a_config_that_is_no_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(_core.CheckpointError, match=r"config\.json"):
        load_hf_config(tmp_path, dtype=None, mapping=ParallelMapping())


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        (
            {"tp_size": 2},
            "tp_size 2 does not divide num_attention_heads 3; tp_size 2 does not divide intermediate_size",
        ),
        ({"pp_size": 5}, "pp_size is 5; expected at most num_hidden_layers 4"),
        (
            {
                "tp_size": 4,
                "hidden_size": 48,
                "num_attention_heads": 12,
                "num_key_value_heads": 6,
                "intermediate_size": 4,
            },
            "tp_size 4 neither divides num_key_value_heads 6 nor is a multiple of it",
        ),
    ],
)
def test_sizes_that_cannot_cut_the_model(load: Any, sizes: dict[str, int], complaint: str) -> None:
    with pytest.raises(_core.ConfigError, match=complaint):
        load(HF, **sizes)


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        (COMMAND_R7B, {"use_parallel_block": False}, "use_parallel_block is false; only true is supported"),
        (COMMAND_R7B, {"sliding_window": None}, "sliding_window is missing, but there are layers of sliding_attention"),
        (EXAONE4, {"layer_types": None}, r'sliding_window_pattern is "LLLG"; expected an integer'),
        (EXAONE4, {"layer_types": ["full_attention"] * 4}, "sliding_window is 20, but no layer has a window"),
        (GEMMA, {"hidden_activation": "gelu"}, 'hidden_activation is "gelu"; only "gelu_pytorch_tanh" is supported'),
        (
            HF,
            {"architectures": ["Gemma3nForCausalLM"]},
            r"it needs several residual streams \(AltUp\)",
        ),
        (PHI3, {"partial_rotary_factor": 1e308}, r"rotary_pct is 1e\+308; expected .* above 0 up to 1"),
        (
            PHI3,
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
             "original_max_position_embeddings": 1},
            "original_max_position_embeddings is 1; expected 2 or more",
        ),
        (T5, {"feed_forward_proj": []}, r"feed_forward_proj is \[\]"),
        (T5, {"feed_forward_proj": {}, "is_gated_act": True}, r"feed_forward_proj is \{\}"),
    ],
)  # fmt: skip
def test_fields_that_a_family_lacks_are_named(
    load: Any, base: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(_core.CheckpointError, match=complaint):
        load(base, **changes)


@pytest.mark.parametrize("architecture", MISSING_OPS)
def test_models_with_missing_ops_are_known_to_transformers_only(architecture: str) -> None:
    assert hasattr(transformers, architecture)
    assert architecture not in FAMILIES
