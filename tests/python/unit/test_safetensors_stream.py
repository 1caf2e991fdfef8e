"""Streamed safetensors files against the safetensors library, and with every kind of damage."""

from __future__ import annotations

import io
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from adaptrt import _core
from adaptrt.common.pauses import pause_by
from adaptrt.common.regular_file import read_at
from adaptrt.common.safetensors_stream import SafetensorsReader, SafetensorsWriter, TensorSpec, reader

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
FLOAT16 = np.dtype(np.float16)

HYPOTHESIS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def arrays(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.default_rng(seed)
    return {
        "matrix": generator.normal(size=(5, 7)).astype(BFLOAT16),
        "empty": np.zeros((0, 3), FLOAT32),
        "vector": generator.normal(size=11).astype(FLOAT32),
        "scalar": np.array(3, np.int64),
        "half": generator.normal(size=(2, 3, 5)).astype(FLOAT16),
    }


def write(path: Path, tensors: dict[str, np.ndarray[Any, Any]], **options: Any) -> Path:
    specs = [TensorSpec(name, array.dtype, array.shape) for name, array in tensors.items()]
    with SafetensorsWriter(path, specs, **options) as writer:
        for name, array in tensors.items():
            for start in range(0, array.size, 3):
                writer.write(name, array.reshape(-1)[start : start + 3])
    return path


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_tensors_written_in_pieces_are_read_whole(tmp_path: Path, alignment: int) -> None:
    tensors = arrays()
    path = write(tmp_path / "a.safetensors", tensors, metadata={"key": "välue"}, alignment=alignment)
    reader = SafetensorsReader(path)
    assert dict(reader.metadata) == {"key": "välue"}
    assert list(reader.specs) == list(tensors)
    for name, array in tensors.items():
        assert reader.array(name).dtype == array.dtype
        assert reader.array(name).shape == array.shape
        assert reader.array(name).tobytes() == array.tobytes()
        assert reader.offset(name) % alignment == 0


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = arrays()
    path = write(tmp_path / "a.safetensors", tensors, metadata={"key": "value"}, alignment=64)
    theirs = safetensors.numpy.load_file(path)
    for name, array in tensors.items():
        np.testing.assert_array_equal(theirs[name], array)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"key": "value"}


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    tensors = arrays()
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file(tensors, path)
    reader = SafetensorsReader(path)
    assert set(reader.specs) == set(tensors)
    for name, array in tensors.items():
        assert reader.array(name).tobytes() == array.tobytes()


def test_arrays_are_read_only_and_outlive_the_reader(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", arrays())
    array = SafetensorsReader(path).array("vector")
    assert not array.flags.writeable
    np.testing.assert_array_equal(array, arrays()["vector"])


@pytest.mark.parametrize("step", [1, 2, 7, None])
@pytest.mark.parametrize(("first", "last"), [(0, 5), (1, 4), (2, 2)])
def test_rows_in_pieces_are_the_rows(tmp_path: Path, step: int | None, first: int, last: int) -> None:
    tensors = arrays()
    reader = SafetensorsReader(write(tmp_path / "a.safetensors", tensors))
    pieces = [piece.copy() for piece in reader.rows("matrix", first, last, step=step)]
    assert all(len(piece) == (step or 5) for piece in pieces[:-1])
    np.testing.assert_array_equal(np.concatenate([np.zeros((0, 7), BFLOAT16), *pieces]), tensors["matrix"][first:last])


def test_an_unknown_tensor_is_named_with_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", arrays())
    with pytest.raises(_core.EngineError, match=r"a\.safetensors: has no tensor 'nothing'"):
        SafetensorsReader(path, _core.EngineError).array("nothing")


def test_a_missing_file_is_the_error_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(_core.AdapterError, match=r"gone\.safetensors: cannot be read: No such file"):
        SafetensorsReader(tmp_path / "gone.safetensors", _core.AdapterError)


# ---- the writer refuses data that differ from the announced file


def test_an_incomplete_file_does_not_appear(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"before")
    spec = TensorSpec("a", FLOAT32, (4,))
    with pytest.raises(ValueError, match="'a' is not complete"), SafetensorsWriter(path, [spec]) as writer:
        writer.write("a", np.zeros(3, np.float32))
    with pytest.raises(RuntimeError, match="stop"), SafetensorsWriter(path, [spec]) as writer:
        raise RuntimeError("stop")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "piece", "complaint"),
    [
        ("b", np.zeros(1, np.float32), "'b' was written where 'a' is due"),
        ("a", np.zeros(5, np.float32), "'a' holds 16 bytes; more were written"),
        ("a", np.zeros(2, np.float64), "'a' is float32; a piece of it is float64"),
    ],
)
def test_a_wrong_piece_is_refused(tmp_path: Path, name: str, piece: np.ndarray[Any, Any], complaint: str) -> None:
    specs = [TensorSpec("a", FLOAT32, (4,)), TensorSpec("b", FLOAT32, (1,))]
    with (
        pytest.raises(ValueError, match=complaint),
        SafetensorsWriter(tmp_path / "a.safetensors", specs) as writer,
    ):
        writer.write(name, piece)


@pytest.mark.parametrize("name", ["", "__metadata__", "__padding__.0", "twice"])
def test_names_that_the_format_cannot_hold_are_refused(tmp_path: Path, name: str) -> None:
    specs = [TensorSpec("twice", FLOAT32, (1,)), TensorSpec(name, FLOAT32, (1,))]
    with pytest.raises(ValueError, match="empty, repeated or reserved"):
        SafetensorsWriter(tmp_path / "a.safetensors", specs)
    assert list(tmp_path.iterdir()) == []


def test_raw_bytes_count_as_the_tensors_bytes(tmp_path: Path) -> None:
    values = np.arange(4, dtype=np.float32)
    with SafetensorsWriter(tmp_path / "a.safetensors", [TensorSpec("a", FLOAT32, (4,))]) as writer:
        writer.write("a", values[:1].tobytes())
        writer.write("a", memoryview(values[1:2]))
        writer.write("a", values[2:].view(np.uint8))
    np.testing.assert_array_equal(SafetensorsReader(tmp_path / "a.safetensors").array("a"), values)


# ---- damaged files


def file_of(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "has 0 bytes"),
        (b"1234567", "has 7 bytes"),
        (file_of({}, length=3), "declares a header of 3 bytes; a file of 10 bytes can have at most 2"),
        (file_of({}, length=(1 << 64) - 1), "declares a header of 18446744073709551615 bytes"),
        (file_of(b"\xff\xfe"), "not UTF-8"),
        (file_of(b" {}"), "does not begin with"),
        (file_of(b"{"), "not JSON"),
        (file_of(b"{" * 90_000), "not JSON"),
        (file_of(b'{"a":' + b"[" * 90_000 + b"]" * 90_000 + b"}"), "not JSON"),
        (file_of(b'{"a":1,"a":1}'), "'a' occurs more than once"),
        (file_of(b'{"__metadata__":{"a":1}}'), "expected an object of strings"),
        (file_of({"__metadata__": []}), "expected an object of strings"),
        (file_of({"a": 3}), "tensor 'a' is 3; expected dtype, shape and data_offsets"),
        (file_of({"a": {**entry(), "more": 1}}, bytes(4)), "expected dtype, shape and data_offsets"),
        (file_of({"": entry()}, bytes(4)), '"" is not a valid tensor name'),
        (file_of({"\ud800": entry()}, bytes(4)), r"a string has \\ud800, half of a character"),
        (file_of({"a": entry(dtype="F31")}, bytes(4)), "tensor 'a' has dtype \"F31\"; accepted: BOOL"),
        (file_of({"a": entry(dtype=["F32"])}, bytes(4)), "has dtype"),
        (file_of({"a": entry(shape=[-1])}, bytes(4)), "has shape"),
        (file_of({"a": entry(shape=[True])}, bytes(4)), "has shape"),
        (file_of({"a": entry(shape=[1.0])}, bytes(4)), "has shape"),
        (file_of({"a": entry(shape=[1 << 63])}, bytes(4)), "has shape"),
        (file_of({"a": entry(shape=[1] * 65)}, bytes(4)), "has shape"),
        (file_of({"a": entry(shape=[1 << 62] * 64)}, bytes(4)), "needs"),
        (file_of({"a": entry(offsets=[0])}, bytes(4)), "expected \\[begin, end\\]"),
        (file_of({"a": entry(offsets=[4, 0])}, bytes(4)), "data_offsets are \\[4, 0\\]"),
        (file_of({"a": entry(offsets=[0, 8])}, bytes(8)), "needs 4 bytes"),
        (file_of({"a": entry()}, bytes(3)), "take 4 bytes, but the file holds 3"),
        (file_of({"a": entry()}, bytes(5)), "take 4 bytes, but the file holds 5"),
        (file_of({"a": entry(offsets=[4, 8])}, bytes(8)), "begins at byte 4 of the data, where 0"),
        (file_of({"a": entry(), "b": entry()}, bytes(4)), "begins at byte 0 of the data, where 4"),
        (file_of({"a": entry(), "b": entry(shape=[2], offsets=[2, 10])}, bytes(10)), "begins at byte 2"),
        (file_of({"a": entry(shape=[1 << 40], offsets=[0, 1 << 42])}), "take 4398046511104 bytes"),
    ],
)
def test_damage_is_named_and_costs_no_memory(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(_core.CheckpointError, match=complaint) as caught:
            SafetensorsReader(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "damaged.safetensors" in str(caught.value)
    assert peak < 100 * len(content) + (1 << 20)


def test_everything_that_is_wrong_is_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(file_of({"a": entry(dtype="X"), "b": entry(shape="?"), "c": 1}))
    with pytest.raises(_core.CheckpointError) as caught:
        SafetensorsReader(path)
    assert all(f"tensor '{name}'" in str(caught.value) for name in "abc")


def accepted_by_the_library(content: bytes) -> bool:
    try:
        safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return False
    return True


def check_against_the_library(path: Path, content: bytes) -> None:
    """Checks that damage raises CheckpointError, or that the library reads the same bytes as we do."""
    path.write_bytes(content)
    try:
        reader = SafetensorsReader(path)
    except _core.CheckpointError:
        return
    theirs = dict(safetensors.deserialize(content))
    assert set(theirs) == set(reader.specs)
    for name in reader.specs:
        assert reader.array(name).tobytes() == bytes(theirs[name]["data"])


@HYPOTHESIS
@given(data=st.data())
def test_flipped_and_cut_bytes(tmp_path: Path, data: st.DataObject) -> None:
    path = write(tmp_path / "a.safetensors", arrays(), metadata={"k": "v"})
    content = bytearray(path.read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    check_against_the_library(path, bytes(content[: data.draw(st.integers(0, len(content)))]))
    check_against_the_library(path, bytes(content))


sizes = st.one_of(st.integers(0, 12), st.sampled_from([-1, 1 << 31, 1 << 62, (1 << 64) - 1, 1 << 64]), st.floats())
entries = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "U8", "F64", "F8_E4M3", "C64", "I4", "", 7, None]),
            "shape": st.one_of(st.lists(sizes, max_size=3), sizes),
            "data_offsets": st.one_of(st.lists(sizes, max_size=3), sizes),
        }
    ),
    st.builds(
        lambda begin, count: entry("U8", [count], [begin, begin + count]),
        st.integers(0, 6),
        st.integers(0, 6),
    ),
)
headers = st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), entries, max_size=4)


@HYPOTHESIS
@given(header=headers, num_bytes=st.integers(0, 12))
@example(header={"a": entry("U8", [4], [0, 4]), "b": entry("U8", [0], [4, 4])}, num_bytes=4)
@example(header={"b": entry("U8", [0], [0, 0]), "a": entry("U8", [4], [0, 4])}, num_bytes=4)
def test_made_up_headers(tmp_path: Path, header: dict[str, object], num_bytes: int) -> None:
    check_against_the_library(tmp_path / "a.safetensors", file_of(header, bytes(range(num_bytes))))


@HYPOTHESIS
@given(
    tensors=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: not name.startswith("__")),
        st.builds(
            lambda dtype, shape, seed: np.frombuffer(
                np.random.default_rng(seed).bytes(int(np.prod(shape)) * dtype.itemsize), dtype
            ).reshape(shape),
            st.sampled_from([BFLOAT16, FLOAT16, FLOAT32, np.dtype(np.uint8), np.dtype(np.int64)]),
            st.lists(st.integers(0, 5), max_size=3).map(tuple),
            st.integers(0, 1000),
        ),
        max_size=5,
    ),
    alignment=st.sampled_from([1, 2, 16, 64]),
)
def test_any_tensors_come_back(tmp_path: Path, tensors: dict[str, np.ndarray[Any, Any]], alignment: int) -> None:
    path = write(tmp_path / "a.safetensors", tensors, alignment=alignment)
    reader = SafetensorsReader(path)
    assert {name: array.tobytes() for name, array in tensors.items()} == {
        name: reader.array(name).tobytes() for name in reader.specs
    }
    assert accepted_by_the_library(path.read_bytes())


def test_a_file_that_is_read_into_memory_may_change_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    expected = np.arange(5000, dtype=np.float32)
    safetensors.numpy.save_file({"a": expected}, path)
    reader = SafetensorsReader(path, _core.AdapterError, in_memory=True)
    path.write_bytes(b"")  # with a mapping, the next read would end the process
    assert np.array_equal(np.concatenate(list(reader.rows("a"))), expected)
    reader.release()
    assert np.array_equal(reader.array("a"), expected)
    with pytest.raises(ValueError, match="read-only"):
        reader.array("a")[0] = 1


def test_a_file_that_changes_while_it_is_read_into_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(10, np.float32)}, path)
    os.utime(path, ns=(0, 0))

    def read_and_touch(file: io.FileIO, path: Path, place: memoryview, offset: int) -> None:
        read_at(file, path, place, offset)
        os.utime(path, ns=(0, 1))

    monkeypatch.setattr("adaptrt.common.safetensors_stream.reader.read_at", read_and_touch)
    with pytest.raises(_core.AdapterError, match=r"a\.safetensors: cannot be read: it was changed while it was read"):
        SafetensorsReader(path, _core.AdapterError, in_memory=True)


def test_a_file_is_read_into_memory_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(1000, dtype=np.float32)
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"a": values}, path)
    monkeypatch.setattr(reader, "PIECE_BYTES", 1024)
    pauses: list[int] = []
    pause_by(lambda: pauses.append(1))
    try:
        read = SafetensorsReader(path, in_memory=True)
    finally:
        pause_by(None)
    np.testing.assert_array_equal(read.array("a"), values)
    assert len(pauses) == -(-path.stat().st_size // 1024)
