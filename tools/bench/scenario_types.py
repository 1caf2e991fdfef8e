"""What is measured of an engine, and under which load."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final


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
    """PEFT adapters, one for each of `count`; empty: a library's own."""

    def rank(self, index: int) -> int:
        """Of adapter `index`."""
        return self.ranks[index % len(self.ranks)]

    def is_dora(self, index: int) -> bool:
        """Of adapter `index`."""
        return math.floor((index + 1) * self.dora_share) > math.floor(index * self.dora_share)


NO_ADAPTERS: Final = AdapterMix(count=0, ranks=(8,))


@dataclass(frozen=True)
class Sizes:
    """What a scenario asks of an engine."""

    requests: int
    """In a batch."""
    longest_input: int
    longest_output: int


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What every kind has."""

    kind: ClassVar[str]
    """Its name in reports."""

    name: str
    title: str
    engine: str
    adapters: AdapterMix
    unit: str
    """Of its value."""

    @property
    def sizes(self) -> Sizes:
        """At most."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Prompt(Scenario):
    """A kind whose request is one prompt."""

    input_length: int

    @property
    def sizes(self) -> Sizes:
        """At most."""
        return Sizes(1, self.input_length, 1)


@dataclass(frozen=True, kw_only=True)
class Batch(Scenario):
    """A kind whose requests generate together."""

    requests: int
    input_length: int
    output_length: int

    @property
    def sizes(self) -> Sizes:
        """At most."""
        return Sizes(self.requests, self.input_length, self.output_length)


@dataclass(frozen=True, kw_only=True)
class Prefill(Prompt):
    """Tokens of a prompt per second, from the time to its first token."""

    kind = "prefill"


@dataclass(frozen=True, kw_only=True)
class Decode(Batch):
    """Generated tokens per second of a full batch, from the median step in which all requests generate."""

    kind = "decode"

    num_threads: int | None = None
    """Of its engine; None: the run's."""


@dataclass(frozen=True, kw_only=True)
class Serve(Scenario):
    """Output tokens per second of a stream of requests, their latencies and the cache's hit rates."""

    kind = "serve"

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

    @property
    def sizes(self) -> Sizes:
        """At most; the engine queues what is more than a batch."""
        return Sizes(1, self.input_length[1] - 1, self.output_length[1] - 1)
