""".ci/check_package.py detects, without a build, a wheel that cannot be built."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = """
[build-system]
requires = ["scikit-build-core"]
build-backend = "scikit_build_core.build"
[project]
name = "example"
version = "1.0"
[tool.scikit-build.wheel.packages]
"example" = "source/example"
"example/room" = "room"
"""


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_package", ROOT / ".ci" / "check_package.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "CMakeLists.txt").write_text("")
    for folder in ("source/example", "room"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def test_a_project_that_can_be_built(check: ModuleType, project: Path) -> None:
    assert list(check.problems(project)) == []


def test_a_folder_of_another_name(check: ModuleType, project: Path) -> None:
    """scikit-build-core requires the last parts of both paths to be equal."""
    text = PROJECT.replace('"source/example"', '"source"')
    (project / "pyproject.toml").write_text(text)
    (problem,) = check.problems(project)
    assert "the wheel's metadata cannot be built" in problem
    assert "must match in the last component" in problem


def test_a_folder_that_does_not_exist(check: ModuleType, project: Path) -> None:
    shutil.rmtree(project / "room")
    assert list(check.problems(project)) == [
        "wheel.packages: the folder of example/room is 'room'; expected a folder that exists"
    ]


def test_a_version_that_cannot_be_read(check: ModuleType, project: Path) -> None:
    text = PROJECT.replace('version = "1.0"', 'dynamic = ["version"]')
    (project / "pyproject.toml").write_text(text)
    (problem,) = check.problems(project)
    assert "the wheel's metadata cannot be built" in problem
