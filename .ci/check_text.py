"""Checks the lengths of Markdown lines and of commit subjects: part of `make lint`.

    .ci/check_text.py

Prints every line that is too long and exits with status 1 if there is one. Commits are checked by their date, so that
the check works in shallow clones and needs no network.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
MAX_LINE = 100
MAX_SUBJECT = 72
# Subjects of earlier commits have other lengths.
FIRST_CHECKED_DATE = "2026-11-27T12:00:00Z"


def long_lines(text: str) -> Iterator[tuple[int, int]]:
    """Yields (line number from 1, length in characters) of each prose line that is longer than MAX_LINE and can be
    wrapped.

    Prose is what stands in paragraphs and list items. Tables, code blocks, headings and HTML are exempt, and so are
    lines without a space after column MAX_LINE or before it, such as a long link.
    """
    lines = text.split("\n")
    parser = MarkdownIt("commonmark").enable("table")
    in_paragraph = False
    for token in parser.parse(text):
        if token.type in ("paragraph_open", "paragraph_close"):
            in_paragraph = token.type == "paragraph_open"
        elif token.type == "inline" and in_paragraph and token.map is not None:
            for index in range(*token.map):
                line = lines[index]
                if len(line) > MAX_LINE and " " in _unquoted(line):
                    yield index + 1, len(line)


def _unquoted(line: str) -> str:
    """Returns the line without its indentation and without a list marker or quote mark."""
    content = line.strip()
    marker, space, rest = content.partition(" ")
    is_marker = marker in ("-", "*", "+", ">") or (marker[:-1].isdigit() and marker[-1] in ".)")
    return rest.strip() if space and is_marker else content


def markdown_files(root: Path) -> list[Path]:
    """Returns the Markdown files that git tracks below `root`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"], cwd=root, check=True, capture_output=True, text=True
    ).stdout
    return [root / name for name in listed.split("\0") if name and (root / name).exists()]


def long_subjects(root: Path) -> list[tuple[str, str]]:
    """Returns (short hash, subject) of commits since FIRST_CHECKED_DATE whose subject is longer than MAX_SUBJECT."""
    log = subprocess.run(
        ["git", "log", "--no-merges", f"--since={FIRST_CHECKED_DATE}", "--format=%h %s"],
        cwd=root, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    commits = [line.split(" ", 1) for line in log.splitlines()]
    return [(commit, subject) for commit, subject in commits if len(subject) > MAX_SUBJECT]


def main(root: Path = ROOT) -> int:
    """Prints what is too long in the checkout `root`; returns the exit status, 0 or 1."""
    problems = []
    for path in markdown_files(root):
        for number, length in long_lines(path.read_text(encoding="utf-8")):
            name = path.relative_to(root)
            problems.append(f"{name}:{number}: line has {length} characters; expected at most {MAX_LINE}")
    for commit, subject in long_subjects(root):
        problems.append(f"commit {commit}: subject has {len(subject)} characters; expected at most {MAX_SUBJECT}")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
