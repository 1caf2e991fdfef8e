"""Reading and writing the config.json of a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptrt import _core
from adaptrt.formats.checkpoint.config import CheckpointConfig, ParallelMapping
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.checkpoint.rotary import YarnScaling
from adaptrt.formats.models.registry import load_config
from support.examples import examples

CONFIG = CheckpointConfig(
    architecture="Qwen2ForCausalLM",
    dtype=_core.DType.BFLOAT16,
    vocab_size=61,
    max_position_embeddings=128,
    hidden_size=36,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_size=12,
    intermediate_size=38,
    norm_epsilon=1e-6,
    rotary_base=1e6,
    rotary_scaling=YarnScaling(factor=4.0, original_max_position_embeddings=32),
    attn_bias=True,
    sliding_window=16,
    sliding_window_layers=(2, 3),
    share_embedding_table=True,
    mapping=ParallelMapping(tp_size=2, pp_size=2),
    eos_token_id=(3, 4),
)


@pytest.mark.parametrize("int8_kv_cache", [False, True])
@pytest.mark.parametrize(
    "weights",
    [
        None,
        QuantConfig(quant_algo=_core.QuantAlgo.W4A16, group_size=64),
        QuantConfig(quant_algo=_core.QuantAlgo.W4A16, group_size=64, bits=3),
    ],
    ids=str,
)
def test_a_config_survives_its_file(weights: QuantConfig | None, int8_kv_cache: bool, tmp_path: Path) -> None:
    config = replace(CONFIG, quantization=weights, int8_kv_cache=int8_kv_cache)
    (tmp_path / "config.json").write_text(config.to_json())
    assert load_config(tmp_path) == config
    written = config.to_dict()["quantization"]
    assert written["kv_cache_quant_algo"] == ("INT8" if int8_kv_cache else None)
    assert written["quant_algo"] == (None if weights is None else "W4A16")
    # Four-bit checkpoints omit the field, as before other numbers of bits existed.
    assert written.get("bits") == (3 if weights is not None and weights.bits == 3 else None)


def test_layers_with_a_quantisation_of_their_own_survive_the_file(tmp_path: Path) -> None:
    how = QuantConfig(
        quant_algo=_core.QuantAlgo.W4A16,
        group_size=64,
        exclude_modules=("transformer.layers.0.mlp.fc",),
        quantized_layers=(
            ("lm_head", QuantConfig(quant_algo=_core.QuantAlgo.W8A16, group_size=32)),
            ("transformer.layers.1.mlp.fc", QuantConfig(quant_algo=_core.QuantAlgo.W4A16, group_size=32, bits=3)),
            (
                "transformer.layers.2.mlp.fc",
                QuantConfig(quant_algo=_core.QuantAlgo.W4A16, group_size=16, has_minimum=True, bits=2),
            ),
        ),
    )
    config = replace(CONFIG, quantization=how, mapping=ParallelMapping())
    (tmp_path / "config.json").write_text(config.to_json())
    assert load_config(tmp_path) == config


@pytest.mark.parametrize("name", [name for name in CONFIG.to_dict() if name != "producer"])
def test_a_missing_or_wrong_field_is_named(name: str) -> None:
    optional = {
        "rotary_scaling",
        "sliding_window",
        "sliding_window_layers",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "embedding_pooling",
        "classifier",
    }
    without = {key: value for key, value in CONFIG.to_dict().items() if key != name}
    wrong = {**CONFIG.to_dict(), name: {"what": "this"}}
    for data in [wrong] if name in optional else [without, wrong]:
        with pytest.raises(_core.CheckpointError, match=rf"^file: .*\b{name}"):
            CheckpointConfig.from_dict(data, subject="file")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"strange": 1}, "strange is unknown"),
        ({"mapping": {"world_size": 3, "tp_size": 2, "pp_size": 2}}, r"mapping.world_size must be .* = 4"),
        (
            {"mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2, "moe_tp_size": 2, "moe_ep_size": 2}},
            "mapping.moe_ep_size cannot be used: moe_tp_size 2 and moe_ep_size 2 do not fit tp_size 2",
        ),
        (
            {"mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2, "moe_tp_size": 1, "moe_ep_size": 2}},
            "moe_ep_size is 2, and the model has no experts",
        ),
        (
            {"mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2, "cp_size": 1}},
            "mapping.cp_size is unknown",
        ),
        (
            {"quantization": {"quant_algo": "FP8"}},
            'quantization.quant_algo is "FP8"; accepted: null, W8A16, W8A8, W4A16, W4A8',
        ),
        ({"quantization": {"quant_algo": "W4A16", "bits": 5}}, "quantization.bits is 5; accepted: 2, 3, 4"),
        (
            {"quantization": {"quant_algo": "W8A16", "bits": 3}},
            "bits is 3; expected 4, except for integers of W4A16 and W4A8",
        ),
        (
            {"quantization": {"quant_algo": "W4A16", "bits": 2, "code": "NF4", "group_size": 64}},
            "bits is 2; expected 4, except for integers of W4A16 and W4A8",
        ),
        (
            {"quantization": {"quant_algo": "W4A8", "group_size": 32, "has_minimum": True}},
            "has_minimum is given; only integers of W4A16 and W8A16 in groups",
        ),
        ({"quantization": {"quant_algo": "W8A16", "has_minimum": True}}, "has_minimum is given; only integers"),
        ({"quantization": {"quant_algo": "W4A8", "group_size": 16}}, "group_size is 16; accepted: 32, 64, 128"),
        (
            {"quantization": {"quant_algo": "W4A16", "group_size": 16, "bits": 3}},
            "group_size is 16; accepted with 3 bits: multiples of 32",
        ),
        ({"quantization": {"quant_algo": "W4A16", "group_size": 48}}, "group_size is 48; accepted: 16, 32, 64, 128"),
        (
            {"quantization": {"quant_algo": "W8A8", "group_size": 64, "has_zero_point": True}},
            "group_size is given, but W8A8 has one scale per output; .*has_zero_point is given",
        ),
        (
            {"quantization": {"quant_algo": "W4A8", "reordered": True}},
            "reordered is given, but W4A8 cannot have permuted inputs",
        ),
        (
            {"quantization": {"quant_algo": "W4A8", "group_size": 64, "code": "NF4", "value_dtype": "bfloat16"}},
            "code is NF4 with W4A8; accepted: W4A16",
        ),
        (
            {"quantization": {"quant_algo": "W8A8", "reordered": True}},
            "reordered is given, but W8A8 cannot have permuted inputs",
        ),
        (
            {"quantization": {"quant_algo": "W4A16", "group_size": 64, "code": "NF4", "reordered": True}},
            "reordered is given, but NF4 cannot have permuted inputs",
        ),
        (
            {"quantization": {"quant_algo": "W8A16", "group_size": 64, "code": "LLM_INT8"}},
            "value_dtype is missing; LLM_INT8 needs it; .*group_size is given, but LLM_INT8 has one scale per output; "
            ".*scale_dtype is bfloat16; LLM_INT8 has float32",
        ),
        (
            {"quantization": {"quant_algo": "W4A16", "code": "LLM_INT8", "value_dtype": "float16"}},
            "code is LLM_INT8 with W4A16; accepted: W8A16",
        ),
        ({"quantization": {"quant_algo": "W8A16", "group_size": 48}}, "group_size is 48; accepted: 16, 32, 64, 128"),
        (
            {"quantization": {"quant_algo": "W8A16", "scale_dtype": "float16"}},
            "scale_dtype is given, but the scales of W8A16 are float32",
        ),
        (
            {"quantization": {"quant_algo": "W8A16", "quantized_layers": {"lm_head": {"quant_algo": "W4A16"}}}},
            "quantized_layers is given with pp_size 2",
        ),
        (
            {"quantization": {"quant_algo": "W8A16", "quantized_layers": {"lm_head": {"quant_algo": "W4A17"}}}},
            'quantized_layers.lm_head.quant_algo is "W4A17"; accepted',
        ),
        ({"quantization": {"quant_algo": "W8A16", "quantized_layers": {"lm_head": {}}}}, "lm_head has no quant_algo"),
        (
            {"quantization": {"quant_algo": "W8A16", "quantized_layers": {"a": {"quantized_layers": {}}}}},
            "a.quantized_layers is given for one layer",
        ),
        (
            {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
            'quantization.kv_cache_quant_algo is "FP8"; accepted: null, INT8',
        ),
        ({"sliding_window_layers": [3, 2]}, "must ascend and stay below num_hidden_layers 4"),
        ({"sliding_window_layers": [4]}, "must ascend and stay below num_hidden_layers 4"),
        ({"sliding_window": None}, "must be given together"),
        ({"num_key_value_heads": 3}, "is not a multiple of num_key_value_heads 3"),
        ({"dtype": "int4"}, "dtype cannot be used: dtype 'int4' is unknown"),
    ],
)
def test_fields_that_disagree(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(_core.CheckpointError, match=complaint):
        CheckpointConfig.from_dict({**CONFIG.to_dict(), **changes}, subject="file")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("yarn"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor"]), inner),
    max_leaves=5,
)


@settings(max_examples=examples(100, 2500), deadline=None)
@given(data=st.data())
def test_any_values_are_read_or_refused(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from([*CONFIG.to_dict(), "strange"]), max_size=3, unique=True))
    changed = {**CONFIG.to_dict(), **{name: data.draw(json_values) for name in names}}
    try:
        config = CheckpointConfig.from_dict(changed, subject="file")
    except _core.CheckpointError:
        return
    assert CheckpointConfig.from_dict(config.to_dict(), subject="again") == config


def test_the_number_of_ranks() -> None:
    assert replace(CONFIG.mapping, tp_size=3, pp_size=5).world_size == 15


def test_experts_of_ranks() -> None:
    mapping = ParallelMapping.of(tp_size=8, pp_size=3, moe_tp_size=2)
    assert mapping == ParallelMapping.of(8, 3, None, 4) == ParallelMapping.of(8, 3, 2, 4)
    shares = [(mapping.experts_of(rank, 8), mapping.moe_tp_rank(rank)) for rank in range(8)]
    groups = [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert shares == [(group, share) for share in range(2) for group in groups]
    assert ParallelMapping.of(8, 3) == ParallelMapping(tp_size=8, pp_size=3)
