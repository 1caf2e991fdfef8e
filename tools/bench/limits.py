"""The machine's limits, measured together with the samples, and how close a row comes to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from ..._core import DType, QuantAlgo, measure_machine_limits
from ...formats.engine.plan import LinearOp, Program
from ...runtime.cuda_engine import CudaEngine
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
"""Units of the fields of MachineLimits."""
GPU_LIMIT_UNITS: Final = {"copy_bandwidth": "B/s", "product_flops": "FLOP/s"}
"""Units of the limits of a GPU: bytes that a copy reads and writes, and a product of 16-bit matrices."""
BANDWIDTHS: Final = ("read_bandwidth", "copy_bandwidth")
"""Names of the limits of memory, of which a machine has one."""
GPU_SIZES: Final = {"copy_bytes": 256 << 20, "product_size": 4096, "repeats": 8, "tries": 3}
"""Sizes of a measurement of a GPU, see CudaEngine.measure_device_limits(). It takes 0.7 GB, which the KV cache leaves
free."""
_BESIDE: Final = "beside_"
TRIES: Final = 3
"""Number of tries per limit and measurement; the best one counts."""


def machine_limits(num_threads: int, tries: int) -> dict[str, float]:
    """The current limits by name."""
    limits = measure_machine_limits(num_threads, tries)
    return {name: getattr(limits, name) for name in LIMIT_UNITS}


class LimitSource(Protocol):
    """The hardware whose limits bound an engine's speed."""

    @property
    def units(self) -> Mapping[str, str]:
        """Units of the limits by name."""

    def measure(self) -> dict[str, float]:
        """Measures the limits, which takes less than a second; returns them by name."""

    def describe(self) -> dict[str, Any]:
        """Fields for the report's machine."""


@dataclass(frozen=True)
class CpuLimits:
    """The limits of this machine's CPUs."""

    num_threads: int

    @property
    def units(self) -> Mapping[str, str]:
        """See LimitSource."""
        return LIMIT_UNITS

    def measure(self) -> dict[str, float]:
        """See LimitSource."""
        return machine_limits(self.num_threads, TRIES)

    def describe(self) -> dict[str, Any]:
        """See LimitSource."""
        return {}


@dataclass(frozen=True)
class GpuLimits:
    """The limits of an engine's GPU."""

    engine: CudaEngine

    @property
    def units(self) -> Mapping[str, str]:
        """See LimitSource."""
        return GPU_LIMIT_UNITS

    def measure(self) -> dict[str, float]:
        """See LimitSource."""
        return dict(zip(self.units, self.engine.measure_device_limits(**GPU_SIZES), strict=True))

    def describe(self) -> dict[str, Any]:
        """See LimitSource."""
        return {"gpu": self.engine.device_name()}


class LimitMeter:
    """The limits of each round: the best of several measurements spread over the round.

    A single measurement may be disturbed, and a row would then exceed the measured limit.
    """

    def __init__(self, source: LimitSource, quiet_share: float) -> None:
        self.source: Final = source
        self._quiet_share = quiet_share
        self._best: dict[str, dict[int, Sample]] = {name: {} for name in source.units}

    def measure(self, number: int) -> dict[str, float]:
        """Measures the limits once more in round `number`; returns them by name. Takes half a second."""
        with NoiseMeter() as meter:
            limits = self.source.measure()
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
        """One sample per round."""
        return {
            name: Figure(self.source.units[name], [best[number] for number in sorted(best)])
            for name, best in self._best.items()
        }


def peak_of(program: Program, limits: Mapping[str, float]) -> str:
    """Name of the multiply-add limit for an engine: the highest of those that it can use.

    float32 for every engine, bfloat16 for bfloat16 engines, and int8 for W8A8 and W4A8 (although their attention,
    adapters and lm_head do not use 8 bits).
    """
    usable = ["float32_flops"]
    if program.dtype == DType.BFLOAT16:
        usable.append("bfloat16_flops")
    if _rounds_activations(program):
        usable.append("int8_ops")
    return greatest(usable, limits)


def greatest(names: Iterable[str], limits: Mapping[str, float]) -> str:
    """Name of the highest limit: on some CPUs the bfloat16 instruction is slower than float32."""
    return max(names, key=lambda name: limits[name])


def _rounds_activations(program: Program) -> bool:
    weights = [part.weight.quantization for op in program.body if isinstance(op, LinearOp) for part in op.parts]
    return any(how is not None and how.algo in (QuantAlgo.W8A8, QuantAlgo.W4A8) for how in weights)


def beside(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The mean of the limits measured directly before and after a sample, to be stored with it.

    Other virtual machines can halve the bandwidth for seconds, so the round's best limit says little about one sample.
    """
    return {_BESIDE + name: (before[name] + after[name]) / 2 for name in before}


def rates_at_limit(figure: Figure, work: Work, tokens: int, bandwidth: Figure, peak: Figure, peak_name: str) -> Figure:
    """Tokens per second that the limits would allow for each sample, for steps of `tokens` tokens.

    Uses the limits stored with the sample; if there are none, those of its round.
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
    """Each sample's tokens per second, divided by the rate of rates_at_limit()."""
    allowed = rates_at_limit(figure, work, tokens, bandwidth, peak, peak_name)
    return Figure(
        "share",
        [
            replace(limit, metrics={"value": sample.metrics["value"] / limit.metrics["value"]})
            for sample, limit in zip(figure.samples, allowed.samples, strict=True)
        ],
    )
