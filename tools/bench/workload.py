"""Request streams for serve scenarios, with S-LoRA's generator.

Sheng et al., "S-LoRA: Serving Thousands of Concurrent LoRA Adapters", MLSys 2024: adapters follow a power law, times
between arrivals are Gamma distributed with shape 1 / cv^2 and scale cv^2 / rate, and lengths are uniform. Zipf
popularity is an addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .scenario_types import Popularity, Serve

FIRST_TOKEN_ID = 300
"""Smaller ids are special tokens in most vocabularies."""


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a workload."""

    arrival: float
    """Seconds after the start; 0 in a closed loop."""
    adapter: int | None
    """Index of the adapter; None: the base model."""
    prompt: list[int]
    output_length: int


def generate(scenario: Serve, vocab_size: int) -> list[PlannedRequest]:
    """The requests of a scenario, in order of arrival.

    Each property has its own random generator, so changing one setting leaves the other properties unchanged.
    """
    generator = np.random.default_rng(scenario.seed)
    arrivals_from, adapters_from, base_from, lengths_from, tokens_from = generator.spawn(5)
    count = scenario.requests
    arrivals = arrival_times(arrivals_from, count, scenario.rate, scenario.cv)
    adapters = draw_adapters(adapters_from, count, scenario.adapters.count, scenario.popularity)
    is_base = base_from.random(count) < scenario.base_share
    inputs = lengths_from.integers(*scenario.input_length, size=count)
    outputs = lengths_from.integers(*scenario.output_length, size=count)
    return [
        PlannedRequest(
            arrival=float(arrivals[i]),
            adapter=None if adapters is None or is_base[i] else int(adapters[i]),
            prompt=random_prompt(int(inputs[i]), vocab_size, tokens_from),
            output_length=int(outputs[i]),
        )
        for i in range(count)
    ]


def random_prompt(length: int, vocab_size: int, generator: np.random.Generator) -> list[int]:
    """Random token ids, without special tokens if the vocabulary is large enough."""
    first = FIRST_TOKEN_ID if vocab_size > 2 * FIRST_TOKEN_ID else 0
    prompt: list[int] = generator.integers(first, vocab_size, length).tolist()
    return prompt


def arrival_times(generator: np.random.Generator, count: int, rate: float | None, cv: float) -> npt.NDArray[np.float64]:
    """Arrival times in seconds [count], ascending; zeros without a rate (closed loop)."""
    if rate is None:
        return np.zeros(count)
    return np.cumsum(generator.gamma(shape=1.0 / cv**2, scale=cv**2 / rate, size=count))


def draw_adapters(
    generator: np.random.Generator, count: int, num_adapters: int, popularity: Popularity
) -> npt.NDArray[np.int64] | None:
    """Adapter indices [count] in [0, num_adapters); None without adapters."""
    if num_adapters == 0:
        return None
    if popularity.power is not None:
        drawn: npt.NDArray[Any] = generator.power(popularity.power, count) * num_adapters
        return np.minimum(drawn.astype(np.int64), num_adapters - 1)
    assert popularity.zipf is not None
    weights = np.arange(1, num_adapters + 1, dtype=np.float64) ** -popularity.zipf
    return generator.choice(num_adapters, size=count, p=weights / weights.sum())
