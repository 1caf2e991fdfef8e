"""Patterns of nodes, matched from a value backwards to what it is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .graph_index import Array, GraphIndex, Node


@dataclass(frozen=True)
class Value:
    """Any value; the match tells which under `name`. Where the name occurs twice, the values must be the same."""

    name: str


@dataclass(frozen=True)
class Constant:
    """A constant of the graph; the match tells its value under `name`."""

    name: str


@dataclass(frozen=True)
class Input:
    """The graph's input of this name."""

    name: str


class Op:
    """A node of this type (its first output) with exactly these attributes, whose inputs match in order."""

    def __init__(self, op_type: str, *inputs: Pattern, **attributes: Any) -> None:
        self.op_type = op_type
        self.inputs = inputs
        self.attributes = attributes


class AnyAttributes(Op):
    """An Op whose attributes are left to the caller."""


Pattern = Value | Constant | Input | Op


@dataclass
class Match:
    """What a pattern stood for."""

    values: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def scalar(self, name: str) -> float:
        """A constant of one element."""
        return float(self.constants[name].item())


def match(index: GraphIndex, value: str, pattern: Pattern) -> Match | None:
    """How a value is made, if the pattern describes it."""
    found = Match()
    return found if _matches(index, value, pattern, found) else None


def _matches(index: GraphIndex, value: str, pattern: Pattern, found: Match) -> bool:
    if isinstance(pattern, Value):
        return found.values.setdefault(pattern.name, value) == value
    if isinstance(pattern, Input):
        return value == pattern.name and value in index.inputs
    if isinstance(pattern, Constant):
        constant = index.constant(value)
        if constant is None:
            return False
        known = found.constants.setdefault(pattern.name, constant)
        return bool(known.shape == constant.shape and (known == constant).all())
    node = index.producer(value)
    if node is None or node.op_type != pattern.op_type or node.outputs[0] != value:
        return False
    if len(node.inputs) != len(pattern.inputs):
        return False
    if not isinstance(pattern, AnyAttributes) and node.attributes != pattern.attributes:
        return False
    found.nodes.append(node)
    return all(
        _matches(index, made_of, inner, found) for made_of, inner in zip(node.inputs, pattern.inputs, strict=True)
    )
