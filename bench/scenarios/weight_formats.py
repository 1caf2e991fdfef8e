"""Builds an engine in any weight format. Linear layers are rounded without calibration while they are read.

Run as `python -m scenarios.weight_formats MODEL_DIR ENGINE FORMAT MAX_BATCH_SIZE MAX_NUM_TOKENS MAX_SEQ_LEN`.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from adaptrt._core import LLM_INT8_FACTOR, DType, QuantAlgo, WeightCode, code_table, dtype_name
from adaptrt.builder.build import build
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.formats.checkpoint.casting import Array, to_float32
from adaptrt.formats.checkpoint.quantization import QuantConfig
from adaptrt.formats.checkpoint.quantizer import QuantizationError, QuantizedRows
from adaptrt.formats.checkpoint.rank_tensors import PlainTensors
from adaptrt.formats.checkpoint.tensor_names import EMBEDDING, LM_HEAD, LM_HEAD_MODULE
from adaptrt.formats.engine.build_config import BuildConfig
from adaptrt.formats.models.registry import declare

Floats = npt.NDArray[np.float32]

_LARGEST: Final = {WeightCode.NF4: 1.0, WeightCode.E4M3: 448.0, WeightCode.LLM_INT8: 1.0}
_E2M1_EXPONENT: Final = 2
"""Exponent of 4, the largest power of two among its numbers."""


def _of_four_bits(code: WeightCode, group_size: int, scales: DType) -> QuantConfig:
    return QuantConfig(
        quant_algo=QuantAlgo.W4A16, group_size=group_size, scale_dtype=scales, code=code, value_dtype=DType.BFLOAT16
    )


def _of_eight_bits(code: WeightCode, group_size: int | None) -> QuantConfig:
    return QuantConfig(
        quant_algo=QuantAlgo.W8A16, group_size=group_size, scale_dtype=DType.FLOAT32, code=code,
        value_dtype=DType.BFLOAT16,
    )  # fmt: skip


def _as_gptq(bits: int, group_size: int, *, act_order: bool = False) -> QuantConfig:
    return QuantConfig(
        quant_algo=QuantAlgo.W4A16, group_size=group_size, scale_dtype=DType.FLOAT16, bits=bits, act_order=act_order
    )


FORMATS: Final[dict[str, QuantConfig | None]] = {
    "bf16": None,
    "w8a16": QuantConfig(quant_algo=QuantAlgo.W8A16),
    "w8a8": QuantConfig(quant_algo=QuantAlgo.W8A8),
    "llm-int8": _of_eight_bits(WeightCode.LLM_INT8, None),
    "fp8-128": _of_eight_bits(WeightCode.E4M3, 128),
    "zero-points-128": QuantConfig(
        quant_algo=QuantAlgo.W8A16, group_size=128, has_zero_point=True, scale_dtype=DType.FLOAT16
    ),
    "w4a16-128": QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=128),
    "w4a8-128": QuantConfig(quant_algo=QuantAlgo.W4A8, group_size=128),
    "act-order-128": _as_gptq(4, 128, act_order=True),
    "nf4-64": _of_four_bits(WeightCode.NF4, 64, DType.FLOAT32),
    "mxfp4": _of_four_bits(WeightCode.E2M1, 32, DType.BFLOAT16),
    "3-bits-128": _as_gptq(3, 128),
    "3-bits-128-int8": _as_gptq(3, 128).with_int8_activations(),
    "2-bits-64": _as_gptq(2, 64),
    "2-bits-64-int8": _as_gptq(2, 64).with_int8_activations(),
}
"""Formats by name; a number is the size of a group. The names that end in int8 have int8 activations."""


def main(model: str, engine: str, name: str, *limits: str) -> None:
    """Builds an engine without LoRA."""
    checkpoint, how = Checkpoint.of_model(Path(model), DType.BFLOAT16), FORMATS[name]
    sizes = dict(zip(("max_batch_size", "max_num_tokens", "max_seq_len"), map(int, limits), strict=True))
    build(checkpoint if how is None else rounded(checkpoint, how), BuildConfig(**sizes), Path(engine))


def rounded(checkpoint: Checkpoint, how: QuantConfig) -> Checkpoint:
    """Returns the checkpoint with all layers except lm_head quantised as `how`. Uses AdaptRT's own quantiser if that
    supports the format.
    """
    if how.can_be_made:
        return checkpoint.quantized(how)
    (tensors,) = checkpoint.ranks
    config = replace(checkpoint.config, quantization=replace(how, exclude_modules=(LM_HEAD_MODULE,)))
    lm_head = EMBEDDING if checkpoint.config.lm_head_is_embedding else LM_HEAD
    # RoundedTensors implements RankTensors.
    network = declare(config, checkpoint.network)
    return replace(checkpoint, network=network, ranks=(RoundedTensors(tensors, how, lm_head),))  # type: ignore[arg-type]


@dataclass(frozen=True)
class RoundedTensors:
    """RankTensors that quantise unquantised RankTensors."""

    source: PlainTensors
    how: QuantConfig
    lm_head_source: str
    errors: tuple[QuantizationError, ...] = ()

    def rows(self, name: str, rows: range, step: int | None = None) -> Iterator[Array]:
        """Implements PlainTensors.rows."""
        return self.source.rows(self.lm_head_source if name == LM_HEAD else name, rows, step)

    def quantized_rows(self, name: str, rows: range, step: int | None = None) -> Iterator[QuantizedRows]:
        """Implements RankTensors.quantized_rows."""
        for piece in self.source.rows(name, rows, step):
            values = to_float32(piece)
            yield round_rows(values[:, self._order(name, values.shape[1])] if self.how.act_order else values, self.how)

    def permutations(self, name: str) -> Array:
        """Implements RankTensors.permutations; for speed, any permutation will do."""
        piece = next(self.source.rows(name, range(1)))
        parts = 3 if name.endswith("qkv.weight") else 1
        return np.tile(self._order(name, piece.shape[1]), (parts, 1))

    def _order(self, name: str, inputs: int) -> Array:
        return np.random.default_rng(zlib.crc32(name.encode())).permutation(inputs).astype(np.int32)


def round_rows(values: Floats, how: QuantConfig) -> QuantizedRows:
    """Rounds float32 [rows, in] to the nearest values. A scale covers its group's maximum magnitude."""
    inputs = values.shape[1]
    groups = values.reshape(len(values), -1, how.group_size or inputs)
    greatest = np.abs(groups).max(axis=2, keepdims=True) + np.float32(1e-12)
    stored, scales, zeros = _scales(groups, greatest, how)
    quotients = (groups / scales).reshape(values.shape)
    if how.code is WeightCode.E4M3:
        return QuantizedRows(quotients.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn), stored[:, :, 0], None)
    if how.code is WeightCode.LLM_INT8:
        return QuantizedRows(np.rint(quotients / np.float32(LLM_INT8_FACTOR)).astype(np.int8), stored[:, :, 0], None)
    if how.is_codebook:
        return QuantizedRows(_pairs(_nearest(quotients, how.code)), stored[:, :, 0], None)
    if how.quant_algo is QuantAlgo.W8A16:
        integers = np.rint(quotients.reshape(groups.shape)) + (0 if zeros is None else zeros)
        flat = integers.clip(-128, 127).astype(np.int8).reshape(values.shape)
        return QuantizedRows(flat, stored[:, :, 0], None if zeros is None else zeros[:, :, 0].astype(np.int8))
    limit = 1 << (how.bits - 1)
    integers = np.rint(quotients).clip(-limit, limit - 1).astype(np.int8).view(np.uint8) & np.uint8(15)
    return QuantizedRows(_pairs(integers), stored[:, :, 0], None)


def _scales(groups: Floats, greatest: Floats, how: QuantConfig) -> tuple[Array, Floats, Floats | None]:
    """Returns the scales in their type and in float32, and the zero points, all [rows, groups, 1]."""
    zeros = None
    if how.code is WeightCode.E2M1:
        made = np.exp2(np.floor(np.log2(greatest)) - _E2M1_EXPONENT)
    elif how.is_codebook:
        made = greatest / np.float32(_LARGEST[how.code])
    elif how.has_zero_point:
        low, high = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
        made = (high - low) / np.float32(255) + np.float32(1e-12)
        zeros = np.rint(-low / made).clip(0, 255) - 128
    else:
        bits = 8 if how.quant_algo is QuantAlgo.W8A16 else how.bits
        made = greatest / np.float32(2 ** (bits - 1) - 0.5)
    dtype = dtype_name(how.scale_dtype if how.has_typed_scales else DType.FLOAT32)
    stored = made.astype(dtype)
    return stored, to_float32(stored), zeros


def _nearest(quotients: Floats, code: WeightCode) -> npt.NDArray[np.uint8]:
    """Returns the indices of the nearest numbers in a code's table."""
    table = code_table(code)
    order = np.argsort(table, kind="stable")
    middles = (table[order][1:] + table[order][:-1]) / 2
    return order.astype(np.uint8)[np.searchsorted(middles, quotients)]


def _pairs(numbers: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    paired: npt.NDArray[np.uint8] = numbers[:, 0::2] | (numbers[:, 1::2] << 4)
    return paired


if __name__ == "__main__":
    main(*sys.argv[1:])
