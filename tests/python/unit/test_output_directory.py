"""Directories that appear whole or not at all, also when two processes write the same one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adaptrt import AdaptrtError
from adaptrt.builder.output_directory import replaced_directory


def writing(target: Path, *, is_ours: bool = True):
    return replaced_directory(target, is_ours=lambda _: is_ours, kind="a directory of the test", error=AdaptrtError)


def test_the_last_of_two_that_write_one_directory_wins(tmp_path: Path, monkeypatch) -> None:
    target = tmp_path / "target"
    with writing(target) as first:
        (first / "first").touch()
        monkeypatch.setattr(os, "getpid", lambda: 0)  # another process
        with writing(target) as second:
            (second / "second").touch()
        assert [entry.name for entry in target.iterdir()] == ["second"]
        monkeypatch.undo()
    assert [entry.name for entry in target.iterdir()] == ["first"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["target"]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(FileNotFoundError), writing(target) as directory:
        (directory / "absent" / "new").touch()
    assert [entry.name for entry in target.iterdir()] == ["old"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["target"]


def test_through_a_link_the_directory_behind_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with writing(tmp_path / "link") as directory:
        (directory / "new").touch()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target" / "new").is_file()


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "theirs").touch()
    with (
        pytest.raises(AdaptrtError, match="neither empty nor a directory of the test"),
        writing(tmp_path, is_ours=False),
    ):
        pass
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("theirs", "loop"):
        with pytest.raises(AdaptrtError, match=f"{name}: exists and is not a directory"), writing(tmp_path / name):
            pass
