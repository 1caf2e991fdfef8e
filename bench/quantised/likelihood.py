"""What windows of tokens are to a model: perplexity, and how far its distributions are from the reference's.

Needs nothing but NumPy, so that each peer's process has it.
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
"""A folder's lists of tokens, and float32 log probabilities [all but the first of each list, vocabulary]."""
_ROWS_AT_ONCE: Final = 128


def log_probabilities(logits: Array) -> Array:
    """float64, of the same shape."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    made: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return made


class Likelihood:
    """Gathers windows in their order, each token but the first predicted from those before it in the window."""

    def __init__(self, reference: Array) -> None:
        self._reference = reference
        self._tokens = 0
        self._log_likelihood = self._divergence = 0.0

    def add(self, ids: list[int], logits: Array) -> None:
        """Takes in logits [at least all tokens but the last, vocabulary]."""
        for row in range(0, len(ids) - 1, _ROWS_AT_ONCE):
            end = min(row + _ROWS_AT_ONCE, len(ids) - 1)
            made = log_probabilities(logits[row:end])
            reference = self._reference[self._tokens : self._tokens + end - row].astype(np.float64)
            self._log_likelihood += float(made[np.arange(end - row), ids[row + 1 : end + 1]].sum())
            self._divergence += float((np.exp(reference) * (reference - made)).sum())
            self._tokens += end - row

    def result(self) -> dict[str, float]:
        """Perplexity, and the mean Kullback-Leibler divergence from the reference, in nats a token."""
        return {
            "perplexity": math.exp(-self._log_likelihood / self._tokens),
            "divergence": self._divergence / self._tokens,
        }


def report(folder: Path, logits_of: Callable[[list[int]], Array], bits: float) -> None:
    """Prints the result of the folder's windows, and `bits`, those of a weight of the layers."""
    likelihood = Likelihood(np.load(folder / REFERENCE, mmap_mode="r"))
    for ids in json.loads((folder / WINDOWS).read_text()):
        likelihood.add(ids, logits_of(ids))
    print(json.dumps({**likelihood.result(), "bits": bits}))
