"""What stands in for a plan's execution contexts: TensorRT's methods, over a network that somebody else evaluates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto

from adaptrt import _core

DTYPES = {
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    TensorProto.INT32: np.dtype(np.int32),
    TensorProto.INT64: np.dtype(np.int64),
}
ENGINE_TYPES = {"float16": _core.DType.FLOAT16, "bfloat16": _core.DType.BFLOAT16}
# What the kernels may ask of addresses.
ALIGNMENT = 256

Profile = Mapping[str, tuple[Sequence[int], Sequence[int], Sequence[int]]]
"""Smallest, usual and largest shape by input."""


class StandInContext:
    """An execution context for one profile. Refuses shapes outside the profile."""

    def __init__(self, network: onnx.ModelProto, profile: Profile) -> None:
        self.network = network
        self.profile = profile
        self.types = {value.name: value.type.tensor_type for value in (*network.graph.input, *network.graph.output)}
        self.inputs = [value.name for value in network.graph.input]
        self.outputs = [value.name for value in network.graph.output]
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self.num_runs = 0
        self.num_enqueues = 0
        self.others: list[StandInContext] = []

    def another(self) -> StandInContext:
        """One more for the same profile."""
        self.others.append(self.alike())
        return self.others[-1]

    def set_input_shape(self, name: str, dims: tuple[int, ...]) -> bool:
        """False when the network or its profile does not take the shape."""
        expected = self.types[name].shape.dim
        if len(dims) != len(expected) or any(
            dim.HasField("dim_value") and dim.dim_value != size for dim, size in zip(expected, dims, strict=True)
        ):
            return False
        if name in self.profile:
            low, _, high = self.profile[name]
            if not all(least <= size <= most for least, size, most in zip(low, dims, high, strict=True)):
                return False
        self._shapes[name] = dims
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        """False for a tensor that there is not."""
        if name not in self.types or address % ALIGNMENT != 0:
            return False
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        """Puts a run over the tensors as they are now into the stream."""
        self.num_enqueues += 1
        self.enqueue(stream, dict(self._shapes), dict(self._addresses))
        return True

    def alike(self) -> StandInContext:
        """A context of the same network and profile, of which nothing is set."""
        raise NotImplementedError

    def enqueue(self, stream: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        """Puts a run into the stream, which counts in num_runs when it is done."""
        raise NotImplementedError
