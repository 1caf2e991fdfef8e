"""Definition of a plugin. Schema, shape function and reference op are derived from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

DOMAIN: Final = "adaptrt"
VERSION: Final = "1"
NAMESPACE: Final = "adaptrt"

Array = np.ndarray[Any, np.dtype[Any]]
Dim = str | int
"""A fixed size, or the name of one. A name means the same size everywhere in a plugin's inputs and outputs."""

ENGINE_TYPE: Final = "T"
ENGINE_TYPES: Final = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")
"""Possible types T; all inputs and outputs of a node with type T share it."""
KERNEL_TYPES: Final = ("tensor(float16)", "tensor(bfloat16)")
"""Types that the CUDA kernels support: tensor cores multiply 16-bit numbers."""

ElementType = Literal["T", "tensor(float)", "tensor(int32)", "tensor(int64)"]


@dataclass(frozen=True)
class Tensor:
    """An input or output."""

    name: str
    type: ElementType
    shape: tuple[Dim, ...]
    doc: str


@dataclass(frozen=True)
class Attribute:
    """An attribute; one without a default is required."""

    name: str
    kind: Literal["int", "ints", "float", "string"]
    doc: str
    default: int | float | str | None = None


# TensorRT's ONNX parser finds a plugin's creator by these two attributes.
_PARSER_ATTRIBUTES: Final = (
    Attribute("plugin_version", "string", "Version of the plugin's interface.", VERSION),
    Attribute("plugin_namespace", "string", "Namespace of the plugin's creator.", NAMESPACE),
)


@dataclass(frozen=True)
class Plugin:
    """An operator of the domain `adaptrt`.

    check: gets the known sizes of the named dimensions, and the attributes; returns the problems.
    evaluate: gets the inputs in order as numpy arrays, and the attributes; returns the outputs.
    aliases: maps each output that is written in place to its input.
    workspace_bytes: gets the maximum sizes of the named dimensions, and the attributes; returns the size of the device
    memory that the kernels may write while they run.
    """

    name: str
    doc: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    own_attributes: tuple[Attribute, ...]
    check: Callable[[Mapping[str, int], Mapping[str, Any]], list[str]]
    evaluate: Callable[[Sequence[Array], Mapping[str, Any]], tuple[Array, ...]]
    aliases: Mapping[str, str]
    workspace_bytes: Callable[[Mapping[str, int], Mapping[str, Any]], int]

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        """All attributes of a node, including those that TensorRT's parser needs."""
        return self.own_attributes + _PARSER_ATTRIBUTES
