"""Links between Markdown files lead somewhere, and docs/decisions/README.md lists every decision."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DECISIONS = ROOT / "docs" / "decisions"
FOLDERS = ("bench", "cpp", "deploy", "docs", "examples", "plugins")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
PAGES_OF_DECISIONS = sorted(page for page in DECISIONS.glob("*.md") if page.name != "README.md")


def prose_of(page: Path) -> str:
    """Returns a page without its code: no link and no heading is in it."""
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()#]", "", code[0]), text)


def anchors_of(page: Path) -> set[str]:
    """Returns the anchors of a page: its headings as GitHub names them, and the ids of its HTML."""
    text = prose_of(page)
    anchors = set(re.findall(r'<a id="([^"]+)"', text))
    for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchors.add(re.sub(r"[^\w\- ]", "", shown).replace(" ", "-"))
    return anchors


def broken_links(page: Path) -> list[str]:
    """Returns the links of a page to files or headings that do not exist."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        path, _, anchor = link.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert broken_links(page) == []


def test_missing_files_and_headings_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text('# One heading\n<a id="mark"></a>\n')
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#one-heading) [b](other.md#mark) [c](#here) [d](https://example.com/x)\n\n## Here\n"
        "[e](none.md) [f](other.md#two) [g](#there) `[h](none.md)`\n```\n[i](none.md)\n```\n"
    )
    assert broken_links(page) == ["none.md", "other.md#two", "#there"]


def test_index_lists_every_decision_once() -> None:
    index = (DECISIONS / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", index, flags=re.MULTILINE)
    assert sorted(listed) == [page.name for page in PAGES_OF_DECISIONS]


@pytest.mark.parametrize("page", PAGES_OF_DECISIONS, ids=lambda page: page.stem)
def test_decisions_have_their_three_headings(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings == ["Context", "Decision", "Consequences"]
