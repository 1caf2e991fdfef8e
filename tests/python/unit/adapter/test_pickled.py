"""Pickled adapters: tensors that claim more bytes than the file has, and compressed files."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from adaptrt import AdapterError
from adaptrt.formats.adapter.pickled import read_pickle


def saved(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = tmp_path / "adapter_model.bin"
    torch.save(tensors, path)
    return path


def test_views_with_all_their_elements_are_read(tmp_path: Path) -> None:
    a = torch.arange(12.0).reshape(3, 4)
    read = read_pickle(saved(tmp_path, {"a": a, "tied": a, "turned": a.T.contiguous().T, "part": a[1:]}))
    assert {name: tensor.tolist() for name, tensor in read.items()} == {
        "a": a.tolist(), "tied": a.tolist(), "turned": a.tolist(), "part": a[1:].tolist(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (torch.ones(1).expand(1 << 40), r"\[1099511627776\] needs 4398046511104 bytes, but 4 are stored"),
        (torch.ones(1 << 10).as_strided((1 << 20, 1 << 10), (0, 1)), "needs 4294967296 bytes, but 4096 are stored"),
        (torch.ones(1 << 20, 1, device="meta"), "expected a dense one with values"),
        (torch.ones(3, 3).to_sparse(), "expected a dense one with values"),
    ],
    ids=["expanded", "strided", "meta", "sparse"],
)
def test_a_tensor_without_all_its_elements_is_refused(tmp_path: Path, tensor: torch.Tensor, complaint: str) -> None:
    with pytest.raises(AdapterError, match=complaint):
        read_pickle(saved(tmp_path, {"a": tensor}))


def test_many_tensors_of_the_same_bytes_are_refused(tmp_path: Path) -> None:
    a = torch.ones(1 << 16)
    path = saved(tmp_path, {f"a{number}": a for number in range(100)})
    with pytest.raises(AdapterError, match=rf"have {100 * 4 << 16} bytes, but the file {path.stat().st_size}"):
        read_pickle(path)


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.zeros(1 << 18)})
    packed = tmp_path / "packed.bin"
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as smaller:
        for entry in archive.infolist():
            smaller.writestr(entry.filename, archive.read(entry))
    assert packed.stat().st_size < 1 << 16
    with pytest.raises(AdapterError, match=rf"but the file {packed.stat().st_size}; expected a file as torch.save"):
        read_pickle(packed)


def test_the_format_without_an_archive_is_read(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.bin"
    torch.save({"a": torch.arange(6.0)}, path, _use_new_zipfile_serialization=False)
    assert np.array_equal(read_pickle(path)["a"], np.arange(6, dtype=np.float32))
