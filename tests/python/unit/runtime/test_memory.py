"""Memory that this process may still take: the least of what the machine and its control groups leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptrt.runtime import memory

MACHINE = 1000 * 1024


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], MACHINE),
        ([("max", "5")], MACHINE),
        ([("700000", "100000")], 600000),
        ([("9000000", "100000")], MACHINE),
        ([("9000000", "100000"), ("500", "200")], 300),
        ([("500", "600")], 0),
    ],
)
def test_the_least_that_is_left_counts(
    groups: list[tuple[str, str]], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       5000 kB\nMemFree:         100 kB\nMemAvailable:   1000 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    paths = [(tmp_path / f"limit{number}", tmp_path / f"usage{number}") for number in range(2)]
    monkeypatch.setattr(memory, "_CONTROL_GROUPS", tuple(paths))
    for pair, contents in zip(paths, groups, strict=False):
        for path, content in zip(pair, contents, strict=True):
            path.write_text(content + "\n")
    assert memory.available_memory() == expected
