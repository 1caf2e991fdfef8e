"""What a scenario file says, checked: engines to build, and what to measure on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from .model import BenchModel


@dataclass(frozen=True)
class RunSettings:
    """How samples are taken."""

    repeats: int
    """Rounds; each takes one sample of every scenario and of the machine's limits."""
    quiet_share: float
    """A sample during which other processes took more than this share of the CPUs is disturbed."""
    extra_samples: int
    """Samples that a scenario may take again because they were disturbed."""
    quiet_wait: float
    """Seconds that a sample waits at most for other processes to rest."""


@dataclass(frozen=True)
class EngineSpec:
    """An engine of the file's model, built by the bench, or an existing one."""

    name: str
    directory: Path | None
    dtype: str
    lora: bool
    dora: bool
    max_lora_rank: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    convert_flags: tuple[str, ...]
    """More flags for `adaptrt convert-checkpoint`, such as those of quantised weights."""
    build_flags: tuple[str, ...]
    optional: bool
    """When it cannot be built, its scenarios are reported as not run."""


@dataclass(frozen=True)
class Popularity:
    """Which adapter a request asks for, of n that are there."""

    power: float | None = None
    """S-LoRA's: index = floor(u^(1/power) * n) for uniform u, so that P(index < i) = (i / n)^power; 1 is uniform."""
    zipf: float | None = None
    """P(index) in proportion to 1 / (index + 1)^zipf."""


@dataclass(frozen=True)
class AdapterMix:
    """The adapters of a scenario; adapter i has ranks[i % len(ranks)]."""

    count: int
    ranks: tuple[int, ...]
    dora_share: float = 0.0
    """Share of the adapters that are DoRA, spread evenly."""
    directories: tuple[str, ...] = ()
    """PEFT adapters, one for each of `count`; empty: random ones are made."""

    def rank(self, index: int) -> int:
        """Of adapter `index`."""
        return self.ranks[index % len(self.ranks)]

    def is_dora(self, index: int) -> bool:
        """Of adapter `index`."""
        return math.floor((index + 1) * self.dora_share) > math.floor(index * self.dora_share)


NO_ADAPTERS: Final = AdapterMix(count=0, ranks=(8,))


@dataclass(frozen=True)
class Comparison:
    """What a scenario is held to."""

    base: str | None
    """The other scenario; None: this one against the machine alone."""
    measure: str
    """ratio: value by value; roofline: share of the roofline by share of the roofline, which takes out the bytes and
    FLOPs that only one of the two has; without a base, the share of the roofline itself. value: the value, no ratio.
    alternating: short runs of the two in turn, pair by pair; the scenario's own value then comes from these runs."""
    at_least: float | None = None
    at_most: float | None = None
    at_least_with_amx: float | None = None
    """In place of `at_least` on a CPU that has AMX."""
    pairs: int = 0
    """That a sample of an alternating comparison has."""

    def on_cpu(self, *, amx: bool) -> Comparison:
        """With the target of a CPU with AMX or without."""
        if not amx or self.at_least_with_amx is None:
            return self
        return replace(self, at_least=self.at_least_with_amx)

    def holds(self, ratio: float) -> bool | None:
        """Whether the target is met; None without one."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least is None or ratio >= self.at_least) and (self.at_most is None or ratio <= self.at_most)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What every kind has."""

    name: str
    title: str
    engine: str
    adapters: AdapterMix
    comparisons: tuple[Comparison, ...]
    unit: str
    """Of its value."""

    @property
    def alternating(self) -> Comparison | None:
        """The comparison by runs in turn, of which a scenario has one at most."""
        return next((comparison for comparison in self.comparisons if comparison.measure == "alternating"), None)


@dataclass(frozen=True, kw_only=True)
class Prefill(Scenario):
    """Tokens of a prompt per second, from the time to its first token."""

    input_length: int


@dataclass(frozen=True, kw_only=True)
class Decode(Scenario):
    """Generated tokens per second of a full batch, from the median step in which all requests generate."""

    requests: int
    input_length: int
    output_length: int
    num_threads: int | None = None
    """Of its engine; None: the run's."""
    competing_processes: int = 0
    """That each keep a core busy meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Overhead(Scenario):
    """Percentage of the time of decode steps that is not the engine's: scheduler, caches, sampling, responses."""

    requests: int
    input_length: int
    output_length: int


@dataclass(frozen=True, kw_only=True)
class FirstToken(Scenario):
    """Milliseconds to the first token of a request whose adapter is at some place."""

    input_length: int
    adapter_from: str
    """device, host, or disk (a PEFT directory that is read with the request)."""


@dataclass(frozen=True, kw_only=True)
class Serve(Scenario):
    """Output tokens per second of a stream of requests, their latencies and the cache's hit rates."""

    popularity: Popularity
    base_share: float
    """Share of the requests that ask for no adapter."""
    device_adapters: int | None
    """Adapters of the largest rank that the device level has room for; None: for all."""
    requests: int
    input_length: tuple[int, int]
    output_length: tuple[int, int]
    concurrency: int | None
    """Closed loop: this many requests at a time, the next as soon as one ends."""
    rate: float | None
    """Open loop: requests per second, whether or not earlier ones have ended."""
    cv: float
    """Open loop: coefficient of variation of the times between arrivals, Gamma distributed; 1 is Poisson."""
    first_token_target: float
    """Seconds; the report says which share of the requests had their first token by then."""
    seed: int
    sweep: str | None
    """Name that scenarios of one line of the plots share."""


@dataclass(frozen=True, kw_only=True)
class Memory(Scenario):
    """MB that a serving process takes at most beyond its engine file, KV cache and adapters."""

    requests: int
    input_length: int
    output_length: int


@dataclass(frozen=True, kw_only=True)
class Load(Scenario):
    """Seconds from an engine directory to the first token of a prompt, in a fresh process with a warm page cache."""

    input_length: int


@dataclass(frozen=True)
class ScenarioFile:
    """All of it."""

    path: Path
    run: RunSettings
    model: BenchModel | None
    """None when every engine has a directory."""
    engines: dict[str, EngineSpec]
    scenarios: tuple[Scenario, ...]
    text: str = ""
    """Of the file; empty where flags said what to measure."""
