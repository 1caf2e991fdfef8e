"""Models whose quantised layers are converted to matrices of the checkpoint's type."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...._core import CheckpointError, ConfigError, DType, dtype_name
from ....common.progress import format_bytes
from ....formats.checkpoint.casting import CHECKPOINT_DTYPES, FLOAT32
from ....formats.checkpoint.hf_weights import HfWeights, MadeMatrix
from ....formats.hugging_face.published.formats import WEIGHT, PublishedFormat
from ....formats.hugging_face.published.gguf_blocks import format_of
from ....formats.network.network import Network
from .kept_layers import KeptLayers, linear_weights


@dataclass(frozen=True)
class Dequantization:
    """The layers of a model published quantised that were dequantised."""

    format: str
    """Text of PublishedFormat.describe()."""
    num_matrices: int
    published_bytes: int
    """Size of the published tensors."""
    num_bytes: int
    """Size of the dequantised matrices."""
    dtype: DType
    rounds_activations: bool
    """True if the format's library rounds activations when it runs the model. AdaptRT does not."""

    def describe(self) -> str:
        """A summary for the user."""
        activations = "; activations are not rounded to 8 bits" if self.rounds_activations else ""
        return (
            f"{self.num_matrices} matrices of {self.format}, {format_bytes(self.published_bytes)}, become "
            f"{format_bytes(self.num_bytes)} of {dtype_name(self.dtype)}{activations}"
        )


def dequantization(
    found: PublishedFormat,
    network: Network,
    weights: HfWeights,
    kept: KeptLayers | None,
    dtype: DType,
    subject: str,
) -> Dequantization | None:
    """The matrices of linear layers that are dequantised because they are not in `kept`; None: there are none.

    Raises CheckpointError if `dtype` would round dequantised values, or the values of kept codebook matrices. Kept
    integers need no such check: engines of every type multiply them alike.
    """
    all_used, own = dict(_matrices_of(network, weights)), np.dtype(dtype_name(dtype))
    used = {name: matrix for name, matrix in all_used.items() if kept is None or name not in kept.matrices}
    typed = all_used if kept is not None and kept.quantization.has_codebooks else used
    if not found.has_model_dtype:
        needed = {matrix.dtype for matrix in typed.values()}
        accepted = [each for each in CHECKPOINT_DTYPES if each == FLOAT32 or needed <= {each}]
        if own not in accepted:
            name, matrix = next((name, matrix) for name, matrix in typed.items() if matrix.dtype != own)
            raise CheckpointError(
                f"{subject}: dtype {own} would round the weights of {found.describe()}, such as '{name}', which are "
                f"{matrix.dtype}; accepted: --dtype {' or '.join(map(str, accepted))}"
            )
    if not used:
        return None
    return Dequantization(
        format=format_of(found, used.values()),
        num_matrices=len(used),
        published_bytes=weights.stored_bytes(used),
        num_bytes=sum(matrix.shape[0] * matrix.shape[1] for matrix in used.values()) * own.itemsize,
        dtype=dtype,
        rounds_activations=found.rounds_activations,
    )


def check_dequantized(found: Dequantization | None, directory: Path) -> None:
    """Raises ConfigError if nothing of a model in `directory` was dequantised, although a user asked for it."""
    if found is None:
        raise ConfigError(f"{directory}: dequantize: the model has no pre-quantised layers; leave dequantize out")


def dequantized_blocks(network: Network, weights: HfWeights, dtype: DType) -> Dequantization | None:
    """The transposed matrices of linear layers that are quantised in a GGUF file; None: there are none.

    Their blocks lie across the outputs, so none can be kept.
    """
    names = {part.source + WEIGHT for weight in linear_weights(network) for part in weight.parts}
    stored = {name: blocks for name in names if name in weights and (blocks := weights.blocks(name)) is not None}
    if not stored:
        return None
    num_values = sum(math.prod(weights.spec(name).shape) for name in stored)
    return Dequantization(
        format=" and ".join(sorted({blocks.type for blocks in stored.values()})),
        num_matrices=len(stored),
        published_bytes=sum(blocks.num_bytes for blocks in stored.values()),
        num_bytes=num_values * np.dtype(dtype_name(dtype)).itemsize,
        dtype=dtype,
        rounds_activations=True,
    )


def _matrices_of(network: Network, weights: HfWeights) -> Iterator[tuple[str, MadeMatrix]]:
    made = weights.matrices
    for weight in linear_weights(network):
        for part in weight.parts:
            if (name := part.source + WEIGHT) in made:
                yield name, made[name]
