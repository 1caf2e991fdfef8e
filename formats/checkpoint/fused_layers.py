"""Splits fused linear layers of files into the layers that transformers has."""

from __future__ import annotations

from collections.abc import Mapping

from ..._core import CheckpointError
from .hf_weights import HfWeights, MadeTensor
from .tensor_rows import TensorRows


def layers_apart(weights: HfWeights, fused: Mapping[str, tuple[str, ...]]) -> HfWeights:
    """Replaces each fused layer by layers that have equal shares of its outputs, in order.

    fused: last names of the layers, by the end of the fused layer's name.

    Raises CheckpointError that lists every fused tensor whose outputs have no such shares.
    """
    made: dict[str, MadeTensor] = {}
    problems: list[str] = []
    for name in weights.names:
        path, _, kind = name.rpartition(".")
        for layer, parts in fused.items():
            if kind not in ("weight", "bias") or not path.endswith(f".{layer}"):
                continue
            shape = weights.spec(name).shape
            if not shape or shape[0] % len(parts) != 0:
                problems.append(f"{weights.where(name)}: is {list(shape)}; expected a multiple of {len(parts)} outputs")
                continue
            share = shape[0] // len(parts)
            for number, part in enumerate(parts):
                rows = range(number * share, (number + 1) * share)
                made[f"{path.removesuffix(layer)}{part}.{kind}"] = TensorRows(weights, name, rows)
    if problems:
        raise CheckpointError("; ".join(problems))
    return weights.with_made(made) if made else weights
