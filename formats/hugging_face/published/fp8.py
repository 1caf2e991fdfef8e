"""FP8 with a scale per block of a matrix, as DeepSeek and Qwen publish it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ...._core import CheckpointError, DType, QuantAlgo, WeightCode, dtype_from_name, dtype_name
from ....common.json_fields import JsonFields, describe, is_integer
from ...checkpoint.casting import BFLOAT16, CHECKPOINT_DTYPES, FLOAT8, FLOAT32, Array, cast, to_float32
from ...checkpoint.hf_weights import HfWeights, MadeMatrix
from ...checkpoint.quantization import FLOAT8_GROUPS, QuantConfig
from ...checkpoint.quantizer import QuantizedRows
from .formats import WEIGHT, in_steps, layers_with, raise_problems, scaled, tensor_problems, with_scales

METHOD: Final = "fp8"
_GREATEST: Final = np.float32(448)
_NAN: Final = 0x7F
# Kernels multiply scales by 256; the result must be finite.
_SCALE_LIMIT: Final = np.float32(2.0**119)
_SCALE: Final = ".weight_scale_inv"
_ACTIVATION_SCALE: Final = ".activation_scale"
# Rounding of activations for FP8 products, which AdaptRT does not do; and lists of layers, which the tensors tell.
_HARMLESS: Final = (
    *("activation_scheme", "dequantize", "ignored_layers", "modules_to_convert", "modules_to_not_convert"),
    "scale_fmt",
)


def read_fp8(fields: JsonFields) -> BlockFp8 | None:
    """Reads FP8's quantization_config. Notes problems in `fields`; the result may be None then."""
    fields.string("fmt", choices=("e4m3",), default="e4m3")
    fields.string("expert_dtype", choices=("fp8",), default="fp8")
    block = read_block(fields, "weight_block_size")
    fields.discard(_HARMLESS)
    return BlockFp8(block, kept_float8(None if block is None else block[1]))


def read_block(fields: JsonFields, name: str) -> tuple[int, int] | None:
    """Reads the outputs and inputs of a block; None, for null or a missing field: the whole matrix is one block."""
    block = fields.raw(name)
    if block is None:
        return None
    if isinstance(block, list) and len(block) == 2 and all(is_integer(size) and size > 0 for size in block):
        return block[0], block[1]
    fields.problem(name, f"is {describe(block)}; expected the outputs and inputs of a block")
    return None


def kept_float8(group_size: int | None) -> QuantConfig | None:
    """Returns FP8's quantisation in a checkpoint, without dtypes; None: checkpoints cannot hold groups of this size."""
    if group_size is not None and group_size % FLOAT8_GROUPS != 0:
        return None
    return QuantConfig(
        quant_algo=QuantAlgo.W8A16, code=WeightCode.E4M3, group_size=group_size, value_dtype=DType.FLOAT32
    )


def number_of_blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Number of blocks along outputs and inputs, including partial blocks."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


@dataclass(frozen=True)
class BlockFp8:
    """w = scale q, with a scale per block."""

    block: tuple[int, int] | None
    """Outputs and inputs of a block; None: the matrix is one block."""
    kept: QuantConfig | None
    has_model_dtype: bool = True
    rounds_activations: bool = True

    def describe(self) -> str:
        """See PublishedFormat.describe."""
        return "FP8" if self.block is None else f"FP8 in blocks of {self.block[0]} x {self.block[1]}"

    def matrices(self, weights: HfWeights) -> dict[str, MadeMatrix]:
        """See PublishedFormat.matrices."""
        found: dict[str, MadeMatrix] = {}
        problems: list[str] = []
        for source in layers_with(weights, _SCALE, self.describe()):
            name = source + WEIGHT
            if name not in weights or len(weights.spec(name).shape) != 2:
                problems.append(f"{weights.where(source + _SCALE)}: expected a weight [out, in] with it")
                continue
            outputs, inputs = weights.spec(name).shape
            stored = weights.spec(source + _SCALE).shape
            grid = stored if self.block is None else number_of_blocks((outputs, inputs), self.block)
            if self.block is None and stored not in ((), (1,), (1, 1)):
                problems.append(f"{weights.where(source + _SCALE)}: is {list(stored)}; expected one scale")
            expected: dict[str, Any] = {
                name: ((FLOAT8,), (outputs, inputs)),
                source + _SCALE: ((FLOAT32, BFLOAT16), grid),
            }
            if source + _ACTIVATION_SCALE in weights:
                expected[source + _ACTIVATION_SCALE] = (
                    CHECKPOINT_DTYPES,
                    weights.spec(source + _ACTIVATION_SCALE).shape,
                )
            problems += tensor_problems(weights, expected)
            block = self.block or (outputs, inputs)
            found[name] = ScaledMatrix(weights, tuple(expected), (outputs, inputs), block, FLOAT32, self.kept)
        raise_problems(weights, problems)
        return found


@dataclass(frozen=True)
class ScaledMatrix:
    """FP8 numbers times the scale of their block: computed in float32, rounded once."""

    weights: HfWeights
    tensors: tuple[str, ...]
    """Names of the numbers, of their scales, and of tensors that are not used."""
    shape: tuple[int, int]
    block: tuple[int, int]
    """Outputs and inputs that share a scale."""
    dtype: np.dtype[Any]
    kept: QuantConfig | None
    """Quantisation in a checkpoint, as config.json tells; None: not kept."""

    def rows(self, rows: range, step: int) -> Iterator[Array]:
        """See MadeMatrix.rows."""
        scales = to_float32(self._scales())
        of_column = np.arange(self.shape[1]) // self.block[1]
        for taken in in_steps(rows, step):
            values = self._numbers(taken).astype(np.float32)
            yield scaled(values, scales[self._blocks_of(taken)][:, of_column], self.dtype)

    def kept_as(self) -> QuantConfig | None:
        """See QuantizedMatrix.kept_as."""
        kept = with_scales(self.kept, scales := self._scales())
        if kept is None or self.shape[1] % 2 != 0 or (np.abs(to_float32(scales)) >= _SCALE_LIMIT).any():
            return None
        return replace(kept, value_dtype=dtype_from_name(str(self.dtype)))

    def quantized_rows(self, rows: range, step: int, how: QuantConfig) -> Iterator[QuantizedRows]:
        """See QuantizedMatrix.quantized_rows."""
        scales = self._scales()
        for taken in in_steps(rows, step):
            numbers, own = self._numbers(taken), scales[self._blocks_of(taken)]
            self._check_values(numbers, own, how)
            yield QuantizedRows(numbers, own.astype(dtype_name(how.scale_dtype)), None)

    def _check_values(self, numbers: Array, scales: Array, how: QuantConfig) -> None:
        """Raises CheckpointError for NaN, and for values that overflow value_dtype."""
        where = self.weights.where(self.tensors[0])
        if ((numbers.view(np.uint8) & _NAN) == _NAN).any():
            raise CheckpointError(f"{where}: holds nan; weights must be finite")
        assert how.value_dtype is not None
        dtype, wide = np.dtype(dtype_name(how.value_dtype)), to_float32(scales)
        with np.errstate(over="ignore"):
            may_overflow = not np.isfinite((_GREATEST * np.abs(wide).max(initial=0)).astype(dtype))
        if may_overflow:
            of_column = np.arange(self.shape[1]) // self.block[1]
            cast(scaled(numbers.astype(np.float32), wide[:, of_column], FLOAT32), dtype, where)

    def _numbers(self, rows: range) -> Array:
        return self.weights.joined_rows(self.tensors[0], rows)

    def _scales(self) -> Array:
        return self.weights.joined_rows(self.tensors[1]).reshape(number_of_blocks(self.shape, self.block))

    def _blocks_of(self, rows: range) -> Array:
        return np.arange(rows.start, rows.stop) // self.block[0]
