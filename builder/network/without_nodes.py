"""Ops, and fields of others, that no ONNX graph has. Does not import onnx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...formats.network.network import Network
from ...formats.network.ops import AddGivenColumns, Attention, Embedding, JoinColumns, JoinNeighbours, Op, Rotary

OPS: Final[tuple[type[Op], ...]] = (AddGivenColumns, JoinColumns, JoinNeighbours)
"""Ops for rows that are given in place of tokens. Graphs have no such rows."""

FIELDS: Final[Mapping[type[Op], tuple[str, ...]]] = {
    Attention: ("window_column", "joint_column", "chunk", "plain_norm_epsilon"),
    Embedding: ("num_later_elements", "num_coordinates"),
    Rotary: ("columns", "is_twice", "is_in_turn"),
}
"""Fields for such rows, and of attention that PagedAttention does not have."""

_UNSET: Final[tuple[object, ...]] = (None, False, 0, ())


def names_of_ops(network: Network, ops: tuple[type[Op], ...]) -> set[str]:
    """Returns the names of those ops that the network has."""
    return {type(op).__name__ for op in network.ops if isinstance(op, ops)}


def names_of_fields(network: Network, fields: Mapping[type[Op], tuple[str, ...]]) -> set[str]:
    """Returns "op.field" for those fields that an op of the network sets."""
    found: set[str] = set()
    for op in network.ops:
        names = next((names for kind, names in fields.items() if isinstance(op, kind)), ())
        found.update(f"{type(op).__name__}.{name}" for name in names if getattr(op, name) not in _UNSET)
    return found
