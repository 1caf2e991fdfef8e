"""Compares decode scenarios by alternating short runs, because the machine's speed changes between samples.

A memory bus that is shared with other machines can lose half of its bandwidth within a second. Two samples taken
seconds apart then differ by more than the effect to be measured. Two consecutive runs of a third of a second seldom do.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from adaptrt.formats.engine.bind import bind_program
from adaptrt.runtime.native_engine import NativeEngine
from adaptrt.tools.bench.batches import batch_adapters, prompts_of
from adaptrt.tools.bench.executors import BenchExecutor, CpuUse, ExecutorKey, key_of
from adaptrt.tools.bench.measure import Metrics, decode
from adaptrt.tools.bench.scenario_types import Decode, Scenario

from .competing import Competitors
from .kinds import ScenarioFile, competing_processes_of
from .random_adapters import RandomAdapters

RUN_TOKENS: Final = 18
"""Maximum tokens per request in a run, which gives 16 steps in which all requests generate."""

_Place = tuple[ExecutorKey, str]
"""Key of an executor: its settings, and the engine whose weights it reads."""
Runner = Callable[[], Metrics]
"""Runs once and returns metrics; `value` is the speed."""


def alternate(row: Runner, base: Runner, pairs: int) -> tuple[Metrics, list[float]]:
    """Runs `pairs` pairs; the base runs first in every second pair. Returns (metrics, row / base of each pair).

    The metrics of a run, such as `value`, are medians over the row's runs. `base_value` is the median over the base's
    runs, and `ratio` the median over the pairs.
    """
    rows: list[Metrics] = []
    bases: list[Metrics] = []
    for number in range(pairs):
        if number % 2 == 0:
            rows.append(row())
            bases.append(base())
        else:
            bases.append(base())
            rows.append(row())
    ratios = [ours["value"] / theirs["value"] for ours, theirs in zip(rows, bases, strict=True)]
    metrics = {name: statistics.median(run[name] for run in rows) for name in rows[0]}
    metrics["base_value"] = statistics.median(run["value"] for run in bases)
    metrics["ratio"] = statistics.median(ratios)
    return metrics, ratios


def alternating_pairs(scenarios: Iterable[Scenario], file: ScenarioFile) -> list[tuple[Decode, Decode]]:
    """Returns pairs (scenario, its base) of the `scenarios` that alternate with another one of their file."""
    by_name = {base.name: base for base in file.scenarios}
    pairs = []
    for scenario in scenarios:
        comparison = file.alternating(scenario)
        if comparison is not None:
            assert isinstance(scenario, Decode)  # The reader of scenario files checks both.
            assert comparison.base is not None
            base = by_name[comparison.base]
            assert isinstance(base, Decode)
            pairs.append((scenario, base))
    return pairs


@dataclass(frozen=True)
class _Side:
    """One of the two scenarios of a pair."""

    scenario: Decode
    place: _Place


def sharing_weights(engine: NativeEngine, other: NativeEngine) -> NativeEngine | None:
    """Returns `engine` with the mapped weights of `other`; None if their weights differ in any byte."""
    ours, theirs = engine.storage.tensors, other.storage.tensors
    if ours.keys() != theirs.keys():
        return None
    if not all(np.array_equal(ours[name].view(np.uint8), theirs[name].view(np.uint8)) for name in ours):
        return None
    program = bind_program(engine.storage.program, theirs, str(engine.storage.path))
    return replace(engine, program=program, storage=other.storage)


class Alternation:
    """Executors of alternating scenarios; both of a pair exist at the same time.

    They reuse prefixes: all but the last token of a run's prompts was computed before, so a run consists only of the
    steps to be measured. If two engines have the same weights, both executors read the weights of the scenario's
    engine, because the memory layout of two files would cause differences of some percent.
    """

    def __init__(
        self, engines: Mapping[str, NativeEngine], pairs: Sequence[tuple[Decode, Decode]], cpu: CpuUse
    ) -> None:
        """Creates the executors for pairs (scenario, its base). Raises ConfigError if there is too little memory."""
        self._sides: dict[str, tuple[_Side, _Side]] = {}
        self._executors: dict[_Place, BenchExecutor] = {}
        on_weights_of: dict[tuple[str, str], NativeEngine | None] = {(name, name): engines[name] for name in engines}
        scenarios: dict[_Place, list[Decode]] = defaultdict(list)
        for row, base in pairs:
            names = (base.engine, row.engine)
            if names not in on_weights_of:
                on_weights_of[names] = sharing_weights(engines[base.engine], engines[row.engine])
            weights = base.engine if on_weights_of[names] is None else row.engine
            self._sides[row.name] = _Side(row, (key_of(row), row.engine)), _Side(base, (key_of(base), weights))
            for side in self._sides[row.name]:
                scenarios[side.place].append(side.scenario)
        try:
            for (key, weights), sharing in scenarios.items():
                engine = on_weights_of[key.engine, weights]
                assert engine is not None
                adapters = RandomAdapters(engine)
                bench = BenchExecutor(engine, key, sharing, cpu, profiled=False, block_reuse=True, library=adapters)
                adapters.forget()  # The caches hold them now.
                self._executors[key, weights] = bench
        except Exception:
            for bench in self.executors:
                bench.close()
            raise

    def competing_processes(self, scenario: Decode) -> int:
        """Number of competing processes that a sample of a scenario and its base needs."""
        return max(competing_processes_of(side.scenario) for side in self._sides[scenario.name])

    def sample(self, scenario: Decode, pairs: int, competitors: Competitors) -> tuple[Metrics, list[float]]:
        """Returns the result of alternate() for a scenario and its base, each with its number of running `competitors`.

        If engines differ, `shared_weights` is added: 1 if they read the same bytes.
        """
        row, base = self._sides[scenario.name]
        metrics, ratios = alternate(self._runner(row, competitors), self._runner(base, competitors), pairs)
        if row.scenario.engine != base.scenario.engine:
            metrics["shared_weights"] = float(row.place[1] == base.place[1])
        return metrics, ratios

    @property
    def executors(self) -> list[BenchExecutor]:
        """All executors; the owner of this object closes them."""
        return list(self._executors.values())

    def on_own_weights(self) -> dict[str, BenchExecutor]:
        """Executors by scenario name, for scenarios whose executor reads the weights of their own engine."""
        sides = [side for pair in self._sides.values() for side in pair]
        return {
            side.scenario.name: self._executors[side.place] for side in sides if side.place[1] == side.scenario.engine
        }

    def _runner(self, side: _Side, competitors: Competitors) -> Runner:
        scenario, bench = side.scenario, self._executors[side.place]
        # The first step of a run computes the additional token; without it, that step would compute whole blocks again.
        prompts = [[*prompt, prompt[0]] for prompt in prompts_of(bench, scenario)]
        adapters = batch_adapters(bench, scenario)
        tokens = min(RUN_TOKENS, scenario.output_length - 1)

        def run() -> Metrics:
            with competitors.running(competing_processes_of(scenario)):
                return decode(bench.executor, prompts, adapters, tokens)

        return run
