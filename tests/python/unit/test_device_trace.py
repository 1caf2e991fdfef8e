"""tests/gpu/device_trace.py cuts a profiler's trace into steps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).resolve().parents[2] / "gpu" / "device_trace.py"
_SPEC = importlib.util.spec_from_file_location("device_trace", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
trace = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = trace  # dataclasses look their module up.
_SPEC.loader.exec_module(trace)


def steps(count: int, gemm: float = 4.0) -> list:
    """Steps of 20 us: an embedding, two products of which one overlaps with the embedding, and a pause."""
    return [
        event
        for first in range(0, 20 * count, 20)
        for event in (
            trace.Event("void adaptrt::cuda::embedding<float>(int)", first, 2.0),
            trace.Event("gemm<(int)3>", first + 1.0, gemm),
            trace.Event("gemm<(int)3>", first + 6.0, gemm),
        )
    ]


def test_the_busy_time_counts_overlapping_kernels_once() -> None:
    found = trace.activity_of(steps(4))
    assert (found.steps, found.period, found.busy) == (3, 20.0, pytest.approx(5.0 + 4.0))
    assert found.pause == pytest.approx(10.0)
    assert found.launches == 3
    assert list(found.kernels) == ["gemm<(int)3>", "embedding<float>"]
    assert found.kernels["gemm<(int)3>"] == trace.Launches(6, 24.0)
    assert found.microseconds == 24.0 + 3 * 2.0


def test_without_an_embedding_the_rarest_kernel_begins_a_step() -> None:
    events = [event for event in steps(4) if "embedding" not in event.name]
    found = trace.activity_of([*events, *(trace.Event("norm", at, 0.5) for at in (0.5, 20.5, 40.5, 60.5))])
    assert (found.steps, found.period) == (3, 20.0)


def test_a_trace_without_two_steps_has_no_activity() -> None:
    assert trace.activity_of([]) is None
    assert trace.activity_of(steps(1)) is None


def test_only_what_the_device_did_is_read() -> None:
    kernel = {"cat": "kernel", "name": "k", "ts": 1, "dur": 2}
    others = [{"cat": "cuda_runtime", "name": "launch", "ts": 0, "dur": 9}, {"ph": "M", "name": "process"}]
    assert trace.device_events({"traceEvents": [*others, kernel]}) == [trace.Event("k", 1.0, 2.0)]


def test_names_lose_their_arguments_but_not_their_template_arguments() -> None:
    name = "void adaptrt::cuda::(anonymous namespace)::kernel_entry<Attention<(int)128>>(Attention<(int)128>)"
    assert trace.short_name(name) == "kernel_entry<Attention<(int)128>>"
