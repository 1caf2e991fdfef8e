"""bench/peers: limits measured with our samples, and targets compared with the machine's limit."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from adaptrt.tools.bench.limits import LIMIT_UNITS
from adaptrt.tools.bench.noise import NoiseMeter
from adaptrt.tools.bench.profile import Work
from adaptrt.tools.bench.report import Figure, Sample
from scenarios.model import BenchModel

PEERS = Path(__file__).parents[4] / "bench" / "peers"


@pytest.fixture(scope="module")
def orchestrator() -> Iterator[ModuleType]:
    """Imports bench/peers/run.py, which imports the modules next to it by their bare names."""
    there = set(sys.modules)
    sys.path.insert(0, str(PEERS))
    try:
        yield importlib.import_module("run")
    finally:
        sys.path.remove(str(PEERS))
        for name in set(sys.modules) - there:
            if str(PEERS) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def figure(*values: float, **metrics: float) -> Figure:
    return Figure("tok/s", [Sample(i, {"value": value, **metrics}, 0.0, 0.0, False) for i, value in enumerate(values)])


class FakeLimits:
    """Returns these bandwidths in turn, and counts the measurements."""

    def __init__(self, *bandwidths: float) -> None:
        self.bandwidths = list(bandwidths)
        self.asked = 0

    def measure(self, number: int) -> dict[str, float]:
        self.asked += 1
        return {**dict.fromkeys(LIMIT_UNITS, 1e12), "read_bandwidth": self.bandwidths.pop(0)}


@dataclass
class FakePeer:
    """Answers every row, and records the order in which peers were asked."""

    name: str
    asked: list[str]
    is_alive: bool = True

    def measure(self, row: str) -> tuple[dict[str, float], NoiseMeter]:
        self.asked.append(self.name)
        return {"value": 2.0}, NoiseMeter()


def run_of(orchestrator: ModuleType, limits: FakeLimits, names: list[str]) -> tuple[Any, list[str]]:
    """Returns a run with peers of these names, and the list of peers asked so far."""
    asked: list[str] = []
    args = Namespace(extra_samples=0, quiet_share=1.0, quiet_wait=0.0, slow_sample=60.0)
    run = orchestrator.Run(args, BenchModel(), Console(quiet=True), limits)
    run.workers = {name: FakePeer(name, asked) for name in names}
    return run, asked


def test_every_second_round_goes_backward(orchestrator: ModuleType) -> None:
    run, asked = run_of(orchestrator, FakeLimits(*[1e9] * 99), ["adaptrt", "peft", "vllm"])
    for number in range(3):
        run._measure_round(["adapter-load"], number)
    assert asked == ["adaptrt", "peft", "vllm", "vllm", "peft", "adaptrt", "adaptrt", "peft", "vllm"]


def test_limits_are_measured_right_beside_our_samples_alone(orchestrator: ModuleType) -> None:
    limits = FakeLimits(1.0, 40e9, 80e9, 2.0)
    run, _ = run_of(orchestrator, limits, ["adaptrt", "peft"])
    run._measure_round(["decode-1"], 0)
    assert limits.asked == 4
    assert run.samples["decode-1", "adaptrt"][0].metrics["beside_read_bandwidth"] == 60e9
    assert run.samples["decode-1", "peft"][0].metrics == {"value": 2.0}


def test_a_target_is_held_against_what_the_limit_allows(orchestrator: ModuleType) -> None:
    # A step of 1 token reads 10 bytes, so 600 bytes/s measured with our samples allow 60 tokens/s. Peers pair by round.
    best = figure(1000.0, 1000.0, 1000.0)
    limits = {name: best for name in LIMIT_UNITS}
    ours, peer = figure(50.0, 54.0, 57.0, beside_read_bandwidth=600.0), figure(40.0, 50.0, 60.0)
    target = orchestrator.Target(1.25, "llama_cpp")
    roofline, llama, other = orchestrator.compared(
        "decode-1", ours, {"llama_cpp": peer, "openvino": peer}, Work(10, 1), limits, target
    )
    assert (roofline.base, roofline.measure, roofline.ratio) == (None, "roofline", pytest.approx(0.9))
    assert (llama.ratio, llama.at_least, llama.holds) == (pytest.approx(1.08), 1.25, False)
    assert llama.at_limit == pytest.approx(1.2)
    assert (other.at_least, other.at_limit) == (None, None)


def test_rows_without_a_limit_have_only_ratios(orchestrator: ModuleType) -> None:
    target = orchestrator.Target(10.0)
    (result,) = orchestrator.compared("mixed-16", figure(20.0), {"peft": figure(1.0)}, None, {}, target)
    assert (result.ratio, result.holds, result.at_limit) == (20.0, True, None)


def test_a_cpu_with_amx_has_targets_of_its_own(orchestrator: ModuleType) -> None:
    target_of_row, llama = sys.modules["rows"].target_of_row, sys.modules["models"].MODELS["0.5b"]
    assert target_of_row("decode-1", llama, amx=False) == orchestrator.Target(1.25, "llama_cpp")
    assert target_of_row("decode-1", llama, amx=True) == orchestrator.Target(1.15)
    assert target_of_row("prefill-8192", llama, amx=False) is None
    assert target_of_row("mixed-16", llama, amx=True) == target_of_row("mixed-16", llama, amx=False)


def test_mixtures_have_their_own_rows_and_target(orchestrator: ModuleType) -> None:
    rows, mixture = sys.modules["rows"], sys.modules["models"].MODELS["qwen3-moe-1b"]
    assert rows.rows_of(mixture) == [
        "prefill-512", "compressed-prefill-512", "prefill-8192", "decode-8192", "decode-1", "compressed-decode-1",
        "decode-16", "compressed-decode-16",
    ]  # fmt: skip
    assert rows.target_of_row("decode-1", mixture, amx=False) == orchestrator.Target(1.25)
    assert rows.work_of_row("decode-1", mixture) is None
    with pytest.raises(SystemExit):
        orchestrator.parse(["--home", "x", "--model", "qwen3-moe-1b", "--rows", "mixed-16"])


def test_eight_bits_are_held_against_the_limit_of_eight_bits(orchestrator: ModuleType) -> None:
    peak_of_row = sys.modules["rows"].peak_of_row
    limits = {"float32_flops": 2.0, "bfloat16_flops": 1.0, "int8_ops": 4.0}
    assert peak_of_row("int8-decode-1", limits) == "int8_ops"
    assert peak_of_row("w8a16-decode-1", limits) == "float32_flops"


def test_the_work_of_a_prompt_has_its_attention(orchestrator: ModuleType) -> None:
    rows, model = sys.modules["rows"], BenchModel(num_hidden_layers=1)
    # The model has one layer, whose query at the last position sees all keys.
    short, long = (rows._attention_flops(tokens, model) for tokens in (512, 1024))
    assert (short, long) == (2 * 2 * 512 * 1024, 2 * 2 * 1024 * 1024)
    more = rows._attention_flops(3, BenchModel(num_hidden_layers=2)) - rows._attention_flops(3, model)
    assert more == 2 * 2 * (1 + 2 + 3) * 1024


def test_an_adapter_adds_its_bytes_to_the_work_of_its_row(orchestrator: ModuleType) -> None:
    rows = sys.modules["rows"]
    model = BenchModel()
    base, adapted = rows.work_of_row("decode-1", model), rows.work_of_row("decode-1-lora", model)
    hidden, ffn, kv = model.hidden_size, model.intermediate_size, model.num_key_value_heads * model.head_dim
    heads = model.num_attention_heads * model.head_dim
    widths = 2 * (hidden + heads) + 2 * (hidden + kv) + 3 * (hidden + ffn)
    values = 16 * widths * model.num_hidden_layers
    assert adapted.num_bytes - base.num_bytes == 2 * values
    assert adapted.flops - base.flops == 2 * values
    assert rows.work_of_row("mixed-16", model) is None


def test_peers_are_not_asked_again_for_weights_that_are_the_same_to_them(orchestrator: ModuleType) -> None:
    run, asked = run_of(orchestrator, FakeLimits(*[1e9] * 99), ["adaptrt", "peft"])
    run._measure_round(["decode-1", "compressed-decode-1"], 0)
    assert asked == ["adaptrt", "peft", "adaptrt"]
    assert ("compressed-decode-1", "peft") not in {*run.samples, *run.not_run}
    run.about = {name: {"versions": {}, "notes": {}} for name in run.workers}
    run.samples["compressed-decode-1", "adaptrt"][0].metrics["value"] = 3.0
    run.args = orchestrator.parse(["--home", "."])
    run.limits.figures = lambda: {name: figure(1e12) for name in LIMIT_UNITS}
    row = run.report().row("compressed-decode-1/adaptrt")
    assert row.settings["peers_of"] == "decode-1"
    assert [(c.base, c.ratio) for c in row.comparisons if c.measure == "ratio"] == [("decode-1/peft", 1.5)]


def test_compressed_rows_come_with_the_rows_whose_peers_they_have(orchestrator: ModuleType) -> None:
    rows = sys.modules["rows"]
    for group in rows.groups():
        for number, name in enumerate(group):
            if rows.ROWS[name].weights == "compressed":
                assert group[number - 1] == rows.source_of_peers(name)
                assert rows.ROWS[name].adapters == rows.ROWS[group[number - 1]].adapters


def test_compression_takes_a_quarter_of_the_weights_bytes_and_nothing_of_adapters(orchestrator: ModuleType) -> None:
    rows, model = sys.modules["rows"], BenchModel()
    for plain in ("prefill-512", "decode-1", "decode-16"):
        before, after = rows.work_of_row(plain, model), rows.work_of_row(f"compressed-{plain}", model)
        assert (after.num_bytes, after.flops) == (0.75 * before.num_bytes, before.flops)
    adapter, compressed = (
        rows.work_of_row(f"{prefix}decode-1-lora", model).num_bytes
        - rows.work_of_row(f"{prefix}decode-1", model).num_bytes
        for prefix in ("", "compressed-")
    )
    assert adapter == compressed
    tied = BenchModel(tie_word_embeddings=True)
    more = (rows.work_of_row("compressed-decode-1", one).num_bytes for one in (tied, model))
    assert next(more) - next(more) == model.vocab_size * model.hidden_size / 2
