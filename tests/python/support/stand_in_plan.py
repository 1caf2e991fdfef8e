"""Replacement for a plan's execution contexts: TensorRT's methods on a network that a subclass evaluates."""

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
# Alignment of addresses that the kernels may require.
ALIGNMENT = 256

Profile = Mapping[str, tuple[Sequence[int], Sequence[int], Sequence[int]]]
"""Minimum, optimum and maximum shape of each input."""


class StandInContext:
    """An execution context for one profile. Rejects shapes outside the profile."""

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
        """Returns another context for the same profile."""
        self.others.append(self.alike())
        return self.others[-1]

    def set_input_shape(self, name: str, dims: tuple[int, ...]) -> bool:
        """Returns False if the network or its profile does not accept the shape."""
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
        """Returns False for an unknown tensor."""
        if name not in self.types or address % ALIGNMENT != 0:
            return False
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        """Enqueues a run on the current tensors in the stream."""
        self.num_enqueues += 1
        self.enqueue(stream, dict(self._shapes), dict(self._addresses))
        return True

    def alike(self) -> StandInContext:
        """Returns a context of the same network and profile, without any settings."""
        raise NotImplementedError

    def enqueue(self, stream: int, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        """Enqueues a run, which increments num_runs at its end."""
        raise NotImplementedError
