"""The quantised weights of published models as a checkpoint has them, rearranged as they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ..._core import CheckpointError, QuantAlgo
from ..checkpoint.casting import BFLOAT16, CHECKPOINT_DTYPES, Array, to_float32
from ..checkpoint.hf_weights import HfWeights
from ..checkpoint.planned_tensor import PlannedTensor, Slice
from ..checkpoint.quantization import QuantConfig
from ..checkpoint.quantizer import QuantizationError, QuantizedRows
from ..network.network import Network
from ..network.ops import Experts, Linear
from ..network.weights import LinearWeight, Part
from .model_tensors import ModelTensors

_SCALE: Final = "weight_scale"
_PACKED: Final = "weight_packed"
_ZERO: Final = "weight_zero_point"
_SHAPE: Final = "weight_shape"
_WORD_BITS: Final = 32
_ROWS_OF_A_PIECE: Final = 512


def with_excluded_modules(quantization: QuantConfig, network: Network, weights: HfWeights, subject: str) -> QuantConfig:
    """The same with the linear layers that the model has as they are.

    Raises CheckpointError for a layer of which a part is quantised, and for a lm_head that is.
    """
    excluded, problems = [], []
    for weight in _linear_weights(network):
        sources = {part.source: f"{part.source}.{_SCALE}" in weights for part in weight.parts}
        if not any(sources.values()):
            excluded.append(str(weight.name))
        elif not weight.quantized or weight.name.layer is None:
            problems.append(f"tensor '{next(iter(sources))}.{_SCALE}': this layer cannot be quantised")
        elif not all(sources.values()):
            said = ", ".join(f"{source} is{'' if quantised else ' not'}" for source, quantised in sources.items())
            problems.append(f"layers that are one in an engine must be quantised alike: {said}")
    if problems:
        raise CheckpointError(f"{subject}: " + "; ".join(problems))
    return replace(quantization, exclude_modules=tuple(dict.fromkeys(excluded)))


def published_shapes(
    network: Network, weights: HfWeights, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Of hf_tensor_shapes(), those of a model whose layers were quantised before it was published."""
    result = dict(shapes)
    for weight in _linear_weights(network):
        if not weight.quantized:
            continue
        for part in weight.parts:
            result.pop(f"{part.source}.weight", None)
            for name, _, shape in _tensors_of(part, weight, network, weights):
                result[name] = shape
    return result


def published_dtypes(network: Network, weights: HfWeights) -> dict[str, tuple[np.dtype[Any], ...]]:
    """What the tensors of quantised layers may be of."""
    return {
        name: dtypes
        for weight in _linear_weights(network)
        if weight.quantized
        for part in weight.parts
        for name, dtypes, _ in _tensors_of(part, weight, network, weights)
    }


def check_stored_shapes(network: Network, weights: HfWeights) -> None:
    """Raises CheckpointError where a packed weight is said to have another shape than the network gives it."""
    problems = []
    for name in published_dtypes(network, weights):
        if not name.endswith(f".{_SHAPE}"):
            continue
        source = name.removesuffix(f".{_SHAPE}")
        said = [int(size) for piece in weights.rows(name, range(2)) for size in piece]
        expected = _shapes_of_sources(network)[source]
        if tuple(said) != expected:
            problems.append(f"{weights.where(name)}: is {said}, but config.json makes the weight {list(expected)}")
    if problems:
        raise CheckpointError("; ".join(problems))


def _shapes_of_sources(network: Network) -> dict[str, tuple[int, int]]:
    return {
        part.source: (part.source_outputs, weight.inputs)
        for weight in _linear_weights(network)
        for part in weight.parts
    }


class PublishedTensors:
    """The tensors of a rank of a model whose layers were quantised before it was published."""

    def __init__(
        self,
        weights: HfWeights,
        plan: Sequence[PlannedTensor],
        dtype: np.dtype[Any],
        network: Network,
        quantization: QuantConfig,
    ) -> None:
        self._plain = ModelTensors(weights, plan, dtype)
        self._weights = weights
        self._plan = {tensor.name: tensor for tensor in plan}
        self._quantization = quantization
        self._inputs = {source: shape[1] for source, shape in _shapes_of_sources(network).items()}

    @property
    def errors(self) -> tuple[QuantizationError, ...]:
        """None: nothing is rounded."""
        return ()

    def rows(self, name: str, rows: range, step: int | None = None) -> Iterator[Array]:
        """As PlainTensors.rows."""
        return self._plain.rows(name, rows, step)

    def quantized_rows(self, name: str, rows: range, step: int | None = None) -> Iterator[QuantizedRows]:
        """As RankTensors.quantized_rows. Raises CheckpointError for scales that engines cannot hold."""
        size = _ROWS_OF_A_PIECE if step is None else step
        for first in range(rows.start, rows.stop, size):
            wanted = range(first, min(first + size, rows.stop))
            pieces = [self._rows_of(part, taken) for part, taken in _parts(self._plan[name], wanted)]
            yield QuantizedRows(
                np.concatenate([piece.weights for piece in pieces]),
                np.concatenate([piece.scales for piece in pieces]),
                np.concatenate([piece.zeros for piece in pieces if piece.zeros is not None])
                if self._quantization.has_zero_point
                else None,
            )

    def _rows_of(self, part: Slice, rows: range) -> QuantizedRows:
        source = part.source.removesuffix(".weight")
        scales = self._read(f"{source}.{_SCALE}", rows).reshape(len(rows), -1)
        if self._quantization.quant_algo is not QuantAlgo.W4A16:
            return QuantizedRows(self._int8(source, rows), to_float32(scales), None)
        stored = scales.astype(BFLOAT16)
        if not np.array_equal(to_float32(stored), to_float32(scales)):
            raise CheckpointError(
                f"{self._weights.where(f'{source}.{_SCALE}')}: has scales of {scales.dtype} that bfloat16 cannot hold, "
                "which engines keep those of four bits in; convert the model that this one was quantised from"
            )
        nibbles = self._unpacked_rows(source, rows, 4)
        if not self._quantization.has_zero_point:
            nibbles ^= 8  # from u = q + 8 to q in two's complement
            return QuantizedRows(nibbles[:, 0::2] | (nibbles[:, 1::2] << 4), stored, None)
        return QuantizedRows(nibbles[:, 0::2] | (nibbles[:, 1::2] << 4), stored, self._zeros(source, rows))

    def _int8(self, source: str, rows: range) -> Array:
        if f"{source}.{_PACKED}" not in self._weights:
            return self._read(f"{source}.weight", rows)
        return (self._unpacked_rows(source, rows, 8) ^ 0x80).view(np.int8)

    def _unpacked_rows(self, source: str, rows: range, bits: int) -> Array:
        return _unpacked(self._read(f"{source}.{_PACKED}", rows), bits)[:, : self._inputs[source]]

    def _zeros(self, source: str, rows: range) -> Array:
        """uint8 [rows, groups]; they are packed along the rows."""
        per_word = _WORD_BITS // 4
        words = range(rows.start // per_word, -(-rows.stop // per_word))
        packed = self._read(f"{source}.{_ZERO}", words)
        zeros = _unpacked(np.ascontiguousarray(packed.T), 4).T
        return np.ascontiguousarray(zeros[rows.start - words.start * per_word :][: len(rows)])

    def _read(self, name: str, rows: range) -> Array:
        return np.concatenate(list(self._weights.rows(name, rows)))


def _unpacked(words: Array, bits: int) -> Array:
    """uint8 [rows, words * 32 / bits]: the unsigned numbers of int32 words, the first in the lowest bits."""
    octets = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8).reshape(len(words), -1)
    if bits == 8:
        return octets
    numbers = np.empty((len(octets), 2 * octets.shape[1]), np.uint8)
    numbers[:, 0::2] = octets & 15
    numbers[:, 1::2] = octets >> 4
    return numbers


def _parts(tensor: PlannedTensor, rows: range) -> Iterator[tuple[Slice, range]]:
    """The slices that some rows of a planned tensor are of, with the rows of their sources."""
    first = 0
    for part in tensor.slices:
        taken = part.rows[max(rows.start - first, 0) : max(rows.stop - first, 0)]
        first += len(part.rows)
        if taken:
            yield part, taken


def _tensors_of(
    part: Part, weight: LinearWeight, network: Network, weights: HfWeights
) -> Iterator[tuple[str, tuple[np.dtype[Any], ...], tuple[int, ...]]]:
    """(name, types, shape) of what the weight of a part's source [out, in] is stored as."""
    how = network.config.quantization
    assert how is not None
    source, outputs, inputs = part.source, part.source_outputs, weight.inputs
    groups, is_4bit = how.groups(inputs), how.quant_algo is QuantAlgo.W4A16
    yield f"{source}.{_SCALE}", CHECKPOINT_DTYPES, (outputs, groups)
    if not is_4bit and f"{source}.{_PACKED}" not in weights:
        yield f"{source}.weight", (np.dtype(np.int8),), (outputs, inputs)
        return
    per_word = _WORD_BITS // (4 if is_4bit else 8)
    yield f"{source}.{_PACKED}", (np.dtype(np.int32),), (outputs, -(-inputs // per_word))
    yield f"{source}.{_SHAPE}", (np.dtype(np.int64), np.dtype(np.int32)), (2,)
    if how.has_zero_point:
        yield f"{source}.{_ZERO}", (np.dtype(np.int32),), (-(-outputs // per_word), groups)


def _linear_weights(network: Network) -> Iterator[LinearWeight]:
    for op in network.ops:
        if isinstance(op, Linear):
            yield from op.weights
        elif isinstance(op, Experts):
            yield from (*op.gate, *op.up, *op.down)
