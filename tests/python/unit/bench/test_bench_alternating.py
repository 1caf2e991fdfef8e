"""Alternating runs: their order, and the samples made from them."""

from __future__ import annotations

import pytest

from adaptrt.tools.bench.display import in_turn
from adaptrt.tools.bench.report import Figure, Sample
from scenarios.alternating import Runner, alternate


def test_every_second_pair_begins_with_the_other() -> None:
    order = []

    def runner(name: str) -> Runner:
        def run() -> dict[str, float]:
            order.append(name)
            return {"value": 1.0}

        return run

    alternate(runner("row"), runner("base"), 4)
    assert order == ["row", "base", "base", "row"] * 2


def test_a_change_of_the_machine_between_pairs_does_not_reach_the_ratio() -> None:
    """The machine's speed halves after the second pair, and drops during the third."""
    speeds = iter([(90.0, 100.0), (90.0, 100.0), (90.0, 50.0), (45.0, 50.0), (45.0, 50.0), (45.0, 50.0)])
    now: list[float] = []

    def take(index: int) -> dict[str, float]:
        if not now:
            now.extend(next(speeds))
        value, now[index] = now[index], 0.0
        if not any(now):
            now.clear()
        return {"value": value, "step_ms": 1e3 / value}

    metrics, ratios = alternate(lambda: take(0), lambda: take(1), 6)
    assert ratios == pytest.approx([0.9, 0.9, 1.8, 0.9, 0.9, 0.9])
    assert metrics["ratio"] == pytest.approx(0.9)
    assert metrics["value"] == pytest.approx(67.5)
    assert metrics["base_value"] == pytest.approx(50.0)
    assert metrics["step_ms"] == pytest.approx((1e3 / 90 + 1e3 / 45) / 2)


def test_pairs_of_samples_that_count_are_told() -> None:
    def sample(number: int, disturbed: bool, *ratios: float) -> Sample:
        return Sample(number, {"value": 9.0, "base_value": 10.0, "ratio": 0.9}, 0.0, 0.0, disturbed, list(ratios))

    figure = Figure("tok/s", [sample(0, False, 0.92, 0.88), sample(1, True, 5.0, 5.0), sample(2, False, 0.9, 0.9)])
    assert in_turn(figure) == "in turn: 9.00 and 10.0 tok/s, 4 pairs, half of them 89.5 to 90.5%"
    for sample_of in figure.samples:
        sample_of.metrics["shared_weights"] = 1.0
    assert in_turn(figure).startswith("in turn on the same weights: 9.00 and")
