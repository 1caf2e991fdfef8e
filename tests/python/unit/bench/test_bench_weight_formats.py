"""bench/scenarios: weights rounded to every format, and the effect on the demo's documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from adaptrt.formats.checkpoint.quantizer import dequantize_rows
from scenarios.demo_quality import DEMO_MODEL, demo_quality
from scenarios.weight_formats import FORMATS, main, round_rows

# Maximum relative errors of normal numbers, for the coarsest group of each format.
LIMITS = {
    "llm-int8": 0.02,
    "fp8-128": 0.04,
    "zero-points-128": 0.02,
    "act-order-128": 0.15,
    "nf4-64": 0.12,
    "mxfp4": 0.2,
    "3-bits-128": 0.35,
    "3-bits-128-int8": 0.35,
    "2-bits-64": 0.8,
    "2-bits-64-int8": 0.8,
}
READ_ALONE = [name for name, how in FORMATS.items() if how is not None and not how.can_be_made]


@pytest.mark.parametrize("name", READ_ALONE)
def test_values_move_by_what_the_bits_leave(name: str) -> None:
    how = FORMATS[name]
    assert how is not None
    assert how.problems() == []
    values = np.random.default_rng(0).normal(size=(6, 256)).astype(np.float32)
    moved = dequantize_rows(round_rows(values, how), how) - values
    error = np.linalg.norm(moved) / np.linalg.norm(values)
    assert LIMITS[name] / 8 < error < LIMITS[name]


def test_fewer_bits_change_the_predictions_of_the_demo_more(tmp_path: Path) -> None:
    names = ["bf16", "llm-int8", "act-order-128", "2-bits-64"]
    for name in names:
        main(str(DEMO_MODEL), str(tmp_path / name), name, "1", "256", "256")
    qualities = demo_quality([tmp_path / name for name in names], 1500)
    assert len({quality.tokens for quality in qualities}) == 1
    divergences = [quality.divergence for quality in qualities]
    assert divergences[0] == 0
    assert divergences == sorted(divergences)
    perplexities = [quality.perplexity for quality in qualities]
    assert perplexities[0] < 2
    assert perplexities[1] < 1.01 * perplexities[0]
    assert perplexities[2] < 1.02 * perplexities[0]
    assert 1.02 * perplexities[0] < perplexities[3] < 2
