"""Directories appear complete or not at all, also if two processes write the same one."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import types
from pathlib import Path

import pytest

from adaptrt import AdaptrtError
from adaptrt.common.output_directory import replaced_directory


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


def test_foreign_files_stay(tmp_path: Path) -> None:
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


def names_in(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


KILLED = 9
CHANGES = ("os.rename", "os.rmdir", "os.remove", "shutil.rmtree", "ctypes.dlopen")


@pytest.mark.parametrize("step", range(8))
def test_a_process_that_is_killed_leaves_the_old_or_the_new(tmp_path: Path, step: int) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").touch()
    child = os.fork()
    if child == 0:
        # Ends the process without cleanup before the step-th call that renames or deletes.
        calls = iter(range(100))

        def kill_at(event: str, _: object) -> None:
            if (
                event in ("os.rename", "os.rmdir", "os.remove", "shutil.rmtree", "ctypes.dlopen")
                and next(calls) == step
            ):
                os._exit(KILLED)

        try:
            with writing(target) as directory:
                (directory / "new").touch()
                sys.addaudithook(kill_at)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, KILLED)
    assert names_in(target) in ({"old"}, {"new"})
    with writing(target) as directory:
        (directory / "newest").touch()
    assert names_in(target) == {"newest"}


def test_the_name_is_there_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    with writing(target) as directory:
        (directory / "old").touch()
    seen = []
    delete = shutil.rmtree

    def look_and_delete(path: Path, **options: bool) -> None:
        seen.append((names_in(target), names_in(path)))
        delete(path, **options)

    monkeypatch.setattr(shutil, "rmtree", look_and_delete)
    with writing(target) as directory:
        (directory / "new").touch()
    assert seen == [({"new"}, {"old"})]
    assert names_in(tmp_path) == {"target"}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_without_an_exchange_of_names_a_directory_is_replaced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    target = tmp_path / "target"
    for name in ("old", "new"):
        with writing(target) as directory:
            (directory / name).touch()
            monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: types.SimpleNamespace(renameat2=lambda *_: -1))
            monkeypatch.setattr(ctypes, "get_errno", lambda: number)
    assert names_in(target) == {"new"}
    assert names_in(tmp_path) == {"target"}


def test_errors_of_an_exchange_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    with writing(target) as directory:
        (directory / "old").touch()
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: types.SimpleNamespace(renameat2=lambda *_: -1))
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EIO)
    with pytest.raises(OSError, match="Input/output error") as raised, writing(target):
        pass
    assert raised.value.filename2 == str(target)
    assert names_in(target) == {"old"}
    assert names_in(tmp_path) == {"target"}
