"""Inputs with which plugin nodes find the adapters of a step, and their reference implementation."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .._core import NUM_TABLE_MODULES
from .definition import Array, Attribute, Tensor

NUM_MODULES: Final = NUM_TABLE_MODULES

SEQUENCE_OFFSETS: Final = Tensor(
    "sequence_offsets",
    "tensor(int32)",
    ("offsets",),
    "First token of each sequence, followed by the number of tokens in all sequences.",
)
ADAPTER_SLOTS: Final = Tensor(
    "adapter_slots", "tensor(int32)", ("sequences",), "Slot of each sequence's adapter; -1: the base model."
)
RANKS: Final = Tensor(
    "ranks",
    "tensor(int32)",
    ("slots", "layers", NUM_MODULES),
    "Rank of each slot's adapter by layer and module id; 0: the module is not adapted.",
)
POINTERS: Final = Tensor(
    "pointers",
    "tensor(int64)",
    ("slots", "layers", NUM_MODULES, 3),
    "Addresses of A[rank, in] and B[out, rank], in the engine's type with the scale in B, and of the float32 "
    "magnitude[out]; 0: none.",
)

MODULE_ATTRIBUTES: Final = (
    Attribute("layer", "int", "Decoder layer, the tables' second index."),
    Attribute("module_ids", "ints", "TensorRT-LLM's module ids of the parts of the output, the tables' third index."),
    Attribute("out_sizes", "ints", "Output width of each part."),
    Attribute("max_rank", "int", "Maximum rank in the table; sizes the workspace of the shrink's results."),
)

TABLE_INPUTS: Final = (SEQUENCE_OFFSETS, ADAPTER_SLOTS, RANKS, POINTERS)


def check_modules(sizes: Mapping[str, int], attributes: Mapping[str, Any]) -> list[str]:
    """Problems of the attributes above, and of the output's width `out`."""
    problems = []
    module_ids, out_sizes = list(attributes["module_ids"]), list(attributes["out_sizes"])
    if not module_ids or len(module_ids) != len(out_sizes) or len(set(module_ids)) != len(module_ids):
        problems.append(
            f"module_ids {module_ids} and out_sizes {out_sizes} must have the same length, with each module once"
        )
    if any(not 0 <= module < NUM_MODULES for module in module_ids):
        problems.append(f"module_ids {module_ids} must be within 0 .. {NUM_MODULES - 1}")
    if attributes["max_rank"] < 1:
        problems.append(f"max_rank {attributes['max_rank']} must be at least 1")
    if "out" in sizes and sum(out_sizes) != sizes["out"]:
        problems.append(f"out_sizes {out_sizes} add up to {sum(out_sizes)}, not to the output's {sizes['out']}")
    if "layers" in sizes and not 0 <= attributes["layer"] < sizes["layers"]:
        problems.append(f"layer {attributes['layer']} must be within 0 .. {sizes['layers'] - 1}")
    if "offsets" in sizes and "sequences" in sizes and sizes["offsets"] != sizes["sequences"] + 1:
        problems.append(f"there are {sizes['offsets']} sequence_offsets for {sizes['sequences']} sequences")
    return problems


def shrink_bytes(sizes: Mapping[str, int], attributes: Mapping[str, Any]) -> int:
    """Size of the shrink's 16-bit results: max_rank per token and part, in rows of at least 16 bytes."""
    row_bytes = -(-int(attributes["max_rank"]) * 2 // 16) * 16
    return sizes["tokens"] * len(attributes["module_ids"]) * row_bytes


@dataclass(frozen=True)
class AdaptedPart:
    """An adapter's effect on one part of the output, for the tokens of one sequence."""

    tokens: slice
    columns: slice
    rank: int
    a: int
    b: int
    magnitude: int
    """Addresses of A, B and the magnitudes; 0: none."""


def adapted_parts(tables: Sequence[Array], attributes: Mapping[str, Any]) -> Iterator[AdaptedPart]:
    """Yields each sequence with an adapter and each part that it adapts. `tables` are the inputs TABLE_INPUTS.

    Raises ValueError for a rank above max_rank.
    """
    sequence_offsets, adapter_slots, ranks, pointers = tables
    starts = np.concatenate([[0], np.cumsum(attributes["out_sizes"])])
    for sequence, slot in enumerate(adapter_slots):
        tokens = slice(int(sequence_offsets[sequence]), int(sequence_offsets[sequence + 1]))
        if slot < 0 or tokens.start == tokens.stop:
            continue
        for part, module in enumerate(attributes["module_ids"]):
            entry = (int(slot), int(attributes["layer"]), int(module))
            rank = int(ranks[entry])
            if rank > attributes["max_rank"]:
                raise ValueError(f"slot {slot} has rank {rank} in module {module}; max_rank {attributes['max_rank']}")
            if rank > 0:
                columns = slice(int(starts[part]), int(starts[part + 1]))
                yield AdaptedPart(tokens, columns, rank, *(int(address) for address in pointers[entry]))


def array_at(address: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """A view of memory that the caller keeps alive."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    buffer = (ctypes.c_char * num_bytes).from_address(address)
    flat: Array = np.frombuffer(memoryview(buffer), np.uint8).view(dtype)
    return flat.reshape(shape)
