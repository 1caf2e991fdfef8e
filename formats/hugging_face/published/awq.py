"""AWQ in AutoAWQ's layouts, for matrix products (gemm) and matrix-vector products (gemv)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...._core import QuantAlgo
from ....common.json_fields import JsonFields, describe
from ...checkpoint.casting import BFLOAT16, FLOAT16, Array, to_float32
from ...checkpoint.hf_weights import HfWeights, MadeMatrix
from ...checkpoint.quantization import GROUP_SIZES, QuantConfig
from ...checkpoint.quantizer import QuantizedRows
from .formats import (
    INT32,
    in_steps,
    matrices_of,
    of_four_bits,
    scaled,
    tensor_problems,
    with_scales,
)
from .gptq import HARMLESS, read_group_size
from .packed_numbers import unpacked

METHOD: Final = "awq"
_GEMM: Final = "gemm"
_GEMV: Final = "gemv"
_BITS: Final = 4
_PER_WORD: Final = 8
# The tensors always have zero points, whether they were chosen or are all 8.
_HARMLESS: Final = (
    *HARMLESS,
    "desc_act",
    "do_fuse",
    "fuse_max_seq_len",
    "meta",
    "modules_to_fuse",
    "sym",
    "zero_point",
)
# Position of each output among the eight numbers of a gemm word.
_GEMM_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)


def read_awq(fields: JsonFields) -> Awq | None:
    """Reads AWQ's quantization_config. Notes problems in `fields`; the result may be None then."""
    bits = fields.integer("bits")
    if bits != _BITS:
        fields.problem("bits", f"is {bits}; accepted: {_BITS}")
    group_size = read_group_size(fields)
    named = [name for name in ("version", "format", "checkpoint_format") if fields.raw(name) is not None]
    layouts = {str(fields.raw(name)).lower() for name in named} or {_GEMM}
    if len(layouts) > 1 or not layouts <= {_GEMM, _GEMV}:
        fields.problem(named[0], f"is {describe(fields.raw(named[0]))}; accepted: {_GEMM}, {_GEMV}")
    if str(fields.raw("backend")).lower() == "llm-awq":
        fields.problem("backend", "is llm-awq, whose layout is not supported; accepted: autoawq")
    fields.discard(_HARMLESS)
    kept = None
    if group_size in (None, *GROUP_SIZES):
        kept = QuantConfig(quant_algo=QuantAlgo.W4A16, group_size=group_size, has_zero_point=True)
    return Awq(group_size=group_size, by_output=_GEMV in layouts, kept=kept)


@dataclass(frozen=True)
class Awq:
    """w = scale (u - zero) with four bits; each output and group of inputs has a scale and a zero point."""

    group_size: int | None
    """Inputs per group; None: all inputs."""
    by_output: bool
    """True for the layout of gemv, with a row per output; False for gemm, with a row per input."""
    kept: QuantConfig | None
    has_model_dtype: bool = False
    rounds_activations: bool = False
    method: str = METHOD
    bits: int = _BITS

    def describe(self) -> str:
        """See PublishedFormat.describe."""
        groups = "" if self.group_size is None else f" in groups of {self.group_size}"
        return f"AWQ of {_BITS} bits{groups}"

    def matrices(self, weights: HfWeights) -> dict[str, MadeMatrix]:
        """See PublishedFormat.matrices."""
        kind = _ByOutput if self.by_output else _ByInput

        def matrix_of(source: str) -> tuple[MadeMatrix, list[str]]:
            matrix = kind(weights, source, self.group_size, self.kept)
            stored = weights.spec(f"{source}.qweight").shape
            if len(stored) != 2:
                return matrix, [f"{weights.where(f'{source}.qweight')}: is {list(stored)}; expected a matrix"]
            return matrix, tensor_problems(weights, matrix.expected())

        return matrices_of(weights, ".qweight", self.describe(), matrix_of)


@dataclass(frozen=True)
class _Matrix:
    weights: HfWeights
    source: str
    group_size: int | None
    kept: QuantConfig | None

    @property
    def tensors(self) -> tuple[str, ...]:
        """See MadeMatrix.tensors."""
        return tuple(f"{self.source}.{part}" for part in ("qweight", "qzeros", "scales"))

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        raise NotImplementedError

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the scales, in which AutoAWQ multiplies."""
        return self.weights.spec(f"{self.source}.scales").dtype

    @property
    def _groups(self) -> int:
        return 1 if self.group_size is None else -(-self.shape[1] // self.group_size)

    def _parts(self, rows: range, step: int) -> Iterator[tuple[Array, Array, Array]]:
        """Yields uint8 [rows, in], scales [rows, groups], zero points uint8 [rows, groups], `step` rows at a time."""
        raise NotImplementedError

    def rows(self, rows: range, step: int) -> Iterator[Array]:
        """See MadeMatrix.rows. Equals the result of AutoAWQ's dequantize_gemm."""
        inputs = self.shape[1]
        groups = np.arange(inputs) // (self.group_size or inputs)
        for numbers, scales, zeros in self._parts(rows, step):
            differences = numbers.astype(np.int8) - zeros.astype(np.int8)[:, groups]
            yield scaled(differences, to_float32(scales)[:, groups], self.dtype)

    def kept_as(self) -> QuantConfig | None:
        """See QuantizedMatrix.kept_as."""
        return with_scales(self.kept, self.weights.joined_rows(f"{self.source}.scales"))

    def quantized_rows(self, rows: range, step: int, how: QuantConfig) -> Iterator[QuantizedRows]:
        """See QuantizedMatrix.quantized_rows."""
        for parts in self._parts(rows, step):
            yield of_four_bits(*parts, how)


class _ByInput(_Matrix):
    """Words [in, out / 8], zero points [groups, out / 8], scales [groups, out]."""

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        inputs, words = self.weights.spec(f"{self.source}.qweight").shape
        return words * _PER_WORD, inputs

    def expected(self) -> dict[str, Any]:
        """Dtypes and shapes of the tensors."""
        outputs, inputs = self.shape
        return {
            f"{self.source}.qweight": ((INT32,), (inputs, outputs // _PER_WORD)),
            f"{self.source}.qzeros": ((INT32,), (self._groups, outputs // _PER_WORD)),
            f"{self.source}.scales": ((FLOAT16, BFLOAT16), (self._groups, outputs)),
        }

    def _parts(self, rows: range, step: int) -> Iterator[tuple[Array, Array, Array]]:
        words = self.weights.joined_rows(f"{self.source}.qweight")
        zeros = _in_order(self.weights.joined_rows(f"{self.source}.qzeros")).T
        scales = self.weights.joined_rows(f"{self.source}.scales").T
        for taken in in_steps(rows, step):
            first = taken.start // _PER_WORD
            numbers = _in_order(words[:, first : -(-taken.stop // _PER_WORD)]).T
            these = slice(taken.start - first * _PER_WORD, taken.stop - first * _PER_WORD)
            of_rows = slice(taken.start, taken.stop)
            yield (
                np.ascontiguousarray(numbers[these]),
                np.ascontiguousarray(scales[of_rows]),
                np.ascontiguousarray(zeros[of_rows]),
            )


class _ByOutput(_Matrix):
    """Words [out, in / 8], zero points [out, words], scales [out, 8 * words]; padded beyond the number of groups."""

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        outputs, words = self.weights.spec(f"{self.source}.qweight").shape
        return outputs, words * _PER_WORD

    def expected(self) -> dict[str, Any]:
        """Dtypes and shapes of the tensors."""
        outputs, inputs = self.shape
        # Like AutoAWQ's calculate_zeros_width: its kernel reads zero points of 1024 inputs at a time.
        at_once = {32: 4, 64: 2}.get(self.group_size or inputs, 1)
        words = -(-(self._groups) // (_PER_WORD * at_once)) * at_once
        return {
            f"{self.source}.qweight": ((INT32,), (outputs, inputs // _PER_WORD)),
            f"{self.source}.qzeros": ((INT32,), (outputs, words)),
            f"{self.source}.scales": ((FLOAT16, BFLOAT16), (outputs, words * _PER_WORD)),
        }

    def _parts(self, rows: range, step: int) -> Iterator[tuple[Array, Array, Array]]:
        groups = self._groups
        for taken in in_steps(rows, step):
            words, zeros, scales = (self.weights.joined_rows(name, taken) for name in self.tensors)
            yield (
                unpacked(words, _BITS),
                np.ascontiguousarray(scales[:, :groups]),
                np.ascontiguousarray(unpacked(zeros, _BITS)[:, :groups]),
            )


def _in_order(words: Array) -> Array:
    """Unpacks gemm's words to uint8 [rows, 8 * words], in the order of the outputs."""
    numbers = unpacked(words, _BITS).reshape(len(words), -1, _PER_WORD)
    result: Array = numbers[:, :, list(_GEMM_PLACES)].reshape(len(words), -1)
    return result
