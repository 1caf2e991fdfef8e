"""Work in several threads."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from adaptrt._core import AdapterError
from adaptrt.common import parallel
from adaptrt.common.parallel import in_threads, num_part_threads, use_threads
from adaptrt.common.pauses import pause_by
from adaptrt.common.safetensors_stream import SafetensorsReader
from adaptrt.common.safetensors_stream.reader import PIECE_BYTES


def test_results_have_the_order_of_the_items() -> None:
    for count in (1, 2, 3, 8):
        with use_threads(count):
            assert in_threads(lambda item: item * item, range(101)) == [item * item for item in range(101)]
            assert in_threads(str, []) == []


def test_work_runs_in_as_many_threads_as_the_caller_allows() -> None:
    assert set(in_threads(lambda _: threading.get_ident(), range(9))) == {threading.get_ident()}
    meet = threading.Barrier(3, timeout=20)
    with use_threads(3):
        assert len(set(in_threads(lambda _: (meet.wait(), threading.get_ident())[1], range(3)))) == 3
    assert set(in_threads(lambda _: threading.get_ident(), range(9))) == {threading.get_ident()}


def test_half_of_the_cpus_work_but_at_most_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpus, expected in ((1, 1), (2, 1), (6, 3), (64, 8)):
        monkeypatch.setattr(parallel, "num_usable_cpus", lambda cpus=cpus: cpus)
        assert num_part_threads() == expected


def test_the_first_error_in_the_order_of_the_items_is_raised() -> None:
    def fail(item: int) -> None:
        raise ValueError(str(item))

    with use_threads(4), pytest.raises(ValueError, match=r"^0$"):
        in_threads(fail, range(40))


def test_threads_pause_as_their_caller_does(tmp_path: Path) -> None:
    content = np.arange(3 * PIECE_BYTES // 4, dtype=np.int32)
    header = b'{"x":{"dtype":"I32","shape":[%d],"data_offsets":[0,%d]}}' % (content.size, content.nbytes)
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + content.tobytes())
    pauses: list[int] = []
    pause_by(lambda: pauses.append(threading.get_ident()))
    try:
        with use_threads(2):
            reader = SafetensorsReader(file, AdapterError, in_memory=True)
    finally:
        pause_by(None)
    assert np.array_equal(reader.array("x"), content)
    assert len(pauses) == 4
    assert threading.get_ident() not in pauses
