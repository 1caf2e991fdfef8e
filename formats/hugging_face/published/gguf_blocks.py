"""Blocks of GGUF files: integers in groups of 16 or 32, with a scale and perhaps a minimum for each group.

Engines hold exactly these numbers. Scales of scales, as super-blocks have them, are multiplied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from ...._core import CheckpointError, DType, QuantAlgo, WeightCode, dtype_name
from ...checkpoint.casting import FLOAT32, Array
from ...checkpoint.hf_weights import HfWeights, MadeMatrix
from ...checkpoint.quantization import QuantConfig
from ...checkpoint.quantizer import QuantizedRows
from ...gguf.blocks import BlockType, Parts
from ...gguf.tensors import GgufWeights
from .formats import PublishedFormat, in_steps, of_four_bits

_GROUP: Final = 32
_SMALL_GROUP: Final = 16
_LARGEST_FP4: Final = 6
_INT4: Final = QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=_GROUP, scale_dtype=DType.FLOAT16)
_INT8: Final = QuantConfig(quant_algo=QuantAlgo.W8A16, group_size=_GROUP, scale_dtype=DType.FLOAT16)
_LARGE_INT4: Final = replace(_INT4, scale_dtype=DType.FLOAT32)
_LARGE_INT8: Final = replace(_INT8, scale_dtype=DType.FLOAT32)
KEPT: Final[Mapping[str, QuantConfig]] = {
    "Q4_0": _INT4,
    "Q4_1": replace(_INT4, has_minimum=True),
    "Q5_0": _INT8,
    "Q5_1": replace(_INT8, has_minimum=True),
    "Q8_0": _INT8,
    "Q2_K": replace(_LARGE_INT4, group_size=_SMALL_GROUP, has_minimum=True, bits=2),
    "Q3_K": replace(_LARGE_INT4, group_size=_SMALL_GROUP),
    "Q4_K": replace(_LARGE_INT4, has_minimum=True),
    "Q5_K": replace(_LARGE_INT8, has_minimum=True),
    "Q6_K": replace(_LARGE_INT8, group_size=_SMALL_GROUP),
    "IQ4_NL": _INT8,
    "IQ4_XS": _LARGE_INT8,
    "MXFP4": QuantConfig(
        quant_algo=QuantAlgo.W4A16,
        group_size=_GROUP,
        scale_dtype=DType.BFLOAT16,
        code=WeightCode.E2M1,
        value_dtype=DType.BFLOAT16,
    ),
}
"""Quantisation of a checkpoint by type. Numbers of five and six bits, and those of IQ4, are integers of eight bits in
it. Those of three bits have four, because words of three bits hold 32 inputs, and groups 16."""


def gguf_blocks(weights: HfWeights) -> GgufBlocks | None:
    """The quantised matrices of a model in a GGUF file; None for another file, or if there are none."""
    for file in weights.gguf_files:
        if file.matrices:
            return GgufBlocks(file)
    return None


@dataclass(frozen=True)
class GgufBlocks:
    """A PublishedFormat: the types of the tensors are its settings."""

    file: GgufWeights
    has_model_dtype: bool = True
    rounds_activations: bool = True

    @cached_property
    def kept(self) -> QuantConfig | None:
        """See PublishedFormat.kept: the most common quantisation of the matrices."""
        counted = Counter(block_type.name for block_type in self.file.matrices.values() if block_type.name in KEPT)
        return KEPT[counted.most_common(1)[0][0]] if counted else None

    def describe(self) -> str:
        """See PublishedFormat.describe."""
        return " and ".join(sorted({block_type.name for block_type in self.file.matrices.values()}))

    def matrices(self, weights: HfWeights) -> dict[str, MadeMatrix]:
        """See PublishedFormat.matrices."""
        return {name: _Matrix(weights, self.file, name, kind) for name, kind in self.file.matrices.items()}


def format_of(found: PublishedFormat, matrices: Iterable[MadeMatrix]) -> str:
    """Text for people: the types of these matrices, or PublishedFormat.describe() for another format."""
    types = {matrix.type.name for matrix in matrices if isinstance(matrix, _Matrix)}
    return " and ".join(sorted(types)) or found.describe()


def joined(matrices: Sequence[MadeMatrix]) -> QuantConfig | None:
    """Returns a quantisation that holds exactly the numbers of all matrices; None if there is none, or if a matrix is
    not of a GGUF file."""
    own = [matrix.kept_as() if isinstance(matrix, _Matrix) else None for matrix in matrices]
    hows = [how for how in own if how is not None and not how.is_codebook]
    if not hows or len(hows) != len(own):
        return None
    return replace(
        _LARGE_INT8,
        group_size=min(how.group_size or _GROUP for how in hows),
        has_minimum=any(how.has_minimum for how in hows),
    )


@dataclass(frozen=True)
class _Matrix:
    weights: HfWeights
    file: GgufWeights
    name: str
    type: BlockType
    dtype: np.dtype[Any] = FLOAT32

    @property
    def tensors(self) -> tuple[str, ...]:
        """See MadeTensor.tensors."""
        return (self.name,)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        outputs, inputs = self.file.specs[self.name].shape
        return outputs, inputs

    def rows(self, rows: range, step: int) -> Iterator[Array]:
        """See MadeTensor.rows."""
        return self.file.rows(self.name, rows.start, rows.stop, step=step)

    def kept_as(self) -> QuantConfig | None:
        """See QuantizedMatrix.kept_as."""
        return KEPT.get(self.type.name)

    def quantized_rows(self, rows: range, step: int, how: QuantConfig) -> Iterator[QuantizedRows]:
        """See QuantizedMatrix.quantized_rows. Raises CheckpointError for a scale that is infinite or NaN."""
        assert self.type.split is not None
        for taken in in_steps(rows, step):
            stored = self.file.stored_rows(self.name, taken.start, taken.stop)
            with np.errstate(over="ignore", invalid="ignore"):
                parts = self.type.split(stored.reshape(-1, self.type.block_bytes))
                largest = parts.scales * np.float32(_LARGEST_FP4 if how.is_codebook else 1)
            if not np.isfinite(largest).all():
                raise CheckpointError(f"{self.file.where(self.name)}: has a scale that is too large, or not a number")
            if parts.minimums is not None and not np.isfinite(parts.minimums).all():
                raise CheckpointError(f"{self.file.where(self.name)}: has a minimum that is too large, or not a number")
            yield rows_of(parts, len(taken), how)


def rows_of(parts: Parts, num_rows: int, how: QuantConfig) -> QuantizedRows:
    """Rows in the form `how`, which may have smaller groups, more bits, or minimums that the blocks lack."""
    numbers, dtype = parts.integers.reshape(num_rows, -1), dtype_name(how.scale_dtype)
    repeats = numbers.shape[1] // (how.group_size or 1) * num_rows // parts.scales.size
    scales = np.repeat(parts.scales.reshape(num_rows, -1), repeats, axis=1).astype(dtype)
    minimums = None
    if how.has_minimum and parts.minimums is None:
        minimums = np.zeros_like(scales)
    elif parts.minimums is not None:
        minimums = np.repeat(parts.minimums.reshape(num_rows, -1), repeats, axis=1).astype(dtype)
    if how.has_few_bits:
        is_unsigned = how.is_codebook or how.has_minimum
        unsigned = numbers.view(np.uint8) if is_unsigned else (numbers + np.int8(8)).view(np.uint8)
        return of_four_bits(unsigned, scales, None, how, minimums)
    return QuantizedRows(np.ascontiguousarray(numbers), scales, None, minimums)
