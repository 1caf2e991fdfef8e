"""Results of a bench run, stored as JSON with a schema version."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from ..._core import ConfigError
from ...common.json_fields import JsonFields, load_json_object

SCHEMA: Final = 1
KIND: Final = "adaptrt-bench"
Metrics = dict[str, float]


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    round: int
    metrics: Metrics
    """Numbers by name; `value` is the sample's value for the row."""
    foreign: float
    """Share of the CPUs that other processes used meanwhile."""
    stolen: float
    """Share that other virtual machines used."""
    disturbed: bool
    """True if `foreign` was above the run's limit."""
    pair_ratios: list[float] = field(default_factory=list)
    """For alternating scenarios: this value divided by the other scenario's, for each pair."""


@dataclass(frozen=True)
class Figure:
    """Samples of one quantity. Median and spread use the undisturbed samples, or all if every one was disturbed."""

    unit: str
    samples: list[Sample]

    def used(self) -> list[Sample]:
        """The samples that count."""
        return [sample for sample in self.samples if not sample.disturbed] or self.samples

    @property
    def is_disturbed(self) -> bool:
        """True if no sample was undisturbed."""
        return all(sample.disturbed for sample in self.samples)

    @property
    def median(self) -> float:
        """Median of the values."""
        return self.metric("value")

    @property
    def low(self) -> float:
        """Minimum of the values."""
        return min(sample.metrics["value"] for sample in self.used())

    @property
    def high(self) -> float:
        """Maximum of the values."""
        return max(sample.metrics["value"] for sample in self.used())

    def metric(self, name: str) -> float:
        """Median of a metric over the samples that count and have it."""
        return statistics.median(sample.metrics[name] for sample in self.used() if name in sample.metrics)

    def metric_names(self) -> list[str]:
        """Names of the metrics of all samples."""
        return sorted({name for sample in self.samples for name in sample.metrics})

    def by_round(self) -> dict[int, float]:
        """The value of each round: its last undisturbed sample, or its last sample."""
        values: dict[int, float] = {}
        for sample in sorted(self.used(), key=lambda sample: sample.round):
            values[sample.round] = sample.metrics["value"]
        return values


def pair_ratios(figure: Figure) -> list[float]:
    """Ratios of all samples that count, ascending; empty for rows that do not alternate."""
    return sorted(ratio for sample in figure.used() for ratio in sample.pair_ratios)


def paired_ratio(row: Figure, base: Figure) -> float:
    """Median of row / base over their common rounds; if there are none, the ratio of the medians."""
    ours, theirs = row.by_round(), base.by_round()
    ratios = [ours[number] / theirs[number] for number in ours if number in theirs]
    return statistics.median(ratios) if ratios else row.median / base.median


@dataclass(frozen=True)
class ComparisonResult:
    """A ratio, and the result of comparing it with a target."""

    base: str | None
    measure: str
    ratio: float
    at_least: float | None
    at_most: float | None
    holds: bool | None
    """None: no target."""
    at_limit: float | None = None
    """The ratio if this row reached the machine's limit; None: not requested."""


@dataclass(frozen=True)
class Row:
    """A scenario and its results."""

    name: str
    title: str
    kind: str
    engine: str
    settings: dict[str, Any]
    """The scenario's settings as written in the file."""
    figure: Figure
    work_bytes: int | None = None
    """Bytes of the step that determines the value; None if there is no single step."""
    work_flops: int | None = None
    comparisons: list[ComparisonResult] = field(default_factory=list)


@dataclass(frozen=True)
class NotRun:
    """A scenario that was not measured."""

    name: str
    title: str
    reason: str


@dataclass(frozen=True)
class Report:
    """Results of a whole run."""

    version: str
    created: str
    """UTC, ISO 8601."""
    machine: dict[str, Any]
    run: dict[str, Any]
    """Settings of the run: repeats, threads, and the limit for disturbed samples."""
    scenario_file: str
    """Text of the file."""
    limits: dict[str, Figure]
    rows: list[Row]
    not_run: list[NotRun]

    def row(self, name: str) -> Row | None:
        """The row with a name; None if there is none."""
        return next((row for row in self.rows if row.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """JSON for a file. It includes medians and spreads, although they follow from the samples."""
        data = {"schema": SCHEMA, "kind": KIND, **asdict(self)}
        for name, figure in self.limits.items():
            data["limits"][name]["summary"] = _summary(figure)
        for written, row in zip(data["rows"], self.rows, strict=True):
            written["figure"]["summary"] = _summary(row.figure)
        return data

    def save(self, path: Path) -> None:
        """Writes the JSON file."""
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")


def _summary(figure: Figure) -> dict[str, Any]:
    return {
        "median": figure.median,
        "low": figure.low,
        "high": figure.high,
        "samples_used": len(figure.used()),
        "disturbed": figure.is_disturbed,
        "metrics": {name: figure.metric(name) for name in figure.metric_names()},
    }


def load_report(path: Path) -> Report:
    """Reads a file that Report.save wrote. Raises ConfigError that lists all problems."""
    fields = JsonFields(load_json_object(path, ConfigError))
    schema = fields.integer("schema")
    if schema != SCHEMA:
        raise ConfigError(f"{path}: schema is {schema}; this version reads {SCHEMA}")
    fields.string("kind", choices=(KIND,))
    report = Report(
        version=fields.string("version"),
        created=fields.string("created"),
        machine=fields.raw("machine"),
        run=fields.raw("run"),
        scenario_file=fields.string("scenario_file"),
        limits={name: _figure(nested) for name, nested in _objects(fields, "limits")},
        rows=[_row(nested) for nested in _list(fields, "rows")],
        not_run=[
            NotRun(nested.string("name"), nested.string("title"), nested.string("reason"))
            for nested in _list(fields, "not_run")
        ],
    )
    for name in ("machine", "run"):
        if not isinstance(getattr(report, name), dict):
            fields.problem(name, "is not an object")
    fields.finish(str(path), ConfigError)
    return report


def _objects(fields: JsonFields, name: str) -> Iterable[tuple[str, JsonFields]]:
    table = fields.object(name)
    if table is None:
        return
    for key in list(table.remaining()):
        nested = table.object(key)
        if nested is not None:
            yield key, nested


def _list(fields: JsonFields, name: str) -> Iterable[JsonFields]:
    """The objects of a list. They share the problems of `fields`."""
    values = fields.raw(name)
    if not isinstance(values, list):
        fields.problem(name, "is not a list")
        return
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            fields.problem(f"{name}[{index}]", "is not an object")
            continue
        nested = JsonFields(value, prefix=f"{name}[{index}].", problems=fields.problems)
        yield nested
        nested.refuse_remaining()


def _figure(fields: JsonFields) -> Figure:
    fields.discard(["summary"])
    figure = Figure(
        unit=fields.string("unit"),
        samples=[
            Sample(
                round=nested.integer("round", minimum=0),
                metrics=_metrics(nested),
                foreign=nested.number("foreign"),
                stolen=nested.number("stolen"),
                disturbed=nested.boolean("disturbed"),
                pair_ratios=_ratios(nested),
            )
            for nested in _list(fields, "samples")
        ],
    )
    if not figure.samples:
        fields.problem("samples", "is empty")
    return figure


def _ratios(fields: JsonFields) -> list[float]:
    """The pairs' ratios; empty in reports of older versions, which had no pairs."""
    values = [] if fields.raw("pair_ratios") is None else fields.raw("pair_ratios")
    if not isinstance(values, list) or not all(isinstance(value, (int, float)) for value in values):
        fields.problem("pair_ratios", "is not a list of numbers")
        return []
    return [float(value) for value in values]


def _metrics(fields: JsonFields) -> Metrics:
    values = fields.raw("metrics")
    if (
        not isinstance(values, dict)
        or "value" not in values
        or not all(isinstance(value, (int, float)) for value in values.values())
    ):
        fields.problem("metrics", "is not an object of numbers with a value")
        return {"value": 0.0}
    return {name: float(value) for name, value in values.items()}


def _row(fields: JsonFields) -> Row:
    figure = fields.object("figure")
    settings = fields.raw("settings")
    if not isinstance(settings, dict):
        fields.problem("settings", "is not an object")
        settings = {}
    return Row(
        name=fields.string("name"),
        title=fields.string("title"),
        kind=fields.string("kind"),
        engine=fields.string("engine"),
        settings=settings,
        figure=Figure("", []) if figure is None else _figure(figure),
        work_bytes=_optional(fields, "work_bytes"),
        work_flops=_optional(fields, "work_flops"),
        comparisons=[
            ComparisonResult(
                base=_optional_text(nested, "base"),
                measure=nested.string("measure"),
                ratio=nested.number("ratio", minimum=-math.inf),  # A value can be negative.
                at_least=nested.optional_number("at_least"),
                at_most=nested.optional_number("at_most"),
                holds=None if nested.raw("holds") is None else nested.boolean("holds"),
                at_limit=nested.optional_number("at_limit"),
            )
            for nested in _list(fields, "comparisons")
        ],
    )


def _optional(fields: JsonFields, name: str) -> int | None:
    """A count that may exceed the limit of JsonFields.integer()."""
    value = fields.optional_number(name)
    return None if value is None else int(value)


def _optional_text(fields: JsonFields, name: str) -> str | None:
    return None if fields.raw(name) is None else fields.string(name)
