"""GGUF files are read with their metadata and tensors, and damaged ones are refused by name."""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptrt import CheckpointError
from adaptrt.formats.gguf.gguf_file import GgufFile, GgufModel
from adaptrt.formats.gguf.header import parse_header

gguf = pytest.importorskip("gguf")

Q8_0 = 8


def written(path: Path, tensors: dict[str, np.ndarray[Any, Any]], keys: Mapping[str, int | str] | None = None) -> Path:
    """Writes a file with the package gguf; arrays of uint8 are blocks of Q8_0."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (keys or {}).items():
        writer.add_uint16(key, value) if isinstance(value, int) else writer.add_string(key, value)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("names", ["a", "ü"])
    writer.add_bool("yes", True)
    writer.add_float32("half", 0.5)
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if values.dtype == np.uint8 else None
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def some_tensors() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    weight = random.standard_normal((3, 64)).astype(np.float32)
    return {
        "plain": weight[:, :5].copy(),
        "half": weight[0].astype(np.float16),
        "blocks": gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0),
        "stacked": random.standard_normal((2, 3, 4)).astype(np.float32),
    }


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return written(tmp_path_factory.mktemp("gguf") / "a.gguf", some_tensors()).read_bytes()


def test_metadata_and_tensors_are_read(tmp_path: Path) -> None:
    tensors = some_tensors()
    file = GgufFile(written(tmp_path / "a.gguf", tensors, {"key": "value"}))
    metadata = file.header.metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["key"] == "value"
    assert metadata["names"] == ["a", "ü"]
    assert metadata["yes"] is True
    assert metadata["half"] == 0.5
    np.testing.assert_array_equal(metadata["numbers"], [1, 2, 3])
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {
        "plain": (3, 5),
        "half": (64,),
        "blocks": (3, 64),
        "stacked": (2, 3, 4),
    }
    np.testing.assert_array_equal(file.rows("plain", slice(1, 3)), tensors["plain"][1:])
    np.testing.assert_array_equal(file.rows("half", slice(0, 1))[0], tensors["half"])
    np.testing.assert_array_equal(file.rows("stacked", slice(0, 6)), tensors["stacked"].reshape(6, 4))
    expected = gguf.dequantize(tensors["blocks"], gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(file.rows("blocks", np.array([2, 0])), expected[[2, 0]])
    file.release()
    np.testing.assert_array_equal(file.rows("plain", slice(0, 3)), tensors["plain"])


def edited(content: bytes, at: int, form: str, value: int) -> bytes:
    return content[:at] + struct.pack(form, value) + content[at + struct.calcsize(form) :]


def after(content: bytes, text: str, skipped: int) -> int:
    return content.index(text.encode()) + len(text) + skipped


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: b"GGML" + c[4:], "begins with b'GGML'; expected b'GGUF'"),
        (lambda c: edited(c, 4, ">I", 3), "is big-endian; expected a little-endian file"),
        (lambda c: edited(c, 4, "<I", 4), "has GGUF version 4, a newer one; accepted: 2 and 3"),
        (lambda c: edited(c, 4, "<I", 1), "has GGUF version 1; accepted: 2 and 3"),
        (lambda c: edited(c, 8, "<Q", 2**60), f"declares {2**60} tensors, but only"),
        (lambda c: edited(c, 16, "<Q", 2**60), f"declares {2**60} metadata keys, but only"),
        (lambda c: edited(c, 24, "<Q", 2**40), "metadata key 0 has a name of 1099511627776 bytes"),
        (lambda c: edited(c, after(c, "yes", 0), "<I", 99), "metadata key 'yes' has a value of type 99"),
        (lambda c: edited(c, after(c, "yes", 4), "<B", 2), "metadata key 'yes' is a boolean of 2; expected 0 or 1"),
        (lambda c: edited(c, after(c, "numbers", 4), "<I", 9), "metadata key 'numbers' is an array of arrays"),
        (lambda c: edited(c, after(c, "numbers", 8), "<Q", 2**50), "values in metadata key 'numbers', but only"),
        (lambda c: edited(c, after(c, "names", 8), "<Q", 2**50), "strings in metadata key 'names', but only"),
        (lambda c: c.replace("ü".encode(), b"\xff\xff"), "metadata key 'names' has a string that is not UTF-8"),
        (lambda c: c.replace(b"\x03\0\0\0\0\0\0\0yes", b"\x04\0\0\0\0\0\0\0half")[:-1], "'half' occurs twice"),
        (lambda c: edited(c, after(c, "plain", 0), "<I", 5), "tensor 'plain' has 5 dimensions; expected 1 to 4"),
        (lambda c: edited(c, after(c, "plain", 4), "<Q", 0), "tensor 'plain' of type F32 is [3, 0]"),
        (lambda c: edited(c, after(c, "plain", 4), "<Q", 2**63), "but tensor 'plain' ends at byte"),
        (lambda c: edited(c, after(c, "plain", 20), "<I", 16), "tensor 'plain' is of type IQ2_XXS, which is not read"),
        (lambda c: edited(c, after(c, "plain", 20), "<I", 40), "is of type NVFP4"),
        (lambda c: edited(c, after(c, "plain", 20), "<I", 77), "is of type 77 (not known to this release)"),
        (lambda c: edited(c, after(c, "plain", 20), "<I", Q8_0), "of type Q8_0 is [3, 5]; expected rows of a multiple"),
        (lambda c: edited(c, after(c, "plain", 24), "<Q", 4), "tensor 'plain' is at offset 4; expected a multiple"),
        (lambda c: edited(c, after(c, "plain", 24), "<Q", 64), "tensors 'plain' and 'half' overlap"),
        (lambda c: c[:-64], "the file is cut off, download it again"),
        (lambda c: c[:200], "the file is cut off, download it again"),
    ],
)
def test_a_damaged_file_is_refused(content: bytes, damage: Any, message: str) -> None:
    damaged = damage(content)
    assert damaged != content
    with pytest.raises(CheckpointError, match=f"^a.gguf: .*{re.escape(message)}"):
        parse_header(damaged, "a.gguf")


def test_an_alignment_is_checked(tmp_path: Path) -> None:
    file = written(tmp_path / "a.gguf", some_tensors(), {"general.alignment": 24})
    with pytest.raises(CheckpointError, match=r"general\.alignment is 24; expected a power of two"):
        GgufFile(file)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    for name, problem in (("empty.gguf", "is empty"), ("absent.gguf", "cannot be read"), (".", "cannot be read")):
        with pytest.raises(CheckpointError, match=problem):
            GgufFile(tmp_path / name)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_header_crashes_the_reader(content: bytes, data: st.DataObject) -> None:
    header = bytearray(content[:500])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, len(header) - 9))
        header[at : at + 8] = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8)))
    damaged = bytes(header) + content[500:]
    end = data.draw(st.integers(0, len(damaged)))
    for case in (damaged, damaged[:end], content[:end]):
        with contextlib.suppress(CheckpointError):
            parsed = parse_header(case, "a.gguf")
            for tensor in parsed.tensors.values():
                assert tensor.offset + tensor.num_bytes <= len(case)


def split_into_two(directory: Path, **keys: int) -> list[Path]:
    tensors = some_tensors()
    names = list(tensors)
    parts = []
    for number in range(2):
        own = {name: tensors[name] for name in names[number::2]}
        facts = {"split.no": number, "split.count": 2, "split.tensors.count": len(names), **keys}
        parts.append(written(directory / f"m-{number + 1:05d}-of-00002.gguf", own, facts))
    return parts


@pytest.mark.parametrize("named", [0, 1])
def test_a_split_file_is_one_model(tmp_path: Path, named: int) -> None:
    parts = split_into_two(tmp_path)
    model = GgufModel(parts[named])
    assert model.paths == parts
    assert set(model.tensors) == set(some_tensors())
    for name, values in some_tensors().items():
        if values.dtype == np.float32:
            found = model.rows(name, slice(None))
            np.testing.assert_array_equal(found, values.reshape(found.shape))
    assert model.path_of("half") == parts[1]
    model.release()


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    parts = split_into_two(tmp_path)
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"is one of 2 parts, and m-00002-of-00002.gguf are missing; download"):
        GgufModel(parts[0])


def test_parts_must_belong_together(tmp_path: Path) -> None:
    parts = split_into_two(tmp_path)
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"m-00002.*split.no and split.count are \(0, 2\); expected \(1, 2\)"):
        GgufModel(parts[0])
    alone = parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"split\.count is 2; expected a name that ends with -00001-of-0000N"):
        GgufModel(alone)
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match=r"split\.tensors.count is 9, but the parts have 4 tensors"):
        GgufModel(split_into_two(tmp_path / "other", **{"split.tensors.count": 9})[0])
