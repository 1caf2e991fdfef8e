"""Plots of a report; they need the extra adaptrt[bench] (matplotlib)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ..._core import ConfigError
from .display import full_title, limit_title
from .limits import BANDWIDTHS
from .measure import PERCENTILES
from .report import Report, Row

SIZE: Final = (8.0, 4.8)
DPI: Final = 140
LEGEND_LINE: Final = 0.17
"""Height in inches of a line of the roofline's legend."""
ROOFS: Final = {
    "int8_ops": "-.",
    "bfloat16_flops": "-",
    "int8_from_l2_ops": ":",
    "bfloat16_from_l2_flops": ":",
    "float32_flops": "--",
    "product_flops": "-",
}
"""Limits of the roofline, and their styles."""
COLOURS: Final = ("#1f6f8b", "#d1495b", "#edae49", "#66a182", "#4a4e69", "#9c89b8")


def require_matplotlib() -> None:
    """Raises ConfigError that says what to install."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib, which is not installed: pip install 'adaptrt[bench]'")


def write_plots(report: Report, directory: Path) -> list[Path]:
    """Writes the plots that the report has data for; returns their files. Raises ConfigError without matplotlib."""
    require_matplotlib()
    import matplotlib as mpl

    mpl.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in PLOTS.items():
        figure = draw(report)
        if figure is not None:
            path = directory / f"{name}.png"
            figure.savefig(path, dpi=DPI)
            written.append(path)
    return written


def _axes(title: str, report: Report, size: tuple[float, float] = SIZE) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    _source(figure, report)
    return figure, axes


def _sweeps(report: Report) -> dict[str, list[Row]]:
    """Rows of each sweep, sorted by the number of adapters."""
    sweeps: dict[str, list[Row]] = {}
    for row in report.rows:
        if row.settings.get("sweep") is not None:
            sweeps.setdefault(row.settings["sweep"], []).append(row)
    for rows in sweeps.values():
        rows.sort(key=_count)
    return sweeps


def _count(row: Row) -> int:
    count: int = row.settings["adapters"]["count"]
    return count


def _numbered(axes: Any, rows: Sequence[Row]) -> None:
    """A logarithmic axis for the number of adapters."""
    counts = sorted({_count(row) for row in rows})
    axes.set_xscale("symlog" if counts[0] == 0 else "log")
    axes.set_xlim(counts[0] / 1.3 if counts[0] else -0.3, counts[-1] * 1.3)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("adapters registered")


def _plain_logarithmic(axis: Any) -> None:
    """Labels 1, 2, 5, 10, ... as plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _source(figure: Any, report: Report) -> None:
    """Writes the machine's description below the plot."""
    machine = report.machine
    text = f"{machine['processor']}, {machine['threads']} threads; {report.created[:10]}; AdaptRT {report.version}"
    figure.text(0.995, 0.005, text, ha="right", va="bottom", fontsize=7, color="#777777")
    figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))


def _throughput(report: Report) -> Any | None:
    sweeps = _sweeps(report)
    if not sweeps:
        return None
    figure, axes = _axes("Throughput against the number of adapters", report)
    for (_, rows), colour in zip(sweeps.items(), COLOURS * len(sweeps), strict=False):
        medians = [row.figure.median for row in rows]
        lower = [row.figure.median - row.figure.low for row in rows]
        upper = [row.figure.high - row.figure.median for row in rows]
        axes.errorbar(
            [_count(row) for row in rows], medians, yerr=[lower, upper], marker="o", capsize=3, color=colour,
            label=_sweep_label(rows[0]),
        )  # fmt: skip
        slots = rows[0].settings["device_adapters"]
        if slots is not None and min(map(_count, rows)) <= slots <= max(map(_count, rows)):
            axes.axvline(slots, color=colour, linestyle=":", linewidth=1)
            axes.annotate(f"room on the device level: {slots}", (slots, 0), xycoords=("data", "axes fraction"),
                          ha="right", xytext=(-4, 6), textcoords="offset points", fontsize=8, color=colour)  # fmt: skip
    _numbered(axes, [row for rows in sweeps.values() for row in rows])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("output tokens/s (median, lowest to highest)")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 0.1))
    return figure


def _sweep_label(row: Row) -> str:
    ranks = row.settings["adapters"]["ranks"]
    text = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"{row.title}, {text}"


def _hit_rate(report: Report) -> Any | None:
    sweeps = {
        name: rows
        for name, rows in _sweeps(report).items()
        if all("device_hit_rate" in row.figure.metric_names() for row in rows)
    }
    if not sweeps:
        return None
    figure, axes = _axes("LoRA cache: requests that found their adapter", report)
    for (_, rows), colour in zip(sweeps.items(), COLOURS * len(sweeps), strict=False):
        for level, line in (("device", "-"), ("host", "--")):
            rates = [100 * row.figure.metric(f"{level}_hit_rate") for row in rows]
            axes.plot([_count(row) for row in rows], rates, line, marker="o", color=colour,
                      label=f"{level} level: {_sweep_label(rows[0])}")  # fmt: skip
    _numbered(axes, [row for rows in sweeps.values() for row in rows])
    axes.set_ylim(0, 105)
    axes.set_ylabel("hits, %")
    axes.legend(frameon=False, loc="lower left")
    return figure


def _latency(report: Report) -> Any | None:
    rows = [row for row in report.rows if row.kind == "serve" and "ttft_ms_p50" in row.figure.metric_names()]
    if not rows:
        return None
    from matplotlib.figure import Figure

    height = 1.8 + 0.32 * len(rows)
    figure = Figure(figsize=(10.0, height), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    labels = [full_title(row) for row in rows]
    for axes, metric, title in zip(
        panels, ("ttft_ms", "itl_ms"), ("Time to first token, ms", "Time between tokens, ms"), strict=True
    ):
        for position, row in enumerate(rows):
            names = row.figure.metric_names()
            values = [row.figure.metric(f"{metric}_p{p}") for p in PERCENTILES if f"{metric}_p{p}" in names]
            if not values:
                continue
            axes.plot([values[0], values[-1]], [position] * 2, color="#bbbbbb", linewidth=2, zorder=1)
            for value, percentile, colour in zip(values, PERCENTILES, COLOURS, strict=False):
                axes.scatter([value], [position], color=colour, zorder=2, s=36,
                             label=f"p{percentile}" if position == 0 else None)  # fmt: skip
        axes.set_title(title, loc="left", fontsize=12)
        axes.set_xscale("log")
        _plain_logarithmic(axes.xaxis)
        axes.grid(alpha=0.3, axis="x")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(rows)), labels)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, ncols=3, loc="outside lower left")
    _source(figure, report)
    return figure


def _roofline(report: Report) -> Any | None:
    rows = [row for row in report.rows if row.work_bytes]
    if not rows:
        return None
    figure, axes = _axes("Roofline", report, (11.0, max(5.2, LEGEND_LINE * len(rows) + 0.8)))
    bandwidth = next(report.limits[name].median for name in BANDWIDTHS if name in report.limits)
    points = [_roofline_point(row) for row in rows]
    low = min(min(intensity for intensity, _ in points) / 2, 0.5)
    medians = {name: limit.median for name, limit in report.limits.items()}
    peaks = {name: medians[name] for name in ROOFS if medians.get(name, 0.0) > 0}
    high = max(2 * max(peaks.values()) / bandwidth, 2 * max(intensity for intensity, _ in points))
    for name, peak in peaks.items():
        ridge = peak / bandwidth
        roof = [low * bandwidth / 1e9, peak / 1e9, peak / 1e9]
        axes.plot([low, ridge, high], roof, ROOFS[name], color="#333333", linewidth=1.2)
        label = f"{limit_title(name)} {peak / 1e9:.0f} G{report.limits[name].unit}"
        axes.annotate(label, (high, peak / 1e9), ha="right",
                      xytext=(0, 3), textcoords="offset points", fontsize=8)  # fmt: skip
    # Above the line, where no row can be.
    middle = (low * min(peaks.values(), default=bandwidth) / bandwidth) ** 0.5
    axes.annotate(f"memory {bandwidth / 1e9:.0f} GB/s", (middle, middle * bandwidth / 1e9), ha="right",
                  xytext=(-6, 4), textcoords="offset points", fontsize=8)  # fmt: skip
    for number, (row, (intensity, rate)) in enumerate(zip(rows, points, strict=True)):
        axes.scatter([intensity], [rate], s=40, zorder=3, color=COLOURS[number % len(COLOURS)],
                     marker="os^DvP"[number // len(COLOURS) % 6], label=f"{row.title} [{row.engine}]")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        _plain_logarithmic(axis)
    axes.set_xlabel("FLOPs per byte of weights, adapters, keys and values")
    axes.set_ylabel("GFLOP/s")
    figure.legend(frameon=False, fontsize=8, loc="outside right center")
    return figure


def _roofline_point(row: Row) -> tuple[float, float]:
    """(FLOPs per byte, GFLOP/s) of the median."""
    assert row.work_bytes
    assert row.work_flops is not None
    per_step = row.settings["input_length"] if row.kind == "prefill" else row.settings["requests"]
    steps_per_second = row.figure.median / per_step
    return row.work_flops / row.work_bytes, row.work_flops * steps_per_second / 1e9


PLOTS: Final[dict[str, Callable[[Report], Any | None]]] = {
    "throughput": _throughput,
    "latency": _latency,
    "cache-hit-rate": _hit_rate,
    "roofline": _roofline,
}
"""File names and their drawing functions."""
