"""Kernels and copies of a device in a profiler's trace, cut into steps."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
# Parts of names that are the same for all kernels.
_NOISE = ("void ", "adaptrt::cuda::", "adaptrt::", "(anonymous namespace)::", "kernels::")
_MOST_CHARACTERS = 140


@dataclass(frozen=True)
class Event:
    """A kernel or copy; times in microseconds."""

    name: str
    begin: float
    duration: float


@dataclass(frozen=True)
class Launches:
    """All launches of a kernel."""

    count: int
    microseconds: float


@dataclass(frozen=True)
class Activity:
    """The device's work in consecutive steps; times in microseconds."""

    steps: int
    period: float
    """From the begin of a step to the begin of the next one."""
    busy: float
    """Time of a step in which at least one kernel or copy ran."""
    pause: float
    """The longest time of a step without one: the median over the steps."""
    kernels: Mapping[str, Launches]
    """By name; those with the most time first."""

    @property
    def launches(self) -> float:
        """Kernels and copies of a step."""
        return sum(kernel.count for kernel in self.kernels.values()) / self.steps

    @property
    def microseconds(self) -> float:
        """Time of all kernels and copies."""
        return sum(kernel.microseconds for kernel in self.kernels.values())


def device_events(trace: Mapping[str, Any]) -> list[Event]:
    """Returns the kernels and copies in a trace of torch's profiler."""
    return [
        Event(event["name"], float(event["ts"]), float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("cat") in _DEVICE_CATEGORIES and "dur" in event
    ]


def activity_of(events: Sequence[Event]) -> Activity | None:
    """Cuts a trace where the kernel that each step has once begins: the embedding, or else the one with the fewest
    launches. None: there are not two of them.
    """
    events = sorted(events, key=lambda event: event.begin)
    counts = Counter(event.name for event in events)
    once = [name for name in counts if "embed" in name.lower()] or [name for name in counts if counts[name] > 2]
    if not once:
        return None
    first_of_step = min(once, key=lambda name: counts[name])
    begins = [event.begin for event in events if event.name == first_of_step]
    if len(begins) < 2:
        return None
    times: dict[str, list[float]] = defaultdict(list)
    pauses = [0.0]
    busy, reached = 0.0, begins[0]
    for event in (event for event in events if begins[0] <= event.begin < begins[-1]):
        if len(pauses) < len(begins) - 1 and event.begin >= begins[len(pauses)]:
            pauses.append(0.0)
        pauses[-1] = max(pauses[-1], event.begin - reached)
        end = event.begin + event.duration
        busy += max(0.0, end - max(event.begin, reached))
        reached = max(reached, end)
        times[short_name(event.name)].append(event.duration)
    steps = len(begins) - 1
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))
    return Activity(
        steps=steps,
        period=(begins[-1] - begins[0]) / steps,
        busy=busy / steps,
        # The time before a step's first kernel counts to that step, so the first one has none.
        pause=statistics.median(pauses[1:] or pauses),
        kernels={name: Launches(len(of_name), sum(of_name)) for name, of_name in ordered},
    )


def short_name(name: str) -> str:
    """Returns a kernel's name without return type, namespaces and arguments."""
    for noise in _NOISE:
        name = name.replace(noise, "")
    depth, end = 0, len(name)
    for at, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0:
            end = at
            break
    return name[:end].strip()[:_MOST_CHARACTERS]
