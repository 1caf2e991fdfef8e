"""Measures a model's likelihood of token windows: perplexity, and divergence from a reference model.

It needs only NumPy, so that every peer's process can use it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

WINDOWS, REFERENCE = "windows.json", "reference.npy"
"""Files in a folder: lists of tokens, and float32 log probabilities [all tokens but each list's first, vocabulary]."""
_ROWS_AT_ONCE: Final = 128


def log_probabilities(logits: Array) -> Array:
    """Log probabilities in float64, of the same shape."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    made: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return made


class Likelihood:
    """Accumulates windows in order. Each token but the first is predicted from the earlier tokens of its window."""

    def __init__(self, reference: Array) -> None:
        self._reference = reference
        self._tokens = 0
        self._log_likelihood = self._divergence = 0.0

    def add(self, ids: list[int], logits: Array) -> None:
        """Adds logits [at least all tokens but the last, vocabulary]."""
        for row in range(0, len(ids) - 1, _ROWS_AT_ONCE):
            end = min(row + _ROWS_AT_ONCE, len(ids) - 1)
            made = log_probabilities(logits[row:end])
            reference = self._reference[self._tokens : self._tokens + end - row].astype(np.float64)
            self._log_likelihood += float(made[np.arange(end - row), ids[row + 1 : end + 1]].sum())
            self._divergence += float((np.exp(reference) * (reference - made)).sum())
            self._tokens += end - row

    def result(self) -> dict[str, float]:
        """Perplexity, and mean Kullback-Leibler divergence from the reference in nats per token."""
        return {
            "perplexity": math.exp(-self._log_likelihood / self._tokens),
            "divergence": self._divergence / self._tokens,
        }


def report(folder: Path, logits_of: Callable[[list[int]], Array], bits: float) -> None:
    """Prints the result for the folder's windows, and `bits`, the bits per weight of the layers."""
    likelihood = Likelihood(np.load(folder / REFERENCE, mmap_mode="r"))
    for ids in json.loads((folder / WINDOWS).read_text()):
        likelihood.add(ids, logits_of(ids))
    print(json.dumps({**likelihood.result(), "bits": bits}))
