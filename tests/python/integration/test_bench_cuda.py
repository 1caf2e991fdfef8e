"""`adaptrt bench` of an engine of backend cuda, on an emulated device, and its count of a step's work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import adaptrt
from adaptrt.builder.build import build
from adaptrt.builder.cli import main as command_line
from adaptrt.builder.conversion.checkpoint import Checkpoint
from adaptrt.formats.engine.build_config import BuildConfig, LoraBuildConfig, PluginConfig
from adaptrt.runtime.compiled_engine import CompiledEngine
from adaptrt.tools.bench import limits
from adaptrt.tools.bench.counted_work import CountedStep, counted_work
from adaptrt.tools.bench.executors import AdapterLibrary, BenchExecutor, CpuUse, key_of, load_measured_engine
from adaptrt.tools.bench.profile import work_of
from adaptrt.tools.bench.report import load_report
from adaptrt.tools.bench.runner import counted_steps, profiled_steps
from adaptrt.tools.bench.scenario_types import AdapterMix, Decode, Prefill
from support.emulated_cuda import emulate
from support.models import ModelSpec, save_adapter, save_model

SPEC = ModelSpec(
    vocab_size=96, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64, intermediate_size=96,
    family="mistral", extra=(("sliding_window", 16),),
)  # fmt: skip
SIZES = BuildConfig(
    max_batch_size=4,
    max_num_tokens=32,
    max_seq_len=64,
    tokens_per_block=16,
    lora_config=LoraBuildConfig(max_lora_rank=4),
    plugin_config=PluginConfig(lora_plugin="auto"),
)
SMALL = {"copy_bytes": 4096, "product_size": 16, "repeats": 1, "tries": 2}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds an engine of each backend; the directory has an adapter too."""
    directory = tmp_path_factory.mktemp("bench-cuda")
    model = save_model(SPEC, directory / "model", dtype=torch.bfloat16)
    save_adapter(model, directory / "adapter", seed=0, r=4)
    for backend in ("native", "cuda"):
        build(Checkpoint.of_model(model), replace(SIZES, backend=backend), directory / backend)
    return directory


def test_an_engine_is_measured_beside_the_limits_of_its_gpu(
    engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    emulate(monkeypatch)
    monkeypatch.setattr(limits, "GPU_SIZES", SMALL)
    assert command_line(
        ["bench", str(engines / "cuda"), "--lora_dir", str(engines / "adapter"), "--requests", "2",
         "--concurrency", "2", "--input_len", "5", "--output_len", "5", "--repeats", "1",
         "--output", str(tmp_path / "report.json")]
    ) == 0  # fmt: skip
    report = load_report(tmp_path / "report.json")
    assert [row.name for row in report.rows] == ["prefill", "decode", "serve"]
    assert all(row.figure.median > 0 for row in report.rows)
    assert set(report.limits) == {"copy_bandwidth", "product_flops"}
    assert all(limit.median > 0 for limit in report.limits.values())
    for row in report.rows[:2]:
        assert row.work_bytes
        assert row.work_flops
        assert row.figure.metric("beside_copy_bandwidth") > 0
    assert report.machine["gpu"] == "host memory"
    told = capsys.readouterr().out
    assert "host memory: copy bandwidth " in told
    assert ", product " in told


def test_steps_of_a_gpu_are_not_recorded(engines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["bench", str(engines / "cuda"), "--profile", str(tmp_path)]) == 2
    assert "the steps of an engine of backend cuda are not recorded" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [Prefill, Decode])
def test_the_count_is_the_one_that_the_native_engine_records(
    kind: type[Prefill] | type[Decode], engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With windows and adapters. Recorded bytes include the panels' padding, and of a prompt the native engine computes
    fewer rows in the last layer.
    """
    mix = AdapterMix(1, (4,), directories=(str(engines / "adapter"),))
    common = {"name": "row", "title": "", "engine": "engine", "adapters": mix, "unit": "tok/s", "input_length": 30}
    scenario: Prefill | Decode = (
        Prefill(**common) if kind is Prefill else Decode(**common, requests=3, output_length=8)  # type: ignore[arg-type]
    )
    native, cuda = (load_measured_engine(engines / backend) for backend in ("native", "cuda"))
    assert isinstance(cuda, CompiledEngine)
    bench = BenchExecutor(native, key_of(scenario), [scenario], CpuUse(1, ""), profiled=True)
    try:
        recorded = profiled_steps(bench, scenario, warm_up=False)
    finally:
        bench.close()
    if kind is Decode:
        recorded = [recorded[len(recorded) // 2]]
    expected, found = work_of(*recorded), counted_work(cuda, counted_steps(cuda, scenario, AdapterLibrary(cuda)))
    if kind is Decode:
        assert found.flops == pytest.approx(expected.flops, rel=0.02)
    else:
        assert expected.flops < found.flops < 1.5 * expected.flops
    assert found.num_bytes == pytest.approx(expected.num_bytes, rel=0.05)
    without = counted_work(cuda, [CountedStep([(0, 1)])])
    assert without.num_bytes < found.num_bytes
    if kind is Prefill:
        chunks = counted_steps(cuda, replace(scenario, input_length=40), AdapterLibrary(cuda))
        assert [(step.chunks, step.logit_rows) for step in chunks] == [([(0, 32)], 0), ([(32, 8)], 1)]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"copy_bytes": 0}, "copy_bytes is 0; expected 1 or more"),
        ({"product_size": 12}, "product_size is 12; expected a multiple of 8"),
        ({"repeats": 0}, "repeats is 0; expected 1 or more"),
        ({"tries": 0}, "tries is 0; expected 1 or more"),
    ],
)
def test_sizes_of_a_measurement_that_are_refused(
    change: dict[str, int], complaint: str, engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    engine = load_measured_engine(engines / "cuda")
    monkeypatch.setattr(limits, "GPU_SIZES", {**SMALL, **change})
    assert isinstance(engine, limits.CudaEngine)
    with pytest.raises(adaptrt.ConfigError, match=complaint):
        limits.GpuLimits(engine).measure()
