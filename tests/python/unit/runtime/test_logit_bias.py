"""Rows that are added to logits."""

from __future__ import annotations

import numpy as np
import pytest

from adaptrt import RequestError
from adaptrt.runtime.logit_bias import logit_bias_row


def test_only_allowed_tokens_keep_their_logits() -> None:
    row = logit_bias_row({}, [1, 3], 5)
    assert row.dtype == np.float32
    assert row.tolist() == [-np.inf, 0.0, -np.inf, 0.0, -np.inf]


def test_all_tokens_are_allowed_unless_some_are_named() -> None:
    assert logit_bias_row({}, None, 3).tolist() == [0.0, 0.0, 0.0]
    assert logit_bias_row({}, [], 2).tolist() == [-np.inf, -np.inf]


def test_biases_are_added_to_allowed_tokens() -> None:
    assert logit_bias_row({0: 2.5, 2: -1.0, 1: 4.0}, [0, 2], 3).tolist() == [2.5, -np.inf, -1.0]


@pytest.mark.parametrize(
    ("bias", "allowed", "text"),
    [
        ({4: 1.0}, None, "logit_bias has token 4; the vocabulary is 0 to 3"),
        ({}, [0, 9], "allowed_token_ids has token 9; the vocabulary is 0 to 3"),
    ],
)
def test_a_token_outside_the_vocabulary_is_named(bias: dict[int, float], allowed: list[int] | None, text: str) -> None:
    with pytest.raises(RequestError) as error:
        logit_bias_row(bias, allowed, 4)
    assert str(error.value) == text
    assert logit_bias_row({3: 1.0}, [3], 4)[3] == 1.0
