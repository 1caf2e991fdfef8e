"""MXFP4, in which GPT-OSS is published: E2M1 numbers, with a power of two per 32 of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...._core import CheckpointError, DType, QuantAlgo, WeightCode, code_table
from ....common.json_fields import JsonFields
from ...checkpoint.casting import BFLOAT16, Array
from ...checkpoint.hf_weights import HfWeights, MadeMatrix
from ...checkpoint.quantization import QuantConfig
from ...checkpoint.quantizer import QuantizedRows
from ...checkpoint.stacked_experts import ALTERNATING_EXPERTS, layer_name
from .formats import WEIGHT, in_steps, layers_with, of_four_bits, raise_problems, scaled, tensor_problems

METHOD: Final = "mxfp4"
# Settings of loading; they do not change the tensors.
_HARMLESS: Final = ("dequantize", "modules_to_not_convert")
_UINT8: Final = np.dtype(np.uint8)
_BLOCKS: Final = "_blocks"
_SCALES: Final = "_scales"
_BLOCK_SIZE: Final = 32
_BLOCK_BYTES: Final = _BLOCK_SIZE // 2
_BIAS: Final = 127
_NO_NUMBER: Final = 255
# The largest number is 6 = 1.5 * 2^2, and the largest power of two in bfloat16 is 2^127.
_LARGEST_EXPONENT: Final = 125
_KEPT: Final = QuantConfig(
    quant_algo=QuantAlgo.W4A16,
    group_size=_BLOCK_SIZE,
    scale_dtype=DType.BFLOAT16,
    code=WeightCode.E2M1,
    value_dtype=DType.BFLOAT16,
)


def read_mxfp4(fields: JsonFields) -> MxFp4:
    """Reads MXFP4's quantization_config."""
    fields.discard(_HARMLESS)
    return MxFp4()


@dataclass(frozen=True)
class MxFp4:
    """Bytes *_blocks [experts, out, in / 32, 16] and *_scales [experts, out, in / 32].

    A byte of blocks has two numbers, the first in its lower half. A byte of scales is an exponent of two, plus 127.
    """

    kept: QuantConfig | None = _KEPT
    # transformers multiplies in the model's dtype, but bfloat16 holds all products exactly.
    has_model_dtype: bool = False
    rounds_activations: bool = False

    def describe(self) -> str:
        """See PublishedFormat.describe."""
        return "MXFP4"

    def matrices(self, weights: HfWeights) -> dict[str, MadeMatrix]:
        """See PublishedFormat.matrices. Each expert's linear layers are separate."""
        found: dict[str, MadeMatrix] = {}
        problems: list[str] = []
        for source in layers_with(weights, _BLOCKS, self.describe()):
            noted = _problems_of(weights, source)
            problems += noted
            if not noted:
                found |= _matrices_of(weights, source)
        raise_problems(weights, problems)
        return found


def _problems_of(weights: HfWeights, source: str) -> list[str]:
    blocks, parameter = source + _BLOCKS, source.rpartition(".")[2]
    if parameter not in ALTERNATING_EXPERTS.layers:
        accepted = ", ".join(ALTERNATING_EXPERTS.layers)
        return [f"{weights.where(blocks)}: is not a layer of experts; accepted: {accepted}"]
    shape = weights.spec(blocks).shape
    layers = len(ALTERNATING_EXPERTS.layers[parameter])
    if len(shape) != 4 or shape[3] != _BLOCK_BYTES or shape[1] % layers != 0:
        odd = "" if layers == 1 else f", out a multiple of {layers}"
        return [f"{weights.where(blocks)}: is {list(shape)}; expected [experts, out, in / 32, {_BLOCK_BYTES}]{odd}"]
    return tensor_problems(weights, {blocks: ((_UINT8,), shape), source + _SCALES: ((_UINT8,), shape[:3])})


def _matrices_of(weights: HfWeights, source: str) -> dict[str, MadeMatrix]:
    block, _, parameter = source.rpartition(".")
    layers = ALTERNATING_EXPERTS.layers[parameter]
    experts, outputs, _, _ = weights.spec(source + _BLOCKS).shape
    return {
        layer_name(block, expert, layer) + WEIGHT: _Matrix(
            weights, source, expert, ALTERNATING_EXPERTS.outputs_of(number, len(layers), outputs)
        )
        for expert in range(experts)
        for number, layer in enumerate(layers)
    }


@dataclass(frozen=True)
class _Matrix:
    """Equals the result of transformers' convert_moe_packed_tensors, for some outputs of one expert."""

    weights: HfWeights
    source: str
    expert: int
    outputs: range
    dtype: np.dtype[Any] = BFLOAT16

    @property
    def tensors(self) -> tuple[str, ...]:
        """See MadeTensor.tensors."""
        return (self.source + _BLOCKS, self.source + _SCALES)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        return len(self.outputs), self.weights.spec(self.source + _SCALES).shape[2] * _BLOCK_SIZE

    def rows(self, rows: range, step: int) -> Iterator[Array]:
        """See MadeTensor.rows."""
        table = code_table(WeightCode.E2M1)
        for numbers, scales in self._pieces(rows, step):
            in_blocks = table[numbers].reshape(len(scales), -1, _BLOCK_SIZE)
            yield scaled(in_blocks, scales[:, :, None], self.dtype).reshape(len(scales), -1)

    def kept_as(self) -> QuantConfig | None:
        """See QuantizedMatrix.kept_as. Requires values that do not overflow bfloat16."""
        exponents = self._exponents(range(len(self.outputs)))
        return _KEPT if exponents.max(initial=0) <= _LARGEST_EXPONENT else None

    def quantized_rows(self, rows: range, step: int, how: QuantConfig) -> Iterator[QuantizedRows]:
        """See QuantizedMatrix.quantized_rows."""
        for numbers, scales in self._pieces(rows, step):
            yield of_four_bits(numbers, scales, None, how)

    def _pieces(self, rows: range, step: int) -> Iterator[tuple[Array, Array]]:
        """Yields numbers uint8 [rows, in] and scales float32 [rows, groups], `step` rows at a time."""
        scales = np.ldexp(np.float32(1.0), self._exponents(rows))
        octets = self._of_expert(self.source + _BLOCKS, rows).reshape(len(rows), -1)
        for taken in in_steps(range(len(rows)), step):
            piece = octets[taken.start : taken.stop]
            numbers = np.empty((len(piece), 2 * piece.shape[1]), np.uint8)
            numbers[:, 0::2] = piece & 15
            numbers[:, 1::2] = piece >> 4
            yield numbers, scales[taken.start : taken.stop]

    def _exponents(self, rows: range) -> Array:
        """Exponents int32 [rows, groups]. Raises CheckpointError for a scale that is NaN."""
        name = self.source + _SCALES
        stored = self._of_expert(name, rows)
        if (stored == _NO_NUMBER).any():
            raise CheckpointError(
                f"{self.weights.where(name)}: expert {self.expert} has a scale of {_NO_NUMBER}, which is not a number; "
                f"accepted: 0 to {_NO_NUMBER - 1}, for 2^-{_BIAS} to 2^{_NO_NUMBER - 1 - _BIAS}"
            )
        exponents: Array = stored.astype(np.int32) - _BIAS
        return exponents

    def _of_expert(self, name: str, rows: range) -> Array:
        """Returns a copy of these rows of a tensor."""
        taken = self.outputs[rows.start : rows.stop]
        (stack,) = self.weights.rows(name, range(self.expert, self.expert + 1))
        return np.ascontiguousarray(stack[0, taken.start : taken.stop : taken.step])
