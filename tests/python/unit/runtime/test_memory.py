"""Available memory: the minimum of the machine and its control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptrt.runtime import memory

MACHINE = 1000 * 1024


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Roots of both versions' control groups, without any group."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       5000 kB\nMemFree:         100 kB\nMemAvailable:   1000 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own")
    paths = tmp_path / "second", tmp_path / "first"
    monkeypatch.setattr(memory, "_ROOTS", paths)
    return paths


def make_group(directory: Path, version: int, limit: str, usage: str, reclaimable: int | None = None) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    for name, content in zip(names, (limit, usage), strict=True):
        (directory / name).write_text(content + "\n")
    if reclaimable is not None:
        line = "total_inactive_file" if version == 1 else "inactive_file"
        (directory / "memory.stat").write_text(f"anon 17\n{line} {reclaimable}\nactive_file 90000\n")


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
def test_the_least_that_is_left_counts(groups: list[tuple[str, str]], expected: int, roots: tuple[Path, Path]) -> None:
    for version, (root, (limit, usage)) in enumerate(zip(roots, groups, strict=False)):
        make_group(root, 2 - version, limit, usage)
    assert memory.available_memory() == expected


@pytest.mark.parametrize("version", [1, 2])
def test_files_that_the_system_can_give_up_are_available(version: int, roots: tuple[Path, Path]) -> None:
    make_group(roots[2 - version], version, "700000", "500000", 150000)
    assert memory.available_memory() == 350000


@pytest.mark.parametrize(
    ("version", "lines"), [(1, "5:cpu:/elsewhere\n4:hugetlb,memory:/jobs/one\n0::/two\n"), (2, "0::/jobs/one\n")]
)
def test_the_groups_of_the_process_and_those_above_them_count(
    version: int, lines: str, roots: tuple[Path, Path], tmp_path: Path
) -> None:
    root = roots[2 - version]
    make_group(root / "jobs" / "one", version, "600000", "100000")
    make_group(root / "elsewhere", version, "5", "1")
    make_group(root / "two", version, "5", "1")
    (tmp_path / "own").write_text(lines)
    assert memory.available_memory() == 500000
    make_group(root / "jobs", version, "500000", "200000")
    assert memory.available_memory() == 300000
    make_group(root / "jobs" / "one", version, "600000", "500000")
    assert memory.available_memory() == 100000


def test_groups_that_are_not_seen_from_here_do_not_count(roots: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "own").write_text("4:memory:/docker/abc\n0::/../abc\n")
    make_group(roots[1], 1, "500000", "100000")
    assert memory.available_memory() == 400000
