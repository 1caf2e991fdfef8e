from __future__ import annotations

import gc
import weakref

import numpy as np

from adaptrt import _core


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
