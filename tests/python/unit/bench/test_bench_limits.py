"""Rooflines in the bench: the limits of a round, and which of them apply to an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from adaptrt import DType
from adaptrt.tools.bench import limits
from adaptrt.tools.bench.profile import Work
from adaptrt.tools.bench.report import Figure, Sample


class FakeLimits:
    int8_ops = bfloat16_flops = int8_from_l2_ops = bfloat16_from_l2_flops = float32_flops = 1.0

    def __init__(self, read_bandwidth: float) -> None:
        self.read_bandwidth = read_bandwidth


def test_the_best_of_a_round_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([30.0, 48.0, 40.0, 20.0])
    monkeypatch.setattr(limits, "measure_machine_limits", lambda threads, rounds: FakeLimits(next(values)))
    meter = limits.LimitMeter(limits.CpuLimits(1), quiet_share=1.0)  # any other load on the machine is ignored
    for number in (0, 0, 0, 1):
        meter.measure(number)
    assert meter.figures()["read_bandwidth"].by_round() == {0: 48.0, 1: 20.0}


def test_a_sample_is_held_against_the_limits_of_its_round() -> None:
    def figure(*values: float) -> Figure:
        return Figure("", [Sample(number, {"value": value}, 0.0, 0.0, False) for number, value in enumerate(values)])

    # A step of 2 tokens reads 10 bytes: 100 bytes/s allow 20 tokens/s.
    shares = limits.roofline_shares(figure(10.0, 10.0), Work(10, 1), 2, figure(100.0, 200.0), figure(1e9, 1e9), "p")
    assert shares.by_round() == pytest.approx({0: 0.5, 1: 0.25})


def test_limits_beside_a_sample_come_before_those_of_its_round() -> None:
    def measured(read_bandwidth: float) -> dict[str, float]:
        return {**dict.fromkeys(limits.LIMIT_UNITS, 1e9), "read_bandwidth": read_bandwidth}

    metrics = {"value": 10.0, **limits.beside(measured(50.0), measured(100.0))}
    best = Figure("", [Sample(0, {"value": 200.0}, 0.0, 0.0, False)])
    shares = limits.roofline_shares(
        Figure("", [Sample(0, metrics, 0.0, 0.0, False)]), Work(10, 1), 2, best, best, "int8_ops"
    )
    assert shares.by_round() == pytest.approx({0: 10.0 / (75.0 / 10 * 2)})


@pytest.mark.parametrize(
    ("dtype", "rounds_activations", "bfloat16", "int8", "expected"),
    [
        (DType.BFLOAT16, False, 2.0, 4.0, "bfloat16_flops"),
        (DType.BFLOAT16, True, 2.0, 4.0, "int8_ops"),
        (DType.FLOAT32, False, 2.0, 4.0, "float32_flops"),
        # An instruction for bfloat16 that is slower than float32's, and no instruction for 8 bits.
        (DType.BFLOAT16, False, 0.5, 0.0, "float32_flops"),
        (DType.BFLOAT16, True, 0.5, 0.0, "float32_flops"),
    ],
)
def test_an_engine_is_held_against_the_greatest_limit_that_it_can_use(
    monkeypatch: pytest.MonkeyPatch, dtype: DType, rounds_activations: bool, bfloat16: float, int8: float, expected: str
) -> None:
    monkeypatch.setattr(limits, "_rounds_activations", lambda program: rounds_activations)
    there = {"float32_flops": 1.0, "bfloat16_flops": bfloat16, "int8_ops": int8}
    assert limits.peak_of(SimpleNamespace(dtype=dtype), there) == expected
