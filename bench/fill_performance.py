"""Writes the tables of docs/performance.md from reports, so that no figure is typed by hand.

    fill_performance.py docs/performance.md [--bench bench.json...] [--peers peers.json...]

The page has a pair of marks for each table and kind of CPU. This script replaces the text between the marks for the
reports' kind of CPU, and keeps the figures of other kinds.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from adaptrt.tools.bench.display import (
    details_of,
    engines_beside,
    full_title,
    in_turn,
    limit_title,
    number,
    reasons_not_run,
)
from adaptrt.tools.bench.report import ComparisonResult, Report, Row, load_report

PEERS = ("adaptrt", "peft", "llama_cpp", "openvino", "vllm")
OURS = "adaptrt"
AMX, WITHOUT_AMX = "amx", "without-amx"
CPUS = (AMX, WITHOUT_AMX)
BEST_PEER = "AdaptRT to the best peer"


def cpu_of(report: Report) -> str:
    """Returns the kind of CPU as it is named in the page's marks. Old reports without the field have no AMX."""
    return AMX if report.machine.get("amx") else WITHOUT_AMX


def _marked(page: str, name: str) -> re.Match[str]:
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    found = list(re.finditer(f"(?<={re.escape(begin)}\n).*?(?={re.escape(end)})", page, re.DOTALL))
    if len(found) != 1:
        raise ValueError(f"the page does not have the marks {begin} and {end} once")
    return found[0]


def content_of(page: str, name: str) -> str:
    """Returns the text between the marks `name`. Raises ValueError unless the page has this pair of marks once."""
    return _marked(page, name)[0]


def fill(page: str, name: str, content: str) -> str:
    """Returns the page with `content` between the marks `name`. Raises ValueError unless the page has the pair once."""
    found = _marked(page, name)
    return f"{page[: found.start()]}{content}\n{page[found.end() :]}"


def machine_of(report: Report) -> str:
    """Machine, date and version of a report."""
    machine = report.machine
    limits = {name: figure for name, figure in report.limits.items() if figure.median > 0}
    scaled = ", ".join(f"{limit_title(name)} {number(f.median / 1e9)} G{f.unit}" for name, f in limits.items())
    return (
        f"{report.created[:10]}, AdaptRT {report.version}: {machine['processor']}, {machine['threads']} threads of "
        f"{machine['cpus']}, {machine['memory_bytes'] / 1e9:.0f} GB, {machine['kernels']} kernels; {scaled}. "
        f"Medians of {usual_rounds(report)} rounds. {other_rounds(report)}".rstrip()
    )


def wrapped(text: str) -> str:
    """A paragraph of Markdown, wrapped at 100 columns."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def bench_table(report: Report) -> str:
    """Table with one row per scenario."""
    rows = []
    for row in report.rows:
        figure = row.figure
        rows.append(
            (
                full_title(row),
                f"{number(figure.median)} {figure.unit}" + disturbed(row),
                f"{number(figure.low)} to {number(figure.high)}",
                "<br>".join([*details_of(row), *(against(result, row, report) for result in row.comparisons)]),
                "<br>".join(target(result) for result in row.comparisons).removesuffix("<br>"),
            )
        )
    parts = [wrapped(machine_of(report)), "", table(("row", "median", "spread", "against", "target"), rows)]
    if report.not_run:
        parts += ["", "Not run:", "", table(("row", "why"), [(entry.title, entry.reason) for entry in report.not_run])]
    return "\n".join(parts)


def disturbed(row: Row) -> str:
    """Returns a mark for rows that should be measured again."""
    return " (disturbed)" if row.figure.is_disturbed else ""


def against(result: ComparisonResult, row: Row, report: Report) -> str:
    """Text of a comparison."""
    if result.measure == "value":
        return ""
    if result.base is None:
        return f"{100 * result.ratio:.1f}% of the roofline"
    base = report.row(result.base)
    title = result.base if base is None else full_title(base)
    allowed = ", per byte and FLOP" if result.measure == "roofline" else ""
    if result.measure == "alternating":
        return f"{100 * result.ratio:.2f}% of {title}, {in_turn(row.figure)}"
    return f"{100 * result.ratio:.1f}% of {title}{allowed}"


def target(result: ComparisonResult) -> str:
    """Returns the text of a target with the result: met or missed."""
    if result.holds is None:
        return ""
    scale, unit = (1, "") if result.measure == "value" else (100, "%")
    bounds = [f"{sign} {scale * bound:g}{unit}" for sign, bound in (("≥", result.at_least), ("≤", result.at_most))
              if bound is not None]  # fmt: skip
    return f"{', '.join(bounds)}: {'met' if result.holds else '**missed**'}"


def peers_table(report: Report) -> str:
    """Table of rows by engines."""
    engines = [name for name in PEERS if any(row.engine == name for row in report.rows)]
    rows = []
    for kind in dict.fromkeys(row.kind for row in report.rows):
        cells = engines_beside(report, kind)
        first = next(iter(cells.values()))
        rows.append(
            (
                f"{first.title}, {first.figure.unit}",
                *(
                    number(cells[name].figure.median) + disturbed(cells[name]) if name in cells else "-"
                    for name in engines
                ),
                best_ratio(cells.get(OURS)),
                peer_targets(cells.get(OURS)),
                limit_share(cells.get(OURS)),
            )
        )
    headings = ("row", *engines, BEST_PEER, "target", "of the machine's limit")
    versions = {row.engine: row.settings["versions"] for row in report.rows}
    told = "; ".join(", ".join(f"{name} {version}" for name, version in versions[engine].items()) for engine in engines)
    parts = [wrapped(machine_of(report)), "", wrapped(f"Model {report.run['model']}. Versions: {told}."), ""]
    worse = not_better(report)
    as_good = "Not better than a peer: " + ("; ".join(worse) if worse else "no row of this run") + "."
    parts += [table(headings, rows), "", wrapped(as_good)]
    notes = [(row.name, row.settings["note"]) for row in report.rows if row.settings["note"]]
    notes += [(short_list(names), f"not run: {reason}") for reason, names in reasons_not_run(report).items()]
    if notes:
        parts += ["", table(("row", "note"), notes)]
    return "\n".join(parts)


def short_list(names: Sequence[str]) -> str:
    """Returns the names of rows (row/peer); if there are more than three, their number and peers."""
    if len(names) <= 3:
        return ", ".join(names)
    peers = dict.fromkeys(name.split("/")[-1] for name in names)
    return f"{len(names)} rows of {', '.join(peers)}"


def is_better_when_less(row: Row) -> bool:
    """True for rows measured in seconds."""
    return row.figure.unit == "s"


def speed_ups(row: Row) -> dict[str, float]:
    """AdaptRT's speed-up over each peer."""
    ratios = {c.base: c.ratio for c in row.comparisons if c.measure == "ratio" and c.base is not None}
    return {base.split("/")[1]: 1 / r if is_better_when_less(row) else r for base, r in ratios.items()}


def best_ratio(row: Row | None) -> str:
    """Speed-up over the fastest peer."""
    ratios = {} if row is None else speed_ups(row)
    return f"{min(ratios.values()):.2f} x" if ratios else "-"


def peer_targets(row: Row | None) -> str:
    """Returns the target, and says if AdaptRT reached it against all peers that it applies to."""
    held = [] if row is None else [c for c in row.comparisons if c.holds is not None and c.base is not None]
    if not held:
        return ""
    worst = min(held, key=lambda result: result.ratio)
    assert worst.base is not None
    met = "met" if all(result.holds for result in held) else "**missed**"
    can_hold = worst.at_limit is None or worst.at_least is None or worst.at_limit >= worst.at_least
    allowed = "" if can_hold else f"; {worst.at_limit:.2f} x at the machine's limit"
    return f"≥ {worst.at_least:g} x {worst.base.split('/')[1]}: {met} ({worst.ratio:.2f} x{allowed})"


def limit_share(row: Row | None) -> str:
    """Share of the roofline."""
    shares = [] if row is None else [c.ratio for c in row.comparisons if c.measure == "roofline"]
    return f"{100 * shares[0]:.0f}%" if shares else "-"


def not_better(report: Report) -> list[str]:
    """Returns the rows in which a peer was at least as good."""
    return [
        f"{row.title} ({peer}, {ratio:.2f} x)"
        for row in report.rows
        if row.engine == OURS
        for peer, ratio in speed_ups(row).items()
        if ratio <= 1.0
    ]


def merged(reports: Sequence[Report]) -> Report:
    """Merges reports. A peer's row, row/peer, counts as a row of its own.

    Samples of a row in a later report replace those in an earlier one. A row's comparisons come from the latest report
    that has both rows.
    """
    result = reports[0]
    for later in reports[1:]:
        rows = {row.name: row for row in result.rows}
        again = {row.name for row in later.rows}
        for row in later.rows:
            before = rows[row.name].comparisons if row.name in rows else []
            kept = [comparison for comparison in before if comparison.base is not None and comparison.base not in again]
            rows[row.name] = replace(row, comparisons=[*row.comparisons, *kept])
        asked = again | {entry.name for entry in later.not_run}
        result = replace(
            result,
            rows=list(rows.values()),
            not_run=[entry for entry in result.not_run if entry.name not in asked] + later.not_run,
        )
    return result


def rounds_of(row: Row) -> int:
    """Number of rounds of the row's median."""
    return len({sample.round for sample in row.figure.used()})


def usual_rounds(report: Report) -> int:
    """The most common number of rounds."""
    return statistics.mode(map(rounds_of, report.rows)) if report.rows else report.run["repeats"]


def other_rounds(report: Report) -> str:
    """Lists rows with another number of rounds, and for peers' rows the peers."""
    usual = usual_rounds(report)
    unusual: dict[str, dict[int, list[str]]] = {}
    for row in report.rows:
        if rounds_of(row) != usual:
            unusual.setdefault(full_title(row), {}).setdefault(rounds_of(row), []).append(row.engine)
    told = [
        f"{title}: "
        + ", ".join(
            str(count) + (f" ({', '.join(names)})" if names[0] in PEERS else "") for count, names in counts.items()
        )
        for title, counts in unusual.items()
    ]
    return f"Rows with other numbers of rounds: {'; '.join(told)}." if told else ""


TABLES: dict[str, Callable[[Report], str]] = {"bench": bench_table, "peers": peers_table}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in TABLES:
        parser.add_argument(
            f"--{name}", type=Path, nargs="+", metavar="REPORT",
            help="samples of a row in a later report replace those in an earlier one",
        )  # fmt: skip
    parser.add_argument("page", type=Path)
    args = parser.parse_args(argv)
    page = args.page.read_text(encoding="utf-8")
    for name, make in TABLES.items():
        by_cpu: dict[str, list[Report]] = {}
        for report in map(load_report, getattr(args, name) or ()):
            by_cpu.setdefault(cpu_of(report), []).append(report)
        for cpu, reports in by_cpu.items():
            page = fill(page, f"{name} {cpu}", make(merged(reports)))
    args.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
