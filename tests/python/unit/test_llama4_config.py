"""Configs of Llama 4: chunks, layers without positions, experts; and what other backends refuse."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaptrt._core import CheckpointError, ConfigError
from adaptrt.builder.compile.cuda_support import problems_of_network
from adaptrt.builder.network.onnx_graph import NetworkOptions, onnx_graph
from adaptrt.builder.network.rotary_frequencies import inverse_frequencies
from adaptrt.formats.adapter.expert_parameters import split_expert_parameters
from adaptrt.formats.checkpoint.rotary import Llama3Scaling
from adaptrt.formats.models.registry import declare
from adaptrt.formats.network.adapter_sites import AdaptedModules
from adaptrt.formats.network.operands import QueryScaling
from support.hf_configs import read_config

# Fields of Llama 4 Scout with smaller sizes.
SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
    "image_token_index": 200092, "model_type": "llama4", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "text_config": {
        "_attn_implementation_autoset": True, "attention_bias": False, "attention_chunk_size": 8192,
        "attention_dropout": 0.0, "attn_scale": 0.1, "attn_temperature_tuning": 4, "bos_token_id": 200000,
        "eos_token_id": [200001, 200007, 200008], "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "interleave_moe_layer_step": 1,
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760,
        "model_type": "llama4_text", "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1,
        "num_hidden_layers": 6, "num_key_value_heads": 8, "num_local_experts": 16, "output_router_logits": False,
        "pad_token_id": 200018, "rms_norm_eps": 1e-05, "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": True,
        "vocab_size": 202048},
    "vision_config": {"model_type": "llama4_vision_model"},
}  # fmt: skip
TEXT = {**SCOUT["text_config"], "architectures": ["Llama4ForCausalLM"]}


@pytest.fixture
def load(tmp_path: Path) -> Any:
    return partial(read_config, tmp_path)


def test_scout(load: Any) -> None:
    config = load(SCOUT)
    assert (config.chunked_layers, config.unrotated_layers) == ((0, 1, 2, 4, 5), (3,))
    assert (config.attention_chunk_size, config.query_scaling_length, config.dense_layers) == (8192, 8192, ())
    assert type(config).from_dict(json.loads(config.to_json()), subject="again") == config
    attentions = declare(config).attentions
    assert [op.chunk for op in attentions] == [8192, 8192, 8192, None, 8192, 8192]
    scaling = QueryScaling(beta=0.1, length=8192, offset=1)
    assert [op.query_scaling for op in attentions] == [None, None, None, scaling, None, None]
    assert [op.plain_norm_epsilon for op in attentions] == [1e-5, 1e-5, 1e-5, None, 1e-5, 1e-5]
    assert declare(config).scales_queries_from == 8191


def test_fields_of_the_text(load: Any) -> None:
    dense = load(TEXT, interleave_moe_layer_step=2)
    assert (dense.dense_layers, dense.intermediate_size, dense.moe_intermediate_size) == ((0, 2, 4), 16384, 8192)
    assert load(TEXT, moe_layers=[1, 4]).dense_layers == (0, 2, 3, 5)
    whole = load(TEXT, attention_chunk_size=None, attn_temperature_tuning=False, use_qk_norm=False)
    assert (whole.chunked_layers, whole.query_scaling_beta, whole.has_plain_norms) == ((), 0.0, False)
    assert load(TEXT, attention_chunk_size=...).attention_chunk_size == 8192
    assert load(TEXT, no_rope_layers=[0, 1, 1, 1, 1, 0]).unrotated_layers == (0, 5)
    kinds = ["full_attention"] * 5 + ["chunked_attention"]
    last = load(TEXT, layer_types=kinds)
    assert last.chunked_layers == (5,)
    assert [op.chunk for op in declare(last).attentions] == [None] * 5 + [8192]
    config = load(TEXT)
    damaged = {**json.loads(config.to_json()), "chunked_layers": [7], "attention_chunk_size": None}
    with pytest.raises(CheckpointError, match=r"chunked_layers \[7\] must ascend.*attention_chunk_size is missing"):
        type(config).from_dict(damaged, subject="damaged")


def test_both_orders_of_an_experts_parameter(load: Any) -> None:
    """PEFT takes the inputs of gate_up_proj [experts, hidden, 2 inner] for its outputs; its first releases did not."""
    sizes = {"hidden_size": 5, "intermediate_size": 3, "num_local_experts": 2, "num_hidden_layers": 1, "head_dim": 4}
    modules = AdaptedModules(declare(load(TEXT, **sizes)))
    block, random = "model.layers.0.feed_forward.experts", np.random.default_rng(0)
    for inputs, outputs in ((5, 6), (3, 5)):
        a, b = (random.standard_normal(shape, dtype=np.float32) for shape in ((2 * 7, inputs), (outputs, 7 * 2)))
        # B has a column for each expert of a rank, A a row for each rank of an expert.
        swapped_a = b.reshape(outputs, 7, 2).transpose(2, 1, 0).reshape(2 * 7, outputs)
        swapped_b = a.reshape(2, 7, inputs).transpose(2, 1, 0).reshape(inputs, 7 * 2)
        found = [
            split_expert_parameters({f"{block}.lora_A.weight": first, f"{block}.lora_B.weight": second}, modules)
            for first, second in ((a, b), (swapped_a, swapped_b))
        ]
        assert not found[0].problems
        assert found[0].tensors.keys() == found[1].tensors.keys()
        for name, tensor in found[0].tensors.items():
            np.testing.assert_array_equal(found[1].tensors[name], tensor)
        assert len(found[0].tensors) == 2 * 2 * (2 if outputs == 6 else 1)
    wrong = {f"{block}.lora_A.weight": np.ones((4, 9)), f"{block}.lora_B.weight": np.ones((5, 4))}
    (problem,) = split_expert_parameters(wrong, modules).problems
    assert "gate_up_proj are [2 rank, 6] and [5, 2 rank], of down_proj [2 rank, 5] and [3, 2 rank]" in problem


def test_equal_frequency_factors_have_nothing_between_them() -> None:
    """Longer waves are scaled, shorter ones are not."""
    scaling = Llama3Scaling(
        factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=8192
    )
    plain, _ = inverse_frequencies(128, 500000.0, None)
    found, _ = inverse_frequencies(128, 500000.0, scaling)
    expected = np.where(2 * np.pi / plain > 8192, plain / np.float32(16), plain)
    np.testing.assert_array_equal(found, expected.astype(np.float32))
    assert 0 < (found == plain).sum() < 64


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"no_rope_layers": [2] * 6}, "no_rope_layers is .*; expected 6 times 0 or 1"),
        ({"layer_types": ["sliding_attention"] * 6}, "expected 6 times chunked_attention or full_attention"),
        ({"attn_temperature_tuning": "yes"}, "attn_temperature_tuning is"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"sliding_window": 12}, "sliding_window is 12"),
    ],
)
def test_fields_that_cannot_be_served_are_named(load: Any, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        load(TEXT, **changes)


def test_other_backends_run_it_or_name_what_they_do_not_have(load: Any) -> None:
    network = declare(load(TEXT, hidden_size=64, vocab_size=61, num_local_experts=2))
    assert problems_of_network(network) == []
    with pytest.raises(ConfigError, match=r"Attention\.chunk, Attention\.plain_norm_epsilon"):
        onnx_graph(network, {}, NetworkOptions())
