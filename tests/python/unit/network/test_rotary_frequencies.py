"""Inverse frequencies against transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from adaptrt.builder.network.rotary_frequencies import inverse_frequencies
from adaptrt.formats.checkpoint.rotary import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from support.models import ModelSpec

# numpy and torch round powers differently, in the last bit or two of float32.
RELATIVE_TOLERANCE = 5e-7

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "linear": (LinearScaling(factor=3.0), {"factor": 3.0}),
    "dynamic": (DynamicScaling(factor=3.0), {"factor": 3.0}),
    "llama3": (Llama3Scaling(**LLAMA3), LLAMA3),
    "yarn": (
        YarnScaling(factor=4.0, original_max_position_embeddings=64),
        {"factor": 4.0, "original_max_position_embeddings": 64},
    ),
    # theta 10 makes slow dimensions rotate more often than the last one.
    "yarn-long": (
        YarnScaling(factor=4.0, original_max_position_embeddings=1024),
        {"factor": 4.0, "original_max_position_embeddings": 1024},
    ),
    "yarn-mscale": (
        YarnScaling(factor=4.0, original_max_position_embeddings=64, mscale=1.2, mscale_all_dim=0.7, truncate=False),
        {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.2, "mscale_all_dim": 0.7,
         "truncate": False},
    ),
    "yarn-attention-factor": (
        YarnScaling(
            factor=4.0, original_max_position_embeddings=64, attention_factor=1.5, beta_fast=20.0, beta_slow=2.0
        ),
        {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5, "beta_fast": 20.0,
         "beta_slow": 2.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("head_dim", [12, 64, 80])
@pytest.mark.parametrize("theta", [10.0, 10000.0, 500000.0])
@pytest.mark.parametrize("name", [None, *SCALINGS])
def test_frequencies_are_transformers(name: str | None, theta: float, head_dim: int) -> None:
    scaling, parameters = SCALINGS[name] if name else (None, {})
    kind = name.split("-")[0] if name else "default"
    rope = {"rope_type": kind, "rope_theta": theta, **parameters}
    config = ModelSpec(head_dim=head_dim, max_position_embeddings=512, extra=(("rope_parameters", rope),)).config()
    compute = ROPE_INIT_FUNCTIONS[kind] if name else LlamaRotaryEmbedding.compute_default_rope_parameters
    expected, expected_factor = compute(config)
    actual, factor = inverse_frequencies(head_dim, theta, scaling)
    assert actual.dtype == np.float32
    assert factor == pytest.approx(expected_factor, rel=1e-12)
    np.testing.assert_allclose(actual, expected.numpy(), rtol=RELATIVE_TOLERANCE)
