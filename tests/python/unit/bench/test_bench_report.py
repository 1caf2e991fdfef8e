"""Reports: medians over the samples that count, paired ratios, and JSON that reads back equal."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from adaptrt import ConfigError
from adaptrt.tools.bench.display import _rows_table
from adaptrt.tools.bench.noise import NoiseMeter, wait_until_quiet
from adaptrt.tools.bench.report import (
    ComparisonResult,
    Figure,
    NotRun,
    Report,
    Row,
    Sample,
    load_report,
    paired_ratio,
)


def figure(*values: float, disturbed: tuple[int, ...] = ()) -> Figure:
    """Makes a figure with one sample per round."""
    samples = [Sample(i, {"value": value}, 0.0, 0.0, i in disturbed) for i, value in enumerate(values)]
    return Figure("tok/s", samples)


def a_report() -> Report:
    comparison = ComparisonResult("b", "ratio", 0.5, 0.9, None, False)
    below_zero = ComparisonResult(None, "value", -2.0, None, 150.0, True)
    rows = [
        Row("a", "A", "decode", "e", {"requests": 1}, figure(1.0, 2.0, disturbed=(1,)), 5_000_000_000, 7, [comparison]),
        Row("b", "B", "serve", "e", {}, figure(3.0)),
        Row("m", "M", "memory", "e", {}, figure(-2.0), comparisons=[below_zero]),
    ]
    limits = {"read_bandwidth": figure(2e10)}
    return Report("1", "2026-01-01T00:00:00Z", {"threads": 2}, {"repeats": 2}, "schema = 1", limits, rows,
                  [NotRun("c", "C", "because")])  # fmt: skip


def test_disturbed_samples_count_only_where_there_are_no_others() -> None:
    some = figure(1.0, 5.0, 3.0, disturbed=(1,))
    assert (some.median, some.low, some.high, some.is_disturbed) == (2.0, 1.0, 3.0, False)
    none = figure(1.0, 5.0, 3.0, disturbed=(0, 1, 2))
    assert (none.median, none.low, none.high, none.is_disturbed) == (3.0, 1.0, 5.0, True)


def test_ratios_pair_the_samples_of_a_round() -> None:
    # The machine was three times slower in the second round, which does not change the ratio.
    assert paired_ratio(figure(10.0, 3.3, 11.0), figure(20.0, 6.6, 22.0)) == pytest.approx(0.5)
    assert paired_ratio(figure(10.0, 99.0, disturbed=(1,)), figure(20.0, 20.0)) == pytest.approx(0.5)
    assert paired_ratio(figure(10.0, 99.0, disturbed=(1,)), figure(1.0, 20.0, disturbed=(0,))) == pytest.approx(0.5)


def test_a_report_is_read_back_equal(tmp_path: Path) -> None:
    report = a_report()
    report.save(tmp_path / "report.json")
    assert load_report(tmp_path / "report.json") == report
    written = json.loads((tmp_path / "report.json").read_text())
    assert (written["schema"], written["kind"]) == (1, "adaptrt-bench")
    assert written["rows"][0]["figure"]["summary"]["median"] == 1.0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda data: data.update(schema=2), "schema is 2; this version reads 1"),
        (lambda data: data.update(kind="other"), "kind"),
        (lambda data: data.update(extra=1), "extra is unknown"),
        (lambda data: data["rows"][0].update(extra=1), r"rows\[0\]\.extra is unknown"),
        (lambda data: data["rows"][0]["figure"]["samples"][0].pop("foreign"), r"samples\[0\]\.foreign is missing"),
        (
            lambda data: data["rows"][0]["figure"]["samples"][0].update(metrics={}),
            "metrics is not an object of numbers",
        ),
        (lambda data: data["rows"][0]["figure"].update(samples=[]), "samples is empty"),
        (lambda data: data.update(rows={}), "rows is not a list"),
        (lambda data: data["not_run"].append(3), r"not_run\[1\] is not an object"),
        (lambda data: data["rows"][0]["comparisons"][0].update(ratio="x"), "ratio"),
    ],
)
def test_a_damaged_report_is_refused(change: Any, complaint: str, tmp_path: Path) -> None:
    data = a_report().to_json()
    change(data)
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=complaint):
        load_report(tmp_path / "report.json")


def test_a_table_has_a_line_per_scenario_and_its_numbers() -> None:
    report = dataclasses.replace(a_report(), run={"repeats": 2, "scenarios": "file.toml"})
    table = _rows_table(report)
    columns = [str(column.header) for column in table.columns]
    assert columns == ["scenario", "median", "lowest", "highest", "", "against", "target"]
    cells = [list(column.cells)[:2] for column in table.columns[:5]]
    assert cells == [["a", "b"], ["1.00", "3.00"], ["1.00", "3.00"], ["1.00", "3.00"], ["tok/s", "tok/s"]]
    assert [column.justify for column in table.columns[1:4]] == ["right"] * 3


def test_own_work_is_no_noise() -> None:
    with NoiseMeter() as meter:
        sum(range(3_000_000))
    assert 0.0 <= meter.noise.foreign <= 1.0
    assert 0.0 <= meter.noise.stolen <= 1.0


def test_waiting_for_quiet_ends() -> None:
    wait_until_quiet(1.0, 60.0)  # any machine is this quiet at the first check
    wait_until_quiet(0.0, 0.0)
