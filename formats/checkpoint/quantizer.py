"""Rounds weights to int8 or four bits, and measures the error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ..._core import LLM_INT8_FACTOR, code_table, dtype_name
from .casting import BFLOAT16, Array, to_float32
from .quantization import QuantConfig

_INT8_LIMIT: Final = 127
_INT4_LIMIT: Final = 7
_UINT4_LIMIT: Final = 15
_UINT4_MIDDLE: Final = 8


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of a weight as checkpoints hold them."""

    weights: Array
    """int8 or FP8 [rows, in], or uint8 [rows, in / 2]: two inputs per byte, the even one in the lower half."""
    scales: Array
    """[rows, groups], of QuantConfig.scale_dtype if has_typed_scales, otherwise float32."""
    zeros: Array | None
    """Zero points [rows, groups], uint8, or int8 if the weights are int8; None without zero points."""
    minimums: Array | None = None
    """Minimums [rows, groups], of QuantConfig.scale_dtype; None without minimums."""


def quantize_rows(rows: Array, config: QuantConfig) -> QuantizedRows:
    """Rounds float32 [rows, in] to the nearest values that the scales allow.

    int8: scale = max|w| / 127 over the row. Four bits: scale = max|w| / 7 over the group; with zero points
    scale = (max(w, 0) - min(w, 0)) / 15 and zero = round(-min(w, 0) / scale). Four-bit scales are rounded to bfloat16
    first, so the integers match the stored scale.
    """
    if not config.has_few_bits:
        scales = np.abs(rows).max(axis=1, keepdims=True, initial=0) / np.float32(_INT8_LIMIT)
        values = np.rint(_quotients(rows, scales)).clip(-_INT8_LIMIT, _INT8_LIMIT)
        return QuantizedRows(values.astype(np.int8), scales, None)
    inputs = rows.shape[1]
    grouped = _groups(rows, config)
    if config.has_zero_point:
        low = np.minimum(grouped.min(axis=2, keepdims=True), 0)
        high = np.maximum(grouped.max(axis=2, keepdims=True), 0)
        scales, wide = _rounded_scales((high - low) / np.float32(_UINT4_LIMIT))
        zeros = np.rint(_quotients(-low, wide)).clip(0, _UINT4_LIMIT)
        values = (np.rint(_quotients(grouped, wide)) + zeros).clip(0, _UINT4_LIMIT)
        integers = values.astype(np.uint8)
        stored_zeros = zeros.astype(np.uint8)[:, :, 0]
    else:
        greatest = np.abs(grouped).max(axis=2, keepdims=True)
        scales, wide = _rounded_scales(greatest / np.float32(_INT4_LIMIT))
        values = np.rint(_quotients(grouped, wide)).clip(-_INT4_LIMIT, _INT4_LIMIT)
        integers = values.astype(np.int8).view(np.uint8) & np.uint8(15)
        stored_zeros = None
    flat = integers.reshape(len(rows), -1)[:, :inputs]
    return QuantizedRows(flat[:, 0::2] | (flat[:, 1::2] << 4), scales[:, :, 0], stored_zeros)


def dequantize_rows(rows: QuantizedRows, config: QuantConfig) -> Array:
    """Returns the values of the integers or codebook entries, float32 [rows, in], in the order of the rows."""
    if config.is_of_eight_bits:
        return _products(rows.weights.astype(np.float32), rows.scales, config)
    if not config.has_few_bits:
        return np.ascontiguousarray(_scaled_differences(rows.weights.astype(np.float32), rows, config))
    values = np.empty((rows.weights.shape[0], 2 * rows.weights.shape[1]), np.int8)
    values[:, 0::2] = rows.weights & 15
    values[:, 1::2] = rows.weights >> 4
    if config.is_codebook:
        return _products(code_table(config.code)[values], rows.scales, config)
    if rows.zeros is None and rows.minimums is None:
        # Sign-extends four bits of two's complement.
        values = ((values ^ _UINT4_MIDDLE) - _UINT4_MIDDLE).astype(np.int8)
    return _scaled_differences(values.astype(np.float32), rows, config)


def _scaled_differences(integers: Array, rows: QuantizedRows, config: QuantConfig) -> Array:
    """Returns (integers - zero points) * scales - minimums, as float32."""
    grouped = _groups(integers, config)
    if rows.zeros is not None:
        grouped = grouped - rows.zeros.astype(np.float32)[:, :, None]
    products = grouped * to_float32(rows.scales)[:, :, None]
    if rows.minimums is not None:
        products = products - to_float32(rows.minimums)[:, :, None]
    result: Array = products.reshape(len(integers), -1)
    return result[:, : integers.shape[1]]


def _products(numbers: Array, scales: Array, config: QuantConfig) -> Array:
    """Returns numbers * scales, as float32, rounded once to value_dtype.

    LLM.int8() values are also multiplied by a factor, in float32.
    """
    assert config.value_dtype is not None
    grouped = _groups(numbers, config)
    products = (grouped * to_float32(scales)[:, :, None]).reshape(len(numbers), -1)[:, : numbers.shape[1]]
    if config.is_llm_int8:
        products *= np.float32(LLM_INT8_FACTOR)
    return to_float32(products.astype(dtype_name(config.value_dtype)))


@dataclass
class QuantizationError:
    """Error of a tensor's quantised values, accumulated over its rows."""

    name: str
    squared_error: float = field(default=0.0, repr=False)
    squared_norm: float = field(default=0.0, repr=False)

    def add(self, rows: Array, quantized: Array) -> None:
        """Adds rows, both float32 [rows, in]."""
        difference = (rows - quantized).astype(np.float64, copy=False)
        self.squared_error += float(np.square(difference).sum())
        self.squared_norm += float(np.square(rows, dtype=np.float64).sum())

    @property
    def relative(self) -> float:
        """||W - quantised W|| / ||W||, Frobenius norms; 0 for a weight of zeros."""
        return float(np.sqrt(self.squared_error / self.squared_norm)) if self.squared_norm > 0 else 0.0


def _groups(rows: Array, config: QuantConfig) -> Array:
    """Returns [rows, groups, size], with the last group padded with zeros."""
    inputs = rows.shape[1]
    size = inputs if config.group_size is None else config.group_size
    padding = -inputs % size
    padded = np.pad(rows, ((0, 0), (0, padding))) if padding else rows
    return padded.reshape(len(rows), -1, size)


def _rounded_scales(scales: Array) -> tuple[Array, Array]:
    """Returns the scales as stored, and those again as float32."""
    stored = scales.astype(BFLOAT16)
    return stored, to_float32(stored)


def _quotients(values: Array, scales: Array) -> Array:
    """Returns values / scales, 0 if the scale is 0."""
    result: Array = np.divide(values, scales, out=np.zeros_like(values), where=scales > 0)
    return result
