from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from adaptrt import _core

FLOAT32, BFLOAT16 = _core.DType.FLOAT32, _core.DType.BFLOAT16
W8A16 = _core.Quantization(algo=_core.QuantAlgo.W8A16)
REORDERED = _core.Quantization(algo=_core.QuantAlgo.W8A16, act_order=True)
ORDER_BYTES = _core.quantized_panel_bytes(REORDERED, 1, 8) - _core.quantized_panel_bytes(W8A16, 1, 8)
COMPRESSED_BYTES = _core.compressed_bytes(64, 8, 1)


def test_a_packed_matrix_and_its_copies_keep_their_buffer() -> None:
    weights = np.arange(12, dtype=np.float32).reshape(3, 4)
    panels = np.zeros(_core.panel_bytes(_core.DType.FLOAT32, 3, 4), np.uint8)
    _core.pack_panels(panels, _core.DType.FLOAT32, 3, 4, 0, weights, _core.DType.FLOAT32)
    buffer = weakref.ref(panels)
    matrix = _core.PanelMatrix(data=panels, dtype=_core.DType.FLOAT32, n=3, k=4)
    part = _core.LinearPart(weight=matrix)
    del panels, matrix
    gc.collect()
    assert buffer() is not None
    np.testing.assert_array_equal(part.weight.rows(0, 3), weights)
    del part
    gc.collect()
    assert buffer() is None


def test_a_vector_keeps_its_buffer() -> None:
    buffer = np.asarray([1, 2, 3], np.float32)
    known = weakref.ref(buffer)
    vector = _core.VectorView(data=buffer)
    part = _core.LinearPart(weight=_core.PanelMatrix(data=b"", dtype=FLOAT32, n=0, k=0), bias=vector)
    del buffer
    gc.collect()
    assert known() is not None
    np.testing.assert_array_equal(vector.values(), [1, 2, 3])
    del vector
    gc.collect()
    assert known() is not None  # the layer's bias is a copy of the vector
    del part
    gc.collect()
    assert known() is None


def test_a_buffer_cannot_be_resized_while_weights_refer_to_it() -> None:
    for make in (
        lambda data: _core.VectorView(data=data),
        lambda data: _core.PanelMatrix(data=data, dtype=FLOAT32, n=1, k=4),
    ):
        buffer = bytearray(16)
        weight = make(buffer)
        with pytest.raises(BufferError):
            buffer.clear()
        del weight
        gc.collect()
        buffer.clear()


def every_second(num_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Returns a strided view of exactly this many bytes."""
    return np.zeros(2 * num_bytes, np.uint8)[::2]


@pytest.mark.parametrize(
    "call",
    [
        lambda: _core.pack_panels(every_second(16), FLOAT32, 1, 4, 0, np.zeros((1, 4), np.float32), FLOAT32),
        lambda: _core.unpack_panels(every_second(16), FLOAT32, 1, 4),
        lambda: _core.pack_quantized_panels(
            every_second(_core.quantized_panel_bytes(W8A16, 1, 8)), W8A16, 1, 8, 0, 1,
            np.zeros((1, 8), np.int8), np.ones(1, np.float32),
        ),
        lambda: _core.pack_quantized_panels(
            np.zeros(_core.quantized_panel_bytes(W8A16, 1, 8), np.uint8), W8A16, 1, 8, 0, 1,
            every_second(8), np.ones(1, np.float32),
        ),
        lambda: _core.pack_permutation(every_second(ORDER_BYTES), REORDERED, 1, 8, np.arange(8, dtype=np.int32)),
        lambda: _core.max_outliers(every_second(64 * 8 * 2), 64, 8),
        lambda: _core.compress_panels(every_second(COMPRESSED_BYTES), np.zeros(64 * 8 * 2, np.uint8), 64, 8, 1),
        lambda: _core.compress_panels(np.zeros(COMPRESSED_BYTES, np.uint8), every_second(64 * 8 * 2), 64, 8, 1),
        lambda: _core.PanelMatrix(data=every_second(16), dtype=FLOAT32, n=1, k=4),
        lambda: _core.VectorView(data=every_second(16)),
        lambda: _core.WeightMemory(path="file", mapping=every_second(16), num_bytes=16),
    ],
)  # fmt: skip
def test_strided_buffers_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="the buffer is not contiguous"):
        call()


@pytest.mark.parametrize("n", [-1, 1 << 31, 1 << 62])
def test_sizes_whose_bytes_cannot_be_counted_are_refused(n: int) -> None:
    panels, row = np.zeros(64, np.uint8), np.zeros((1, 4), np.float32)
    calls: list[Callable[[], object]] = [
        lambda: _core.pack_panels(panels, FLOAT32, n, 4, 0, row, FLOAT32),
        lambda: _core.unpack_panels(panels, FLOAT32, n, 4),
        lambda: _core.pack_quantized_panels(panels, W8A16, n, 4, 0, 1, np.zeros((1, 4), np.int8), row[:, 0]),
        lambda: _core.pack_permutation(panels, REORDERED, n, 4, np.arange(4, dtype=np.int32)),
        lambda: _core.compressed_bytes(n, 8, 0),
        lambda: _core.PanelMatrix(data=panels, dtype=FLOAT32, n=n, k=4),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rf"n is {n} and k is \d; expected numbers in \[0, 2\*\*31\)"):
            call()


def test_rows_beyond_the_matrix_are_refused() -> None:
    panels, rows = np.zeros(32, np.uint8), np.zeros((2, 4), np.float32)
    for first in (-1, 1, 2**63 - 1):
        with pytest.raises(ValueError, match="the source's rows do not lie within the matrix"):
            _core.pack_panels(panels, FLOAT32, 2, 4, first, rows, FLOAT32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: _core.CastOp(input=1 << 40, output=0),
            r"CastOp\.input is 1099511627776 \(int\); accepted: int from -",
        ),
        (lambda: _core.SendOp(input="x"), r"SendOp\.input is 'x' \(str\); accepted: int"),
        (
            lambda: _core.Routing(scores=2, top_k=1, norm_topk_prob=True),
            r"Routing\.scores is 2 \(int\); accepted: RouterScores",
        ),
        (lambda: _core.LoraPart(module="q", out_size=1), r"LoraPart\.module is 'q' \(str\); accepted: int"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_a_module_that_there_is_not_is_refused() -> None:
    with pytest.raises(_core.ConfigError, match="there is no LoRA module with id 99"):
        _core.LoraPart(module=99, out_size=1)


def test_records_are_read_only_and_say_their_fields() -> None:
    op = _core.AllReduceOp(input=1, output=2, add=True)
    assert repr(op) == "AllReduceOp(input=1, output=2, add=True)"
    with pytest.raises(AttributeError):
        op.add = False  # type: ignore[misc]
