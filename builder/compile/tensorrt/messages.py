"""What the parent asks of a child process, and what the child tells while it works: JSON objects, one a line."""

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
"""One of them ends every conversation, unless the child dies."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """One plan to build. Paths are absolute."""

    package: str
    network: str
    """The ONNX graph without its stored weights."""
    weights: str | None
    """A safetensors file with the stored weights; None: the network has none, they are inputs."""
    compute_capability: str | None
    """None: that of the GPU at hand."""
    profiles: tuple[Mapping[str, Shapes], ...]
    """For each profile, shapes of the inputs that are not fixed."""
    timing_cache: str | None
    streams_weights: bool
    """Whether a budget may keep some of the weights on the host while the plan runs."""
    plan: str
    """The file to write."""


@dataclass(frozen=True, kw_only=True)
class NetworkTensor:
    """An input or output as TensorRT's network has it."""

    name: str
    dtype: str
    """numpy's name."""
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
    """TensorRT's own description of the plan's layers, as it logs it; empty if it does not."""
    base_bytes: int
    """Peak memory of the process before it read the network: Python, the packages and their libraries."""
    peak_bytes: int
    """Peak memory of the process."""


def request_to_json(request: PlanRequest) -> str:
    """The text that the child reads."""
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
