"""Prints a report of peers as a table and draws a plot."""

from __future__ import annotations

from pathlib import Path

from models import title_of_model
from process import OURS
from rich import box
from rich.table import Table
from rows import ROWS

from adaptrt.tools.bench.display import engines_beside, number
from adaptrt.tools.bench.report import Report, Row

PEERS = ("adaptrt", "peft", "llama_cpp", "openvino", "vllm")
COLOURS = dict(zip(PEERS, ("#1f6f8b", "#d1495b", "#edae49", "#66a182", "#4a4e69"), strict=True))


def table_of(report: Report) -> Table:
    """Table of rows by peers, with AdaptRT's ratio to the best peer."""
    peers = [name for name in PEERS if any(row.engine == name for row in report.rows)]
    table = Table(title=f"{title_of_model(report.run['model'])}, {report.machine['threads']} threads",
                  box=box.SIMPLE_HEAD, title_justify="left")  # fmt: skip
    table.add_column("row", no_wrap=True)
    for name in peers:
        table.add_column(name, justify="right")
    table.add_column("of the best\npeer", justify="right")
    table.add_column("of the\nlimit", justify="right")
    for kind in dict.fromkeys(row.kind for row in report.rows):
        cells = engines_beside(report, kind)
        table.add_row(
            f"{kind}, {next(iter(cells.values())).figure.unit}",
            *(_cell(cells.get(name)) for name in peers),
            ratio_text(cells.get(OURS)),
            limit_text(cells.get(OURS)),
        )
    return table


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    return number(row.figure.median) + (" *" if row.figure.is_disturbed else "")


def ratio_text(row: Row | None) -> str:
    """Returns AdaptRT's speed relative to the best peer. Higher is better, also for rows in seconds."""
    ratios = [c.ratio for c in row.comparisons if c.measure == "ratio"] if row is not None else []
    if row is None or not ratios:
        return "-"
    return f"{1 / max(ratios):.2f} x" if row.figure.unit == "s" else f"{min(ratios):.2f} x"


def limit_text(row: Row | None) -> str:
    """Share of the machine's limit."""
    shares = [c.ratio for c in row.comparisons if c.measure == "roofline"] if row is not None else []
    return f"{100 * shares[0]:.0f}%" if shares else "-"


def draw(report: Report, path: Path) -> None:
    """Plots the throughput of every peer, relative to AdaptRT in each row."""
    from matplotlib.figure import Figure as Canvas

    kinds = [kind for kind in ROWS if any(row.kind == kind and row.figure.unit == "tok/s" for row in report.rows)]
    peers = [name for name in PEERS if any(row.engine == name for row in report.rows)]
    figure = Canvas(figsize=(10.0, 1.4 + 0.55 * len(kinds)), layout="constrained")
    axes = figure.add_subplot()
    height = 0.8 / len(peers)
    for position, kind in enumerate(kinds):
        cells = engines_beside(report, kind)
        for index, name in enumerate(peers):
            row = cells.get(name)
            if row is None:
                continue
            y = position + (index - (len(peers) - 1) / 2) * height
            value = row.figure.median
            error = [[value - row.figure.low], [row.figure.high - value]]
            axes.barh(y, value, height, color=COLOURS[name], xerr=error, ecolor="#777777",
                      label=name if kind == kinds[0] else None)  # fmt: skip
            axes.annotate(number(value), (row.figure.high, y), xytext=(4, 0), textcoords="offset points", va="center",
                          fontsize=7)  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(kinds)), [ROWS[kind].title for kind in kinds])
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s (median, lowest to highest)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3, axis="x")
    title = f"{title_of_model(report.run['model'])}; {report.machine['processor']}, {report.machine['threads']} threads"
    axes.set_title(f"{title}; {report.created[:10]}", loc="left", fontsize=11)
    figure.legend(frameon=False, ncols=len(peers), loc="outside lower left")
    figure.savefig(path, dpi=140)
