"""Requests of a scenario: their prompts and adapters."""

from __future__ import annotations

import numpy as np

from ..._core import LoraConfig
from .executors import BenchExecutor
from .scenario_types import Batch, Prompt
from .workload import random_prompt


def prompts_of(bench: BenchExecutor, scenario: Prompt | Batch) -> list[list[int]]:
    """The prompts of a scenario; the same for every sample."""
    generator = np.random.default_rng(scenario.input_length)
    vocab_size = bench.engine.program.vocab_size
    return [random_prompt(scenario.input_length, vocab_size, generator) for _ in range(scenario.sizes.requests)]


def adapter_of(bench: BenchExecutor, scenario: Prompt) -> LoraConfig | None:
    """The adapter of a single-request scenario; None without adapters."""
    return bench.library.reference(scenario.adapters, 0) if scenario.adapters.count else None


def batch_adapters(bench: BenchExecutor, scenario: Batch) -> list[LoraConfig | None]:
    """The adapter of each request, in rotation."""
    count = scenario.adapters.count
    if count == 0:
        return [None] * scenario.requests
    return [bench.library.reference(scenario.adapters, i % count) for i in range(scenario.requests)]
