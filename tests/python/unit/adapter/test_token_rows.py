"""Rows of trained tokens: PEFT saves the rows of a tied lm_head twice."""

from __future__ import annotations

import numpy as np

from adaptrt.formats.adapter.token_rows import _is_saved_twice


def test_only_equal_tensors_are_the_same_rows() -> None:
    first, equal = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    different = np.zeros((2, 3), np.float32)
    assert _is_saved_twice("a", {"a": first, "b": equal})
    assert not _is_saved_twice("a", {"a": first, "b": different})
    assert not _is_saved_twice("a", {"a": first})
