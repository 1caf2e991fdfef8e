"""Decode scenarios that are compared by short runs in turn, because the machine's speed changes between samples.

A memory that is shared with other machines can lose half its bandwidth from one second to the next. Two samples that
are seconds apart then differ by more than what is to be told apart; two runs of a third of a second, one right after
the other, seldom do.
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
"""That each request of a run generates at most: 16 times from one step to the next in which all of them do."""

_Place = tuple[ExecutorKey, str]
"""Of an executor: what it runs, and the engine whose weights it reads."""
Runner = Callable[[], Metrics]
"""Runs once; `value` is its speed."""


def alternate(row: Runner, base: Runner, pairs: int) -> tuple[Metrics, list[float]]:
    """(metrics of a sample, row / base of each pair) of `pairs` runs of each, the base first in every second pair.

    `value` and every other metric of a run is the median over the row's runs, `base_value` that of the base's, and
    `ratio` the median of the pairs.
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
    """(scenario, its base) of those of `scenarios` that alternate with another one of their file."""
    by_name = {base.name: base for base in file.scenarios}
    pairs = []
    for scenario in scenarios:
        comparison = file.alternating(scenario)
        if comparison is not None:
            assert isinstance(scenario, Decode)  # the reader of scenario files sees to both
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
    """`engine` on the mapped weights of `other`; None unless both have the same, byte for byte."""
    ours, theirs = engine.storage.tensors, other.storage.tensors
    if ours.keys() != theirs.keys():
        return None
    if not all(np.array_equal(ours[name].view(np.uint8), theirs[name].view(np.uint8)) for name in ours):
        return None
    program = bind_program(engine.storage.program, theirs, str(engine.storage.path))
    return replace(engine, program=program, storage=other.storage)


class Alternation:
    """The executors of scenarios that alternate with another one, both alive at once.

    They reuse prefixes: a run's prompts were seen before but for their last token, so that it consists of the steps
    that it is about. Where two engines have the same weights, both executors read those of the scenario's engine: where
    in memory a file lies makes percents, which neither engine can help.
    """

    def __init__(
        self, engines: Mapping[str, NativeEngine], pairs: Sequence[tuple[Decode, Decode]], cpu: CpuUse
    ) -> None:
        """Makes the executors of (scenario, its base). Raises ConfigError where memory does not suffice."""
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
                adapters.forget()  # the caches have them now
                self._executors[key, weights] = bench
        except Exception:
            for bench in self.executors:
                bench.close()
            raise

    def competing_processes(self, scenario: Decode) -> int:
        """That a sample needs, of a scenario and its base."""
        return max(competing_processes_of(side.scenario) for side in self._sides[scenario.name])

    def sample(self, scenario: Decode, pairs: int, competitors: Competitors) -> tuple[Metrics, list[float]]:
        """As alternate() gives it, of a scenario and its base, each beside as many `competitors` as it asks for.

        With `shared_weights` where engines differ: 1 where they read the same bytes.
        """
        row, base = self._sides[scenario.name]
        metrics, ratios = alternate(self._runner(row, competitors), self._runner(base, competitors), pairs)
        if row.scenario.engine != base.scenario.engine:
            metrics["shared_weights"] = float(row.place[1] == base.place[1])
        return metrics, ratios

    @property
    def executors(self) -> list[BenchExecutor]:
        """All of them; who made this closes them."""
        return list(self._executors.values())

    def on_own_weights(self) -> dict[str, BenchExecutor]:
        """By name of those scenarios whose executor reads the weights of their own engine."""
        sides = [side for pair in self._sides.values() for side in pair]
        return {
            side.scenario.name: self._executors[side.place] for side in sides if side.place[1] == side.scenario.engine
        }

    def _runner(self, side: _Side, competitors: Competitors) -> Runner:
        scenario, bench = side.scenario, self._executors[side.place]
        # The token more is computed by the step that begins a run, which would otherwise compute whole blocks again.
        prompts = [[*prompt, prompt[0]] for prompt in prompts_of(bench, scenario)]
        adapters = batch_adapters(bench, scenario)
        tokens = min(RUN_TOKENS, scenario.output_length - 1)

        def run() -> Metrics:
            with competitors.running(competing_processes_of(scenario)):
                return decode(bench.executor, prompts, adapters, tokens)

        return run
