"""Decode scenarios that are compared by short runs in turn, because the machine's speed changes between samples.

A memory that is shared with other machines can lose half its bandwidth from one second to the next. Two samples that
are seconds apart then differ by more than what is to be told apart; two runs of a third of a second, one right after
the other, seldom do.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from ...runtime.native_engine import NativeEngine
from .batches import batch_adapters, prompts_of
from .executors import BenchExecutor, ExecutorKey, key_of
from .measure import Metrics, decode
from .scenario_types import Decode, Scenario

RUN_TOKENS: Final = 18
"""That each request of a run generates at most: 16 times from one step to the next in which all of them do."""

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


def alternating_pairs(scenarios: Iterable[Scenario], bases: Iterable[Scenario]) -> list[tuple[Decode, Decode]]:
    """(scenario, its base) of those of `scenarios` that alternate with one of `bases`."""
    by_name = {base.name: base for base in bases}
    pairs = []
    for scenario in scenarios:
        if scenario.alternating is not None:
            assert isinstance(scenario, Decode)  # the reader of scenario files sees to both
            assert scenario.alternating.base is not None
            base = by_name[scenario.alternating.base]
            assert isinstance(base, Decode)
            pairs.append((scenario, base))
    return pairs


class Alternation:
    """The executors of scenarios that alternate with another one, both alive at once.

    They reuse prefixes, which other samples do not: a run's prompts were seen before but for their last token, so that
    a run consists of the steps that it is about.
    """

    def __init__(
        self, engines: Mapping[str, NativeEngine], pairs: Sequence[tuple[Decode, Decode]], num_threads: int
    ) -> None:
        """Makes the executors of (scenario, its base). Raises ConfigError where memory does not suffice."""
        self._bases = {row.name: base for row, base in pairs}
        groups: dict[ExecutorKey, list[Decode]] = defaultdict(list)
        for scenario in (scenario for pair in pairs for scenario in pair):
            groups[key_of(scenario)].append(scenario)
        self._executors: dict[ExecutorKey, BenchExecutor] = {}
        try:
            for key, scenarios in groups.items():
                self._executors[key] = BenchExecutor(
                    engines[key.engine], key, scenarios, num_threads, profiled=False, block_reuse=True
                )
        except Exception:
            self.close()
            raise

    def sample(self, scenario: Decode, pairs: int) -> tuple[Metrics, list[float]]:
        """As alternate() gives it, of a scenario and its base."""
        return alternate(self._runner(scenario), self._runner(self._bases[scenario.name]), pairs)

    def close(self) -> None:
        """End the executors."""
        for bench in self._executors.values():
            bench.close()

    def _runner(self, scenario: Decode) -> Runner:
        bench = self._executors[key_of(scenario)]
        # The token more is computed by the step that begins a run, which would otherwise compute whole blocks again.
        prompts = [[*prompt, prompt[0]] for prompt in prompts_of(bench, scenario)]
        adapters = batch_adapters(bench, scenario)
        tokens = min(RUN_TOKENS, scenario.output_length - 1)
        return lambda: decode(bench.executor, prompts, adapters, tokens)
