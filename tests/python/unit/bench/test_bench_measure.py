"""Parts of a sample: the steps that count, noise, the machine, and the sizes of adapters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adaptrt import DType
from adaptrt._core import ConfigError, cpu_kernels
from adaptrt.tools.bench import run_command
from adaptrt.tools.bench.batches import adapter_of, batch_adapters
from adaptrt.tools.bench.executors import BenchExecutor
from adaptrt.tools.bench.measure import decode_steps
from adaptrt.tools.bench.plots import _roofline_point
from adaptrt.tools.bench.report import Figure, Row, Sample
from adaptrt.tools.bench.runner import Bench
from adaptrt.tools.bench.system import describe_machine


def step(second: int, engine_ms: float, batch: tuple[int, int] | None) -> Any:
    """Makes a step's statistics. batch: numbers of requests in prefill and in generation; None: missing."""
    stats = None if batch is None else SimpleNamespace(num_context_requests=batch[0], num_gen_requests=batch[1])
    return SimpleNamespace(
        timestamp=f"01-02-2026 03:04:{second:02}.500000", engine_latency_ms=engine_ms, inflight_batching_stats=stats
    )


def test_only_steps_in_which_all_requests_generate_count() -> None:
    steps = [
        step(0, 1, (4, 0)), step(1, 2, (1, 4)), step(2, 3, (0, 4)), step(3, 4, (0, 3)), step(4, 5, None),
        step(5, 6, (0, 4)), step(6, 7, (0, 5)), step(9, 8, (0, 4)),
    ]  # fmt: skip
    executor: Any = SimpleNamespace(get_latest_iteration_stats=lambda: steps)
    between, in_engine = decode_steps(executor, 4)
    assert (between.tolist(), in_engine.tolist()) == ([3.0, 4.0], [0.006, 0.008])
    with pytest.raises(ConfigError, match="fewer than two steps generated for all 5 requests at once"):
        decode_steps(executor, 5)
    steps.append(step(11, 9, (0, 5)))
    between, in_engine = decode_steps(executor, 5)
    assert (between.tolist(), in_engine.tolist()) == ([5.0], [0.009])


@pytest.mark.parametrize(("foreign", "is_disturbed"), [(0.03999, False), (0.04, False), (0.04001, True)])
def test_a_sample_tells_how_noisy_it_was(foreign: float, is_disturbed: bool) -> None:
    bench: Any = SimpleNamespace(settings=SimpleNamespace(quiet_share=0.04))
    meter: Any = SimpleNamespace(noise=SimpleNamespace(foreign=foreign, stolen=0.123456))
    made = Bench.made(bench, 3, {"value": 2.0}, meter, (0.5,))
    assert made == Sample(3, {"value": 2.0}, 0.04, 0.1235, is_disturbed, [0.5])


def test_the_machine_is_told_with_the_kernels_that_run() -> None:
    chosen = describe_machine(3)
    assert (chosen["threads"], chosen["kernels"]) == (3, cpu_kernels()[0])
    assert describe_machine(3, "portable")["kernels"] == "portable"


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_take_padded_rows_of_each_part_on_the_device(dora: bool) -> None:
    """DoRA adapters also take a float32 magnitude for each output."""
    parts = [SimpleNamespace(module=1, out_size=10), SimpleNamespace(module=2, out_size=16)]
    site = SimpleNamespace(
        parts=parts, in_size=24, most_rows_of_a=lambda rank: rank + 3, most_rows_of_b=lambda outputs: outputs + 6
    )
    layout = SimpleNamespace(sites=[site, site], dtype=DType.BFLOAT16, dora_enabled=dora)
    bench: Any = SimpleNamespace(engine=SimpleNamespace(program=SimpleNamespace(lora=layout)))
    of_a, of_b, magnitudes = 2 * 8 * 25, (16 + 22) * 6, 10 + 16
    assert BenchExecutor._bytes_on_device(bench, 5) == 2 * (2 * (of_a + of_b) + (4 * magnitudes if dora else 0))


def test_requests_of_a_batch_have_the_adapters_in_turn() -> None:
    library = SimpleNamespace(reference=lambda mix, index: f"{mix.name}{index}")
    bench: Any = SimpleNamespace(library=library)

    def scenario(count: int) -> Any:
        return SimpleNamespace(adapters=SimpleNamespace(name="a", count=count), requests=5)

    assert batch_adapters(bench, scenario(0)) == [None] * 5
    assert batch_adapters(bench, scenario(2)) == ["a0", "a1", "a0", "a1", "a0"]
    assert adapter_of(bench, scenario(0)) is None
    assert adapter_of(bench, scenario(2)) == "a0"


@pytest.mark.parametrize(
    ("kind", "settings"), [("prefill", {"input_length": 4}), ("decode", {"input_length": 9, "requests": 4})]
)
def test_a_point_of_the_roofline_is_the_work_of_a_step(kind: str, settings: dict[str, Any]) -> None:
    figure = Figure("tok/s", [Sample(0, {"value": 8.0}, 0.0, 0.0, False)])
    row = Row("a", "A", kind, "e", settings, figure, 5_000_000_000, 10_000_000_000)
    assert _roofline_point(row) == (2.0, 20.0)  # two steps per second


def test_a_report_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    def run() -> Any:
        raise AssertionError("it ran")

    console: Any = None
    for output in (tmp_path, tmp_path / "none" / "report.json"):
        args: Any = SimpleNamespace(output=output, plots=None)
        with pytest.raises(ConfigError, match=f"--output {output}: cannot be written; expected a file in a directory"):
            run_command.measure(run, args, console)
