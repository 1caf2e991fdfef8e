"""Tables of a report and of a profile for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..kernel_names import describe_kernels
from .measure import DIVERGENCE, PERCENTILES, WEIGHT_BYTES
from .profile import OpSummary, seconds_between_ranks
from .report import ComparisonResult, Figure, Report, Row, pair_ratios

MIDDLE_HALF: Final = (25, 75)
"""Percentiles that enclose half of the pairs' ratios."""


def tables_of(report: Report) -> Iterable[RenderableType]:
    """All tables of a report, in order."""
    yield _machine_line(report)
    yield _rows_table(report)
    served = [row for row in report.rows if row.kind == "serve"]
    if served:
        yield _serve_table(served)
    if report.not_run:
        yield _not_run_table(report)
    if any(row.figure.is_disturbed for row in report.rows):
        share = 100 * report.run["quiet_share"]
        yield Text(f"* every sample disturbed: other processes took more than {share:.0f}% of the CPUs")


def _machine_line(report: Report) -> Text:
    machine = report.machine
    limits = ", ".join(
        f"{limit_title(name)} {_scaled(figure)}" for name, figure in report.limits.items() if figure.median > 0
    )
    if "gpu" in machine:
        return Text(f"{machine['gpu']}: {limits}")
    kernels = describe_kernels(machine["kernels"])
    return Text(f"{machine['processor']}, {machine['threads']} threads, {kernels} kernels: {limits}")


def limit_title(name: str) -> str:
    """Title of a machine limit, without its unit."""
    return name.replace("_", " ").removesuffix(" flops").removesuffix(" ops").replace("l2", "L2")


def _scaled(figure: Figure) -> str:
    return f"{figure.median / 1e9:.0f} G{figure.unit}"


def _rows_table(report: Report) -> Table:
    table = Table(
        title=f"AdaptRT {report.version}, {report.run['scenarios']}", box=box.SIMPLE_HEAD, title_justify="left"
    )
    table.add_column("scenario", no_wrap=True)
    table.add_column("median", justify="right")
    table.add_column("lowest", justify="right")
    table.add_column("highest", justify="right")
    table.add_column("", no_wrap=True)
    table.add_column("against")
    table.add_column("target")
    for row in report.rows:
        figure = row.figure
        table.add_row(
            row.name,
            *(number(value) for value in (figure.median, figure.low, figure.high)),
            figure.unit + (" *" if figure.is_disturbed else ""),
            "\n".join([*details_of(row), *(_against(result, figure) for result in row.comparisons)]),
            Text("\n").join(_target(result, figure) for result in row.comparisons),
        )
    return table


def details_of(row: Row) -> list[str]:
    """Details of a table row in addition to its value."""
    if row.kind == "decode" and WEIGHT_BYTES in row.figure.metric_names():
        return [f"{row.figure.metric(WEIGHT_BYTES) / 1e6:.0f} MB of weights read per token"]
    if row.kind == "perplexity":
        return [f"{row.figure.median:.4f}, {row.figure.metric(DIVERGENCE):.5f} nats apart"]
    if row.kind != "overhead":
        return []
    metric = row.figure.metric
    return [
        f"{metric('outside_engine_us'):.0f} us of {metric('step_ms'):.1f} ms",
        f"enqueue_request {metric('enqueue_us_p50'):.0f} us, p99 {metric('enqueue_us_p99'):.0f} us",
    ]


def in_turn(figure: Figure) -> str:
    """Compares a row with the one that it alternates with: both values, number of pairs, spread of their ratios."""
    ratios = pair_ratios(figure)
    low, high = (100 * float(np.percentile(ratios, percentile)) for percentile in MIDDLE_HALF)
    shares = "shared_weights" in figure.metric_names() and figure.metric("shared_weights") == 1.0
    return (
        f"in turn{' on the same weights' if shares else ''}: "
        f"{number(figure.median)} and {number(figure.metric('base_value'))} {figure.unit}, "
        f"{len(ratios)} pairs, half of them {low:.1f} to {high:.1f}%"
    )


def _against(result: ComparisonResult, figure: Figure) -> str:
    if result.measure == "value":
        return ""
    if result.measure == "alternating":
        return f"{100 * result.ratio:.2f}% of {result.base}, {in_turn(figure)}"
    what = "roofline" if result.base is None else result.base
    if result.measure == "roofline" and result.base is not None:
        what += "'s roofline share"
    return f"{100 * result.ratio:.1f}% of {what}"


def _target(result: ComparisonResult, figure: Figure) -> Text:
    if result.holds is None:
        return Text("")
    absolute = result.measure == "value"
    bounds = []
    for sign, bound in ((">=", result.at_least), ("<=", result.at_most)):
        if bound is not None:
            bounds.append(f"{sign} {number(bound)} {figure.unit}" if absolute else f"{sign} {100 * bound:g}%")
    word, style = ("met", "green") if result.holds else ("missed", "red")
    return Text(f"{', '.join(bounds)}: ").append(word, style=style)


def _serve_table(rows: Sequence[Row]) -> Table:
    table = Table(title="serving: medians over the samples, times in ms", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("scenario", no_wrap=True)
    table.add_column("requests\n/s", justify="right")
    table.add_column("first token\np50, p90, p99", justify="right", no_wrap=True)
    table.add_column("between tokens\np50, p90, p99", justify="right", no_wrap=True)
    table.add_column("on\ntime", justify="right")
    table.add_column("adapters\nused", justify="right")
    table.add_column("device\nhits", justify="right")
    for row in rows:
        hits = f"{100 * row.figure.metric('device_hit_rate'):.0f}%" if _has(row, "device_hit_rate") else "-"
        table.add_row(
            row.name,
            f"{row.figure.metric('requests_per_second'):.2f}",
            *(_percentiles(row, metric) for metric in ("ttft_ms", "itl_ms")),
            f"{100 * row.figure.metric('first_token_on_time'):.0f}%",
            f"{row.figure.metric('adapters_used'):.0f}",
            hits,
        )
    return table


def _has(row: Row, metric: str) -> bool:
    return metric in row.figure.metric_names()


def full_title(row: Row) -> str:
    """Name with the number of adapters, which distinguishes the scenarios of a sweep."""
    if row.settings.get("sweep") is None:
        return row.title
    count = row.settings["adapters"]["count"]
    return f"{row.title}, {count} adapter{'' if count == 1 else 's'}"


def reasons_not_run(report: Report) -> dict[str, list[str]]:
    """Names of the scenarios that were not run, by reason."""
    reasons: dict[str, list[str]] = {}
    for entry in report.not_run:
        reasons.setdefault(entry.reason, []).append(entry.name)
    return reasons


def engines_beside(report: Report, kind: str) -> dict[str, Row]:
    """Returns the rows of one kind by engine, for a report with peers.

    If a row's settings have `peers_of`, the peers' rows of that kind are used, because the peers did not run this row's
    own kind.
    """
    rows = {row.engine: row for row in report.rows if row.kind == kind}
    sources = {row.settings.get("peers_of", kind) for row in rows.values()}
    others = [row for row in report.rows if row.kind in sources and row.engine not in rows]
    return rows | {row.engine: row for row in others}


def _percentiles(row: Row, metric: str) -> str:
    names = [f"{metric}_p{percentile}" for percentile in PERCENTILES]
    return ", ".join(number(row.figure.metric(name)) if _has(row, name) else "-" for name in names)


def _not_run_table(report: Report) -> Table:
    table = Table(title="not run", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("scenario", no_wrap=True)
    table.add_column("reason")
    for entry in report.not_run:
        table.add_row(entry.name, entry.reason)
    return table


def profile_table(
    title: str, summaries: Sequence[OpSummary], step_seconds: float, bandwidth: float, flops: float
) -> Table:
    """Table of the time that a step spends in each op. Limits are in bytes and FLOPs per second."""
    # Narrow enough for a terminal with 80 columns.
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", show_footer=True, padding=0)
    in_ops = sum(summary.seconds for summary in summaries)
    least = sum(summary.work.least_seconds(bandwidth, flops) for summary in summaries)
    notes = [f"outside ops {1e3 * (step_seconds - in_ops):.2f} ms"]
    if between_ranks := seconds_between_ranks(summaries):
        notes.append(f"between ranks {1e3 * between_ranks:.2f} ms, {100 * between_ranks / step_seconds:.1f}%")
    table.add_column("op", footer=Text("\n".join(notes)))
    for heading, footer in (
        ("times", ""),
        ("ms", f"{1e3 * step_seconds:.2f}"),
        ("of\nstep", ""),
        ("MB", f"{sum(s.work.num_bytes for s in summaries) / 1e6:.1f}"),
        ("adapter\nMB", f"{sum(s.adapter_bytes for s in summaries) / 1e6:.1f}"),
        ("MFLOP", f"{sum(s.work.flops for s in summaries) / 1e6:.0f}"),
        ("GB/s", ""),
        ("GFLOP\n/s", ""),
        ("roof-\nline", f"{100 * least / step_seconds:.0f}%"),
        ("busy", ""),
    ):
        table.add_column(heading, justify="right", footer=footer, no_wrap=True)
    for summary in summaries:
        work, seconds = summary.work, summary.seconds
        has_work = work.num_bytes + work.flops > 0
        table.add_row(
            summary.name,
            f"{summary.count:g}",
            f"{1e3 * seconds:.2f}",
            f"{100 * seconds / step_seconds:.1f}%",
            f"{work.num_bytes / 1e6:.2f}",
            f"{summary.adapter_bytes / 1e6:.2f}",
            f"{work.flops / 1e6:.1f}",
            f"{work.num_bytes / seconds / 1e9:.1f}" if has_work else "-",
            f"{work.flops / seconds / 1e9:.1f}" if work.flops else "-",
            f"{100 * work.least_seconds(bandwidth, flops) / seconds:.0f}%" if has_work else "-",
            f"{100 * summary.busy_share:.0f}%",
        )
    return table


def number(value: float) -> str:
    """Formats a value with the digits that a measurement justifies."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"
