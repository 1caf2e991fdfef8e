"""Reading any rows of a checkpoint's tensor, in steps of any size, gives the same as slicing the whole tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from adaptrt.builder.conversion.model_tensors import ModelTensors
from adaptrt.formats.checkpoint.hf_weights import HfWeights
from adaptrt.formats.checkpoint.planned_tensor import PlannedTensor, Slice

FLOAT32 = np.dtype(np.float32)
# Shapes [out, in] in both layouts.
SHAPES = {"linear": (9, 6), "conv1d": (7, 6)}
ARRAYS = {name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> HfWeights:
    directory: Path = tmp_path_factory.mktemp("model")
    stored = {"linear": ARRAYS["linear"], "conv1d": np.ascontiguousarray(ARRAYS["conv1d"].T)}
    save_file(stored, directory / "model.safetensors")
    return HfWeights(directory)


@st.composite
def slices(draw: st.DrawFn) -> Slice:
    source = draw(st.sampled_from(list(SHAPES)))
    first, last = sorted(draw(st.tuples(*[st.integers(0, SHAPES[source][0])] * 2)))
    columns = None if draw(st.booleans()) else range(2, 6)
    return Slice(source, range(first, last), columns, transposed=source == "conv1d")


@given(st.data())
def test_rows(weights: HfWeights, data: st.DataObject) -> None:
    parts = data.draw(st.lists(slices(), min_size=1, max_size=5))
    columns = parts[0].columns
    parts = [Slice(part.source, part.rows, columns, part.transposed) for part in parts]
    zero_rows = data.draw(st.integers(0, 3))
    width = 6 if columns is None else len(columns)
    cut = [ARRAYS[part.source][part.rows.start : part.rows.stop, 6 - width :] for part in parts]
    whole = np.concatenate([*cut, np.zeros((zero_rows, width), np.float32)])
    tensors = ModelTensors(weights, [PlannedTensor("made", whole.shape, tuple(parts), zero_rows)], FLOAT32)
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    step = data.draw(st.none() | st.integers(1, 8))
    pieces = list(tensors.rows("made", range(first, last), step))
    assert all(piece.flags.c_contiguous for piece in pieces)
    if step is not None:
        assert [len(piece) for piece in pieces[:-1]] == [step] * len(pieces[:-1])
        assert all(0 < len(piece) <= step for piece in pieces)
    np.testing.assert_array_equal(np.concatenate([whole[:0], *pieces]), whole[first:last])
