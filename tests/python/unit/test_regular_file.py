"""Only regular files are opened, and everything read from a file is one version."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from adaptrt.common.regular_file import file_version, open_regular, read_at, read_into, read_regular


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert read_regular(path, 3) == b"abc"
    place = bytearray(2)
    with open_regular(path) as file:
        read_into(file, path, memoryview(place))
    assert place == b"ab"


def test_a_larger_file_than_accepted_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcd")
    with pytest.raises(OSError, match="it has 4 bytes; expected at most 3"):
        read_regular(path, 3)


def test_fifos_devices_sockets_and_directories_are_refused_by_name(tmp_path: Path) -> None:
    fifo, unix_socket = tmp_path / "fifo", tmp_path / "socket"
    os.mkfifo(fifo)  # it has no writer, so a blocking open would never return
    kinds = {fifo: "a FIFO", Path("/dev/null"): "a device", tmp_path: "a directory", unix_socket: "a socket"}
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(unix_socket))
        for path, kind in kinds.items():
            with pytest.raises(OSError, match=f"it is {kind}; expected a regular file") as caught:
                read_regular(path, 10)
            assert caught.value.filename == str(path)


def test_a_fifo_in_place_of_a_file_that_was_looked_at_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    checked = path.stat()
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(Path, "stat", lambda self: checked)
    with pytest.raises(OSError, match="it is a FIFO; expected a regular file"):
        read_regular(path, 10)


@pytest.mark.parametrize("change", ["longer", "rewritten", "cut"])
def test_a_file_that_is_written_while_it_is_read_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcd")
    os.utime(path, ns=(0, 0))
    content = {"longer": b"abcde", "rewritten": b"efgh", "cut": b"a"}[change]
    with pytest.raises(OSError, match="it was changed while it was read"), open_regular(path):
        path.write_bytes(content)


def test_a_file_that_another_one_replaces_stays_what_was_opened(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_bytes(b"abcd")
    other.write_bytes(b"efgh")
    with open_regular(path) as file:
        other.replace(path)
        assert file.read() == b"abcd"


def test_an_end_before_the_size_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    with pytest.raises(OSError, match="it ends 1 bytes before its size"), open_regular(path) as file:
        read_into(file, path, memoryview(bytearray(4)))


def test_several_places_of_a_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    with open_regular(path) as file:
        for offset in (4, 0, 2):
            place = bytearray(2)
            read_at(file, path, memoryview(place), offset)
            assert place == b"abcdef"[offset : offset + 2]
        with pytest.raises(OSError, match="it ends 1 bytes before its size"):
            read_at(file, path, memoryview(bytearray(3)), 4)


def test_a_version_is_told_from_the_next(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_bytes(b"abcd")
    os.utime(path, ns=(0, 0))
    before = file_version(path)
    assert file_version(path) == before
    os.utime(path, ns=(0, 1))
    assert file_version(path) != before
    other.write_bytes(b"abcd")
    os.utime(other, ns=(0, 0))
    other.replace(path)
    assert file_version(path) != before
