"""Blocks of GGUF files that have a scale for every 32 numbers. Engines hold exactly these numbers and scales."""

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
from ...gguf.blocks import BlockType
from ...gguf.tensors import GgufWeights
from .formats import PublishedFormat, in_steps, of_four_bits

_GROUP: Final = 32
_LARGEST_FP4: Final = 6
_INT8: Final = QuantConfig(quant_algo=QuantAlgo.W8A16, group_size=_GROUP, scale_dtype=DType.FLOAT16)
_KEPT: Final[Mapping[str, QuantConfig]] = {
    "Q4_0": QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=_GROUP, scale_dtype=DType.FLOAT16),
    "Q5_0": _INT8,
    "Q8_0": _INT8,
    "IQ4_NL": _INT8,
    "IQ4_XS": QuantConfig(quant_algo=QuantAlgo.W8A16, group_size=_GROUP, scale_dtype=DType.FLOAT32),
    "MXFP4": QuantConfig(
        quant_algo=QuantAlgo.W4A16,
        group_size=_GROUP,
        scale_dtype=DType.BFLOAT16,
        code=WeightCode.E2M1,
        value_dtype=DType.BFLOAT16,
    ),
}
"""Quantisation of a checkpoint by type. The numbers of Q5_0 and IQ4 are integers of eight bits in it."""


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
        counted = Counter(block_type.name for block_type in self.file.matrices.values() if block_type.name in _KEPT)
        return _KEPT[counted.most_common(1)[0][0]] if counted else None

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
    return replace(_INT8, scale_dtype=DType.FLOAT32)


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
        return _KEPT.get(self.type.name)

    def quantized_rows(self, rows: range, step: int, how: QuantConfig) -> Iterator[QuantizedRows]:
        """See QuantizedMatrix.quantized_rows. Raises CheckpointError for a scale that is infinite or NaN."""
        assert self.type.split is not None
        for taken in in_steps(rows, step):
            stored = self.file.stored_rows(self.name, taken.start, taken.stop)
            scales, numbers = self.type.split(stored.reshape(-1, self.type.block_bytes))
            scales, numbers = scales.reshape(len(taken), -1), numbers.reshape(len(taken), -1)
            with np.errstate(over="ignore"):
                largest = scales * np.float32(_LARGEST_FP4 if how.is_codebook else 1)
            if not np.isfinite(largest).all():
                raise CheckpointError(f"{self.file.where(self.name)}: has a scale that is too large, or not a number")
            yield _rows_of(numbers, scales, how)


def _rows_of(numbers: Array, scales: Array, how: QuantConfig) -> QuantizedRows:
    if how.has_few_bits:
        unsigned = numbers if how.is_codebook else (numbers + np.int8(8)).view(np.uint8)
        return of_four_bits(unsigned, scales, None, how)
    return QuantizedRows(np.ascontiguousarray(numbers), scales.astype(dtype_name(how.scale_dtype)), None)
