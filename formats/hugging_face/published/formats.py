"""What every format of quantised layers says of itself, and the checks that they share."""

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
    """One of a format whose integers and scales checkpoints can have."""

    def kept_as(self) -> QuantConfig | None:
        """How a checkpoint can hold exactly these numbers, scales and zero points; None: not at all."""

    def quantized_rows(self, rows: range, step: int, how: QuantConfig) -> Iterator[QuantizedRows]:
        """Rows of it, `step` at a time; `how` is kept_as(), or that with float32 scales."""


class ReorderedMatrix(QuantizedMatrix, Protocol):
    """One whose kept_as() may be reordered."""

    def input_order(self) -> Array:
        """int32 [in]: input i of quantized_rows() is input order[i] of the matrix."""


class PublishedFormat(Protocol):
    """How a model's layers were quantised before it was published. Which layers these are, the tensors tell."""

    @property
    def kept(self) -> QuantConfig | None:
        """What the numbers and scales become in a checkpoint as far as config.json tells.

        The matrices are QuantizedMatrix then, and each of them says what it becomes. None: checkpoints cannot have
        them.
        """

    @property
    def has_model_dtype(self) -> bool:
        """The format's library rounds the weights to the type that the model is loaded in, whatever it is.

        False: it gives them in a type that the tensors tell.
        """

    @property
    def rounds_activations(self) -> bool:
        """The format's library rounds what comes into a layer too, as the model runs."""

    def describe(self) -> str:
        """What people read: GPTQ of 4 bits in groups of 128."""

    def matrices(self, weights: HfWeights) -> dict[str, MadeMatrix]:
        """The weights of the quantised layers by their names, dequantised as they are read.

        Raises CheckpointError with every tensor that is missing, or of another type or shape than the format gives it.
        """


Expected = Mapping[str, tuple[Sequence[np.dtype[Any]], tuple[int, ...]]]
"""The types and the shape of tensors, by name."""


def tensor_problems(weights: HfWeights, expected: Expected) -> list[str]:
    """What is wrong with tensors that a quantised layer consists of."""
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
    """What stands before `suffix` in the names of tensors. Raises CheckpointError where there are none."""
    found = [name.removesuffix(suffix) for name in weights.names if name.endswith(suffix)]
    if not found:
        raise CheckpointError(
            f"{weights.directory}: quantization_config says {format_name}, but no tensor is named *{suffix}"
        )
    return found


def raise_problems(weights: HfWeights, problems: Sequence[str]) -> None:
    """Raises CheckpointError if there are any."""
    if problems:
        raise CheckpointError(f"{weights.directory}: " + "; ".join(problems))


def matrices_of(
    weights: HfWeights, suffix: str, format_name: str, matrix_of: Callable[[str], tuple[MadeMatrix, list[str]]]
) -> dict[str, MadeMatrix]:
    """The matrix of each layer that has a tensor named *suffix, by the name of its weight.

    `matrix_of` gives a layer's matrix and what is wrong with its tensors. Raises CheckpointError with all of that, and
    where there are no layers.
    """
    found: dict[str, MadeMatrix] = {}
    problems: list[str] = []
    for source in layers_with(weights, suffix, format_name):
        found[source + WEIGHT], noted = matrix_of(source)
        problems += noted
    raise_problems(weights, problems)
    return found


def in_steps(rows: range, step: int) -> Iterator[range]:
    """The same, `step` at a time."""
    for first in range(rows.start, rows.stop, step):
        yield range(first, min(first + step, rows.stop))


def scaled(numbers: Array, scales: Array, dtype: np.dtype[Any]) -> Array:
    """numbers * scales, float32, in `dtype`, rounded to nearest even.

    What overflows it becomes infinite, and products of scales that are not finite stay so; cast() refuses them.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        product: Array = (numbers * scales).astype(dtype, copy=False)
    return product


def with_scales(kept: QuantConfig | None, scales: Array) -> QuantConfig | None:
    """The same, with these scales' type where scales have one; None where they are not finite."""
    if kept is None or not np.isfinite(to_float32(scales)).all():
        return None
    if not kept.has_typed_scales:
        return kept
    return replace(kept, scale_dtype=dtype_from_name(str(scales.dtype)))


def with_groups(kept: QuantConfig | None, groups: Array) -> QuantConfig | None:
    """The same for inputs that are in these groups [in], reordered unless they lie in order.

    None where a group has more or fewer inputs than it says.
    """
    if kept is None:
        return None
    in_order = np.arange(len(groups)) // (kept.group_size or len(groups))
    if not np.array_equal(np.sort(groups), in_order):
        return None
    return kept if np.array_equal(groups, in_order) else replace(kept, reordered=True)


def order_of_groups(groups: Array) -> Array:
    """As ReorderedMatrix.input_order: group by group, and as they stand within one."""
    return np.argsort(groups, kind="stable").astype(np.int32)


def group_problems(weights: HfWeights, name: str, count: int) -> list[str]:
    """What is wrong with a tensor that names the group of each input, of so many."""
    groups = weights.joined_rows(name)
    wrong = groups[(groups < 0) | (groups >= count)]
    if wrong.size == 0:
        return []
    return [f"{weights.where(name)}: names group {wrong[0]}; there are {count}, from 0 on"]


def of_eight_bits(numbers: Array, scales: Array, zeros: Array | None, how: QuantConfig) -> QuantizedRows:
    """Rows of int8: `numbers` uint8 [rows, in], `scales` [rows, groups], `zeros` uint8 [rows, groups].

    Numbers and zeros stand for 128 less.
    """
    dtype = dtype_name(how.scale_dtype) if how.has_typed_scales else np.float32
    return QuantizedRows(_less_128(numbers), scales.astype(dtype), None if zeros is None else _less_128(zeros))


def _less_128(numbers: Array) -> Array:
    return np.ascontiguousarray(numbers ^ 0x80).view(np.int8)


def of_four_bits(numbers: Array, scales: Array, zeros: Array | None, how: QuantConfig) -> QuantizedRows:
    """Rows of W4A16: `numbers` uint8 [rows, in] from 0 to 15, `scales` [rows, groups], `zeros` uint8 [rows, groups].

    Without zeros and a code the numbers stand for 8 less.
    """
    if zeros is None and not how.is_coded:
        numbers = numbers ^ 8  # from u = q + 8 to q in two's complement
    packed = numbers[:, 0::2] | (numbers[:, 1::2] << 4)
    return QuantizedRows(packed, scales.astype(dtype_name(how.scale_dtype)), zeros)
