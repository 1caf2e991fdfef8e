"""What a plugin's definition consists of. Schemas, shape functions and reference ops are derived from it."""

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
"""A named size, equal wherever the name occurs in a plugin's inputs and outputs, or a fixed one."""

ENGINE_TYPE: Final = "T"
ENGINE_TYPES: Final = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")
"""The types that T can be; it is the same in all inputs and outputs of a node."""
KERNEL_TYPES: Final = ("tensor(float16)", "tensor(bfloat16)")
"""Those of them that the CUDA kernels have: tensor cores multiply 16-bit numbers."""

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


# TensorRT's ONNX parser finds a plugin's creator by these two.
_PARSER_ATTRIBUTES: Final = (
    Attribute("plugin_version", "string", "Version of the plugin's interface.", VERSION),
    Attribute("plugin_namespace", "string", "Namespace of the plugin's creator.", NAMESPACE),
)


@dataclass(frozen=True)
class Plugin:
    """An operator of the domain `adaptrt`.

    `check` gets the sizes that are known of the named dimensions, and the attributes, and returns what does not
    fit. `evaluate` gets the inputs in order as numpy arrays and the attributes, and returns the outputs.
    `aliases` says which output is which input, written in place. `workspace_bytes` gets the largest sizes of the named
    dimensions and the attributes: device memory that the plugin's kernels may write while they run.
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
        """All attributes of a node, those that TensorRT's parser needs included."""
        return self.own_attributes + _PARSER_ATTRIBUTES
