"""bench/quantised: weights rounded to every form, and the table of perplexities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from quantised.rounded import round_rows
from quantised.run import DEMO_MODEL, FORMATS, Speed, engines_of, print_table, qualities_over_demo, qualities_over_text

from adaptrt.formats.checkpoint.quantizer import dequantize_rows

# Errors of normal numbers as a share of them, for the coarsest of their groups.
LIMITS = {
    "LLM.int8() *": 0.02,
    "FP8, groups of 128 *": 0.04,
    "8 bits, zero points, 128 *": 0.02,
    "4 bits, act-order, 128 *": 0.15,
    "NF4, blocks of 64 *": 0.12,
    "MXFP4 *": 0.2,
    "3 bits, groups of 128 *": 0.35,
    "3 bits, int8 activations, 128 *": 0.35,
    "2 bits, groups of 64 *": 0.8,
    "2 bits, int8 activations, 64 *": 0.8,
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


def test_perplexities_of_forms_beside_one_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["bfloat16", "LLM.int8() *", "4 bits, act-order, 128 *", "2 bits, groups of 64 *"]
    engines = engines_of(DEMO_MODEL, names, [], tmp_path)
    qualities = qualities_over_demo(engines, 1500)
    divergences = [quality.divergence for quality in qualities.values()]
    assert divergences[0] == 0
    assert divergences == sorted(divergences)
    perplexities = [quality.perplexity for quality in qualities.values()]
    assert perplexities[0] < 2
    assert perplexities[1] < 1.01 * perplexities[0]
    assert perplexities[2] < 1.02 * perplexities[0]
    assert 1.02 * perplexities[0] < perplexities[3] < 2
    (tmp_path / "text.txt").write_text("Q: What is the weather in Paris?\nA: It is sunny today." * 20)
    of_text = qualities_over_text({"again": engines["bfloat16"]}, DEMO_MODEL, tmp_path / "text.txt", 300)
    assert of_text["again"].tokens == 298  # two windows of up to 255
    times = [file.stat().st_mtime_ns for file in tmp_path.rglob("rank0.engine")]
    assert engines_of(DEMO_MODEL, names, [], tmp_path) == engines
    assert [file.stat().st_mtime_ns for file in tmp_path.rglob("rank0.engine")] == times
    capsys.readouterr()
    print_table({"bfloat16": Speed(917.5, 30.25, 0.8, 900.0)}, qualities)
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split()[:5] == ["bfloat16", "917.5", "30.2", "80.0%", "900"]
    assert [line.split()[-1] for line in lines[3:]] == [
        f"{quality.divergence / quality.tokens:.5f}" for quality in qualities.values()
    ]
