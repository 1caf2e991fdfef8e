"""Embeddings of fewer dimensions than the model's."""

from __future__ import annotations

import numpy as np
import pytest

from adaptrt._core import PoolingParams
from adaptrt.serve.embeddings import cut

ROW = np.array([3.0, -4.0, 12.0], np.float32)


@pytest.mark.parametrize("dimensions", [None, 3])
def test_whole_embeddings_stay_as_they_are(dimensions: int | None) -> None:
    assert cut(ROW, dimensions, PoolingParams(normalize=True)) is ROW


def test_a_cut_embedding_has_length_one_again() -> None:
    row = cut(ROW, 2, PoolingParams(normalize=True))
    assert row.dtype == np.float32
    np.testing.assert_array_equal(row, np.array([0.6, -0.8], np.float32))


def test_embeddings_that_are_not_normalised_are_cut_alone() -> None:
    np.testing.assert_array_equal(cut(ROW, 2, PoolingParams(normalize=False)), ROW[:2])


def test_zeros_stay_zeros() -> None:
    zeros = np.array([0.0, 0.0, 5.0], np.float32)
    np.testing.assert_array_equal(cut(zeros, 2, PoolingParams(normalize=True)), zeros[:2])
