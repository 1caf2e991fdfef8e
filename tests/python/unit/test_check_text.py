""".ci/check_text.py: lengths of Markdown lines and of commit subjects."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / ".ci" / "check_text.py"
LONG = "word " * 20 + "word"  # 104 characters
LINK = "https://example.org/" + "x" * 100


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_text", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def commit(repository: Path, subject: str, date: str) -> None:
    environment = {**os.environ, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    command = ["git", "-c", "user.name=n", "-c", "user.email=n@example.org", "commit", "-q", "--allow-empty"]
    subprocess.run([*command, "-m", subject], cwd=repository, env=environment, check=True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param(LONG, [(1, 104)], id="paragraph"),
        pytest.param("short\n\nshort\n" + LONG, [(4, 104)], id="second line of a paragraph"),
        pytest.param("- " + LONG, [(1, 106)], id="list item"),
        pytest.param("- a\n\n  " + LONG, [(3, 106)], id="second paragraph of a list item"),
        pytest.param("w" * 60 + " " + "w" * 39, [], id="100 characters"),
        pytest.param("w" * 60 + " " + "w" * 40, [(1, 101)], id="101 characters"),
        pytest.param(LINK, [], id="link"),
        pytest.param("- " + LINK, [], id="link in a list item"),
        pytest.param("12. " + LINK, [], id="link in a numbered item"),
        pytest.param("see " + LINK, [(1, 124)], id="link that can go to a line of its own"),
        pytest.param("# " + LONG, [], id="heading"),
        pytest.param("| a |\n| --- |\n| " + LONG + " |", [], id="table"),
        pytest.param("```\n" + LONG + "\n```", [], id="fenced code"),
        pytest.param("a\n\n    " + LONG, [], id="indented code"),
        pytest.param("<!-- " + LONG + " -->", [], id="comment"),
    ],
)
def test_prose_lines_are_checked(check: ModuleType, text: str, found: list[tuple[int, int]]) -> None:
    assert list(check.long_lines(text)) == found


def test_problems_of_a_checkout_are_printed(
    check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "page.md").write_text("short\n")
    (tmp_path / "untracked.md").write_text(LONG)
    subprocess.run(["git", "add", "page.md"], cwd=tmp_path, check=True)
    commit(tmp_path, "s" * 90, "2026-11-01T00:00:00Z")
    commit(tmp_path, "s" * 72, "2026-12-01T00:00:00Z")
    assert check.main(tmp_path) == 0
    assert capsys.readouterr().out == ""

    (tmp_path / "page.md").write_text(f"short\n\n{LONG}\n")
    commit(tmp_path, "s" * 73, "2026-12-02T00:00:00Z")
    assert check.main(tmp_path) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first == "page.md:3: line has 104 characters; expected at most 100"
    assert second.startswith("commit ")
    assert second.endswith(": subject has 73 characters; expected at most 72")
