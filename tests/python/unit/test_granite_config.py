"""Configs of Granite 4, of Granite with windows, and of Granite with experts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from adaptrt import _core
from adaptrt.formats.models.granite_hybrid import GraniteHybridConfig
from adaptrt.formats.models.registry import declare
from adaptrt.formats.models.registry import read_config as read_checkpoint_config
from adaptrt.formats.network.ops import Linear, Rotary
from support.hf_configs import GRANITE4, HF, read_config


@pytest.fixture
def load(tmp_path: Path) -> Any:
    return partial(read_config, tmp_path)


def test_a_published_config_is_read(load: Any) -> None:
    config = load(GRANITE4)
    assert isinstance(config, GraniteHybridConfig)
    assert (config.intermediate_size, config.head_size, config.rotary_base) == (8190, 64, 1e7)
    assert (config.embedding_multiplier, config.logits_scaling) == (12, 10)
    assert config.share_embedding_table


@pytest.mark.parametrize(("kind", "base"), [("rope", 1e7), ("nope", 0.0), (None, 0.0), (..., 0.0)])
def test_positions(load: Any, kind: object, base: float) -> None:
    """transformers rotates only if the field is rope."""
    network = declare(load(GRANITE4, position_embedding_type=kind))
    assert [op.base for op in network.ops if isinstance(op, Rotary)] == [base]


def test_the_older_name_of_layer_types(load: Any) -> None:
    assert load(GRANITE4, layer_types=..., layers_block_type=["attention"] * 3) == load(GRANITE4)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"layer_types": ["conv", "mamba", "attention"]},
            "layer_types has 1 conv, 1 mamba, 1 attention; expected 3 times",
        ),
        ({"layer_types": ["attention"] * 2}, "layer_types has 2 attention; expected 3 times"),
        ({"layer_types": ..., "mamba_n_heads": 7}, "mamba_n_heads times mamba_d_head is 448; expected 5120"),
        ({"num_local_experts": 64, "num_experts_per_tok": 65}, "moe_top_k 65 is more than moe_num_experts 64"),
        ({"position_embedding_type": "alibi"}, 'position_embedding_type is "alibi"; accepted: rope, nope'),
        ({"normalization_function": "layernorm"}, 'normalization_function is "layernorm"; only "rmsnorm" is supported'),
    ],
)
def test_fields_that_cannot_be_served_are_named(load: Any, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(_core.CheckpointError, match=complaint):
        load(GRANITE4, **changes)


@pytest.mark.parametrize(("stated", "read"), [(26, 26), (0, None), (..., 1024)])
def test_experts_may_have_a_shared_mlp(load: Any, stated: object, read: int | None) -> None:
    """0 means none, and transformers' default is 1024."""
    base = {**HF, "num_local_experts": 5, "num_experts_per_tok": 2}
    shared = load({**base, "architectures": ["GraniteMoeSharedForCausalLM"]}, shared_intermediate_size=stated)
    assert (shared.shared_expert_intermediate_size, shared.moe_intermediate_size) == (read, 37)
    names = [weight.name.name for op in declare(shared).ops if isinstance(op, Linear) for weight in op.weights]
    assert ("mlp.fc" in names) == (read is not None)
    with pytest.raises(_core.CheckpointError, match="shared_intermediate_size is 26: an unknown field"):
        load({**base, "architectures": ["GraniteMoeForCausalLM"]}, shared_intermediate_size=26)


SWA = {**HF, "architectures": ["GraniteSWAForCausalLM"], "rope_theta": 5000.0}


@pytest.mark.parametrize(
    ("stated", "bases"),
    [
        (None, [5000.0]),
        ([5000, 0, 5000, 300.5], [5000.0, 300.5, 0.0]),
        ([0, 0, 0, 0], [0.0]),
    ],
)
def test_rotary_bases_by_layer(load: Any, stated: object, bases: list[float]) -> None:
    config = load(SWA, layer_rope_theta=stated)
    assert (config.sliding_window, config.sliding_window_layers) == (128, (1, 2, 3))
    assert read_checkpoint_config(json.loads(config.to_json()), subject="config.json") == config
    assert [op.base for op in declare(config).ops if isinstance(op, Rotary)] == bases


@pytest.mark.parametrize(
    ("stated", "complaint"),
    [
        ([300.0], "layer_rope_theta has 1 numbers; expected 4, one per layer"),
        ([1, 2, 3, -4], r"layer_rope_theta is .*; expected a list of finite numbers, at least 0"),
        ([1, 2, 3, True], r"layer_rope_theta is .*; expected a list of finite numbers, at least 0"),
        (300.0, "layer_rope_theta is 300.0; expected a list of finite numbers"),
    ],
)
def test_other_rotary_bases_are_refused(load: Any, stated: object, complaint: str) -> None:
    with pytest.raises(_core.CheckpointError, match=complaint):
        load(SWA, layer_rope_theta=stated)
