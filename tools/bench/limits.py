"""What the machine can do at best, measured beside the samples, and how near to it a row comes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from ..._core import DType, QuantAlgo, measure_machine_limits
from ...formats.engine.plan import LinearOp, Program
from .noise import NoiseMeter
from .profile import Work
from .report import Figure, Sample

LIMIT_UNITS: Final = {
    "read_bandwidth": "B/s",
    "int8_ops": "OP/s",
    "bfloat16_flops": "FLOP/s",
    "int8_from_l2_ops": "OP/s",
    "bfloat16_from_l2_flops": "FLOP/s",
    "float32_flops": "FLOP/s",
}
"""Fields of MachineLimits."""
_BESIDE: Final = "beside_"
TRIES: Final = 3
"""Of each limit in a measurement, of which the best counts."""


def machine_limits(num_threads: int, tries: int) -> dict[str, float]:
    """By name, as they are now."""
    limits = measure_machine_limits(num_threads, tries)
    return {name: getattr(limits, name) for name in LIMIT_UNITS}


class LimitMeter:
    """The limits of each round of a run: the best of measurements that are spread over the round.

    A single one can fall into a moment at which the machine is disturbed, and a row would then reach more than it.
    """

    def __init__(self, num_threads: int, quiet_share: float) -> None:
        self._threads = num_threads
        self._quiet_share = quiet_share
        self._best: dict[str, dict[int, Sample]] = {name: {} for name in LIMIT_UNITS}

    def measure(self, number: int) -> dict[str, float]:
        """Once more in round `number`, by name; half a second."""
        with NoiseMeter() as meter:
            limits = machine_limits(self._threads, TRIES)
        noise = meter.noise
        for name, best in self._best.items():
            value = limits[name]
            if number not in best or value > best[number].metrics["value"]:
                disturbed = noise.foreign > self._quiet_share
                best[number] = Sample(
                    number, {"value": value}, round(noise.foreign, 4), round(noise.stolen, 4), disturbed
                )
        return limits

    def figures(self) -> dict[str, Figure]:
        """One sample a round."""
        return {
            name: Figure(LIMIT_UNITS[name], [best[number] for number in sorted(best)])
            for name, best in self._best.items()
        }


def peak_of(program: Program, limits: Mapping[str, float]) -> str:
    """Name of the multiply-add limit that an engine is held against: the greatest of what it can use.

    That is float32 for every engine, bfloat16 for bfloat16 ones, and 8 bits for W8A8 and W4A8 (whose attention,
    adapters and lm_head are not in 8 bits).
    """
    usable = ["float32_flops"]
    if program.dtype == DType.BFLOAT16:
        usable.append("bfloat16_flops")
    if _rounds_activations(program):
        usable.append("int8_ops")
    return greatest(usable, limits)


def greatest(names: Iterable[str], limits: Mapping[str, float]) -> str:
    """The name whose limit is greatest: bfloat16's own instruction is slower than float32's on some CPUs."""
    return max(names, key=lambda name: limits[name])


def _rounds_activations(program: Program) -> bool:
    weights = [part.weight.quantization for op in program.body if isinstance(op, LinearOp) for part in op.parts]
    return any(how is not None and how.algo in (QuantAlgo.W8A8, QuantAlgo.W4A8) for how in weights)


def beside(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What a sample keeps of the limits that were measured right before and after it: their mean.

    Neighbours of the machine can halve its bandwidth for seconds, so that the best of a round says little of a sample.
    """
    return {_BESIDE + name: (before[name] + after[name]) / 2 for name in LIMIT_UNITS}


def rates_at_limit(figure: Figure, work: Work, tokens: int, bandwidth: Figure, peak: Figure, peak_name: str) -> Figure:
    """What the limits allow in place of each sample: tokens per second, for steps of `tokens`.

    Limits are those beside the sample; where none were measured there, those of its round.
    """
    bandwidths, peaks = bandwidth.by_round(), peak.by_round()
    allowed = []
    for sample in figure.samples:
        number, metrics = sample.round, sample.metrics
        seconds = work.least_seconds(
            metrics.get(_BESIDE + "read_bandwidth", bandwidths.get(number, bandwidth.median)),
            metrics.get(_BESIDE + peak_name, peaks.get(number, peak.median)),
        )
        allowed.append(Sample(number, {"value": tokens / seconds}, sample.foreign, sample.stolen, sample.disturbed))
    return Figure(figure.unit, allowed)


def roofline_shares(figure: Figure, work: Work, tokens: int, bandwidth: Figure, peak: Figure, peak_name: str) -> Figure:
    """Each sample of tokens per second as its share of what rates_at_limit() gives for it."""
    allowed = rates_at_limit(figure, work, tokens, bandwidth, peak, peak_name)
    return Figure(
        "share",
        [
            replace(limit, metrics={"value": sample.metrics["value"] / limit.metrics["value"]})
            for sample, limit in zip(figure.samples, allowed.samples, strict=True)
        ],
    )
