"""bench/: tables of docs/performance.md from reports, and the protocol between the orchestrator and a peer."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from adaptrt.tools.bench.report import ComparisonResult, Figure, NotRun, Report, Row, Sample

ROOT = Path(__file__).parents[4]
PEERS = ROOT / "bench" / "peers"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    return module(ROOT / "bench" / "fill_performance.py")


def figure(unit: str, value: float, *, disturbed: bool = False) -> Figure:
    return Figure(unit, [Sample(0, {"value": value}, 0.0, 0.0, disturbed)])


def report(rows: list[Row]) -> Report:
    machine = {"processor": "P", "threads": 2, "cpus": 2, "memory_bytes": 8e9, "kernels": "k"}
    limits = {"read_bandwidth": figure("B/s", 2e10), "bfloat16_flops": figure("FLOP/s", 0.0),
              "int8_from_l2_ops": figure("OP/s", 3e10)}  # fmt: skip
    return Report("1.0", "2026-01-02T00:00:00Z", machine, {"repeats": 3, "model": "0.5b"}, "", limits, rows,
                  [NotRun("mixed-16/vllm", "mixed", "not installed")])  # fmt: skip


def test_the_page_has_marks_for_every_table(pages: ModuleType, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    names = [f"{name} {cpu}" for cpu in pages.CPUS for name in pages.TABLES]
    for name in names:
        page = pages.fill(page, name, f"new {name}")
        assert f"<!-- {name} -->\nnew {name}\n<!-- end of {name} -->" in page
        assert pages.content_of(page, name) == f"new {name}\n"
    with pytest.raises(ValueError, match="does not have the marks"):
        pages.fill(page, "other", "x")


def test_reports_fill_the_tables_of_their_kind_of_cpu(pages: ModuleType, tmp_path: Path) -> None:
    details = {"versions": {"x": "1"}, "note": ""}

    def saved(name: str, processor: str, *figures: tuple[str, str, float], **machine: bool) -> str:
        rows = [
            Row(f"{kind}/{engine}", kind.upper(), kind, engine, details, figure("tok/s", value),
                comparisons=[ComparisonResult(f"{kind}/peft", "ratio", 2.0, 3.0, None, False)]
                if engine == "adaptrt" else [])
            for kind, engine, value in figures
        ]  # fmt: skip
        whole = report(rows)
        replace(whole, machine={**whole.machine, "processor": processor, **machine}).save(tmp_path / name)
        return str(tmp_path / name)

    page = tmp_path / "page.md"
    names = [f"peers {cpu}" for cpu in pages.CPUS]
    page.write_text("".join(f"<!-- {name} -->\nnone\n<!-- end of {name} -->\n" for name in names))
    old = saved("old.json", "Old", ("a", "adaptrt", 20.0), ("a", "peft", 10.0))
    pages.main([str(page), "--peers", old])
    assert pages.content_of(page.read_text(), "peers amx") == "none\n"
    new = saved("new.json", "New", ("a", "adaptrt", 40.0), ("a", "peft", 20.0), ("b", "adaptrt", 5.0), amx=True)
    pages.main([str(page), "--peers", new])
    text = page.read_text()
    assert "| A, tok/s | 20.0 | 10.0 | 2.00 x |" in pages.content_of(text, "peers without-amx")
    assert "| A, tok/s | 40.0 | 20.0 | 2.00 x |" in pages.content_of(text, "peers amx")
    pages.main([str(page), "--peers", old, new])
    assert page.read_text() == text


def test_our_rows_are_judged_against_the_best_peer(pages: ModuleType) -> None:
    details = {"versions": {"x": "1"}, "note": ""}

    def ratio(base: str, value: float) -> ComparisonResult:
        return ComparisonResult(base, "ratio", value, None, None, None)

    rows = [
        Row("decode-1/adaptrt", "decode", "decode-1", "adaptrt", details, figure("tok/s", 30.0),
            comparisons=[ratio("decode-1/peft", 3.0),
                         ComparisonResult("decode-1/openvino", "ratio", 0.9, 1.1, None, False)]),
        Row("decode-1/peft", "decode", "decode-1", "peft", details, figure("tok/s", 10.0, disturbed=True)),
        Row("adapter-load/adaptrt", "load", "adapter-load", "adaptrt", details, figure("s", 0.1),
            comparisons=[ratio("adapter-load/peft", 0.1)]),
    ]  # fmt: skip
    text = pages.peers_table(report(rows))
    assert "| decode, tok/s | 30.0 | 10.0 (disturbed) | 0.90 x | ≥ 1.1 x openvino: **missed** (0.90 x) | - |" in text
    assert "| load, s | 0.10 | - | 10.00 x |  | - |" in text
    assert "Not better than a peer: decode (openvino, 0.90 x)." in text
    assert "| mixed-16/vllm | not run: not installed |" in text
    assert "read bandwidth 20.0 GB/s" in text
    assert "bfloat16" not in text
    assert "int8 from L2 30.0 GOP/s" in " ".join(text.split())


def test_a_row_that_peers_were_not_asked_for_shows_those_of_another(pages: ModuleType) -> None:
    def row(kind: str, engine: str, value: float, *results: ComparisonResult) -> Row:
        details = {"versions": {"x": "1"}, "note": "", "peers_of": "a"}
        return Row(f"{kind}/{engine}", kind.upper(), kind, engine, details, figure("tok/s", value),
                   comparisons=list(results))  # fmt: skip

    result = ComparisonResult("a/peft", "ratio", 4.0, 3.0, None, True)
    rows = [row("a", "adaptrt", 30.0), row("a", "peft", 10.0), row("b", "adaptrt", 40.0, result)]
    text = pages.peers_table(report(rows))
    assert "| A, tok/s | 30.0 | 10.0 | - |  | - |" in text
    assert "| B, tok/s | 40.0 | 10.0 | 4.00 x | ≥ 3 x peft: met (4.00 x) | - |" in text


def test_targets_are_shown_as_met_or_missed(pages: ModuleType) -> None:
    rows = [
        Row("a", "A", "decode", "e", {}, figure("tok/s", 3.0),
            comparisons=[ComparisonResult(None, "roofline", 0.5, 0.85, None, False)]),
        Row("m", "M", "memory", "e", {}, figure("MB", 60.0),
            comparisons=[ComparisonResult(None, "value", 60.0, None, 150.0, True)]),
    ]  # fmt: skip
    turns = Figure("tok/s", [Sample(0, {"value": 9.0, "base_value": 3.0, "ratio": 3.0}, 0.0, 0.0, False, [3.0, 3.0])])
    rows.append(Row("b", "B", "decode", "e", {}, turns, comparisons=[
        ComparisonResult("a", "alternating", 3.0, 0.5, None, True),
    ]))  # fmt: skip
    text = pages.bench_table(report(rows))
    assert "| 300.00% of A, in turn: 9.00 and 3.00 tok/s, 2 pairs, half of them 300.0 to 300.0% | ≥ 50%: met |" in text
    assert "| A | 3.00 tok/s | 3.00 to 3.00 | 50.0% of the roofline | ≥ 85%: **missed** |" in text
    assert "| M | 60.0 MB | 60.0 to 60.0 |  | ≤ 150: met |" in text


def test_a_later_report_replaces_what_it_has(pages: ModuleType) -> None:
    details = {"versions": {"x": "1"}, "note": ""}

    def of(value: float, ratios: dict[str, float], *names: str) -> Report:
        """Makes a report whose rows have this value; the comparisons of adaptrt's row have these ratios."""
        compared = [ComparisonResult(None, "roofline", value / 10, None, None, None)]
        compared += [ComparisonResult(base, "ratio", ratio, None, None, None) for base, ratio in ratios.items()]
        return report([
            Row(name, "t", name.split("/")[0], name.split("/")[1], details, figure("tok/s", value),
                comparisons=compared if name == "a/adaptrt" else [])
            for name in names
        ])  # fmt: skip

    first = of(1.0, {"a/peft": 3.0, "a/vllm": 4.0}, "a/adaptrt", "a/peft", "a/vllm", "b/adaptrt")
    second = of(2.0, {"a/peft": 3.5, "a/openvino": 5.0}, "a/adaptrt", "a/peft", "a/openvino")
    third = of(3.0, {}, "a/vllm")
    merged = pages.merged([first, second, third])
    assert {row.name: row.figure.median for row in merged.rows} == {
        "a/adaptrt": 2.0, "a/peft": 2.0, "a/vllm": 3.0, "b/adaptrt": 1.0, "a/openvino": 2.0,
    }  # fmt: skip
    ours = merged.row("a/adaptrt")
    assert ours is not None
    assert [(c.base, c.ratio) for c in ours.comparisons] == [
        (None, 0.2), ("a/peft", 3.5), ("a/openvino", 5.0), ("a/vllm", 4.0),
    ]  # fmt: skip
    assert [entry.name for entry in merged.not_run] == ["mixed-16/vllm"]


def test_a_peer_that_is_measured_later_is_no_longer_told_as_not_run(pages: ModuleType) -> None:
    details = {"versions": {"x": "1"}, "note": ""}
    row = Row("mixed-16/vllm", "t", "mixed-16", "vllm", details, figure("tok/s", 1.0))
    assert pages.merged([report([]), replace(report([row]), not_run=[])]).not_run == []


def test_rows_of_more_rounds_than_others_are_told(pages: ModuleType) -> None:
    details = {"versions": {"x": "1"}, "note": ""}

    def row(name: str, rounds: int) -> Row:
        samples = [Sample(number, {"value": 1.0}, 0.0, 0.0, False) for number in range(rounds)]
        kind, engine = name.split("/")
        return Row(name, kind.upper(), kind, engine, details, Figure("tok/s", samples))

    rows = [row("a/adaptrt", 4), row("a/peft", 4), row("b/adaptrt", 9), row("b/peft", 2), row("b/vllm", 9)]
    text = pages.peers_table(report([*rows, row("c/adaptrt", 4)]))
    assert "Medians of 4 rounds. Rows with other numbers of rounds: B: 9 (adaptrt, vllm), 2 (peft)." in text
    text = pages.bench_table(report([row("a/bf16", 1), row("b/bf16", 1), row("c/bf16", 3)]))
    assert "Medians of 1 rounds. Rows with other numbers of rounds: C: 3." in text
    assert pages.machine_of(report([row("a/bf16", 1)])).endswith("Medians of 1 rounds.")


@pytest.mark.parametrize(
    ("at_limit", "told"),
    [(None, "(1.05 x)"), (1.21, "(1.05 x)"), (1.08, "(1.05 x; 1.08 x at the machine's limit)")],
)
def test_a_missed_target_stands_beside_what_the_limit_allows(
    pages: ModuleType, at_limit: float | None, told: str
) -> None:
    slow = ComparisonResult("a/peft", "ratio", 1.05, 1.1, None, False, at_limit=at_limit)
    row = Row("a/adaptrt", "A", "a", "adaptrt", {}, figure("tok/s", 60.0), comparisons=[slow])
    assert pages.peer_targets(row) == f"≥ 1.1 x peft: **missed** {told}"


def test_many_rows_that_were_not_run_are_counted(pages: ModuleType) -> None:
    names = ["a/peft", "b/peft", "a/vllm", "b/vllm"]
    assert pages.short_list(names[:3]) == "a/peft, b/peft, a/vllm"
    assert pages.short_list(names) == "4 rows of peft, vllm"


def test_paragraphs_are_wrapped(pages: ModuleType) -> None:
    lines = pages.wrapped("word " * 50 + "x" * 120 + " a-b").splitlines()
    assert max(len(line) for line in lines[:-2]) <= 100
    assert lines[-2:] == ["x" * 120, "a-b"]


# The peer's clock advances by one millisecond per token, independent of the machine.
FAKE_PEER = """
import time
from worker import Peer, Row, decode_row, main

now = 0.0
time.perf_counter = lambda: now

class Fake:
    def __init__(self, answer):
        print("a library's chatter")
        self.answer = answer
    def generate(self, prompts, new_tokens):
        global now
        now += 0.001 * new_tokens
        return [[7] * min(self.answer, new_tokens) for _ in prompts]
    def close(self):
        print("the end")

def make(task):
    return Peer(
        versions={"fake": "1"},
        load=lambda variant: Fake({"long": 100, "short": 3}[variant]),
        rows={
            "decode-16": decode_row("long", task.batch),
            "capped": decode_row("long", task.batch, most_tokens=3),
            "short": decode_row("short", task.batch),
            "unknown": Row("unknown", lambda variant, new_tokens: {}),
        },
        refused={"mixed-16": "cannot"},
    )

main(make)
"""


def test_a_peer_answers_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text(json.dumps({"short": [[1, 2]] * 16, "long": [[1] * 512]}))
    script = tmp_path / "fake_peer.py"
    script.write_text(FAKE_PEER)
    asked = [
        ("decode-16", True),
        ("decode-16", False),
        ("capped", False),
        ("short", False),
        ("unknown", True),
        ("none", False),
    ]
    done = subprocess.run(
        [sys.executable, str(script), "--root", str(tmp_path), "--threads", "1", "--new_tokens", "5"],
        input="".join(json.dumps({"row": row, "warm_up": warm_up}) + "\n" for row, warm_up in asked),
        capture_output=True, text=True, check=True, env={"PYTHONPATH": str(PEERS)},
    )  # fmt: skip
    about, warm, decoded, capped, short, unloadable, unknown = map(json.loads, done.stdout.splitlines())
    assert about["versions"] == {"fake": "1"}
    assert about["refused"] == {"mixed-16": "cannot"}
    assert warm["load_seconds"] >= 0
    assert decoded["metrics"]["value"] == pytest.approx(16 * 4 / 0.004)
    assert decoded["metrics"]["seconds"] == pytest.approx(0.005)
    assert capped["metrics"]["seconds"] == pytest.approx(0.003)
    assert "asked for 5 tokens for each of 16 prompts" in short["error"]
    assert "KeyError" in unloadable["error"]
    assert "KeyError" in unknown["error"]
    assert done.stderr.count("chatter") == 2
    assert done.stderr.count("the end") == 2
