"""What a scenario sends to its executor: the prompt and the adapter of each request."""

from __future__ import annotations

import numpy as np

from ..._core import LoraConfig
from .executors import BenchExecutor
from .scenario_types import Batch, Prompt
from .workload import random_prompt


def prompts_of(bench: BenchExecutor, scenario: Prompt | Batch) -> list[list[int]]:
    """The same for every sample."""
    generator = np.random.default_rng(scenario.input_length)
    vocab_size = bench.engine.program.vocab_size
    return [random_prompt(scenario.input_length, vocab_size, generator) for _ in range(scenario.sizes.requests)]


def adapter_of(bench: BenchExecutor, scenario: Prompt) -> LoraConfig | None:
    """Of a scenario of one request; None without adapters."""
    return bench.library.reference(scenario.adapters, 0) if scenario.adapters.count else None


def batch_adapters(bench: BenchExecutor, scenario: Batch) -> list[LoraConfig | None]:
    """Of each request: the adapters in turn."""
    count = scenario.adapters.count
    if count == 0:
        return [None] * scenario.requests
    return [bench.library.reference(scenario.adapters, i % count) for i in range(scenario.requests)]
