"""Inverse frequencies of the rotary embedding, in float32, by the formulas of transformers' modeling_rope_utils.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...formats.checkpoint.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RotaryScaling,
    YarnScaling,
    yarn_mscale,
)

FloatArray = np.ndarray[Any, np.dtype[np.float32]]


def inverse_frequencies(
    head_size: int, base: float, scaling: RotaryScaling | ProportionalScaling | None
) -> tuple[FloatArray, float]:
    """Returns (float32[head_size / 2], factor of cosine and sine).

    For DynamicScaling they hold for lengths up to max_position_embeddings, for LongRopeScaling up to
    original_max_position_embeddings. A base of 0 means no rotation.
    """
    if base == 0.0:  # No rotation.
        return np.zeros(head_size // 2, np.float32), 1.0
    plain = (np.float32(1.0) / base_powers(head_size, base)).astype(np.float32)
    if scaling is None or isinstance(scaling, DynamicScaling):
        return plain, 1.0
    if isinstance(scaling, LinearScaling):
        return plain / np.float32(scaling.factor), 1.0
    if isinstance(scaling, ProportionalScaling):
        rotated = np.arange(head_size // 2) < int(scaling.share * head_size // 2)
        return np.where(rotated, plain / np.float32(scaling.factor), np.float32(0.0)), 1.0
    if isinstance(scaling, Llama3Scaling):
        return _llama3(plain, scaling), 1.0
    if isinstance(scaling, LongRopeScaling):
        return _divided(head_size, base, scaling.short_factor), scaling.attention_factor
    return _yarn(head_size, base, scaling)


def long_inverse_frequencies(head_size: int, base: float, scaling: LongRopeScaling) -> FloatArray:
    """LongRopeScaling's inverse frequencies for lengths beyond original_max_position_embeddings."""
    return _divided(head_size, base, scaling.long_factor)


def _divided(head_size: int, base: float, factors: tuple[float, ...]) -> FloatArray:
    divided: FloatArray = np.float32(1.0) / (np.asarray(factors, np.float32) * base_powers(head_size, base))
    return divided


def base_powers(head_size: int, base: float) -> FloatArray:
    """base^(2 i / head_size)."""
    powers: FloatArray = np.float32(base) ** exponents(head_size)
    return powers


def exponents(head_size: int) -> FloatArray:
    """2 i / head_size for i in [0, head_size / 2)."""
    result: FloatArray = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    return result


def _llama3(plain: FloatArray, scaling: Llama3Scaling) -> FloatArray:
    original = scaling.original_max_position_embeddings
    longest = original / scaling.low_freq_factor
    shortest = original / scaling.high_freq_factor
    wavelengths = np.float32(2 * math.pi) / plain
    scaled: FloatArray = np.where(wavelengths > longest, plain / np.float32(scaling.factor), plain)
    if scaling.high_freq_factor == scaling.low_freq_factor:  # as in Llama 4
        return scaled.astype(np.float32)
    smooth = (original / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    interpolated = (1 - smooth) * scaled / np.float32(scaling.factor) + smooth * scaled
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return np.where(between, interpolated, scaled).astype(np.float32)


def _yarn(head_size: int, base: float, scaling: YarnScaling) -> tuple[FloatArray, float]:
    powers = base_powers(head_size, base)
    extrapolated = np.float32(1.0) / powers
    interpolated = np.float32(1.0) / (np.float32(scaling.factor) * powers)
    low = _yarn_dimension(scaling.beta_fast, head_size, base, scaling)
    high = _yarn_dimension(scaling.beta_slow, head_size, base, scaling)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001  # The ramp must not have zero width.
    ramp = np.clip((np.arange(head_size // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    share = (1 - ramp).astype(np.float32)
    frequencies = interpolated * (1 - share) + extrapolated * share
    return frequencies.astype(np.float32), _yarn_attention_factor(scaling)


def _yarn_dimension(rotations: float, head_size: int, base: float, scaling: YarnScaling) -> float:
    """The dimension that makes `rotations` turns over the original context."""
    turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
    return head_size * math.log(turns) / (2 * math.log(base))


def _yarn_attention_factor(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor, 1.0)
