"""Prefetch directories: arrays as numpy writes them, and invalid files."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaptrt import AdapterError
from adaptrt.formats.adapter.convert import CONFIG_FILE, WEIGHTS_FILE
from adaptrt.runtime import adapter_prefetch
from adaptrt.runtime.adapter_prefetch import prefetched_adapters

WEIGHTS, CONFIG = np.arange(12, dtype=np.float32).reshape(1, 2, 6), np.arange(8, dtype=np.int32).reshape(1, 2, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "7").mkdir()
    np.save(tmp_path / "7" / WEIGHTS_FILE, WEIGHTS)
    np.save(tmp_path / "7" / CONFIG_FILE, CONFIG)
    return tmp_path / "7"


def read(folder: Path) -> tuple[Any, Any]:
    ((found, adapter),) = prefetched_adapters(folder.parent)
    assert (found, adapter.task_id) == (folder, 7)
    return adapter.weights, adapter.config


def npy(array: np.ndarray[Any, Any], version: tuple[int, int] | None = None) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=version)
    return buffer.getvalue()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_arrays_are_read_as_numpy_reads_them(folder: Path, order: Any, version: tuple[int, int]) -> None:
    (folder / WEIGHTS_FILE).write_bytes(npy(np.array(WEIGHTS, order=order), version))
    weights, config = read(folder)
    assert np.array_equal(weights, WEIGHTS)
    assert np.array_equal(config, CONFIG)


def header(text: str, data: bytes = b"") -> bytes:
    line = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line + data


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "cannot be read as a NumPy array"),
        (b"x" * 200, "cannot be read as a NumPy array"),
        (npy(WEIGHTS)[:-1], r"float32 \[1, 2, 6\] needs 48 bytes after the header; the file has 47"),
        (npy(WEIGHTS) + b"x", "needs 48 bytes after the header; the file has 49"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}"), "needs 4000000000000 bytes"),
        (
            header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -4)}", b"x" * 16),
            r"\[-1, -4\]; expected numb",
        ),
        (header("{'descr': '|O', 'fortran_order': False, 'shape': (2,)}", b"x" * 16), "is object .*; expected numbers"),
        (header("{'descr': '<f4', 'shape': (2,)}"), "cannot be read as a NumPy array"),
        (header("(" * 100), "cannot be read as a NumPy array"),
        (b"\x93NUMPY\x03\x00" + b"x" * 100, r"format version \(3, 0\); expected one of \(1, 0\), \(2, 0\)"),
        (b"PK\x03\x04" + b"x" * 100, "is an archive of arrays; expected one array"),
    ],
)
def test_values_that_are_no_arrays_are_refused(folder: Path, content: bytes, complaint: str) -> None:
    (folder / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(AdapterError, match=f"{WEIGHTS_FILE}: .*{complaint}"):
        read(folder)


def test_a_fifo_is_refused_without_waiting(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()
    os.mkfifo(folder / WEIGHTS_FILE)
    with pytest.raises(AdapterError, match="it is a FIFO; expected a regular file"):
        read(folder)


def test_weights_and_config_are_of_one_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = adapter_prefetch._load_array

    def load_and_change(path: Path) -> Any:
        array = load(path)
        if path.name == WEIGHTS_FILE:
            np.save(path, array)
        return array

    monkeypatch.setattr(adapter_prefetch, "_load_array", load_and_change)
    with pytest.raises(AdapterError, match="changed while they were read"):
        read(folder)
