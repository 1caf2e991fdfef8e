"""compressed-tensors, the format of llm-compressor: integers of 8 and 4 bits, and FP8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ...._core import CheckpointError, ConfigError, QuantAlgo
from ....common.json_fields import JsonFields, describe
from ...checkpoint.casting import CHECKPOINT_DTYPES, FLOAT8, Array, to_float32
from ...checkpoint.hf_weights import HfWeights, MadeMatrix
from ...checkpoint.quantization import GROUP_SIZES, QuantConfig
from ...checkpoint.quantizer import QuantizedRows
from .formats import (
    INT32,
    WEIGHT,
    group_problems,
    in_steps,
    layers_with,
    of_eight_bits,
    of_four_bits,
    order_of_groups,
    raise_problems,
    scaled,
    tensor_problems,
    with_groups,
    with_scales,
)
from .fp8 import ScaledMatrix, kept_float8, number_of_blocks, read_block
from .packed_numbers import unpacked

METHOD: Final = "compressed-tensors"
_INT_QUANTIZED: Final = "int-quantized"
_PACK_QUANTIZED: Final = "pack-quantized"
_FLOAT_QUANTIZED: Final = "float-quantized"
_FORMATS: Final = (_INT_QUANTIZED, _PACK_QUANTIZED, _FLOAT_QUANTIZED)
# Calibration settings and notes of tools; they do not change the tensors.
_HARMLESS: Final = ("global_compression_ratio", "quantization_status", "version", "ignore")
_HARMLESS_ARGS: Final = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
# Features that change the computation; they must be absent.
_ABSENT: Final = ("kv_cache_scheme", "sparsity_config", "transform_config")
_SCALE: Final = ".weight_scale"
_PACKED: Final = ".weight_packed"
_ZERO: Final = ".weight_zero_point"
_SHAPE: Final = ".weight_shape"
_GROUP: Final = ".weight_g_idx"
_INPUT_SCALE: Final = ".input_scale"
_WORD_BITS: Final = 32
# actorder values. With the first ones the groups are consecutive inputs; with the others a tensor holds the groups.
_IN_ORDER: Final = (None, False, "static", "weight")
_ACT_ORDERS: Final = (True, "group", "dynamic")


def read_compressed_tensors(fields: JsonFields) -> Integers | Float8 | None:
    """Reads compressed-tensors' quantization_config. Notes problems in `fields`; the result may be None then."""
    file_format = fields.string("format", choices=_FORMATS)
    groups = fields.object("config_groups")
    fields.discard(_HARMLESS)
    for name in _ABSENT:
        if fields.raw(name) not in (None, {}):
            fields.problem(name, "is set, which is not supported")
    if groups is None:
        return None
    names = list(groups.remaining())
    group = groups.object(names[0]) if len(names) == 1 else None
    if group is None:
        fields.problem("config_groups", f"has {len(names)} groups; expected one group: layers that are quantised alike")
        return None
    if group.strings("targets") != ("Linear",):
        group.problem("targets", "must be ['Linear']; other layers are not supported")
    if group.raw("output_activations") is not None:
        group.problem("output_activations", "is set, but outputs are not quantised")
    own_format = group.optional_string("format")
    if own_format not in (None, file_format):
        group.problem("format", f"is '{own_format}'; expected the model's format '{file_format}'")
    weights, activations = group.object("weights"), group.object("input_activations", optional=True)
    if weights is None:
        return None
    if file_format == _FLOAT_QUANTIZED:
        if activations is not None:
            _discard_float_activations(activations)
        return _float8_of(weights, rounds_activations=activations is not None)
    found = _integers_of(weights, file_format)
    return found if activations is None else _with_activations(activations, found)


def _integers_of(args: JsonFields, file_format: str) -> Integers:
    bits = _number_of_bits(args, "int", (4, 8))
    strategy = args.string("strategy", choices=("channel", "group"))
    group_size = args.integer("group_size") if strategy == "group" else None
    if strategy == "channel" and args.raw("group_size") not in (None, -1):
        args.problem("group_size", f"is {describe(args.raw('group_size'))}, but strategy is channel")
    symmetric = args.boolean("symmetric", default=True)
    _refuse_dynamic(args, expected=False)
    order = args.raw("actorder")
    if order not in (*_IN_ORDER, *_ACT_ORDERS):
        accepted = "null, static or weight, group or dynamic"
        args.problem("actorder", f"is {describe(order)}; accepted: {accepted}")
    act_order = order in _ACT_ORDERS
    if act_order and (strategy != "group" or file_format != _PACK_QUANTIZED):
        args.problem("actorder", f"is {describe(order)}, which needs strategy group and format {_PACK_QUANTIZED}")
    _finish(args)
    if file_format == _INT_QUANTIZED:
        if bits == 8 and strategy != "channel":
            args.problem("strategy", "must be channel for 8 bits")
        elif not symmetric:
            args.problem("symmetric", f"must be true for {file_format}")
    kept = None
    if group_size in (None, *GROUP_SIZES):
        algo = QuantAlgo.W8A16 if bits == 8 else QuantAlgo.W4A16
        kept = QuantConfig(quant_algo=algo, group_size=group_size, has_zero_point=not symmetric)
    return Integers(bits, group_size, symmetric, act_order, kept, is_packed=file_format == _PACK_QUANTIZED)


def _with_activations(args: JsonFields, weights: Integers) -> Integers:
    """Returns the same weights, for 8-bit activations with a scale per token, computed at run time."""
    _number_of_bits(args, "int", (8,))
    if args.string("strategy", choices=("token", "tensor", "group")) != "token":
        args.problem("strategy", "must be token: one scale per token")
    if not args.boolean("symmetric", default=True):
        args.problem("symmetric", "must be true")
    args.discard(("group_size", "actorder"))
    _refuse_dynamic(args, expected=True)
    _finish(args)
    kept = _kept_with_int8_activations(weights)
    if kept is None:
        args.problem("num_bits", "needs weights of 8 bits (channel, symmetric), or of 4 bits without permuted inputs")
        return weights
    return replace(weights, kept=kept)


def _kept_with_int8_activations(weights: Integers) -> QuantConfig | None:
    """Returns None if the weights are not kept, or do not support int8 activations."""
    if weights.kept is None:
        return None
    try:
        return replace(weights.kept, act_order=weights.act_order).with_int8_activations()
    except ConfigError:
        return None


def _float8_of(args: JsonFields, *, rounds_activations: bool) -> Float8:
    _number_of_bits(args, "float", (8,))
    strategy = args.string("strategy", choices=("tensor", "channel", "block"))
    if not args.boolean("symmetric", default=True):
        args.problem("symmetric", "must be true")
    block = read_block(args, "block_structure")
    if (strategy == "block") != (block is not None):
        args.problem("block_structure", f"is {describe(args.raw('block_structure'))}, but strategy is {strategy}")
    args.discard(("group_size", "actorder"))
    _refuse_dynamic(args, expected=False)
    _finish(args)
    return Float8(strategy, block, rounds_activations, kept_float8(None if block is None else block[1]))


def _discard_float_activations(args: JsonFields) -> None:
    """Ignores the rounding of activations: dequantised weights do not use it."""
    _number_of_bits(args, "float", (8,))
    args.discard(("strategy", "symmetric", "dynamic", "group_size", "actorder"))
    _finish(args)


def _number_of_bits(args: JsonFields, kind: str, accepted: tuple[int, ...]) -> int:
    args.string("type", choices=(kind,))
    bits = args.integer("num_bits", maximum=_WORD_BITS)
    if bits not in accepted:
        args.problem("num_bits", f"is {bits}; accepted: {' or '.join(map(str, accepted))}")
    return bits


def _refuse_dynamic(args: JsonFields, *, expected: bool) -> None:
    dynamic = args.raw("dynamic")
    if dynamic is not expected:
        args.problem("dynamic", f"is {describe(dynamic)}; accepted: {str(expected).lower()}")


def _finish(args: JsonFields) -> None:
    args.discard(_HARMLESS_ARGS)
    if "block_structure" in args.remaining() and args.raw("block_structure") is not None:
        args.problem("block_structure", "is set, which is not supported")


@dataclass(frozen=True)
class Integers:
    """w = scale (q - zero), with q of 8 or 4 bits in two's complement."""

    bits: int
    group_size: int | None
    """Inputs per group; None: all inputs of an output share a scale."""
    symmetric: bool
    act_order: bool
    """True if a tensor holds the group of each input."""
    kept: QuantConfig | None
    is_packed: bool
    """True if 4-bit numbers are packed, False if each has a byte."""
    has_model_dtype: bool = False
    rounds_activations: bool = False

    def describe(self) -> str:
        """See PublishedFormat.describe."""
        groups = "" if self.group_size is None else f" in groups of {self.group_size}"
        return f"compressed-tensors of {self.bits} bits{groups}"

    def matrices(self, weights: HfWeights) -> dict[str, MadeMatrix]:
        """See PublishedFormat.matrices."""
        found: dict[str, MadeMatrix] = {}
        problems: list[str] = []
        for source in layers_with(weights, _SCALE, self.describe()):
            shape = _shape_of(weights, source, problems)
            if shape is None:
                continue
            matrix = _IntegerMatrix(weights, source, self, shape)
            noted = tensor_problems(weights, matrix.expected())
            if self.act_order and not noted:
                noted = group_problems(weights, source + _GROUP, -(-shape[1] // (self.group_size or 1)))
            problems += noted
            if shape[1] % (self.group_size or 1) != 0:
                problems.append(
                    f"{weights.where(source + _SCALE)}: {shape[1]} inputs; expected a multiple of group_size "
                    f"{self.group_size}"
                )
            found[source + WEIGHT] = matrix
        raise_problems(weights, problems)
        return found


def _shape_of(weights: HfWeights, source: str, problems: list[str]) -> tuple[int, int] | None:
    """Returns [out, in]: the weight's shape or, for a packed weight, the content of its shape tensor."""
    name, said = source + WEIGHT, source + _SHAPE
    if source + _PACKED not in weights and name in weights:
        stored = weights.spec(name).shape
        if len(stored) == 2:
            return stored[0], stored[1]
        problems.append(f"{weights.where(name)}: is {list(stored)}; expected [out, in]")
        return None
    noted = tensor_problems(weights, {said: ((np.dtype(np.int64), INT32), (2,))})
    problems += noted
    if noted:
        return None
    outputs, inputs = (int(size) for size in weights.joined_rows(said))
    if min(outputs, inputs) < 1:
        problems.append(f"{weights.where(said)}: is [{outputs}, {inputs}]; expected [out, in]")
        return None
    return outputs, inputs


@dataclass(frozen=True)
class _IntegerMatrix:
    weights: HfWeights
    source: str
    how: Integers
    shape: tuple[int, int]

    def expected(self) -> dict[str, Any]:
        """Dtypes and shapes of the tensors."""
        outputs, inputs = self.shape
        bits, groups = self.how.bits, 1 if self.how.group_size is None else -(-inputs // self.how.group_size)
        scales = {self.source + _SCALE: (CHECKPOINT_DTYPES, (outputs, groups))}
        if not self._is_packed:
            return {self.source + WEIGHT: ((np.dtype(np.int8),), self.shape), **scales}
        per_word = _WORD_BITS // bits
        expected: dict[str, Any] = {self.source + _PACKED: ((INT32,), (outputs, -(-inputs // per_word))), **scales}
        expected[self.source + _SHAPE] = ((np.dtype(np.int64), INT32), (2,))
        if not self.how.symmetric:
            expected[self.source + _ZERO] = ((INT32,), (-(-outputs // per_word), groups))
        if self.how.act_order:
            expected[self.source + _GROUP] = ((INT32,), (inputs,))
        return expected

    @property
    def _is_packed(self) -> bool:
        return (self.how.bits == 4 and self.how.is_packed) or self.source + _PACKED in self.weights

    @property
    def tensors(self) -> tuple[str, ...]:
        """See MadeMatrix.tensors."""
        return tuple(self.expected())

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the scales, in which the library multiplies."""
        return self.weights.spec(self.source + _SCALE).dtype

    def rows(self, rows: range, step: int) -> Iterator[Array]:
        """See MadeMatrix.rows. Equals the result of compressed_tensors' dequantize."""
        groups = self._groups()
        for taken in in_steps(rows, step):
            scales = to_float32(self.weights.joined_rows(self.source + _SCALE, taken))
            zeros = self._zeros(taken)
            middle = 2 ** (self.how.bits - 1)
            subtracted = middle if zeros is None else zeros.astype(np.int16)[:, groups]
            differences = self._numbers(taken).astype(np.int16) - subtracted
            yield scaled(differences, scales[:, groups], self.dtype)

    def kept_as(self) -> QuantConfig | None:
        """See QuantizedMatrix.kept_as."""
        if self.how.bits == 4 and self.shape[1] % 2 != 0:
            return None
        kept = with_scales(self.how.kept, self.weights.joined_rows(self.source + _SCALE))
        return with_groups(kept, self._groups())

    def permutation(self) -> Array:
        """See ActOrderMatrix.permutation."""
        return order_of_groups(self._groups())

    def quantized_rows(self, rows: range, step: int, how: QuantConfig) -> Iterator[QuantizedRows]:
        """See QuantizedMatrix.quantized_rows."""
        order = self.permutation()
        for taken in in_steps(rows, step):
            scales, numbers = self.weights.joined_rows(self.source + _SCALE, taken), self._numbers(taken)[:, order]
            make = of_eight_bits if self.how.bits == 8 else of_four_bits
            yield make(numbers, scales, self._zeros(taken), how)

    def _groups(self) -> Array:
        """Group of each input [in]."""
        if self.how.act_order:
            return self.weights.joined_rows(self.source + _GROUP)
        return np.arange(self.shape[1]) // (self.how.group_size or self.shape[1])

    def _numbers(self, rows: range) -> Array:
        """Returns q + 2^(bits - 1), as uint8 [rows, in]."""
        if not self._is_packed:
            return self._bytes(self.weights.joined_rows(self.source + WEIGHT, rows))
        return unpacked(self.weights.joined_rows(self.source + _PACKED, rows), self.how.bits)[:, : self.shape[1]]

    def _bytes(self, values: Array) -> Array:
        """Returns q + 2^(bits - 1), as uint8. Raises CheckpointError if q has more bits."""
        middle = 2 ** (self.how.bits - 1)
        if values.size and not -middle <= values.min() <= values.max() < middle:
            raise CheckpointError(
                f"{self.weights.where(self.source + WEIGHT)}: has integers from {values.min()} to {values.max()}; "
                f"expected {-middle} to {middle - 1} for {self.how.bits} bits"
            )
        numbers: Array = (values.astype(np.int16) + middle).astype(np.uint8)
        return numbers

    def _zeros(self, rows: range) -> Array | None:
        """Returns zero + 2^(bits - 1), as uint8 [rows, groups]; the file packs them along the rows."""
        if self.how.symmetric:
            return None
        per_word = _WORD_BITS // self.how.bits
        words = range(rows.start // per_word, -(-rows.stop // per_word))
        packed = self.weights.joined_rows(self.source + _ZERO, words)
        zeros = unpacked(packed.T, self.how.bits).T
        return np.ascontiguousarray(zeros[rows.start - words.start * per_word :][: len(rows)])


@dataclass(frozen=True)
class Float8:
    """w = scale q, with FP8 q and a scale per matrix, output or block."""

    strategy: str
    block: tuple[int, int] | None
    rounds_activations: bool
    kept: QuantConfig | None
    has_model_dtype: bool = False

    def describe(self) -> str:
        """See PublishedFormat.describe."""
        scales = f"block of {self.block[0]} x {self.block[1]}" if self.block is not None else self.strategy
        return f"compressed-tensors of FP8 with a scale for each {scales}"

    def matrices(self, weights: HfWeights) -> dict[str, MadeMatrix]:
        """See PublishedFormat.matrices."""
        found: dict[str, MadeMatrix] = {}
        problems: list[str] = []
        for source in layers_with(weights, _SCALE, self.describe()):
            shape = _shape_of(weights, source, problems)
            if shape is None:
                continue
            block = self.block or ((1, shape[1]) if self.strategy == "channel" else shape)
            grid: tuple[int, ...] = number_of_blocks(shape, block)
            stored = weights.spec(source + _SCALE).shape
            if self.strategy == "tensor" and stored in ((), (1,)):
                grid = stored
            expected: dict[str, Any] = {
                source + WEIGHT: ((FLOAT8,), shape),
                source + _SCALE: (CHECKPOINT_DTYPES, grid),
            }
            if (activations := source + _INPUT_SCALE) in weights:
                expected[activations] = (CHECKPOINT_DTYPES, weights.spec(activations).shape)
            problems += tensor_problems(weights, expected)
            dtype = weights.spec(source + _SCALE).dtype
            found[source + WEIGHT] = ScaledMatrix(weights, tuple(expected), shape, block, dtype, self.kept)
        raise_problems(weights, problems)
        return found
