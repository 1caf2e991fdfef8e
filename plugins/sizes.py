"""Sizes of a plugin's named dimensions in a node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .definition import Plugin


def bind_sizes(plugin: Plugin, shapes: Sequence[Sequence[int]]) -> tuple[dict[str, int], list[str]]:
    """Returns (size by name, problems: where shapes differ from the definition or from one another).

    `shapes` are the inputs' shapes in order; a size below 0 is unknown.
    """
    if len(shapes) != len(plugin.inputs):
        return {}, [f"has {len(shapes)} inputs; expected {len(plugin.inputs)}"]
    sizes: dict[str, int] = {}
    problems = []
    for tensor, shape in zip(plugin.inputs, shapes, strict=True):
        if len(shape) != len(tensor.shape):
            problems.append(f"input {tensor.name} has {len(shape)} dimensions; expected {len(tensor.shape)}")
            continue
        for name, size in zip(tensor.shape, shape, strict=True):
            if size < 0:
                continue
            expected = name if isinstance(name, int) else sizes.setdefault(name, size)
            if size != expected:
                problems.append(f"input {tensor.name} has {size} where '{name}' is {expected}")
    return sizes, problems


def places_of(plugin: Plugin, names: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """(input, axis) from which each named dimension can be read."""
    first: dict[str, tuple[int, int]] = {}
    for index, tensor in enumerate(plugin.inputs):
        for axis, name in enumerate(tensor.shape):
            if isinstance(name, str):
                first.setdefault(name, (index, axis))
    return tuple(first[name] for name in names)
