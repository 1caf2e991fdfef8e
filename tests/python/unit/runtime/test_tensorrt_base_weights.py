"""Rows of a TensorRT engine's weights for adapters, in the Hugging Face layer's shape and order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from adaptrt._core import AdapterError
from adaptrt.runtime.tensorrt.base_weights import WeightsFileBase

# One fused layer of two modules with 3 and 2 outputs, and one layer of a single module.
FUSED = np.arange(20, dtype=np.float32).reshape(5, 4)
ALONE = np.arange(100, 108, dtype=np.float32).reshape(2, 4)


class Reader:
    """Reads a checkpoint's tensors row by row."""

    def rows(self, tensor: str, first: int, last: int) -> Iterator[np.ndarray]:
        weights = {"layer.fused.weight": FUSED, "layer.alone.weight": ALONE}
        for row in range(first, last):
            yield weights[tensor][row : row + 1]


class Key:
    """A module of several parts whose rows have another order in the Hugging Face layer."""

    def __init__(self, parts: tuple[str, ...], order: list[range]) -> None:
        self.layer = 3
        self.path = "layer"
        self.module = SimpleNamespace(parts=parts)
        self.order = order

    def in_source_order(self, outputs: int) -> list[range]:
        assert sum(len(rows) for rows in self.order) == outputs
        return self.order


@pytest.fixture
def base() -> WeightsFileBase:
    def weight(name: str, *parts: tuple[str, int]) -> Any:
        return SimpleNamespace(
            name=name, parts=[SimpleNamespace(module=module, outputs=outputs) for module, outputs in parts]
        )

    fused = weight("layer.fused", ("first", 3), ("second", 2))
    site = SimpleNamespace(layer=3, in_size=4, weights=[fused, weight("layer.alone", ("third", 2))])
    return WeightsFileBase(cast(Any, [site]), cast(Any, Reader()), Path("engine"))


@pytest.mark.parametrize(
    ("parts", "order", "expected"),
    [
        (("second",), [range(2)], [FUSED[3:]]),
        (("first", "second"), [range(5)], [FUSED]),
        (("first", "second"), [range(3, 5), range(3)], [FUSED[3:], FUSED[:3]]),
        (("first", "second"), [range(1), range(4, 5), range(1, 4)], [FUSED[:1], FUSED[4:], FUSED[1:4]]),
        (("third", "first"), [range(2, 5), range(2)], [FUSED[:3], ALONE]),
    ],
)
def test_rows_are_in_the_order_of_the_hugging_face_layer(
    base: WeightsFileBase, parts: tuple[str, ...], order: list[range], expected: list[np.ndarray]
) -> None:
    key = cast(Any, Key(parts, order))
    np.testing.assert_array_equal(np.concatenate(list(base.row_blocks(key))), np.concatenate(expected))
    assert base.shape(key) == (sum(len(rows) for rows in order), 4)


def test_a_module_that_the_engine_does_not_have(base: WeightsFileBase) -> None:
    assert base.shape(cast(Any, Key(("first", "fourth"), []))) is None
    for refused in (base.bias, lambda key: base.rows_at(key, [1])):
        with pytest.raises(AdapterError, match="engine is a TensorRT engine"):
            refused(cast(Any, Key(("first",), [])))
