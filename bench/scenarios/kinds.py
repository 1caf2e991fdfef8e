"""What a scenario file says, checked: engines to build, what to measure on them, and what it is held to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from adaptrt.tools.bench.scenario_types import Batch, Decode, Prompt, RunSettings, Scenario

from .model import BenchModel


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
    build_flags: tuple[str, ...]
    """More flags for `adaptrt build`, such as those of quantised weights."""
    optional: bool
    """When it cannot be built, its scenarios are reported as not run."""


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
class CrowdedDecode(Decode):
    """A decode scenario beside processes that each keep a core busy."""

    competing_processes: int


@dataclass(frozen=True, kw_only=True)
class Overhead(Batch):
    """Percentage of the time of decode steps that is not the engine's: scheduler, caches, sampling, responses."""

    kind = "overhead"


@dataclass(frozen=True, kw_only=True)
class FirstToken(Prompt):
    """Milliseconds to the first token of a request whose adapter is at some place."""

    kind = "first_token"

    adapter_from: str
    """device, host, or disk (a PEFT directory that is read with the request)."""


@dataclass(frozen=True, kw_only=True)
class Memory(Batch):
    """MB that a serving process takes at most beyond its engine file, KV cache and adapters."""

    kind = "memory"


@dataclass(frozen=True, kw_only=True)
class Load(Prompt):
    """Seconds from an engine directory to the first token of a prompt, in a fresh process with a warm page cache."""

    kind = "load"


@dataclass(frozen=True)
class ScenarioFile:
    """All of it."""

    path: Path
    run: RunSettings
    model: BenchModel | None
    """None when every engine has a directory."""
    engines: dict[str, EngineSpec]
    scenarios: tuple[Scenario, ...]
    comparisons: Mapping[str, tuple[Comparison, ...]]
    """By scenario."""
    text: str

    def alternating(self, scenario: Scenario) -> Comparison | None:
        """The comparison by runs in turn, of which a scenario has one at most."""
        return next((one for one in self.comparisons[scenario.name] if one.measure == "alternating"), None)


def competing_processes_of(scenario: Scenario) -> int:
    """That a scenario's own runs need beside them."""
    return scenario.competing_processes if isinstance(scenario, CrowdedDecode) else 0
