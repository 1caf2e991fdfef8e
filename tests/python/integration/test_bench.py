"""Runs bench/run.py from a scenario file to report, plots and profile, and `adaptrt bench`, on a very small model."""

from __future__ import annotations

import functools
import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from adaptrt._core import cpu_kernels
from adaptrt.builder.cli import main as command_line
from adaptrt.builder.cli import run_command
from adaptrt.tools.bench import limits
from adaptrt.tools.bench.executors import BenchExecutor, CpuUse, key_of, load_native_engine
from adaptrt.tools.bench.report import Report, load_report
from scenarios import command
from scenarios.alternating import sharing_weights
from scenarios.child import run_child
from scenarios.engines import EngineShelf
from scenarios.kinds import Load, Memory
from scenarios.scenario_file import load_scenarios

SCENARIOS = """schema = 1
[run]
repeats = 2
quiet_share = 1.0
quiet_wait = 0.0

[model]
vocab_size = 256
hidden_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
intermediate_size = 96
max_position_embeddings = 128
tie_word_embeddings = true

[[engine]]
name = "small"
max_batch_size = 4
max_num_tokens = 128
max_seq_len = 128
max_lora_rank = 8

[[engine]]
name = "without-lora"
lora = false
max_batch_size = 4
max_num_tokens = 128
max_seq_len = 128

[[engine]]
name = "none"
optional = true
build_flags = ["--no_such_flag"]

[[scenario]]
name = "prefill"
kind = "prefill"
engine = "small"
input = 40
  [[scenario.compare]]
  at_least = 0.000001

[[scenario]]
name = "base"
kind = "decode"
engine = "small"
requests = 4
input = 8
output = 8

[[scenario]]
name = "mixed"
kind = "decode"
engine = "small"
requests = 4
input = 8
output = 8
adapters = { count = 4, ranks = [4, 8], dora_share = 0.5 }
  [[scenario.compare]]
  with = "base"
  [[scenario.compare]]
  with = "base"
  measure = "roofline"

[[scenario]]
name = "in-turn"
kind = "decode"
engine = "small"
requests = 4
input = 8
output = 8
adapters = { count = 2, ranks = [4] }
  [[scenario.compare]]
  with = "base"
  measure = "alternating"
  pairs = 4
  at_most = 1e9
  [[scenario.compare]]
  with = "mixed"

[[scenario]]
name = "off"
kind = "decode"
engine = "without-lora"
requests = 4
input = 8
output = 8
  [[scenario.compare]]
  with = "base"
  measure = "alternating"
  pairs = 2

[[scenario]]
name = "around"
kind = "overhead"
engine = "small"
requests = 4
input = 8
output = 16
adapters = { count = 4, ranks = [4] }

[[scenario]]
name = "crowded"
kind = "decode"
engine = "small"
requests = 1
input = 8
output = 8
threads = 1
competing_processes = 1

[[scenario]]
name = "crowded-in-turn"
kind = "decode"
engine = "small"
requests = 1
input = 8
output = 8
competing_processes = 1
  [[scenario.compare]]
  with = "crowded"
  measure = "alternating"
  pairs = 2

[[scenario]]
name = "host"
kind = "first_token"
engine = "small"
input = 8
adapters = { count = 1, ranks = [8] }
adapter_from = "host"

[[scenario]]
name = "disk"
kind = "first_token"
engine = "small"
input = 8
adapters = { count = 1, ranks = [8], dora_share = 1.0 }
adapter_from = "disk"
  [[scenario.compare]]
  with = "host"
  at_most = 0.0

[[scenario]]
name = "closed"
kind = "serve"
engine = "small"
requests = 8
concurrency = 3
input = [2, 8]
output = [2, 6]
adapters = { count = [1, 6], ranks = [4] }
popularity = { zipf = 0.9 }
device_adapters = 3

[[scenario]]
name = "open"
kind = "serve"
engine = "small"
requests = 8
rate = 500.0
input = 4
output = [2, 6]
base_share = 0.5
adapters = { count = 2, ranks = [8] }

[[scenario]]
name = "memory"
kind = "memory"
engine = "small"
requests = 4
input = 8
output = 8
adapters = { count = 2, ranks = [8] }
  [[scenario.compare]]
  measure = "value"
  at_most = 1e9

[[scenario]]
name = "load"
kind = "load"
engine = "small"

[[scenario]]
name = "impossible"
kind = "prefill"
engine = "none"
input = 8
"""


@pytest.fixture(scope="module", autouse=True)
def limits_measured_once() -> Iterator[None]:
    """Measures the machine's limits once per module: it takes a second on all processors, and no test depends on
    repeats."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "measure_machine_limits", functools.cache(limits.measure_machine_limits))
        yield


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench")
    (directory / "small.toml").write_text(SCENARIOS)
    return directory


def scenarios(*arguments: object) -> int:
    """Runs bench/run.py with the arguments and returns its exit status."""
    return run_command(command, [str(argument) for argument in arguments], prog="bench/run.py", description="")


def bench(work: Path, *arguments: object) -> int:
    return scenarios(work / "small.toml", "--work_dir", work / "engines", "--num_threads", 2, *arguments)


@pytest.fixture(scope="module")
def report(work: Path) -> Report:
    assert bench(work, "--output", work / "report.json", "--plots", work / "plots") == 0
    return load_report(work / "report.json")


def test_every_scenario_is_reported(report: Report) -> None:
    assert [row.name for row in report.rows] == [
        "prefill", "base", "mixed", "in-turn", "off", "around", "crowded", "crowded-in-turn", "host",
        "disk", "closed-1", "closed-6", "open", "memory", "load",
    ]  # fmt: skip
    assert all(len(row.figure.samples) == 2 for row in report.rows)
    assert all(
        sample.metrics["value"] > 0 for row in report.rows for sample in row.figure.samples if row.name != "memory"
    )
    assert [(entry.name, entry.reason.startswith("engine 'none': ")) for entry in report.not_run] == [
        ("impossible", True)
    ]
    assert "no_such_flag" in report.not_run[0].reason


def test_targets_are_judged(report: Report) -> None:
    held = {row.name: [comparison.holds for comparison in row.comparisons] for row in report.rows if row.comparisons}
    assert held == {
        "prefill": [True], "mixed": [None, None], "in-turn": [True, None], "off": [None],
        "crowded-in-turn": [None], "disk": [False], "memory": [True],
    }  # fmt: skip


def test_runs_in_turn_are_compared_pair_by_pair(report: Report) -> None:
    row = report.row("in-turn")
    assert row is not None
    assert row.comparisons[0].ratio == row.figure.metric("ratio")
    for sample in row.figure.samples:
        assert len(sample.pair_ratios) == 4
        assert sample.metrics["ratio"] == statistics.median(sample.pair_ratios)
        assert sample.metrics["value"] > 0
        assert sample.metrics["base_value"] > 0
        assert not any(name.startswith("beside_") for name in sample.metrics)
    off = report.row("off")
    assert off is not None
    for sample in off.figure.samples:
        assert len(sample.pair_ratios) == 2
        assert sample.metrics["shared_weights"] == 1.0
    alone = [other for other in report.rows if other.name not in ("in-turn", "off", "crowded-in-turn")]
    assert not any(sample.pair_ratios for other in alone for sample in other.figure.samples)


def test_weights_are_shared_where_they_are_the_same(report: Report, work: Path) -> None:
    del report  # builds the engines
    directories, _ = EngineShelf(work / "engines", print).prepare(load_scenarios(work / "small.toml"))
    lora, plain = (load_native_engine(directories[name]) for name in ("small", "without-lora"))
    shared = sharing_weights(plain, lora)
    assert shared is not None
    assert shared.storage is lora.storage
    assert not shared.program.lora.sites
    tensors = {name: array.copy() for name, array in lora.storage.tensors.items()}
    list(tensors.values())[-1].view(np.uint8)[-1] ^= 1
    assert sharing_weights(plain, replace(lora, storage=SimpleNamespace(tensors=tensors))) is None


def test_serving_is_described(report: Report) -> None:
    closed, opened = report.row("closed-6"), report.row("open")
    assert closed is not None
    assert opened is not None
    for sample in closed.figure.samples:
        assert sample.metrics["ttft_ms_p50"] <= sample.metrics["ttft_ms_p99"] <= sample.metrics["latency_ms_p99"]
        assert sample.metrics["host_hit_rate"] == 1.0
        assert 0.0 <= sample.metrics["device_hit_rate"] <= 1.0
    assert 1 <= opened.figure.metric("adapters_used") <= 2


def test_time_outside_the_engine_is_reported(report: Report) -> None:
    around = report.row("around")
    assert around is not None
    for sample in around.figure.samples:
        assert 0.0 < sample.metrics["value"] < 100.0
        assert 0.0 < sample.metrics["enqueue_us_p50"] <= sample.metrics["enqueue_us_p99"]


def test_limits_and_work_are_there(report: Report) -> None:
    assert report.limits["read_bandwidth"].median > 0
    assert report.limits["float32_flops"].median > 0
    base, mixed = report.row("base"), report.row("mixed")
    assert base is not None
    assert mixed is not None
    assert base.work_bytes is not None
    assert mixed.work_bytes is not None
    assert mixed.work_bytes > base.work_bytes


def test_plots_are_drawn(report: Report, work: Path) -> None:
    names = {path.name for path in (work / "plots").iterdir()}
    assert names == {"throughput.png", "latency.png", "cache-hit-rate.png", "roofline.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (work / "plots").iterdir())


def test_a_profile_is_complete_and_nested(report: Report, work: Path) -> None:
    assert bench(work, "--only", "mixed", "--profile", work / "profile") == 0
    events = json.loads((work / "profile" / "mixed.json").read_text())["traceEvents"]
    timed = [event for event in events if event["ph"] == "X"]
    steps = [event for event in timed if event["tid"] == 0 and event["name"] == "step"]
    assert steps
    for step in steps:
        assert step["args"] == {"tokens": 4, "sequences": 4, "adapters": 4, "logit rows": 4}
        inside = [event for event in timed if event["tid"] == 0 and event is not step and _holds(step, event)]
        # Embedding, rotary table, five ops and two norms per layer, the row selection, two head ops, sampling.
        assert len(inside) == 2 + 2 * 7 + 1 + 3
        assert all(first["ts"] + first["dur"] <= second["ts"] for first, second in itertools.pairwise(inside))
        assert sum(event["dur"] for event in inside) <= step["dur"]
        _check_work(inside)
    ops = sum(event["tid"] == 0 for event in timed) - len(steps)
    assert ops == len(steps) * (2 + 2 * 7 + 1 + 3)
    for event in timed:
        if event["tid"] > 0:
            assert event["dur"] > 0


def test_layers_have_the_same_names_without_adapters(report: Report, work: Path) -> None:
    assert bench(work, "--only", "off", "--profile", work / "profile") == 0
    events = json.loads((work / "profile" / "off.json").read_text())["traceEvents"]
    timed = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    steps = sum(event["name"] == "step" for event in timed)
    products = Counter(event["name"] for event in timed if " to " in event["name"])
    # Two products in attention and two in the MLP, in each of two layers.
    assert list(products.values()) == [2 * steps] * 4
    assert all("/" in name and not any(map(str.isdigit, name)) for name in products)


def _holds(step: dict[str, Any], event: dict[str, Any]) -> bool:
    return bool(step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"])


def _check_work(ops: list[dict[str, Any]]) -> None:
    """Checks the work of four tokens of the model above, with two LoRA adapters of rank 4 and two DoRA adapters of rank
    8."""
    linear = {event["name"]: event["args"] for event in ops if "attn_" in event["name"] or "mlp_" in event["name"]}
    size = 2
    gate_up = linear["mlp_h_to_4h + mlp_gate"]
    assert gate_up["weight bytes"] == 2 * 96 * 64 * size
    assert gate_up["flops"] == 2 * 4 * (2 * 96 * 64)
    # Adapters with an even index have rank 4 and are plain; those with an odd index have rank 8 and magnitudes.
    products = sum(rank * (2 * 64 + 2 * 96) for rank in (4, 8, 4, 8))
    assert gate_up["adapter flops"] == 2 * products
    assert gate_up["adapter bytes"] == products * size + 2 * (2 * 96 * 4)
    query_key_value = linear["attn_q + attn_k + attn_v"]
    assert query_key_value["weight bytes"] == (64 + 32 + 32) * 64 * size
    head = next(event["args"] for event in ops if event["name"] == "lm_head")
    assert head["weight bytes"] == 256 * 64 * size
    assert head["flops"] == 2 * 4 * 256 * 64


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--kernels", "abacus"], "--kernels is 'abacus'; this CPU can run: "),
        (["--only", "zzz"], "--only: no scenario zzz"),
        (["--profile", "x", "--output", "y"], "--profile writes no report"),
        (["--output", "no-such-directory/report.json"], "report.json: cannot be written"),
        (["--only", "load", "--profile", "x"], "has no prefill or decode scenario"),
    ],
)
def test_flags_are_checked(
    work: Path, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(work, *arguments) == 2
    assert complaint in capsys.readouterr().err


def test_numbers_have_ranges(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(work, "--repeats", "0")
    assert ended.value.code == 2
    assert "argument --repeats: it is 0; expected an integer from 1 to" in capsys.readouterr().err


def test_engines_run_the_kernels_of_the_flag(report: Report, work: Path) -> None:
    assert report.machine["kernels"] == cpu_kernels()[0]
    output = work / "portable.json"
    assert bench(work, "--only", "prefill", "load", "memory", "--repeats", "1", "--kernels", "portable",
                 "--output", output) == 0  # fmt: skip
    assert load_report(output).machine["kernels"] == "portable"


def test_engines_have_the_kernels_that_are_asked_for(report: Report, work: Path) -> None:
    del report  # builds the engines
    file = load_scenarios(work / "small.toml")
    directories, _ = EngineShelf(work / "engines", print).prepare(file)
    for scenario in file.scenarios:
        if isinstance(scenario, (Load, Memory)):
            with pytest.raises(RuntimeError, match="kernels is 'abacus'; this CPU can run"):
                run_child(scenario, directories[scenario.engine], CpuUse(1, "abacus"))
    prefill = file.scenarios[0]
    engine = load_native_engine(directories[prefill.engine])
    for profiled in (False, True):
        made = BenchExecutor(engine, key_of(prefill), [prefill], CpuUse(1, "portable"), profiled=profiled)
        assert made.executor.engine_info.kernels == "portable"
        made.close()


def test_scenarios_that_do_not_fit_are_refused(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    too_much = work / "too-much.toml"
    text = SCENARIOS.replace("input = 40", "input = 400").replace("ranks = [4, 8]", "ranks = [16]")
    too_much.write_text(text.replace("requests = 4\ninput = 8\noutput = 8\n", "requests = 5\n"))
    assert scenarios(too_much, "--work_dir", work / "engines") == 2
    message = capsys.readouterr().err
    assert "scenario 'prefill' has prompts of 400 tokens; the engine takes 128" in message
    assert "scenario 'base' has 5 requests in a batch; the engine takes 4" in message
    assert "scenario 'mixed' has rank 16; the engine takes 8" in message


def test_an_unknown_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert scenarios("no-such-file") == 2
    assert "none of the repository's scenario files: adapter_kinds, default, " in capsys.readouterr().err
    assert command_line(["bench", "quick"]) == 2
    assert "quick: is not a directory; expected an engine. To run AdaptRT's own scenarios" in capsys.readouterr().err


@pytest.fixture(scope="module")
def engine(report: Report, work: Path) -> Path:
    """Returns an engine with LoRA and DoRA up to rank 8, four sequences and 128 tokens."""
    del report  # builds it
    return next(path for path in (work / "engines").glob("engine-*") if load_native_engine(path).lora.sites)


def test_an_engine_is_measured_with_its_adapters_and_load(engine: Path, work: Path) -> None:
    adapter, output = next((work / "engines" / "adapters").iterdir()), work / "engine.json"
    assert command_line(
        ["bench", str(engine), "--lora_dir", str(adapter), str(adapter), "--zipf", "1.0", "--requests", "6",
         "--concurrency", "3", "--input_len", "2:8", "--output-len", "5", "--repeats", "1", "--num_threads", "2",
         "--output", str(output)]
    ) == 0  # fmt: skip
    prefill, decode, serve = load_report(output).rows
    assert prefill.settings["input_length"] == 8
    assert (decode.settings["requests"], decode.settings["output_length"]) == (3, 5)
    assert (serve.settings["requests"], serve.settings["concurrency"]) == (6, 3)
    assert serve.settings["input_length"] == [2, 9]
    assert serve.settings["adapters"]["ranks"] == [8, 8]
    assert serve.figure.metric("adapters_used") == 2
    assert not prefill.comparisons
    assert all(row.figure.median > 0 for row in (prefill, decode, serve))


def test_an_engine_can_be_profiled(engine: Path, work: Path) -> None:
    assert command_line(
        ["bench", str(engine), "--input_len", "8", "--output_len", "8", "--rate", "100", "--num_threads", "2",
         "--profile", str(work / "engine-profile")]
    ) == 0  # fmt: skip
    assert {path.name for path in (work / "engine-profile").iterdir()} == {"prefill.json", "decode.json"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--requests", "0"], "--requests is 0; accepted: 1 and more"),
        (["--input_len", "9:8"], "--input_len is 9:8; accepted: N or LOW:HIGH with 1 <= LOW <= HIGH"),
        (["--output_len", "0:2"], "--output_len is 0:2; accepted"),
        (["--rate", "nan"], "--rate is nan; accepted: numbers above 0"),
        (["--rate", "2", "--concurrency", "3"], "--concurrency and --rate: expected one of them"),
        (["--cv", "2"], "--cv has no effect without --rate"),
        (["--zipf", "1"], "--zipf has no effect without --lora_dir"),
        (["--input_len", "200"], "scenario 'prefill' has prompts of 200 tokens; the engine takes 128"),
        (["--lora_dir", "nowhere"], "nowhere: is not a directory"),
    ],
)
def test_flags_of_a_load_are_checked(
    engine: Path, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line(["bench", str(engine), *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_a_directory_without_an_engine_is_refused(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["bench", str(work)]) == 2
    assert str(work) in capsys.readouterr().err
