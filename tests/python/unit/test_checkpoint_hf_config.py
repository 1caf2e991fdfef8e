"""Reading Hugging Face's config.json in both of its spellings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptrt import _core
from adaptrt.builder.checkpoint.config import CheckpointConfig, ParallelMapping
from adaptrt.builder.checkpoint.rotary import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from adaptrt.builder.conversion.hf_config import load_hf_config
from adaptrt.builder.models.missing_ops import MISSING_OPS
from adaptrt.builder.models.registry import FAMILIES as FAMILIES_BY_ARCHITECTURE
from support.families import FAMILIES, RELATIVES
from support.models import ModelSpec

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
# tiiuae/falcon-7b's fields, with smaller sizes.
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
# Those with one base for all layers.
WITH_ROPE = {
    name: family
    for name, family in {**FAMILIES, **RELATIVES}.items()
    if "rope_theta" in (getattr(family.config().get_text_config(), "rope_parameters", None) or {})
}
# transformers itself cannot do without layer_types in EXAONE 4 without a window; Qwen2-MoE with one is refused.
WITH_KINDS_OF_LAYERS = [
    name
    for name, family in {**FAMILIES, **RELATIVES}.items()
    if hasattr(family.config().get_text_config(), "layer_types") and name not in ("exaone4-rotated", "qwen2-moe")
]


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Reads a Hugging Face config given as a dictionary; a value of ... leaves the field out."""

    def load(
        base: dict[str, Any],
        *,
        stated: _core.DType | None = None,
        tp_size: int = 1,
        pp_size: int = 1,
        **changes: Any,
    ) -> CheckpointConfig:
        fields = {name: value for name, value in {**base, **changes}.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        mapping = ParallelMapping(tp_size=tp_size, pp_size=pp_size)
        return load_hf_config(tmp_path, dtype=stated, mapping=mapping)

    return load


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_transformers_saves_is_read(tmp_path: Path, family: str) -> None:
    config = ModelSpec(family=family, max_position_embeddings=99).config()
    config.architectures = [f"{family.capitalize()}ForCausalLM"]
    config.dtype = "float16"
    config.save_pretrained(tmp_path)
    read = load_hf_config(tmp_path, dtype=None, mapping=ParallelMapping())
    assert read.dtype == _core.DType.FLOAT16
    assert (read.hidden_size, read.head_size, read.num_key_value_heads) == (36, 12, 1)
    assert (read.vocab_size, read.intermediate_size, read.max_position_embeddings) == (61, 37, 99)
    assert read.norm_epsilon == config.rms_norm_eps
    assert read.rotary_base == config.rope_parameters["rope_theta"]
    assert read.attn_bias == (family == "qwen2")
    assert read.qk_layernorm == (family == "qwen3")


def test_what_is_left_out_is_what_transformers_takes(load: Any) -> None:
    theirs = transformers.LlamaConfig(**{name: HF[name] for name in HF if name not in ("architectures", "torch_dtype")})
    ours = load(HF)
    assert ours.num_key_value_heads == theirs.num_key_value_heads == 3
    assert ours.head_size == theirs.head_dim == 12
    assert ours.rotary_base == theirs.rope_parameters["rope_theta"]
    assert ours.share_embedding_table == theirs.tie_word_embeddings
    assert ours.attn_bias == theirs.attention_bias
    assert ours.mlp_bias == theirs.mlp_bias


@pytest.mark.parametrize(
    ("changes", "kv_heads", "norms", "parallel"),
    [
        ({}, 1, 1, True),
        ({"num_kv_heads": 6}, 1, 1, True),  # which transformers writes, and does not use
        ({"multi_query": False, "parallel_attn": False}, 6, 1, False),
        ({"new_decoder_architecture": True, "num_kv_heads": 3, "parallel_attn": False}, 3, 2, True),
        ({"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}, 2, 1, True),
    ],
)
def test_falcon(load: Any, changes: dict[str, Any], kv_heads: int, norms: int, parallel: bool) -> None:
    read = load(FALCON, **changes)
    found = (read.num_key_value_heads, read.num_ln_in_parallel_attn, read.parallel_attention)
    assert found == (kv_heads, norms, parallel)
    assert (read.head_size, read.intermediate_size, read.max_position_embeddings) == (16, 384, 2048)
    assert (read.hidden_act, read.share_embedding_table, read.attn_bias) == ("gelu", True, False)


@pytest.mark.parametrize("family", WITH_ROPE)
def test_rope_theta_is_what_transformers_takes_where_it_is_left_out(family: str, tmp_path: Path) -> None:
    config = WITH_ROPE[family].config()
    data = config.to_dict()
    for nested in (data, data.get("text_config", {})):
        nested.pop("rope_theta", None)
        nested.get("rope_parameters", {}).pop("rope_theta", None)
    theirs = type(config).from_dict(data).get_text_config().rope_parameters["rope_theta"]
    data["architectures"] = [type(WITH_ROPE[family].random_model()).__name__]
    (tmp_path / "config.json").write_text(json.dumps(data, default=str))
    assert load_hf_config(tmp_path, dtype=_core.DType.FLOAT32, mapping=ParallelMapping()).rotary_base == theirs


@pytest.mark.parametrize("family", WITH_KINDS_OF_LAYERS)
def test_windows_are_those_that_transformers_takes_where_layer_types_are_left_out(family: str, tmp_path: Path) -> None:
    config = {**FAMILIES, **RELATIVES}[family].config()
    data = config.to_dict()
    for nested in (data, data.get("text_config", {})):
        nested.pop("layer_types", None)
        if "use_sliding_window" in nested:
            nested.update(use_sliding_window=True, sliding_window=20)
    theirs = type(config).from_dict(data).get_text_config()
    data["architectures"] = [type({**FAMILIES, **RELATIVES}[family].random_model()).__name__]
    (tmp_path / "config.json").write_text(json.dumps(data, default=str))
    ours = load_hf_config(tmp_path, dtype=_core.DType.FLOAT32, mapping=ParallelMapping())
    layers = tuple(layer for layer, kind in enumerate(theirs.layer_types) if kind == "sliding_attention")
    assert ours.sliding_window_layers == layers
    assert ours.sliding_window == (theirs.sliding_window if layers else None)


@pytest.mark.parametrize("spelling", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("value", ["float16", "torch.float16"])
def test_both_spellings_of_dtype(load: Any, spelling: str, value: str) -> None:
    assert load({**HF, "torch_dtype": ...}, **{spelling: value}).dtype == _core.DType.FLOAT16


def test_a_stated_dtype_wins(load: Any) -> None:
    assert load(HF, stated=_core.DType.FLOAT32).dtype == _core.DType.FLOAT32
    assert load({**HF, "torch_dtype": ...}, stated=_core.DType.FLOAT32).dtype == _core.DType.FLOAT32


@pytest.mark.parametrize(
    "extra",
    [
        {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
        {"max_sequence_length": 2048, "_flash_attn_2_enabled": True, "pretraining_tp": 2, "use_cache": False},
        {
            "_name_or_path": "x",
            "do_sample": True,
            "temperature": 0.6,
            "top_p": 0.9,
            "max_length": 4096,
            "pruned_heads": {},
        },
        {"unknown_but_null": None},
    ],
)
def test_fields_that_do_not_matter(load: Any, extra: dict[str, Any]) -> None:
    assert load({**HF, **extra}) == load(HF)


def test_code_of_published_models_that_is_now_transformers_own(load: Any) -> None:
    assert load(PHI3, auto_map=PHI3_CODE) == load(PHI3)


def test_token_ids(load: Any) -> None:
    config = load(HF, bos_token_id=1, eos_token_id=[2, 5], pad_token_id=-1)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, (2, 5), None)
    assert load(HF, eos_token_id=7).eos_token_id == (7,)
    assert load(HF).eos_token_id == ()


SCALINGS = [
    ({"rope_type": "default"}, None),
    ({"rope_type": "linear", "factor": 2.5}, LinearScaling(factor=2.5)),
    ({"rope_type": "dynamic", "factor": 2}, DynamicScaling(factor=2.0)),
    (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=64),
    ),
    ({"rope_type": "yarn", "factor": 4.0}, YarnScaling(factor=4.0, original_max_position_embeddings=128)),
    (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 1.1,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
            "truncate": False,
        },
        YarnScaling(
            factor=4,
            original_max_position_embeddings=32,
            attention_factor=1.1,
            beta_fast=16,
            beta_slow=2,
            mscale=0.7,
            mscale_all_dim=0.9,
            truncate=False,
        ),
    ),
]


@pytest.mark.parametrize(("scaling", "expected"), SCALINGS)
def test_rope_in_every_spelling(load: Any, scaling: dict[str, Any], expected: Any) -> None:
    old = {name if name != "rope_type" else "type": value for name, value in scaling.items()}
    spellings = [
        {"rope_parameters": {**scaling, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": scaling},
        {"rope_theta": 5e5, "rope_scaling": old},
        {"rope_theta": 5e5, "rope_scaling": {**old, **scaling}},
    ]
    for spelling in spellings:
        config = load(HF, **spelling)
        assert config.rotary_base == 5e5
        assert config.rotary_scaling == expected
        assert CheckpointConfig.from_dict(config.to_dict(), subject="again") == config


def test_null_rope_scaling_is_none(load: Any) -> None:
    assert load(HF, rope_scaling=None, rope_theta=7.0).rotary_scaling is None


@pytest.mark.parametrize(
    ("base", "changes", "window", "layers"),
    [
        (MISTRAL, {"sliding_window": 16}, 16, (0, 1, 2, 3)),
        (MISTRAL, {"sliding_window": None}, None, ()),
        (QWEN, {"sliding_window": 16}, None, ()),
        (QWEN, {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, 16, (3,)),
        (QWEN, {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 4}, None, ()),
        (QWEN, {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 2}, None, ()),
        (
            QWEN3,
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            },
            16,
            (1, 3),
        ),
        (QWEN3, {"layer_types": ["full_attention"] * 4}, None, ()),
    ],
)
def test_sliding_windows(
    load: Any, base: dict[str, Any], changes: dict[str, Any], window: int | None, layers: tuple[int, ...]
) -> None:
    config = load(base, **changes)
    assert (config.sliding_window, config.sliding_window_layers) == (window, layers)


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
    (QWEN3, {"head_dim": ...}, "head_dim is missing"),
    (HF, {"eos_token_id": "x"}, "eos_token_id is .x.; expected an integer or a list of integers"),
    # what the model is
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
    # maths that we do not have
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
        {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}},
        "high_freq_factor is 4.0; it must be above low_freq_factor 4.0",
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
def test_what_is_refused_is_named(load: Any, base: dict[str, Any], changes: dict[str, Any], complaint: str) -> None:
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
        ({"pp_size": 3}, "pp_size 3 does not divide num_hidden_layers 4"),
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
EXAONE4 = {
    **HF, "architectures": ["Exaone4ForCausalLM"], "num_key_value_heads": 1, "sliding_window": 20,
    "sliding_window_pattern": "LLLG", "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}  # fmt: skip
GEMMA = {
    **HF, "architectures": ["GemmaForCausalLM"], "num_key_value_heads": 1, "head_dim": 12, "hidden_act": "gelu",
    "hidden_activation": None,
}  # fmt: skip


def test_command_r7b_as_it_is_published(load: Any) -> None:
    read = load(COMMAND_R7B)
    assert (read.sliding_window, read.sliding_window_layers) == (20, (0, 1, 2))
    assert (read.rotary_base, read.logit_scale, read.share_embedding_table) == (50000.0, 0.25, True)


def test_models_that_see_as_they_are_published(load: Any) -> None:
    flat, nested = load(QWEN2_5_VL_7B), load(QWEN3_VL_4B)
    assert (flat.head_size, flat.rotary_base, flat.rotary_scaling, flat.sliding_window) == (128, 1e6, None, None)
    assert (flat.dtype, flat.eos_token_id, flat.share_embedding_table) == (_core.DType.BFLOAT16, (151645,), False)
    assert (nested.head_size, nested.rotary_base, nested.rotary_scaling) == (128, 5e6, None)
    assert (nested.dtype, nested.eos_token_id, nested.share_embedding_table) == (_core.DType.BFLOAT16, (151645,), True)


def test_windows_of_exaone4(load: Any) -> None:
    read = load(EXAONE4)
    assert read.sliding_window_layers == (0, 1, 2)
    assert load(EXAONE4, layer_types=None, sliding_window_pattern=4) == read
    assert load(EXAONE4, layer_types=..., sliding_window_pattern=...) == read
    assert load(EXAONE4, sliding_window=None, layer_types=None).sliding_window_layers == ()


def test_the_first_gemmas_mean_the_approximation_when_they_say_gelu(load: Any) -> None:
    assert load(GEMMA).hidden_act == transformers.GemmaConfig(hidden_act="gelu").hidden_act.replace("pytorch_", "")


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
            {"architectures": ["Gemma4ForCausalLM"]},
            "would need heads of another size in layers without a",
        ),
        (HF, {"architectures": ["Qwen3_5ForConditionalGeneration"]}, "which would need layers of linear attention"),
    ],
)
def test_what_families_cannot_have_is_named(
    load: Any, base: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(_core.CheckpointError, match=complaint):
        load(base, **changes)


@pytest.mark.parametrize("architecture", MISSING_OPS)
def test_what_would_need_more_ops_is_known_to_transformers_and_not_to_us(architecture: str) -> None:
    assert hasattr(transformers, architecture)
    assert architecture not in FAMILIES_BY_ARCHITECTURE


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("yarn"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor"]), inner),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_hugging_face_values_are_read_or_refused(tmp_path_factory: Any, data: st.DataObject) -> None:
    base = data.draw(st.sampled_from([HF, QWEN, MISTRAL, QWEN3, QWEN_VL, {**QWEN_VL, "text_config": QWEN_VL_TEXT}]))
    fields = [
        *base,
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
        "layer_types",
        "sliding_window",
        "eos_token_id",
        "text_config",
        "tie_word_embeddings",
    ]
    names = data.draw(st.lists(st.sampled_from(fields), max_size=3, unique=True))
    directory = tmp_path_factory.mktemp("hf")
    changed = {**base, **{name: data.draw(json_values) for name in names}}
    (directory / "config.json").write_text(json.dumps(changed))
    try:
        config = load_hf_config(directory, dtype=None, mapping=ParallelMapping())
    except _core.CheckpointError:
        return
    assert CheckpointConfig.from_dict(config.to_dict(), subject="again") == config
