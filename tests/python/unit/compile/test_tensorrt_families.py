"""Plans with every family's features: biases, tied weights, RoPE types, windows, normalised heads, odd sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptrt._core import DType
from adaptrt.builder.build import build
from support.engines import make_checkpoint
from support.models import ModelSpec
from support.tensorrt_plans import adapter_nodes, attention_layers, needs_tensorrt_rtx, tensorrt_config

pytestmark = needs_tensorrt_rtx


def rope(rope_type: str, **parameters: object) -> tuple[tuple[str, object], ...]:
    return (("rope_parameters", {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}),)


SPECS = {
    "head80-biases": ModelSpec(
        hidden_size=40, num_attention_heads=2, num_key_value_heads=2, head_dim=80,
        extra=(("attention_bias", True), ("mlp_bias", True)),
    ),
    "tied-dynamic": ModelSpec(
        tie_word_embeddings=True, max_position_embeddings=20, extra=rope("dynamic", factor=2.0)
    ),
    "yarn": ModelSpec(extra=rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "mistral-window": ModelSpec(family="mistral", extra=(("sliding_window", 5),)),
    "qwen2": ModelSpec(family="qwen2"),
    "qwen3": ModelSpec(family="qwen3", num_attention_heads=4, num_key_value_heads=2),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_a_plan_is_made(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    checkpoint = make_checkpoint(spec, tmp_path, DType.FLOAT16)
    config = tensorrt_config("8.6", adapters="dora", max_batch_size=4, max_num_tokens=16, tokens_per_block=4)
    report = build(checkpoint, config, tmp_path / "engine")
    (plan,), (built,) = report.compiled.plans.files, report.compiled.built
    assert len(adapter_nodes(report.directory / plan.stored.file)) == 5 * spec.num_hidden_layers
    for profile in (0, 1):
        assert len(attention_layers(built.layers, profile=profile)) == spec.num_hidden_layers
    names = {tensor.name for tensor in report.compiled.plans.tensors}
    assert ("prompt_lengths" in names) == ("dynamic" in name)
