"""What a scenario sends to its executor: the prompt and the adapter of each request."""

from __future__ import annotations

import numpy as np

from ..._core import LoraConfig
from .executors import BenchExecutor
from .scenario_types import Decode, FirstToken, Overhead, Prefill, Scenario
from .workload import random_prompt


def prompts_of(bench: BenchExecutor, scenario: Prefill | Decode | Overhead | FirstToken) -> list[list[int]]:
    """The same for every sample."""
    generator = np.random.default_rng(scenario.input_length)
    vocab_size = bench.engine.program.vocab_size
    return [random_prompt(scenario.input_length, vocab_size, generator) for _ in range(requests_of(scenario))]


def requests_of(scenario: Scenario) -> int:
    """How many requests generate at once; 1 for kinds that have no batch."""
    return scenario.requests if isinstance(scenario, (Decode, Overhead)) else 1


def adapter_of(bench: BenchExecutor, scenario: Prefill | FirstToken) -> LoraConfig | None:
    """Of a scenario of one request; None without adapters."""
    return bench.library.reference(scenario.adapters, 0) if scenario.adapters.count else None


def batch_adapters(bench: BenchExecutor, scenario: Decode | Overhead) -> list[LoraConfig | None]:
    """Of each request: the adapters in turn."""
    count = scenario.adapters.count
    if count == 0:
        return [None] * scenario.requests
    return [bench.library.reference(scenario.adapters, i % count) for i in range(scenario.requests)]
