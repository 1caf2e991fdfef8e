"""docs/formats.md states what the code's tables have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adaptrt._core import lora_modules
from adaptrt.formats.checkpoint.activation import HIDDEN_ACTS
from adaptrt.formats.engine.engine_config import FORMAT_VERSIONS
from adaptrt.formats.engine.engine_file import FORMAT_VERSION
from adaptrt.formats.models.registry import FAMILIES, specimen
from adaptrt.formats.network.adapter_sites import AdaptedModules

PAGE = Path(__file__).parents[3] / "docs" / "formats.md"


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def row(page: str, first: str) -> str:
    """Returns the second cell of the table row that begins with `first`."""
    (cell,) = re.findall(rf"^\| {re.escape(first)} \| (.*?) \|$", page, re.MULTILINE)
    return cell


def test_every_activation_is_listed(page: str) -> None:
    assert re.findall(r"`(\w+)`", row(page, "`hidden_act`")) == list(HIDDEN_ACTS)


def test_the_versions_are_those_that_are_written(page: str) -> None:
    assert f"`version` = {FORMAT_VERSION} and" in page
    assert row(page, "`format_version`").startswith("1: native, 2: TensorRT, 3: CUDA;")
    assert FORMAT_VERSIONS == {"native": 1, "tensorrt": 2, "cuda": 3}


def test_the_modules_have_their_ids(page: str) -> None:
    listed = {int(number): name for number, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.MULTILINE)}
    modules = {info.id: info.name for info in lora_modules()}
    refused = {8, 24, 25}
    assert listed == {number: name for number, name in modules.items() if number not in refused}
    served = {name for family in FAMILIES.values() for name in AdaptedModules(specimen(family)).names}
    assert served.isdisjoint(modules[number] for number in refused)
