"""Progress reports of tasks."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from adaptrt.common import progress
from adaptrt.common.terminal_progress import TerminalProgress


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_sizes_as_people_read_them(num_bytes: int, text: str) -> None:
    assert progress.format_bytes(num_bytes) == text


def test_a_stream_that_is_no_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    with progress.progress_on(stream).task("Packing", 4096) as advance:
        advance(1024)
        advance(3072)
    lines = stream.getvalue().splitlines()
    assert lines[:3] == ["Packing: 4.0 KiB", "Packing: 1.0 KiB of 4.0 KiB", "Packing: 4.0 KiB of 4.0 KiB"]
    assert lines[3].startswith("Packing: done in ")


def test_items_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    with progress.progress_on(stream).items("prompts", 3) as advance:
        advance(1)
        advance(2)
    assert stream.getvalue().splitlines()[:3] == ["prompts: 3", "prompts: 1 of 3", "prompts: 3 of 3"]
    terminal = io.StringIO()
    with TerminalProgress(Console(file=terminal, force_terminal=True)).items("prompts", 3) as advance:
        advance(3)
    assert "3/3" in terminal.getvalue()
    with progress.SilentProgress().items("prompts", 3) as advance:
        advance(3)


def test_lines_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 3600.0)
    with progress.progress_on(stream).task("Packing", 1000) as advance:
        for _ in range(1000):
            advance(1)
    assert len(stream.getvalue().splitlines()) == 2


def test_a_task_that_fails_is_not_done() -> None:
    stream = io.StringIO()
    with pytest.raises(RuntimeError), progress.progress_on(stream).task("Packing", 1000):
        raise RuntimeError
    assert "done" not in stream.getvalue()


def test_tasks_side_by_side_get_lines_with_their_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    with progress.progress_on(stream).phases(["First", "Second"]) as (first, second):
        first("Starting", 0.0)
        second("Starting", 0.0)
        first("Timing", 0.25)
        first("Done", 1.0)
    lines = stream.getvalue().splitlines()
    assert lines[:5] == ["First", "First: 0%, Starting", "Second", "Second: 0%, Starting", "First: 25%, Timing"]
    assert lines[5].startswith("First: done in ")
    assert len(lines) == 6


def test_tasks_side_by_side_are_bars_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with TerminalProgress(console).phases(["First", "Second"]) as (first, second):
        first("Timing [kernels]", 0.25)
        second("Done", 1.0)
    text = console.file.getvalue()
    for part in ("First", "25%", "Timing [kernels]", "Second", "100%", "Done"):
        assert part in text


def test_silence() -> None:
    with progress.SilentProgress().phases(["First", "Second"]) as reports:
        for report in reports:
            report("Timing", 0.5)
    with progress.SilentProgress().task("Packing", 10) as advance:
        advance(10)
