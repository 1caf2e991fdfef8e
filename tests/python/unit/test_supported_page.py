"""docs/supported.md lists the entries of the code's tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adaptrt.formats.models.registry import FAMILIES, architectures_of

PAGE = Path(__file__).parents[3] / "docs" / "supported.md"


@pytest.fixture(scope="module")
def architectures() -> list[str]:
    """Returns the architectures of the page's tables, in order."""
    page = PAGE.read_text(encoding="utf-8")
    models = page[page.index("## Models") : page.index("### What models may have")]
    rows = [line.split("|")[1] for line in models.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def test_the_page_lists_every_architecture_once(architectures: list[str]) -> None:
    expected = [name for family in FAMILIES.values() for name in architectures_of(family)]
    assert sorted(architectures) == sorted(expected)
