"""Measures all scenarios in every round, so that a drift of the machine's speed affects all of them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from ... import __version__
from ..._core import ConfigError, LoraConfig, StepRecord
from ...runtime.compiled_engine import CompiledEngine
from ...runtime.cuda_engine import CudaEngine
from ...runtime.native_engine import NativeEngine
from .batches import adapter_of, batch_adapters, prompts_of
from .counted_work import CountedStep, counted_work
from .executors import AdapterLibrary, BenchExecutor, CpuUse, ExecutorKey, key_of, num_chunks, problems_of
from .limits import CpuLimits, GpuLimits, LimitMeter, beside
from .measure import Metrics, decode, first_token_seconds, prefill, request, serve
from .measure import finish as finish_request
from .noise import NoiseMeter, wait_until_quiet
from .on_ranks import is_run_by_workers
from .profile import Work, median_step, work_of
from .report import ComparisonResult, Figure, NotRun, Report, Row, Sample
from .scenario_types import Decode, Prefill, Prompt, RunSettings, Scenario, Serve
from .system import describe_machine, utc_now
from .workload import generate, random_prompt

Progress = Callable[[str], None]

WARM_UP_TOKENS: Final = 8
PROFILED_PROMPTS: Final = 3


class Bench:
    """One run of scenarios over engines.

    Subclasses override public methods to run other kinds than prefill, decode and serve.
    """

    def __init__(
        self,
        subject: Path,
        scenarios: Sequence[Scenario],
        run: RunSettings,
        engines: Mapping[str, CompiledEngine],
        cpu: CpuUse,
        progress: Progress,
    ) -> None:
        """`subject`: the engine or file named by errors and by the report."""
        self.subject: Final = subject
        self.scenarios: Final = tuple(scenarios)
        self.settings: Final = run
        self.engines: Final = engines
        self.cpu: Final = cpu
        self.executors: Final[dict[str, BenchExecutor]] = {}
        """Executors by scenario; scenarios may share one."""
        self.work: Final[dict[str, Work]] = {}
        """Work of a step, for scenarios with a roofline."""
        self.not_run: Final[dict[str, str]] = {}
        """Reasons by scenario."""
        self.say: Final = progress
        self._samples: dict[str, list[Sample]] = defaultdict(list)
        on_gpu = [engine for engine in engines.values() if isinstance(engine, CudaEngine)]
        source = GpuLimits(on_gpu[0]) if on_gpu else CpuLimits(cpu.num_threads)
        self.limits: Final = LimitMeter(source, run.quiet_share)
        self._extra: dict[str, int] = {}
        self._salts = itertools.count(1)

    def run(self) -> Report:
        """Measures everything. Raises ConfigError that lists all scenarios that do not fit their engines."""
        try:
            self._check_fit()
            self.prepare()
            for scenario in self.runnable():
                self.warm_up(scenario)
                self._extra[scenario.name] = self.settings.extra_samples
            for number in range(self.settings.repeats):
                self.say(f"round {number + 1} of {self.settings.repeats}")
                for scenario in self.runnable():
                    self._measure(scenario, number)
                self.limits.measure(number)
        finally:
            self.close()
        return self._report()

    def close(self) -> None:
        """Shuts down the executors."""
        for executor in set(self.executors.values()):
            executor.close()

    def runnable(self) -> list[Scenario]:
        """Scenarios that can be run."""
        return [scenario for scenario in self.scenarios if scenario.name not in self.not_run]

    def library(self, engine: CompiledEngine) -> AdapterLibrary:
        """The library of an engine's adapters."""
        return AdapterLibrary(engine)

    def needs_executor(self, scenario: Scenario) -> bool:
        """True if a scenario runs on a shared executor."""
        return True

    def prepare(self) -> None:
        """Creates the executors, and counts the bytes and operations of steps."""
        groups: dict[ExecutorKey, list[Scenario]] = defaultdict(list)
        for scenario in self.runnable():
            if self.needs_executor(scenario) or isinstance(scenario, (Prefill, Decode)):
                groups[key_of(scenario)].append(scenario)
        for key, scenarios in groups.items():
            self.say(f"preparing engine '{key.engine}' for {len(scenarios)} scenarios")
            engine = self.engines[key.engine]
            try:
                self._find_work(engine, key, [s for s in scenarios if isinstance(s, (Prefill, Decode))])
                alone = [s for s in scenarios if s.name not in self.executors and self.needs_executor(s)]
                if alone:
                    library = self.library(engine)
                    shared = BenchExecutor(engine, key, alone, self.cpu, profiled=False, library=library)
            except ConfigError as error:
                self.not_run.update({scenario.name: str(error) for scenario in scenarios})
                continue
            for scenario in alone:
                self.executors[scenario.name] = shared

    def warm_up(self, scenario: Scenario) -> None:
        """Runs a scenario once, or one request on its engine."""
        if isinstance(scenario, Serve):
            bench = self.executors[scenario.name]
            prompt = random_prompt(1, bench.engine.program.vocab_size, np.random.default_rng(0))
            finish_request(bench.executor, bench.executor.enqueue_request(request(prompt, WARM_UP_TOKENS)))
        else:
            self.sample(scenario)

    def take(self, scenario: Scenario, number: int) -> Sample:
        """Takes a sample in round `number`, and measures the noise meanwhile."""
        has_roofline = scenario.name in self.work
        before = self.limits.measure(number) if has_roofline else {}
        bench = self.executors.get(scenario.name)
        with NoiseMeter([] if bench is None else bench.processes) as meter:
            metrics = self.sample(scenario)
        if has_roofline:
            metrics |= beside(before, self.limits.measure(number))
        return self.made(number, metrics, meter)

    def made(self, number: int, metrics: Metrics, meter: NoiseMeter, ratios: Sequence[float] = ()) -> Sample:
        """Creates a sample from metrics measured while `meter` ran."""
        noise = meter.noise
        disturbed = noise.foreign > self.settings.quiet_share
        return Sample(number, metrics, round(noise.foreign, 4), round(noise.stolen, 4), disturbed, list(ratios))

    def sample(self, scenario: Scenario) -> Metrics:
        """Runs a scenario once and measures it."""
        bench = self.executors[scenario.name]
        if isinstance(scenario, Prompt):
            # Warm-up: the sample must not depend on what ran before it.
            first_token_seconds(bench.executor, prompts_of(bench, scenario)[0], adapter_of(bench, scenario))
        if isinstance(scenario, Prefill):
            return prefill(bench.executor, prompts_of(bench, scenario)[0], adapter_of(bench, scenario))
        if isinstance(scenario, Decode):
            adapters = batch_adapters(bench, scenario)
            # With prefix reuse, each sample only reuses its own prefixes.
            salt = next(self._salts)
            return decode(bench.executor, prompts_of(bench, scenario), adapters, scenario.output_length, salt)
        assert isinstance(scenario, Serve)
        workload = generate(scenario, bench.engine.program.vocab_size)
        return serve(bench.executor, scenario, workload, bench.library.references(scenario.adapters))

    def comparisons(
        self, scenario: Scenario, figures: Mapping[str, Figure], limits: Mapping[str, Figure]
    ) -> list[ComparisonResult]:
        """Comparisons of a scenario with other rows and limits."""
        return []

    @property
    def text(self) -> str:
        """Text of the scenario file; empty without one."""
        return ""

    def _check_fit(self) -> None:
        problems = [
            f"scenario '{scenario.name}' {problem}"
            for scenario in self.runnable()
            for problem in problems_of(scenario, self.engines[scenario.engine])
        ]
        if problems:
            raise ConfigError(f"{self.subject}: " + "; ".join(problems))

    def _find_work(self, engine: CompiledEngine, key: ExecutorKey, scenarios: list[Prefill | Decode]) -> None:
        """Runs each scenario once on an engine that counts the bytes and operations of its steps.

        A GPU's engines do not count, so this does it. Workers' engines do not count, so their rows have no roofline.
        """
        if isinstance(engine, CudaEngine):
            library = self.library(engine)
            for scenario in scenarios:
                self.work[scenario.name] = counted_work(engine, counted_steps(engine, scenario, library))
            return
        if not scenarios or not isinstance(engine, NativeEngine) or is_run_by_workers(engine):
            return
        bench = BenchExecutor(engine, key, scenarios, self.cpu, profiled=True, library=self.library(engine))
        try:
            for scenario in scenarios:
                steps = profiled_steps(bench, scenario, warm_up=False)
                is_chunked = isinstance(scenario, Prefill) and num_chunks(scenario, engine) > 1
                self.work[scenario.name] = work_of(*(steps if is_chunked else [median_step(steps)]))
        finally:
            bench.close()

    def _measure(self, scenario: Scenario, number: int) -> None:
        """Takes a sample. Retakes it if it was disturbed, while the scenario has extra samples left."""
        while True:
            wait_until_quiet(self.settings.quiet_share, self.settings.quiet_wait)
            sample = self.take(scenario, number)
            self._samples[scenario.name].append(sample)
            if not sample.disturbed or self._extra[scenario.name] == 0:
                return
            self._extra[scenario.name] -= 1

    def _report(self) -> Report:
        limits = self.limits.figures()
        figures = {s.name: Figure(s.unit, self._samples[s.name]) for s in self.runnable()}
        rows = []
        for scenario in self.runnable():
            work = self.work.get(scenario.name)
            rows.append(
                Row(
                    name=scenario.name,
                    title=scenario.title,
                    kind=scenario.kind,
                    engine=scenario.engine,
                    settings=_settings(scenario),
                    figure=figures[scenario.name],
                    work_bytes=None if work is None else work.num_bytes,
                    work_flops=None if work is None else work.flops,
                    comparisons=self.comparisons(scenario, figures, limits),
                )
            )
        titles = {scenario.name: scenario.title for scenario in self.scenarios}
        return Report(
            version=__version__,
            created=utc_now(),
            machine=describe_machine(self.cpu.num_threads, self.cpu.kernels) | self.limits.source.describe(),
            run={**asdict(self.settings), "threads": self.cpu.num_threads, "scenarios": self.subject.name},
            scenario_file=self.text,
            limits=limits,
            rows=rows,
            not_run=[NotRun(name, titles[name], reason) for name, reason in self.not_run.items()],
        )


def counted_steps(engine: CompiledEngine, scenario: Prefill | Decode, library: AdapterLibrary) -> list[CountedStep]:
    """Steps of one prompt, or the step in the middle of a generating batch."""
    mix = scenario.adapters

    def lora(index: int) -> LoraConfig | None:
        return library.tensors(mix, index % mix.count) if mix.count else None

    if isinstance(scenario, Decode):
        middle = scenario.input_length + scenario.output_length // 2
        adapters = [lora(index) for index in range(scenario.requests)]
        return [CountedStep([(middle, 1)] * scenario.requests, adapters, scenario.requests)]
    length, most = scenario.input_length, engine.config.build_config.max_num_tokens
    firsts = range(0, length, most)
    return [CountedStep([(first, min(most, length - first))], [lora(0)], int(first == firsts[-1])) for first in firsts]


def profiled_steps(bench: BenchExecutor, scenario: Prefill | Decode, *, warm_up: bool) -> list[StepRecord]:
    """Steps of a run on a profiled executor: those of whole prompts, or those in which all requests generate.

    If a prompt takes several steps, these are the steps of one prompt.

    warm_up: runs the scenario once before, so that times are those of a warm engine. Bytes and operations do not
    change.
    """
    executor = bench.executor
    prompts = prompts_of(bench, scenario)
    if isinstance(scenario, Prefill):
        if warm_up:
            first_token_seconds(executor, prompts[0], adapter_of(bench, scenario))
        bench.profile.take_steps()
        is_chunked = num_chunks(scenario, bench.engine) > 1
        for _ in range(PROFILED_PROMPTS if warm_up and not is_chunked else 1):
            first_token_seconds(executor, prompts[0], adapter_of(bench, scenario))
        steps = bench.profile.take_steps()
        return [step for step in steps if is_chunked or step.num_tokens == scenario.input_length]
    adapters = batch_adapters(bench, scenario)
    for _ in range(2 if warm_up else 1):
        bench.profile.take_steps()
        decode(executor, prompts, adapters, scenario.output_length)
    steps = bench.profile.take_steps()
    return [step for step in steps if step.num_tokens == step.num_sequences == scenario.requests]


def _settings(scenario: Scenario) -> dict[str, Any]:
    return {name: value for name, value in asdict(scenario).items() if name not in ("name", "title", "engine")}
