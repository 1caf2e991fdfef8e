"""Runs a scenario file: more kinds and comparisons than `adaptrt bench`, with engines built for it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from adaptrt import ConfigError, Executor, LoraConfig
from adaptrt._core import amx_is_permitted
from adaptrt.runtime.compiled_engine import CompiledEngine
from adaptrt.tools.bench.batches import adapter_of, batch_adapters, prompts_of
from adaptrt.tools.bench.executors import BenchExecutor, CpuUse
from adaptrt.tools.bench.limits import beside, peak_of, roofline_shares
from adaptrt.tools.bench.measure import DIVERGENCE, Metrics, first_token_seconds
from adaptrt.tools.bench.noise import NoiseMeter
from adaptrt.tools.bench.report import ComparisonResult, Figure, Sample, paired_ratio
from adaptrt.tools.bench.runner import Bench, Progress
from adaptrt.tools.bench.scenario_types import Decode, Prefill, Scenario

from .alternating import Alternation, alternating_pairs
from .child import run_child
from .competing import competing_processes
from .demo_quality import demo_quality
from .engines import EngineShelf
from .generation import generate, generation_executor
from .kinds import (
    Comparison,
    FirstToken,
    Generation,
    Load,
    Memory,
    Overhead,
    Perplexity,
    Reuse,
    ScenarioFile,
    competing_processes_of,
    engines_of,
)
from .overhead import overhead
from .peft_adapter import write_peft_adapter
from .random_adapters import RandomAdapters
from .reuse import reuse

COLD_TASKS: Final = 1 << 40
"""First task id of the adapters that exist only during a sample."""


OWN_PROCESSES: Final = (Load, Memory, Perplexity)
"""Scenarios that need no warm-up, because each sample starts a process or an executor."""
OWN_EXECUTORS: Final = (*OWN_PROCESSES, Reuse, Generation)


class ScenarioBench(Bench):
    """One run of a scenario file."""

    def __init__(self, file: ScenarioFile, work_dir: Path, cpu: CpuUse, progress: Progress) -> None:
        """Builds the engines. Raises ConfigError if one that is not optional cannot be built."""
        self._file = file
        self._work_dir = work_dir
        self._shelf = EngineShelf(work_dir, progress)
        directories, reasons = self._shelf.prepare(file)
        engines = self._shelf.load(file, directories)
        super().__init__(file.path, file.scenarios, file.run, engines, cpu, progress)
        for scenario in file.scenarios:
            for name in engines_of(scenario):
                if name in reasons:
                    self.not_run[scenario.name] = f"engine '{name}': {reasons[name]}"
        self._alternation: Alternation | None = None
        self._cold_tasks = itertools.count(COLD_TASKS)
        self._perplexities: dict[str, Metrics] = {}
        self._generating: dict[str, Executor] = {}
        """Executors of Generation, by engine."""

    @property
    def text(self) -> str:
        """Text of the scenario file."""
        return self._file.text

    def library(self, engine: CompiledEngine) -> RandomAdapters:
        """Random adapters made for the engine."""
        return RandomAdapters(engine)

    def needs_executor(self, scenario: Scenario) -> bool:
        """False for scenarios that make their own process or executor, or that alternate with another one."""
        return not isinstance(scenario, OWN_EXECUTORS) and self._file.alternating(scenario) is None

    def prepare(self) -> None:
        """Creates the executors of alternating scenarios first; other scenarios use these executors if possible.

        If a scenario's base cannot run, the scenario cannot run either.
        """
        pairs = []
        for scenario, base in alternating_pairs(self.runnable(), self._file):
            if base.name in self.not_run:
                self.not_run[scenario.name] = f"alternates with '{base.name}': {self.not_run[base.name]}"
            else:
                pairs.append((scenario, base))
        if pairs:
            self.say(f"preparing {len(pairs)} scenarios that alternate with another one")
            try:
                self._alternation = Alternation(self.engines, pairs, self.cpu)
            except ConfigError as error:
                self.not_run.update({scenario.name: str(error) for scenario, _ in pairs})
            else:
                self.executors.update(self._alternation.on_own_weights())
        super().prepare()

    def close(self) -> None:
        """Shuts down the executors."""
        own = set() if self._alternation is None else set(self._alternation.executors)
        for executor in {*self.executors.values(), *own}:
            executor.close()
        for generating in self._generating.values():
            generating.shutdown()

    def warm_up(self, scenario: Scenario) -> None:
        """Runs the scenario once, or one pair of runs if it alternates. Does nothing for OWN_PROCESSES."""
        if self._file.alternating(scenario) is not None:
            self._take_in_turn(scenario, 1)
        elif not isinstance(scenario, OWN_PROCESSES):
            super().warm_up(scenario)

    def take(self, scenario: Scenario, number: int) -> Sample:
        """Takes pairs of runs if the scenario alternates, otherwise a single sample.

        Alternating runs are not compared with the machine's limits: they take too long for limits that are measured
        before and after them.
        """
        alternating = self._file.alternating(scenario)
        if alternating is not None:
            return self._take_in_turn(scenario, alternating.pairs, number)
        competing = competing_processes_of(scenario)
        if competing == 0:
            return super().take(scenario, number)
        before = self.limits.measure(number)
        with (
            competing_processes(competing) as competitors,
            NoiseMeter(competitors.processes) as meter,
            competitors.running(competing),
        ):
            metrics = self.sample(scenario)
        return self.made(number, metrics | beside(before, self.limits.measure(number)), meter)

    def sample(self, scenario: Scenario) -> Metrics:
        """Runs a scenario once and measures it."""
        if isinstance(scenario, (Load, Memory)):
            return run_child(scenario, self.engines[scenario.engine].directory, self.cpu)
        if isinstance(scenario, Perplexity):
            return self._perplexity(scenario)
        if isinstance(scenario, Reuse):
            return reuse(self.engines[scenario.engine], scenario, self.cpu)
        if isinstance(scenario, Generation):
            if scenario.engine not in self._generating:
                directory = self.engines[scenario.engine].directory
                self._generating[scenario.engine] = generation_executor(directory, self.cpu)
            return generate(self._generating[scenario.engine], scenario)
        if isinstance(scenario, Overhead):
            bench = self.executors[scenario.name]
            adapters = batch_adapters(bench, scenario)
            return overhead(bench.executor, prompts_of(bench, scenario), adapters, scenario.output_length)
        if isinstance(scenario, FirstToken):
            bench = self.executors[scenario.name]
            first_token_seconds(bench.executor, prompts_of(bench, scenario)[0], adapter_of(bench, scenario))
            return {"value": 1e3 * self._first_token(bench, scenario)}
        return super().sample(scenario)

    def comparisons(
        self, scenario: Scenario, figures: Mapping[str, Figure], limits: Mapping[str, Figure]
    ) -> list[ComparisonResult]:
        """Returns the comparisons in the file, except those with scenarios that were not run."""
        return [
            self._compare(scenario, comparison, figures, limits)
            for comparison in self._file.comparisons[scenario.name]
            if comparison.base is None or comparison.base in figures
        ]

    def _take_in_turn(self, scenario: Scenario, pairs: int, number: int = 0) -> Sample:
        assert isinstance(scenario, Decode)
        assert self._alternation is not None
        competing = self._alternation.competing_processes(scenario)
        with competing_processes(competing) as competitors, NoiseMeter(competitors.processes) as meter:
            metrics, ratios = self._alternation.sample(scenario, pairs, competitors)
        return self.made(number, metrics, meter, ratios)

    def _perplexity(self, scenario: Perplexity) -> Metrics:
        """Measures the perplexity only once, because it is the same in every round."""
        if scenario.name not in self._perplexities:
            names = (scenario.reference, scenario.engine)
            _, quality = demo_quality([self.engines[name].directory for name in names], scenario.tokens)
            metrics = {"value": quality.perplexity, DIVERGENCE: quality.divergence / quality.tokens}
            self._perplexities[scenario.name] = metrics
        return self._perplexities[scenario.name]

    def _first_token(self, bench: BenchExecutor, scenario: FirstToken) -> float:
        """Returns the seconds to first token. An adapter that is not on the device gets a new id each time, and is
        removed afterwards.
        """
        prompt = prompts_of(bench, scenario)[0]
        if scenario.adapter_from == "device":
            return first_token_seconds(bench.executor, prompt, bench.library.reference(scenario.adapters, 0))
        task = next(self._cold_tasks)
        try:
            if scenario.adapter_from == "host":
                bench.executor.put_adapter(bench.library.tensors(scenario.adapters, 0, task_id=task))
                return first_token_seconds(bench.executor, prompt, LoraConfig(task))
            directory = self._peft_directory(scenario)
            start = time.perf_counter()
            adapter = LoraConfig.from_peft(task, directory, bench.engine)
            reading = time.perf_counter() - start
            return reading + first_token_seconds(bench.executor, prompt, adapter)
        finally:
            bench.executor.unload_adapter(task)

    def _peft_directory(self, scenario: FirstToken) -> Path:
        """Returns the adapter's directory. It is created during warm-up, so its files are in the page cache, and
        samples do not measure the disk.
        """
        rank = scenario.adapters.rank(0)
        if self._file.model is None or self._file.engines[scenario.engine].directory is not None:
            raise ConfigError(
                f"scenario '{scenario.name}' reads an adapter from disk, which the bench makes for its own models; "
                f"engine '{scenario.engine}' has a directory"
            )
        base = self._shelf.model(self._file.model)
        directory = self._work_dir / "adapters" / f"{base.name}-rank{rank}"
        if not directory.exists():
            dora = scenario.adapters.is_dora(0)
            write_peft_adapter(self._file.model, base, directory, rank, seed=rank, dora=dora)
        return directory

    def _compare(
        self,
        scenario: Scenario,
        comparison: Comparison,
        figures: Mapping[str, Figure],
        limits: Mapping[str, Figure],
    ) -> ComparisonResult:
        if comparison.measure == "value":
            ratio = figures[scenario.name].median
        elif comparison.measure == "alternating":
            ratio = figures[scenario.name].metric("ratio")
        elif comparison.measure == "ratio":
            assert comparison.base is not None
            ratio = paired_ratio(figures[scenario.name], figures[comparison.base])
        else:
            ours = self._roofline_share(scenario, figures[scenario.name], limits)
            if comparison.base is None:
                ratio = ours.median
            else:
                base = next(s for s in self.scenarios if s.name == comparison.base)
                ratio = paired_ratio(ours, self._roofline_share(base, figures[base.name], limits))
        target = comparison.on_cpu(amx=amx_is_permitted())
        return ComparisonResult(
            comparison.base, comparison.measure, ratio, target.at_least, target.at_most, target.holds(ratio)
        )

    def _roofline_share(self, scenario: Scenario, figure: Figure, limits: Mapping[str, Figure]) -> Figure:
        tokens = scenario.input_length if isinstance(scenario, Prefill) else scenario.sizes.requests
        medians = {name: limit.median for name, limit in limits.items()}
        peak = peak_of(self.engines[scenario.engine].storage.program, medians)
        return roofline_shares(figure, self.work[scenario.name], tokens, limits["read_bandwidth"], limits[peak], peak)
