"""Runs a scenario file: all scenarios in turn, round after round, so that a drift of the machine's speed meets all."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from ... import __version__
from ..._core import (
    ConfigError,
    LoraConfig,
    StepRecord,
    amx_is_permitted,
)
from ...runtime.native_engine import NativeEngine
from .alternating import Alternation, alternating_pairs
from .batches import adapter_of, batch_adapters, prompts_of, requests_of
from .child import run_child
from .competing import Competitors, competing_processes
from .engines import EngineShelf, Progress
from .executors import COLD_TASKS, BenchExecutor, CpuUse, adapter_directory, key_of, load_native_engine, problems_of
from .limits import LimitMeter, beside, peak_of, roofline_shares
from .measure import Metrics, decode, first_token_seconds, overhead, prefill, request, serve
from .measure import finish as finish_request
from .noise import NoiseMeter, wait_until_quiet
from .peft_adapter import write_peft_adapter
from .profile import Work, median_step, work_of
from .report import ComparisonResult, Figure, NotRun, Report, Row, Sample, paired_ratio
from .scenario_types import (
    Comparison,
    Decode,
    FirstToken,
    Load,
    Memory,
    Overhead,
    Prefill,
    Scenario,
    ScenarioFile,
    Serve,
)
from .system import describe_machine, utc_now
from .workload import generate, random_prompt

WARM_UP_TOKENS: Final = 8
PROFILED_PROMPTS: Final = 3


class Bench:
    """One run over a scenario file."""

    def __init__(self, file: ScenarioFile, work_dir: Path, cpu: CpuUse, progress: Progress) -> None:
        self._file = file
        self._work_dir = work_dir
        self._cpu = cpu
        self._progress = progress
        self._shelf = EngineShelf(work_dir, progress)
        self._engines: dict[str, NativeEngine] = {}
        self._executors: dict[str, BenchExecutor] = {}
        """By scenario; shared."""
        self._alternation: Alternation | None = None
        self._work: dict[str, Work] = {}
        self._samples: dict[str, list[Sample]] = defaultdict(list)
        self._limits = LimitMeter(cpu.num_threads, file.run.quiet_share)
        self._extra: dict[str, int] = {}
        self._not_run: dict[str, str] = {}
        self._cold_tasks = itertools.count(COLD_TASKS)
        self._salts = itertools.count(1)

    def run(self) -> Report:
        """Measure everything. Raises ConfigError with all scenarios that do not fit their engines."""
        try:
            self._prepare()
            for number in range(self._file.run.repeats):
                self._progress(f"round {number + 1} of {self._file.run.repeats}")
                for scenario in self._runnable():
                    self._measure(scenario, number)
                self._limits.measure(number)
        finally:
            others = [] if self._alternation is None else self._alternation.executors
            for executor in {*self._executors.values(), *others}:
                executor.close()
        return self._report()

    def _runnable(self) -> list[Scenario]:
        return [scenario for scenario in self._file.scenarios if scenario.name not in self._not_run]

    def _prepare(self) -> None:
        directories, reasons = self._shelf.prepare(self._file)
        self._engines = {name: load_native_engine(path) for name, path in directories.items()}
        for scenario in self._file.scenarios:
            if scenario.engine in reasons:
                self._not_run[scenario.name] = f"engine '{scenario.engine}': {reasons[scenario.engine]}"
        self._check_fit()
        self._prepare_alternation()
        groups: dict[Any, list[Scenario]] = defaultdict(list)
        for scenario in self._runnable():
            if not isinstance(scenario, (Load, Memory)):
                groups[key_of(scenario)].append(scenario)
        for key, scenarios in groups.items():
            self._progress(f"preparing engine '{key.engine}' for {len(scenarios)} scenarios")
            engine = self._engines[key.engine]
            try:
                self._find_work(engine, key, [s for s in scenarios if isinstance(s, (Prefill, Decode))])
                alone = [s for s in scenarios if s.name not in self._executors and s.alternating is None]
                if alone:
                    shared = BenchExecutor(engine, key, alone, self._cpu, profiled=False)
            except ConfigError as error:
                self._not_run.update({scenario.name: str(error) for scenario in scenarios})
                continue
            for scenario in alone:
                self._executors[scenario.name] = shared
        for scenario in self._runnable():
            self._warm_up(scenario)
            self._extra[scenario.name] = self._file.run.extra_samples

    def _prepare_alternation(self) -> None:
        """Makes the executors of scenarios that alternate; the others' own samples run there too, where they can.

        A scenario whose base cannot be run cannot be run either.
        """
        pairs = []
        for scenario, base in alternating_pairs(self._runnable(), self._file.scenarios):
            if base.name in self._not_run:
                self._not_run[scenario.name] = f"alternates with '{base.name}': {self._not_run[base.name]}"
            else:
                pairs.append((scenario, base))
        if not pairs:
            return
        self._progress(f"preparing {len(pairs)} scenarios that alternate with another one")
        try:
            self._alternation = Alternation(self._engines, pairs, self._cpu)
        except ConfigError as error:
            self._not_run.update({scenario.name: str(error) for scenario, _ in pairs})
        else:
            self._executors |= self._alternation.on_own_weights()

    def _check_fit(self) -> None:
        problems = [
            f"scenario '{scenario.name}' {problem}"
            for scenario in self._runnable()
            for problem in problems_of(scenario, self._engines[scenario.engine])
        ]
        if problems:
            raise ConfigError(f"{self._file.path}: " + "; ".join(problems))

    def _find_work(self, engine: NativeEngine, key: Any, scenarios: list[Prefill | Decode]) -> None:
        """Runs each scenario once on an engine that counts what its steps must move and multiply."""
        if not scenarios:
            return
        bench = BenchExecutor(engine, key, scenarios, self._cpu, profiled=True)
        try:
            for scenario in scenarios:
                self._work[scenario.name] = work_of(median_step(profiled_steps(bench, scenario, warm_up=False)))
        finally:
            bench.close()

    def _warm_up(self, scenario: Scenario) -> None:
        if isinstance(scenario, (Prefill, Decode, Overhead, FirstToken)):
            with competing_processes(self._competing(scenario)) as competitors:
                self._take(scenario, 1, competitors)
        elif isinstance(scenario, Serve):
            bench = self._executors[scenario.name]
            prompt = random_prompt(1, bench.engine.program.vocab_size, np.random.default_rng(0))
            finish_request(bench.executor, bench.executor.enqueue_request(request(prompt, WARM_UP_TOKENS)))

    def _measure(self, scenario: Scenario, number: int) -> None:
        """Takes a sample; another one in place of one that was disturbed, while the scenario has any left."""
        settings = self._file.run
        # Runs in turn take longer than limits beside them would hold for, and are not held against any.
        has_roofline = scenario.name in self._work and scenario.alternating is None
        while True:
            wait_until_quiet(settings.quiet_share, settings.quiet_wait)
            before = self._limits.measure(number) if has_roofline else {}
            pairs = 0 if scenario.alternating is None else scenario.alternating.pairs
            with (
                competing_processes(self._competing(scenario)) as competitors,
                NoiseMeter(competitors.processes) as meter,
            ):
                metrics, ratios = self._take(scenario, pairs, competitors)
            if has_roofline:
                metrics |= beside(before, self._limits.measure(number))
            sample = self._made(number, metrics, meter, ratios)
            self._samples[scenario.name].append(sample)
            if not sample.disturbed or self._extra[scenario.name] == 0:
                return
            self._extra[scenario.name] -= 1

    def _made(self, number: int, metrics: Metrics, meter: NoiseMeter, ratios: list[float]) -> Sample:
        noise = meter.noise
        disturbed = noise.foreign > self._file.run.quiet_share
        return Sample(number, metrics, round(noise.foreign, 4), round(noise.stolen, 4), disturbed, ratios)

    def _competing(self, scenario: Scenario) -> int:
        """Processes that a sample of the scenario needs beside it."""
        if not isinstance(scenario, Decode):
            return 0
        if scenario.alternating is None:
            return scenario.competing_processes
        assert self._alternation is not None
        return self._alternation.competing_processes(scenario)

    def _take(self, scenario: Scenario, pairs: int, competitors: Competitors) -> tuple[Metrics, list[float]]:
        """(metrics, ratio of each pair) of `pairs` pairs where the scenario alternates, otherwise of itself alone."""
        if scenario.alternating is None:
            return self._sample(scenario, competitors), []
        assert isinstance(scenario, Decode)
        assert self._alternation is not None
        return self._alternation.sample(scenario, pairs, competitors)

    def _sample(self, scenario: Scenario, competitors: Competitors) -> Metrics:
        if isinstance(scenario, (Load, Memory)):
            return run_child(scenario, self._engines[scenario.engine].directory, self._cpu)
        bench = self._executors[scenario.name]
        if isinstance(scenario, (Prefill, FirstToken)):
            # What ran before the sample, or did not, is not what is measured.
            first_token_seconds(bench.executor, prompts_of(bench, scenario)[0], adapter_of(bench, scenario))
        if isinstance(scenario, Prefill):
            return prefill(bench.executor, prompts_of(bench, scenario)[0], adapter_of(bench, scenario))
        if isinstance(scenario, Decode):
            adapters = batch_adapters(bench, scenario)
            # Where prefixes are reused, a sample has its own.
            salt = next(self._salts)
            with competitors.running(scenario.competing_processes):
                return decode(bench.executor, prompts_of(bench, scenario), adapters, scenario.output_length, salt)
        if isinstance(scenario, Overhead):
            adapters = batch_adapters(bench, scenario)
            return overhead(bench.executor, prompts_of(bench, scenario), adapters, scenario.output_length)
        if isinstance(scenario, FirstToken):
            return {"value": 1e3 * self._first_token(bench, scenario)}
        assert isinstance(scenario, Serve)
        workload = generate(scenario, bench.engine.program.vocab_size)
        return serve(bench.executor, scenario, workload, bench.library.references(scenario.adapters))

    def _first_token(self, bench: BenchExecutor, scenario: FirstToken) -> float:
        """Seconds; an adapter that is not on the device comes under a new id each time, and goes again."""
        prompt = prompts_of(bench, scenario)[0]
        if scenario.adapter_from == "device":
            return first_token_seconds(bench.executor, prompt, bench.library.reference(scenario.adapters, 0))
        task = next(self._cold_tasks)
        try:
            if scenario.adapter_from == "host":
                bench.executor.put_adapter(bench.library.tensors(scenario.adapters, 0, task_id=task))
                return first_token_seconds(bench.executor, prompt, LoraConfig(task))
            directory = self._peft_directory(scenario)
            with _Timer() as reading:
                adapter = LoraConfig.from_peft(task, directory, bench.engine)
            return reading.seconds + first_token_seconds(bench.executor, prompt, adapter)
        finally:
            bench.executor.unload_adapter(task)

    def _peft_directory(self, scenario: FirstToken) -> Path:
        """Made in the warm-up, so its files are in the page cache: what is measured is reading them, not the disk."""
        rank = scenario.adapters.rank(0)
        if self._file.model is None or self._file.engines[scenario.engine].directory is not None:
            raise ConfigError(
                f"scenario '{scenario.name}' reads an adapter from disk, which the bench makes for its own models; "
                f"engine '{scenario.engine}' has a directory"
            )
        base = self._shelf.model(self._file.model)
        directory = adapter_directory(self._work_dir, base, rank)
        if not directory.exists():
            dora = scenario.adapters.is_dora(0)
            write_peft_adapter(self._file.model, base, directory, rank, seed=rank, dora=dora)
        return directory

    def _report(self) -> Report:
        limits = self._limits.figures()
        figures = {s.name: Figure(s.unit, self._samples[s.name]) for s in self._runnable()}
        rows = []
        for scenario in self._runnable():
            work = self._work.get(scenario.name)
            rows.append(
                Row(
                    name=scenario.name,
                    title=scenario.title,
                    kind=KIND_NAMES[type(scenario)],
                    engine=scenario.engine,
                    settings=_settings(scenario),
                    figure=figures[scenario.name],
                    work_bytes=None if work is None else work.num_bytes,
                    work_flops=None if work is None else work.flops,
                    comparisons=[
                        result
                        for comparison in scenario.comparisons
                        if (result := self._compare(scenario, comparison, figures, limits)) is not None
                    ],
                )
            )
        titles = {scenario.name: scenario.title for scenario in self._file.scenarios}
        return Report(
            version=__version__,
            created=utc_now(),
            machine=describe_machine(self._cpu.num_threads, self._cpu.kernels),
            run={**asdict(self._file.run), "threads": self._cpu.num_threads, "scenarios": self._file.path.name},
            scenario_file=self._file.text,
            limits=limits,
            rows=rows,
            not_run=[NotRun(name, titles[name], reason) for name, reason in self._not_run.items()],
        )

    def _compare(
        self, scenario: Scenario, comparison: Comparison, figures: dict[str, Figure], limits: dict[str, Figure]
    ) -> ComparisonResult | None:
        """None when the other scenario was not run."""
        if comparison.base is not None and comparison.base not in figures:
            return None
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
                base = next(s for s in self._file.scenarios if s.name == comparison.base)
                ratio = paired_ratio(ours, self._roofline_share(base, figures[base.name], limits))
        target = comparison.on_cpu(amx=amx_is_permitted())
        return ComparisonResult(
            comparison.base, comparison.measure, ratio, target.at_least, target.at_most, target.holds(ratio)
        )

    def _roofline_share(self, scenario: Scenario, figure: Figure, limits: dict[str, Figure]) -> Figure:
        tokens = scenario.input_length if isinstance(scenario, Prefill) else requests_of(scenario)
        peak = self._peak(scenario, limits)
        return roofline_shares(figure, self._work[scenario.name], tokens, limits["read_bandwidth"], limits[peak], peak)

    def _peak(self, scenario: Scenario, limits: dict[str, Figure]) -> str:
        """Name of the multiply-add limit that a scenario's engine is held against."""
        medians = {name: figure.median for name, figure in limits.items()}
        return peak_of(self._engines[scenario.engine].storage.program, medians)


KIND_NAMES: Final[dict[type[Scenario], str]] = {
    Prefill: "prefill",
    Decode: "decode",
    Overhead: "overhead",
    FirstToken: "first_token",
    Serve: "serve",
    Memory: "memory",
    Load: "load",
}


class _Timer:
    """Seconds of a block."""

    seconds = 0.0

    def __enter__(self) -> _Timer:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._start


def profiled_steps(bench: BenchExecutor, scenario: Prefill | Decode, *, warm_up: bool) -> list[StepRecord]:
    """Steps of a run on a profiled executor: those of a whole prompt, or those in which all requests generate.

    With `warm_up`, a run before it makes their times those of a warm engine; what they move and multiply is the same.
    """
    executor = bench.executor
    prompts = prompts_of(bench, scenario)
    if isinstance(scenario, Prefill):
        if warm_up:
            first_token_seconds(executor, prompts[0], adapter_of(bench, scenario))
        bench.profile.take_steps()
        for _ in range(PROFILED_PROMPTS if warm_up else 1):
            first_token_seconds(executor, prompts[0], adapter_of(bench, scenario))
        steps = bench.profile.take_steps()
        return [step for step in steps if step.num_tokens == scenario.input_length]
    adapters = batch_adapters(bench, scenario)
    for _ in range(2 if warm_up else 1):
        bench.profile.take_steps()
        decode(executor, prompts, adapters, scenario.output_length)
    steps = bench.profile.take_steps()
    return [step for step in steps if step.num_tokens == step.num_sequences == scenario.requests]


def _settings(scenario: Scenario) -> dict[str, Any]:
    written = asdict(scenario)
    return {name: value for name, value in written.items() if name not in ("name", "title", "engine", "comparisons")}
