"""The checked content of a scenario file: engines to build, scenarios, and their comparisons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from adaptrt.tools.bench.scenario_types import AdapterMix, Batch, Decode, Prompt, RunSettings, Scenario, Sizes

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
    """Additional flags for `adaptrt build`, such as quantisation flags."""
    convert_flags: tuple[str, ...]
    """Flags for `adaptrt convert-checkpoint`, such as --tp_size; without any, the build converts the model."""
    model_dir: Path | None
    """A Hugging Face directory to build instead of the file's model."""
    family: str | None
    """A family of families.py whose random model is built instead of the file's."""
    weights: str | None
    """A format of weight_formats.py to which the layers are rounded; None: as the build's flags say."""
    weight_memory: int | None
    """Bytes of memory for weights when the engine is loaded; None: they are mapped."""
    optional: bool
    """True: if it cannot be built, its scenarios are reported as not run."""

    @property
    def is_of_model(self) -> bool:
        """True if it is built of the file's model."""
        return self.directory is None and self.model_dir is None and self.family is None


@dataclass(frozen=True)
class Comparison:
    """A comparison of a scenario, with its targets."""

    base: str | None
    """The other scenario; None: only the machine's limits."""
    measure: str
    """ratio: quotient of the two values. roofline: quotient of the two shares of the roofline, which takes account of
    bytes and FLOPs that only one of the two has; without a base, the share of the roofline itself. value: the value
    itself. alternating: quotient of short runs of the two in turn, pair by pair; the scenario's own value then comes
    from these runs."""
    at_least: float | None = None
    at_most: float | None = None
    at_least_with_amx: float | None = None
    """Replaces `at_least` on a CPU with AMX."""
    pairs: int = 0
    """Number of pairs in a sample of an alternating comparison."""

    def on_cpu(self, *, amx: bool) -> Comparison:
        """The comparison with the target for a CPU with or without AMX."""
        if not amx or self.at_least_with_amx is None:
            return self
        return replace(self, at_least=self.at_least_with_amx)

    def holds(self, ratio: float) -> bool | None:
        """True if the target is met; None without a target."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least is None or ratio >= self.at_least) and (self.at_most is None or ratio <= self.at_most)


@dataclass(frozen=True, kw_only=True)
class CrowdedDecode(Decode):
    """A decode scenario with competing processes that each keep a core busy."""

    competing_processes: int


@dataclass(frozen=True, kw_only=True)
class Overhead(Batch):
    """Percentage of decode steps' time that is spent outside of the engine: scheduler, caches, sampling, responses."""

    kind = "overhead"


@dataclass(frozen=True, kw_only=True)
class FirstToken(Prompt):
    """Milliseconds to first token of a request, depending on the location of its adapter."""

    kind = "first_token"

    adapter_from: str
    """device, host, or disk (a PEFT directory that is read with the request)."""


@dataclass(frozen=True, kw_only=True)
class Memory(Batch):
    """Maximum MB of a serving process beyond its engine file, KV cache and adapters."""

    kind = "memory"


@dataclass(frozen=True, kw_only=True)
class Load(Prompt):
    """Seconds from an engine directory to the first token of a prompt, in a fresh process with a warm page cache."""

    kind = "load"


TEXTS: Final = ("greedy", "sampled", "json", "one_token", "few_tokens")
"""Texts of Generation. json: sampled, as records of a JSON schema. one_token: only one token is allowed, so that every
draft is right. few_tokens: 24 tokens are allowed but no repetition of three, so that every draft is wrong."""
KV_FROM: Final = ("computed", "pool", "page_cache", "disk")


@dataclass(frozen=True)
class VariedMix(AdapterMix):
    """Adapters of a kind other than LoRA and DoRA."""

    variant: str = ""
    """A key of random_adapters.VARIANTS."""


@dataclass(frozen=True, kw_only=True)
class Generation(Batch):
    """Tokens per second of requests whose text is restricted, with or without drafts."""

    kind = "generate"

    text: str
    """One of TEXTS."""
    drafts: int
    """Maximum number of tokens that a step drafts from the request's own text."""


@dataclass(frozen=True, kw_only=True)
class Reuse(Prompt):
    """Milliseconds to first token of a prompt that the base model has already computed, followed by a question."""

    kind = "reuse"

    question: int
    """Number of tokens after the prompt."""
    kv_from: str
    """One of KV_FROM: where the prompt's keys and values are; computed: nowhere."""
    alora: bool
    """True: the adapter changes only the question, so the prompt's keys and values can be reused."""

    @property
    def sizes(self) -> Sizes:
        """Maximum sizes."""
        return Sizes(1, self.input_length + self.question, 1)


@dataclass(frozen=True, kw_only=True)
class Perplexity(Scenario):
    """Perplexity of an engine of the demo's model on the demo's documents, and its divergence from another engine."""

    kind = "perplexity"

    tokens: int
    """Minimum number of tokens of the documents."""
    reference: str
    """The other engine."""

    @property
    def sizes(self) -> Sizes:
        """Documents are short."""
        return Sizes(1, 1, 1)


@dataclass(frozen=True)
class ScenarioFile:
    """The whole file."""

    path: Path
    run: RunSettings
    model: BenchModel | None
    """None if every engine has a directory."""
    engines: dict[str, EngineSpec]
    scenarios: tuple[Scenario, ...]
    comparisons: Mapping[str, tuple[Comparison, ...]]
    """Comparisons by scenario."""
    text: str
    groups: Mapping[str, tuple[str, ...]]
    """Scenario names by the name of their table, which may name several engines."""

    def alternating(self, scenario: Scenario) -> Comparison | None:
        """The alternating comparison of a scenario, which has at most one."""
        return next((one for one in self.comparisons[scenario.name] if one.measure == "alternating"), None)


def engines_of(scenario: Scenario) -> tuple[str, ...]:
    """Names of the engines that a scenario needs."""
    return (scenario.engine, scenario.reference) if isinstance(scenario, Perplexity) else (scenario.engine,)


def competing_processes_of(scenario: Scenario) -> int:
    """Number of competing processes during a scenario's own runs."""
    return scenario.competing_processes if isinstance(scenario, CrowdedDecode) else 0
