"""Adapter files are written all or none, without leftovers."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from adaptrt.formats.adapter.dora import write_files


def test_a_full_disk_leaves_neither_files_nor_a_staging_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first").write_bytes(b"old")
    write = Path.write_bytes

    def write_until_full(path: Path, content: bytes) -> int:
        if path.name == "second":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_until_full)
    with pytest.raises(OSError, match="No space left"):
        write_files(tmp_path, {"first": b"new", "second": b"new"})
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    assert (tmp_path / "first").read_bytes() == b"old"


def test_written_files_stand_alone(tmp_path: Path) -> None:
    write_files(tmp_path / "made", {"first": b"1", "second": b"2"})
    assert {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()} == {"first": b"1", "second": b"2"}
