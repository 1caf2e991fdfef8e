"""Scenarios: the quantities measured on an engine, and the load."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

from ..._core import PeftCacheConfig


@dataclass(frozen=True)
class RunSettings:
    """Settings for taking samples."""

    repeats: int
    """Number of rounds. Each takes one sample of every scenario and of the machine's limits."""
    quiet_share: float
    """A sample is disturbed if other processes used more than this share of the CPUs."""
    extra_samples: int
    """Maximum number of samples that a scenario may repeat because they were disturbed."""
    quiet_wait: float
    """Maximum seconds that a sample waits for other processes to become idle."""


@dataclass(frozen=True)
class Popularity:
    """Distribution of the requested adapter among n adapters."""

    power: float | None = None
    """S-LoRA's distribution: index = floor(u^(1/power) * n) for uniform u, so P(index < i) = (i / n)^power; 1 is
    uniform."""
    zipf: float | None = None
    """P(index) is proportional to 1 / (index + 1)^zipf."""


@dataclass(frozen=True)
class AdapterMix:
    """The adapters of a scenario. Adapter i has rank ranks[i % len(ranks)]."""

    count: int
    ranks: tuple[int, ...]
    dora_share: float = 0.0
    """Share of DoRA adapters, spread evenly."""
    directories: tuple[str, ...] = ()
    """Directories of PEFT adapters, one for each of `count`; empty: the library creates the adapters."""
    storage: str = PeftCacheConfig().lora_storage
    """PeftCacheConfig.lora_storage of the executor."""

    def rank(self, index: int) -> int:
        """Rank of adapter `index`."""
        return self.ranks[index % len(self.ranks)]

    def is_dora(self, index: int) -> bool:
        """True if adapter `index` is DoRA."""
        return math.floor((index + 1) * self.dora_share) > math.floor(index * self.dora_share)


NO_ADAPTERS: Final = AdapterMix(count=0, ranks=(8,))


@dataclass(frozen=True)
class Sizes:
    """Sizes that a scenario needs from an engine."""

    requests: int
    """Requests in a batch."""
    longest_input: int
    longest_output: int


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Fields that all kinds share."""

    kind: ClassVar[str]
    """Name of the kind in reports."""

    name: str
    title: str
    engine: str
    adapters: AdapterMix
    unit: str
    """Unit of the value."""

    @property
    def sizes(self) -> Sizes:
        """Maximum sizes."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Prompt(Scenario):
    """A kind with one prompt per request."""

    input_length: int

    @property
    def sizes(self) -> Sizes:
        """Maximum sizes."""
        return Sizes(1, self.input_length, 1)


@dataclass(frozen=True, kw_only=True)
class Batch(Scenario):
    """A kind whose requests generate together."""

    requests: int
    input_length: int
    output_length: int

    @property
    def sizes(self) -> Sizes:
        """Maximum sizes."""
        return Sizes(self.requests, self.input_length, self.output_length)


@dataclass(frozen=True, kw_only=True)
class Prefill(Prompt):
    """Prompt tokens per second, from the time to first token."""

    kind = "prefill"

    num_threads: int | None = None
    """Threads of its engine; None: the run's."""


@dataclass(frozen=True, kw_only=True)
class Decode(Batch):
    """Generated tokens per second of a full batch, from the median step in which all requests generate."""

    kind = "decode"

    num_threads: int | None = None
    """Threads of its engine; None: the run's."""


@dataclass(frozen=True, kw_only=True)
class Serve(Scenario):
    """Output tokens per second of a stream of requests, with latencies and cache hit rates."""

    kind = "serve"

    popularity: Popularity
    base_share: float
    """Share of requests without an adapter."""
    device_adapters: int | None
    """Number of adapters of the maximum rank that fit in the device level; None: all."""
    requests: int
    input_length: tuple[int, int]
    output_length: tuple[int, int]
    concurrency: int | None
    """Closed loop: number of concurrent requests; the next one starts when one ends."""
    rate: float | None
    """Open loop: requests per second, independent of earlier requests."""
    cv: float
    """Open loop: coefficient of variation of the Gamma-distributed times between arrivals; 1 is Poisson."""
    first_token_target: float
    """Seconds; the report gives the share of requests whose first token arrived within it."""
    seed: int
    sweep: str | None
    """Name shared by the scenarios of one line in the plots."""

    @property
    def sizes(self) -> Sizes:
        """Maximum sizes; the engine queues requests beyond its batch size."""
        return Sizes(1, self.input_length[1] - 1, self.output_length[1] - 1)
