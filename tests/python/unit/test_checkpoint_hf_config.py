"""Reading Hugging Face's config.json in both of its spellings."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptrt import _core
from adaptrt.formats.checkpoint.config import ParallelMapping
from adaptrt.formats.checkpoint.rotary import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from adaptrt.formats.hugging_face.hf_config import load_hf_config
from support.examples import examples
from support.families import FAMILIES, RELATIVES
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
    QWEN2_5_VL_7B,
    QWEN3,
    QWEN3_VL_4B,
    QWEN_VL,
    QWEN_VL_TEXT,
    read_config,
)
from support.models import ModelSpec

# Families with one base for all layers.
WITH_ROPE = {
    name: family
    for name, family in {**FAMILIES, **RELATIVES}.items()
    if "rope_theta" in (getattr(family.config().get_text_config(), "rope_parameters", None) or {})
}
# Excluded: transformers itself needs layer_types for EXAONE 4 without a window; Qwen2-MoE with a window is refused, and
# so is Granite 4 without layer_types, because all its layers would be Mamba's.
NEEDING_LAYER_TYPES = ("exaone4-rotated", "qwen2-moe", "granite4")
WITH_KINDS_OF_LAYERS = [
    name
    for name, family in {**FAMILIES, **RELATIVES}.items()
    if hasattr(family.config().get_text_config(), "layer_types") and name not in NEEDING_LAYER_TYPES
]


@pytest.fixture
def load(tmp_path: Path) -> Any:
    return partial(read_config, tmp_path)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_configs_that_transformers_saves_are_read(tmp_path: Path, family: str) -> None:
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


def test_missing_fields_have_the_defaults_of_transformers(load: Any) -> None:
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
        ({"num_kv_heads": 6}, 1, 1, True),  # transformers writes it but does not use it
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
        for name in ("rope_theta", "alpha"):  # HunYuan's alpha changes the base
            nested.get("rope_parameters", {}).pop(name, None)
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
        assert type(config).from_dict(json.loads(json.dumps(config.to_dict())), subject="again") == config


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


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("yarn"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor"]), inner),
    max_leaves=5,
)


@settings(max_examples=examples(100, 2500), deadline=None)
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
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict())), subject="again") == config


@pytest.mark.parametrize("content", [None, {}, {"eos_token_id": 3}, {"eos_token_id": [3, 5], "top_k": "odd"}])
def test_end_tokens_are_those_that_generation_stops_at(tmp_path: Path, content: dict[str, Any] | None) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content), encoding="utf-8")
    expected = (content or {}).get("eos_token_id", 2)
    config = read_config(tmp_path, {**HF, "eos_token_id": 2})
    assert config.eos_token_id == (tuple(expected) if isinstance(expected, list) else (expected,))


@pytest.mark.parametrize("end", ["</s>", [3, -1], 2**31, {}])
def test_an_end_token_that_is_none_is_refused_by_name(tmp_path: Path, end: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}), encoding="utf-8")
    said = r"generation_config\.json: eos_token_id .*expected an integer or a list of integers"
    with pytest.raises(_core.CheckpointError, match=said):
        read_config(tmp_path, HF)
