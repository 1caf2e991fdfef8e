"""Models for tests of published quantisation, and checks of their checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from support.models import ModelSpec

SPEC = ModelSpec(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96)
WHOLE_SPEC = dataclasses.replace(SPEC, hidden_size=128, head_dim=32, intermediate_size=256)
"""Layers whose inputs are whole blocks of every format."""
_LAYERS = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")


def assert_same_weights(checkpoint: Path, values: Path, dtype: Any) -> None:
    """Checks the weights bit for bit in the checkpoint's type."""
    made, theirs = load_file(checkpoint / "rank0.safetensors"), load_file(values / "model.safetensors")
    for layer in range(SPEC.num_hidden_layers):
        expected = [theirs[f"model.layers.{layer}.{name}_proj.weight"].astype(dtype) for name in _LAYERS]
        found = [
            made[f"transformer.layers.{layer}.{name}.weight"]
            for name in ("attention.qkv", "attention.dense", "mlp.gate", "mlp.fc", "mlp.proj")
        ]
        qkv = np.concatenate(expected[:3])
        # TensorRT-LLM's mlp.fc is the projection before the activation.
        for own, other in zip(found, (qkv, expected[3], expected[5], expected[4], expected[6]), strict=True):
            assert own.dtype == dtype
            assert own.tobytes() == other.tobytes()
