"""The parent's request and the child process's messages: JSON objects, one per line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from ....formats.engine.tensorrt.plan_config import Shapes

LOG: Final = "log"
PHASE: Final = "phase"
REFUSED: Final = "refused"
DESCRIBED: Final = "described"
BUILT: Final = "built"
FINAL_KINDS: Final = frozenset({REFUSED, DESCRIBED, BUILT})
"""Every conversation ends with one of these, unless the child crashes."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """One plan to build. Paths are absolute."""

    package: str
    network: str
    """The ONNX graph without the stored weights."""
    weights: str | None
    """A safetensors file with the stored weights; None: the weights are inputs."""
    compute_capability: str | None
    """None: the local GPU's."""
    profiles: tuple[Mapping[str, Shapes], ...]
    """For each profile, the shapes of the dynamic inputs."""
    timing_cache: str | None
    streams_weights: bool
    """True if a budget may keep some of the weights on the host while the plan runs."""
    plan: str
    """Path of the plan to write."""


@dataclass(frozen=True, kw_only=True)
class NetworkTensor:
    """An input or output of TensorRT's network."""

    name: str
    dtype: str
    """numpy's name of the type."""
    shape: tuple[int, ...]
    """-1: known at run time."""
    mode: str
    """`input` or `output`."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """A plan that was written."""

    num_bytes: int
    checksum: str
    """XXH3-128 of the file."""
    tensors: tuple[NetworkTensor, ...]
    layers: str
    """TensorRT's description of the plan's layers, as logged; empty if it logs none."""
    base_bytes: int
    """Peak memory of the process before it read the network: Python, the packages and their libraries."""
    peak_bytes: int
    """Peak memory of the process."""


def request_to_json(request: PlanRequest) -> str:
    """The JSON text of a request."""
    return json.dumps(asdict(request))


def request_from_json(text: str) -> PlanRequest:
    """The inverse of request_to_json()."""
    data = json.loads(text)
    profiles = tuple({name: _shapes(shapes) for name, shapes in profile.items()} for profile in data.pop("profiles"))
    return PlanRequest(**data, profiles=profiles)


def built_to_message(built: Built) -> dict[str, Any]:
    """The message that ends a build."""
    return {"kind": BUILT, **asdict(built)}


def built_from_message(message: Mapping[str, Any]) -> Built:
    """The inverse of built_to_message()."""
    data = {name: value for name, value in message.items() if name != "kind"}
    tensors = tuple(NetworkTensor(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in data.pop("tensors"))
    return Built(**data, tensors=tensors)


def _shapes(data: Sequence[Sequence[int]]) -> Shapes:
    smallest, usual, largest = (tuple(shape) for shape in data)
    return smallest, usual, largest
