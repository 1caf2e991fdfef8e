"""Adapters below the roots: names within limits, and nothing outside the roots."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptrt.serve import adapter_roots
from adaptrt.serve.adapter_roots import AdapterRoots


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def make(*directories: Path) -> None:
    for directory in directories:
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text("{}")


def test_adapters_are_listed_by_their_paths_from_a_root(root: Path, tmp_path: Path) -> None:
    make(root / "b", root / "a", root / "org" / "team" / "c", root / "b" / "checkpoint-5", tmp_path / "outside" / "x")
    make(root / "poet:0.5", root / "a\\b", tmp_path / "other" / "d")
    (root / "empty").mkdir()
    (root / "file").write_text("")
    (root / "near").symlink_to(root / "org" / "team" / "c")
    (root / "loop").symlink_to(root)
    (root / "far").symlink_to(tmp_path / "outside" / "x")
    (root / "elsewhere").symlink_to(tmp_path / "outside")
    listed = AdapterRoots([root, tmp_path / "other"]).names()
    assert listed.names == ("a", "b", "d", "near", "org/team/c")
    assert listed.is_complete
    assert all(AdapterRoots([root, tmp_path / "other"]).find(name) for name in listed.names)


def test_a_config_that_lies_elsewhere_is_not_listed(root: Path, tmp_path: Path) -> None:
    make(tmp_path / "outside", root / "a")
    (root / "b").mkdir()
    (root / "b" / "adapter_config.json").symlink_to(tmp_path / "outside" / "adapter_config.json")
    assert AdapterRoots([root]).names().names == ("a",)


def test_files_below_that_are_read_stay_within_the_roots(root: Path, tmp_path: Path) -> None:
    make(root / "a", root / "b")
    (tmp_path / "secret").write_text("")
    for name in ("a", "b"):
        (root / name / "additional_chat_templates").mkdir()
    (root / "b" / "additional_chat_templates" / "x.jinja").symlink_to(tmp_path / "secret")
    roots = AdapterRoots([root])
    assert (roots.find("a"), roots.confine("a")) == (root / "a", root / "a")
    assert (roots.find("b"), roots.confine("b")) == (None, None)


@pytest.mark.parametrize(("limit", "value"), [("MAX_LISTED", 3), ("MAX_VISITED", 5), ("MAX_DEPTH", 1)])
def test_a_list_has_bounds(root: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    make(*(root / "team" / f"{i}" for i in range(9)), root / "one")
    assert AdapterRoots([root]).names().is_complete
    monkeypatch.setattr(adapter_roots, limit, value)
    listed = AdapterRoots([root]).names()
    assert not listed.is_complete
    assert len(listed.names) <= 4


def test_a_directory_without_a_config_is_not_listed_to_find_an_adapter(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "many").mkdir()

    def refuse(_: Path) -> list[str]:
        raise AssertionError("it was listed")

    monkeypatch.setattr(adapter_roots, "_links", refuse)
    assert AdapterRoots([root]).find("many") is None
