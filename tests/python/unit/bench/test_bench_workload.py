"""The generator's requests follow the distributions that its parameters name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from adaptrt.tools.bench.scenario_types import AdapterMix, Popularity, Serve
from adaptrt.tools.bench.workload import arrival_times, draw_adapters, generate

DRAWS = 200_000
DEVIATIONS = 4.5
"""Allowed error of a mean or a frequency, in standard deviations. Seeds are fixed, so a test fails always or never."""


def serve(**fields: object) -> Serve:
    defaults: dict[str, object] = {
        "name": "s",
        "title": "s",
        "engine": "e",
        "unit": "tok/s",
        "adapters": AdapterMix(10, (8, 16)),
        "popularity": Popularity(power=1.0),
        "base_share": 0.0,
        "device_adapters": None,
        "requests": 500,
        "input_length": (8, 512),
        "output_length": (4, 5),
        "concurrency": None,
        "rate": 2.0,
        "cv": 1.0,
        "first_token_target": 6.0,
        "seed": 42,
        "sweep": None,
    }
    return Serve(**{**defaults, **fields})


@pytest.mark.parametrize("power", [0.3, 1.0, 2.0])
def test_a_power_law_gives_the_first_i_adapters_their_share(power: float) -> None:
    drawn = draw_adapters(np.random.default_rng(1), DRAWS, 20, Popularity(power=power))
    assert drawn is not None
    assert drawn.min() >= 0
    assert drawn.max() <= 19
    for first in (1, 5, 10, 19):
        expected = (first / 20) ** power
        spread = (expected * (1 - expected) / DRAWS) ** 0.5
        assert abs((drawn < first).mean() - expected) < DEVIATIONS * spread


@pytest.mark.parametrize("exponent", [0.9, 1.5])
def test_zipf_gives_each_adapter_its_share(exponent: float) -> None:
    drawn = draw_adapters(np.random.default_rng(2), DRAWS, 50, Popularity(zipf=exponent))
    assert drawn is not None
    weights = np.arange(1, 51) ** -exponent
    expected = weights / weights.sum()
    seen = np.bincount(drawn, minlength=50) / DRAWS
    assert np.all(np.abs(seen - expected) < DEVIATIONS * np.sqrt(expected * (1 - expected) / DRAWS))


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_arrivals_have_their_rate_and_their_variation(cv: float) -> None:
    times = arrival_times(np.random.default_rng(3), DRAWS, 4.0, cv)
    gaps = np.diff(times, prepend=0.0)
    assert np.all(gaps >= 0)
    assert abs(gaps.mean() - 0.25) < DEVIATIONS * 0.25 * cv / DRAWS**0.5
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.02)


def test_a_closed_loop_has_no_arrival_times() -> None:
    assert not arrival_times(np.random.default_rng(4), 5, None, 1.0).any()


def test_requests_keep_to_their_lengths_and_share_of_the_base() -> None:
    requests = generate(serve(requests=5000, base_share=0.25, input_length=(8, 20)), vocab_size=1000)
    lengths = np.array([len(request.prompt) for request in requests])
    assert (lengths.min(), lengths.max()) == (8, 19)
    assert {request.output_length for request in requests} == {4}
    assert {token for request in requests for token in request.prompt} <= set(range(300, 1000))
    base = np.mean([request.adapter is None for request in requests])
    assert abs(base - 0.25) < DEVIATIONS * (0.25 * 0.75 / 5000) ** 0.5


def test_a_seed_gives_the_same_requests_and_each_parameter_changes_its_own_part() -> None:
    first = generate(serve(), vocab_size=1000)
    assert generate(serve(), vocab_size=1000) == first
    assert generate(serve(seed=43), vocab_size=1000) != first
    faster = generate(serve(rate=8.0), vocab_size=1000)
    assert [r.prompt for r in faster] == [r.prompt for r in first]
    assert [r.adapter for r in faster] == [r.adapter for r in first]
    assert [r.arrival * 4 for r in faster] == pytest.approx([r.arrival for r in first])


def test_without_adapters_all_requests_are_for_the_base() -> None:
    none = dataclasses.replace(serve(), adapters=AdapterMix(0, (8,)))
    assert all(request.adapter is None for request in generate(none, vocab_size=1000))


def test_ranks_go_round_and_dora_is_spread_evenly() -> None:
    mix = AdapterMix(16, (8, 16, 32, 64), dora_share=0.25)
    assert [mix.rank(i) for i in range(5)] == [8, 16, 32, 64, 8]
    assert [i for i in range(16) if mix.is_dora(i)] == [3, 7, 11, 15]
    assert sum(AdapterMix(16, (8,), 0.5).is_dora(i) for i in range(16)) == 8
    assert not any(AdapterMix(16, (8,)).is_dora(i) for i in range(16))
    assert all(AdapterMix(16, (8,), 1.0).is_dora(i) for i in range(16))
