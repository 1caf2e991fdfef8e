"""bitsandbytes: NF4 and FP4, with plain or nested (quantised) scales, and LLM.int8()."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ...._core import (
    LLM_INT8_FACTOR,
    CheckpointError,
    DType,
    QuantAlgo,
    WeightCode,
    code_table,
    dtype_from_name,
    dtype_name,
)
from ....common.json_fields import JsonFields, parse_json_object
from ...checkpoint.casting import BFLOAT16, FLOAT16, FLOAT32, Array, cast
from ...checkpoint.hf_weights import HfWeights, MadeMatrix
from ...checkpoint.quantization import CODE_GROUP_SIZES, QuantConfig
from ...checkpoint.quantizer import QuantizedRows
from .formats import WEIGHT, in_steps, layers_with, of_four_bits, raise_problems, scaled, tensor_problems

METHOD: Final = "bitsandbytes"
# Settings of calibration and loading; they do not change the tensors.
_HARMLESS: Final = (
    *("_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"),
    *("bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload", "llm_int8_skip_modules", "llm_int8_threshold"),
)
_UINT8: Final = np.dtype(np.uint8)
_DTYPES: Final = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}
_NESTED_BLOCK_SIZE: Final = 256
_MAX_STATE_BYTES: Final = 4096
_CODES: Final = {"nf4": WeightCode.NF4, "fp4": WeightCode.FP4}
# Assumed until the tensors are read, which have the real block size.
_USUAL_BLOCK_SIZE: Final = 64
_INT8_FACTOR: Final = np.float32(LLM_INT8_FACTOR)
_GREATEST_INT8: Final = np.float32(128)
_KEPT_INT8: Final = QuantConfig(
    quant_algo=QuantAlgo.W8A16, scale_dtype=DType.FLOAT32, code=WeightCode.LLM_INT8, value_dtype=DType.FLOAT32
)


def read_bitsandbytes(fields: JsonFields) -> Bits4 | Bits8 | None:
    """Reads bitsandbytes' quantization_config. Notes problems in `fields`; the result may be None then."""
    is_4bit = fields.boolean("load_in_4bit", default=False)
    is_8bit = fields.boolean("load_in_8bit", default=False)
    if fields.boolean("llm_int8_has_fp16_weight", default=False):
        fields.problem("llm_int8_has_fp16_weight", "is true; only false is supported")
    kind = str(fields.raw("bnb_4bit_quant_type") or "fp4")
    fields.discard(_HARMLESS)
    if is_4bit == is_8bit:
        fields.problem("load_in_4bit", f"and load_in_8bit are both {str(is_4bit).lower()}; expected one of them")
        return None
    if not is_4bit:
        return Bits8()
    # Each layer's tensors have the real values; these are for callers that only know config.json.
    code = _CODES.get(kind, WeightCode.NF4)
    return Bits4(_kept(code, _USUAL_BLOCK_SIZE, DType.BFLOAT16))


def _kept(code: WeightCode, block_size: int, dtype: DType) -> QuantConfig:
    return QuantConfig(
        quant_algo=QuantAlgo.W4A16,
        group_size=block_size,
        scale_dtype=DType.FLOAT32,
        code=code,
        value_dtype=dtype,
    )


@dataclass(frozen=True)
class Bits4:
    """NF4 and FP4: entries of a codebook of 16 numbers, times a scale per block of consecutive numbers."""

    kept: QuantConfig | None
    has_model_dtype: bool = False
    rounds_activations: bool = False

    def describe(self) -> str:
        """See PublishedFormat.describe."""
        return "bitsandbytes of 4 bits"

    def matrices(self, weights: HfWeights) -> dict[str, MadeMatrix]:
        """See PublishedFormat.matrices."""
        suffixes = {kind: f"{WEIGHT}.quant_state.bitsandbytes__{kind}" for kind in _CODES}
        found: dict[str, MadeMatrix] = {}
        problems: list[str] = []
        for name in weights.names:
            for kind, suffix in suffixes.items():
                if name.endswith(suffix):
                    weight = name.removesuffix(suffix) + WEIGHT
                    matrix = _read_matrix(weights, weight, name, kind, problems)
                    if matrix is not None:
                        found[weight] = matrix
        if not found and not problems:
            layers_with(weights, next(iter(suffixes.values())), self.describe())
        raise_problems(weights, problems)
        return found


@dataclass(frozen=True)
class _Matrix4Bit:
    """Equals the result of bitsandbytes.functional.dequantize_4bit, in float32 until the last rounding."""

    weights: HfWeights
    name: str
    state: str
    kind: str
    shape: tuple[int, int]
    block_size: int
    dtype: np.dtype[Any]
    offset: np.float32 | None
    """Offset of nested scales; None if the scales are not quantised."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """See MadeMatrix.tensors."""
        nested = () if self.offset is None else ("nested_absmax", "nested_quant_map")
        return (self.name, self.state, *(f"{self.name}.{part}" for part in ("absmax", "quant_map", *nested)))

    def rows(self, rows: range, step: int) -> Iterator[Array]:
        """See MadeMatrix.rows."""
        scales = self._scales()
        for taken in in_steps(rows, step):
            yield self._values(taken, scales)

    def _values(self, rows: range, scales: Array) -> Array:
        outputs, inputs = self.shape
        first, last = rows.start * inputs, rows.stop * inputs
        # Blocks run over the matrix row by row, and may begin in the middle of a row.
        size = self.block_size
        begin, end = first // size * size, min(-(-last // size) * size, outputs * inputs)
        numbers = self._numbers(begin, end)
        padded = np.zeros(-(-(end - begin) // size) * size, np.float32)
        padded[: end - begin] = code_table(_CODES[self.kind])[numbers]
        values = scaled(padded.reshape(-1, size), scales[begin // size : -(-end // size), None], self.dtype)
        return values.reshape(-1)[first - begin : last - begin].reshape(len(rows), inputs)

    def kept_as(self) -> QuantConfig | None:
        """See QuantizedMatrix.kept_as. Requires blocks within rows, and values that do not overflow their dtype."""
        scales = self._scales()
        with np.errstate(over="ignore"):
            # The largest number of either codebook is 1.
            is_finite = np.isfinite(scales.astype(self.dtype)).all()
        if self.shape[1] % self.block_size != 0 or not is_finite:
            return None
        return _kept(_CODES[self.kind], self.block_size, dtype_from_name(str(self.dtype)))

    def quantized_rows(self, rows: range, step: int, how: QuantConfig) -> Iterator[QuantizedRows]:
        """See QuantizedMatrix.quantized_rows."""
        inputs = self.shape[1]
        scales = self._scales().reshape(-1, inputs // self.block_size)
        for taken in in_steps(rows, step):
            numbers = self._numbers(taken.start * inputs, taken.stop * inputs).reshape(len(taken), inputs)
            yield of_four_bits(numbers, scales[taken.start : taken.stop], None, how)

    def _numbers(self, begin: int, end: int) -> Array:
        """Returns the codes of elements [begin, end), as uint8; `begin` is even."""
        octets = _octets(self.weights, self.name, range(begin // 2, -(-end // 2)))
        numbers = np.empty(2 * len(octets), np.uint8)
        numbers[0::2] = octets >> 4
        numbers[1::2] = octets & 15
        return numbers[: end - begin]

    def _scales(self) -> Array:
        """Scales float32 [blocks]."""
        stored = self.weights.joined_rows(f"{self.name}.absmax")
        if self.offset is None:
            return stored
        code = self.weights.joined_rows(f"{self.name}.nested_quant_map")
        scales = self.weights.joined_rows(f"{self.name}.nested_absmax")
        each = np.repeat(scales, _NESTED_BLOCK_SIZE)[: len(stored)]
        result: Array = code[stored] * each + self.offset
        return result


def _octets(weights: HfWeights, name: str, octets: range) -> Array:
    """Returns bytes of a tensor [n, 1] of any dtype, as uint8."""
    size = weights.spec(name).dtype.itemsize
    rows = range(octets.start // size, -(-octets.stop // size))
    found = np.ascontiguousarray(weights.joined_rows(name, rows)).view(np.uint8).reshape(-1)
    return found[octets.start - rows.start * size :][: len(octets)]


def _read_matrix(weights: HfWeights, name: str, state: str, kind: str, problems: list[str]) -> _Matrix4Bit | None:
    spec, where = weights.spec(state), weights.where(state)
    if spec.dtype != _UINT8 or len(spec.shape) != 1 or spec.num_bytes > _MAX_STATE_BYTES:
        problems.append(f"{where}: is {spec.dtype} {list(spec.shape)}; expected JSON, uint8 [up to {_MAX_STATE_BYTES}]")
        return None
    text = weights.joined_rows(state).tobytes().decode("utf-8", errors="replace")
    noted: list[str] = []
    fields = JsonFields(parse_json_object(text, where, CheckpointError), problems=noted)
    fields.string("quant_type", choices=(kind,))
    block_size = fields.integer("blocksize")
    if block_size not in CODE_GROUP_SIZES:
        fields.problem("blocksize", f"is {block_size}; accepted: {', '.join(map(str, CODE_GROUP_SIZES))}")
    dtype = fields.string("dtype", choices=_DTYPES)
    shape = fields.integers("shape", minimum=1)
    if len(shape) != 2:
        fields.problem("shape", f"is {list(shape)}; expected [out, in]")
    offset = None
    if "nested_blocksize" in fields or f"{name}.nested_absmax" in weights:
        if fields.integer("nested_blocksize") != _NESTED_BLOCK_SIZE:
            fields.problem("nested_blocksize", f"must be {_NESTED_BLOCK_SIZE}")
        fields.string("nested_dtype", choices=("float32",))
        offset = np.float32(fields.number("nested_offset"))
    fields.refuse_remaining()
    if noted:
        problems.append(f"{where}: " + "; ".join(noted))
        return None
    outputs, inputs = shape
    matrix = _Matrix4Bit(weights, name, state, kind, (outputs, inputs), block_size, _DTYPES[dtype], offset)
    noted = _problems_of(matrix)
    problems += noted
    return None if noted else matrix


def _problems_of(matrix: _Matrix4Bit) -> list[str]:
    weights, name = matrix.weights, matrix.name
    if name not in weights:
        return [f"tensor '{name}' is missing"]
    count = matrix.shape[0] * matrix.shape[1]
    blocks = -(-count // matrix.block_size)
    stored = weights.spec(name)
    num_octets = -(-count // 2)
    rows = -(-num_octets // stored.dtype.itemsize)
    # bnb_4bit_quant_storage: the bytes may be stored under another dtype, for FSDP.
    expected: dict[str, Any] = {name: ((_UINT8, *_DTYPES.values()), (rows, 1))}
    expected[f"{name}.quant_map"] = ((FLOAT32,), (16,))
    expected[f"{name}.absmax"] = ((FLOAT32 if matrix.offset is None else _UINT8,), (blocks,))
    if matrix.offset is not None:
        expected[f"{name}.nested_absmax"] = ((FLOAT32,), (-(-blocks // _NESTED_BLOCK_SIZE),))
        expected[f"{name}.nested_quant_map"] = ((FLOAT32,), (256,))
    problems = tensor_problems(weights, expected)
    if not problems:
        code = weights.joined_rows(f"{name}.quant_map")
        if not np.array_equal(code, code_table(_CODES[matrix.kind])):
            problems.append(f"{weights.where(f'{name}.quant_map')}: is not the table of {matrix.kind}")
    return problems


@dataclass(frozen=True)
class Bits8:
    """LLM.int8(): int8 with a scale per output."""

    kept: QuantConfig | None = _KEPT_INT8
    has_model_dtype: bool = True
    rounds_activations: bool = True

    def describe(self) -> str:
        """See PublishedFormat.describe."""
        return "LLM.int8() of bitsandbytes"

    def matrices(self, weights: HfWeights) -> dict[str, MadeMatrix]:
        """See PublishedFormat.matrices."""
        found: dict[str, MadeMatrix] = {}
        problems: list[str] = []
        for source in layers_with(weights, ".SCB", self.describe()):
            noted = self._problems_of(weights, source)
            if not noted:
                found[source + WEIGHT] = _MatrixInt8(weights, source, self.kept)
            problems += noted
        raise_problems(weights, problems)
        return found

    def _problems_of(self, weights: HfWeights, source: str) -> list[str]:
        outputs = weights.spec(f"{source}.SCB").shape
        name = source + WEIGHT
        inputs = weights.spec(name).shape[1:] if name in weights else (0,)
        if len(outputs) != 1 or len(inputs) != 1:
            return [f"{weights.where(f'{source}.SCB')}: expected [out], with a weight [out, in]"]
        problems = tensor_problems(
            weights,
            {name: ((np.dtype(np.int8),), (*outputs, *inputs)), f"{source}.SCB": ((FLOAT32,), outputs)},
        )
        layout = f"{source}.weight_format"
        if layout in weights and not problems:
            stored = weights.joined_rows(layout)
            if stored.size != 1 or stored.dtype != _UINT8 or stored.flat[0] != 0:
                problems.append(
                    f"{weights.where(layout)}: is {stored.tolist()} of {stored.dtype}; accepted: 0 (row by row)"
                )
        return problems


@dataclass(frozen=True)
class _MatrixInt8:
    """Equals the result of bitsandbytes.functional.int8_vectorwise_dequant: float32."""

    weights: HfWeights
    source: str
    kept: QuantConfig | None
    dtype: np.dtype[Any] = FLOAT32

    @property
    def tensors(self) -> tuple[str, ...]:
        """See MadeMatrix.tensors."""
        names = tuple(self.source + suffix for suffix in (WEIGHT, ".SCB", ".weight_format"))
        return tuple(name for name in names if name in self.weights)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        outputs, inputs = self.weights.spec(self.source + WEIGHT).shape
        return outputs, inputs

    def rows(self, rows: range, step: int) -> Iterator[Array]:
        """See MadeMatrix.rows."""
        for taken in in_steps(rows, step):
            scales, integers = self._tensors(taken)
            yield _values_int8(integers, scales)

    def kept_as(self) -> QuantConfig | None:
        """See QuantizedMatrix.kept_as."""
        scales, _ = self._tensors(range(self.shape[0]))
        return self.kept if self.shape[1] % 2 == 0 and np.isfinite(scales).all() else None

    def quantized_rows(self, rows: range, step: int, how: QuantConfig) -> Iterator[QuantizedRows]:
        """See QuantizedMatrix.quantized_rows."""
        assert how.value_dtype is not None
        dtype = np.dtype(dtype_name(how.value_dtype))
        for taken in in_steps(rows, step):
            scales, integers = self._tensors(taken)
            # Products are rounded before they are multiplied by the factor, so they may overflow.
            with np.errstate(over="ignore"):
                may_overflow = not np.isfinite((_GREATEST_INT8 * np.abs(scales)).astype(dtype)).all()
            if may_overflow:
                cast(_values_int8(integers, scales), dtype, self.weights.where(self.source + WEIGHT))
            yield QuantizedRows(integers, scales[:, None], None)

    def _tensors(self, rows: range) -> tuple[Array, Array]:
        """Returns the scales, float32 [rows], and the integers, int8 [rows, in]."""
        scales = self.weights.joined_rows(f"{self.source}.SCB", rows)
        return scales, self.weights.joined_rows(self.source + WEIGHT, rows)


def _values_int8(integers: Array, scales: Array) -> Array:
    values: Array = scaled(integers, scales[:, None], FLOAT32) * _INT8_FACTOR
    return values
