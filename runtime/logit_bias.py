"""Numbers that are added to the logits of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .._core import RequestError
from .pooled import FloatArray


def logit_bias_row(
    logit_bias: Mapping[int, float], allowed_token_ids: Sequence[int] | None, vocab_size: int
) -> FloatArray:
    """Returns float32 [vocab_size]. allowed_token_ids: other tokens get minus infinity; None: all are allowed.

    Raises RequestError for a token outside the vocabulary.
    """
    for name, tokens in (("logit_bias", logit_bias), ("allowed_token_ids", allowed_token_ids or ())):
        highest = max(tokens, default=0)
        if highest >= vocab_size:
            raise RequestError(f"{name} has token {highest}; the vocabulary is 0 to {vocab_size - 1}")
    row = np.zeros(vocab_size, np.float32)
    if allowed_token_ids is not None:
        row[:] = -np.inf
        row[list(allowed_token_ids)] = 0.0
    for token, bias in logit_bias.items():
        row[token] += bias
    return row
