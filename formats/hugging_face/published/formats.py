"""Interface of all quantisation formats, and checks that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np

from ...._core import CheckpointError, dtype_from_name, dtype_name
from ...checkpoint.casting import Array, to_float32
from ...checkpoint.hf_weights import HfWeights, MadeMatrix
from ...checkpoint.quantization import QuantConfig
from ...checkpoint.quantizer import QuantizedRows

INT32: Final = np.dtype(np.int32)
WEIGHT: Final = ".weight"


class QuantizedMatrix(MadeMatrix, Protocol):
    """A matrix whose integers and scales checkpoints can hold."""

    def kept_as(self) -> QuantConfig | None:
        """Returns the quantisation with which a checkpoint holds exactly these numbers; None: checkpoints cannot."""

    def quantized_rows(self, rows: range, step: int, how: QuantConfig) -> Iterator[QuantizedRows]:
        """Yields rows, `step` at a time; `how` is kept_as(), possibly with float32 scales."""


class ActOrderMatrix(QuantizedMatrix, Protocol):
    """A matrix whose inputs kept_as() may permute."""

    def permutation(self) -> Array:
        """Permutation int32 [in]: input i of quantized_rows() is input order[i] of the matrix."""


class PublishedFormat(Protocol):
    """Quantisation of a published model's layers. The tensors tell which layers are quantised."""

    @property
    def kept(self) -> QuantConfig | None:
        """Quantisation in a checkpoint, as far as config.json tells; None: checkpoints cannot hold these numbers.

        If it is not None, the matrices are QuantizedMatrix, and each of them has its own kept_as().
        """

    @property
    def has_model_dtype(self) -> bool:
        """True if the format's library rounds the weights to the dtype in which the model is loaded.

        False: the tensors decide the dtype.
        """

    @property
    def rounds_activations(self) -> bool:
        """True if the format's library also rounds the inputs of layers at run time."""

    def describe(self) -> str:
        """Text for people: GPTQ of 4 bits in groups of 128."""

    def matrices(self, weights: HfWeights) -> dict[str, MadeMatrix]:
        """Returns the weights of the quantised layers by name; they are dequantised as they are read.

        Raises CheckpointError that lists every tensor that is missing, or has another dtype or shape than the format's.
        """


Expected = Mapping[str, tuple[Sequence[np.dtype[Any]], tuple[int, ...]]]
"""Accepted dtypes and the shape of tensors, by name."""


def tensor_problems(weights: HfWeights, expected: Expected) -> list[str]:
    """Lists problems of the tensors of a quantised layer."""
    problems = []
    for name, (dtypes, shape) in expected.items():
        if name not in weights:
            problems.append(f"tensor '{name}' is missing")
            continue
        spec = weights.spec(name)
        if spec.shape != shape:
            problems.append(f"{weights.where(name)}: is {list(spec.shape)}; expected {list(shape)}")
        if spec.dtype not in dtypes:
            problems.append(f"{weights.where(name)}: is of {spec.dtype}; accepted: {', '.join(map(str, dtypes))}")
    return problems


def layers_with(weights: HfWeights, suffix: str, format_name: str) -> list[str]:
    """Returns the beginnings of tensor names that end with `suffix`. Raises CheckpointError if there are none."""
    found = [name.removesuffix(suffix) for name in weights.names if name.endswith(suffix)]
    if not found:
        raise CheckpointError(
            f"{weights.directory}: quantization_config says {format_name}, but no tensor is named *{suffix}"
        )
    return found


def raise_problems(weights: HfWeights, problems: Sequence[str]) -> None:
    """Raises CheckpointError if there are any problems."""
    if problems:
        raise CheckpointError(f"{weights.directory}: " + "; ".join(problems))


def matrices_of(
    weights: HfWeights, suffix: str, format_name: str, matrix_of: Callable[[str], tuple[MadeMatrix, list[str]]]
) -> dict[str, MadeMatrix]:
    """Returns the matrix of each layer that has a tensor *suffix, by the name of its weight.

    `matrix_of` returns a layer's matrix and the problems of its tensors. Raises CheckpointError that lists all
    problems, or if there are no layers.
    """
    found: dict[str, MadeMatrix] = {}
    problems: list[str] = []
    for source in layers_with(weights, suffix, format_name):
        found[source + WEIGHT], noted = matrix_of(source)
        problems += noted
    raise_problems(weights, problems)
    return found


def in_steps(rows: range, step: int) -> Iterator[range]:
    """Splits a range into ranges of `step`."""
    for first in range(rows.start, rows.stop, step):
        yield range(first, min(first + step, rows.stop))


def scaled(numbers: Array, scales: Array, dtype: np.dtype[Any]) -> Array:
    """Returns numbers * scales, computed in float32, rounded to nearest even in `dtype`.

    Overflow becomes infinite, and products of scales that are not finite stay so; cast() refuses them.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        product: Array = (numbers * scales).astype(dtype, copy=False)
    return product


def with_scales(kept: QuantConfig | None, scales: Array) -> QuantConfig | None:
    """Sets the dtype of the scales, if they have one; returns None if the scales are not finite."""
    if kept is None or not np.isfinite(to_float32(scales)).all():
        return None
    if not kept.has_typed_scales:
        return kept
    return replace(kept, scale_dtype=dtype_from_name(str(scales.dtype)))


def with_groups(kept: QuantConfig | None, groups: Array) -> QuantConfig | None:
    """Marks the inputs as permuted, unless their groups [in] are consecutive.

    Returns None if the groups have unequal sizes.
    """
    if kept is None:
        return None
    in_order = np.arange(len(groups)) // (kept.group_size or len(groups))
    if not np.array_equal(np.sort(groups), in_order):
        return None
    return kept if np.array_equal(groups, in_order) else replace(kept, act_order=True)


def order_of_groups(groups: Array) -> Array:
    """See ActOrderMatrix.permutation. Sorts the inputs by group, stably."""
    return np.argsort(groups, kind="stable").astype(np.int32)


def group_problems(weights: HfWeights, name: str, count: int) -> list[str]:
    """Lists problems of a tensor that holds the group of each input; `count` is the number of groups."""
    groups = weights.joined_rows(name)
    wrong = groups[(groups < 0) | (groups >= count)]
    if wrong.size == 0:
        return []
    return [f"{weights.where(name)}: names group {wrong[0]}; there are {count}, from 0 on"]


def of_eight_bits(numbers: Array, scales: Array, zeros: Array | None, how: QuantConfig) -> QuantizedRows:
    """Makes int8 rows from `numbers` uint8 [rows, in], `scales` [rows, groups], `zeros` uint8 [rows, groups].

    Subtracts 128 from numbers and zeros.
    """
    dtype = dtype_name(how.scale_dtype) if how.has_typed_scales else np.float32
    return QuantizedRows(_less_128(numbers), scales.astype(dtype), None if zeros is None else _less_128(zeros))


def _less_128(numbers: Array) -> Array:
    return np.ascontiguousarray(numbers ^ 0x80).view(np.int8)


def of_four_bits(
    numbers: Array, scales: Array, zeros: Array | None, how: QuantConfig, minimums: Array | None = None
) -> QuantizedRows:
    """Makes W4A16 rows: `numbers` uint8 [rows, in] from 0 to 15, `scales` [rows, groups], `zeros` uint8 [rows, groups],
    `minimums` of how.scale_dtype [rows, groups].

    Integers without zeros and minimums are stored with an offset of 8.
    """
    if zeros is None and minimums is None and not how.is_codebook:
        numbers = numbers ^ 8  # from u = q + 8 to q in two's complement
    packed = numbers[:, 0::2] | (numbers[:, 1::2] << 4)
    return QuantizedRows(packed, scales.astype(dtype_name(how.scale_dtype)), zeros, minimums)
