"""Commands of the demo are shown in lines that can be copied."""

from __future__ import annotations

import shlex

import pytest

from adaptrt.tools.demo_display import command_lines

WORDS = ["serve", "a model", "--port", "8000", "--lora-modules", "poet=/a", "--log-requests"]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (100, ["adaptrt serve 'a model' --port 8000 --lora-modules poet=/a --log-requests"]),
        (
            48,
            ["adaptrt serve 'a model' --port 8000 \\", "    --lora-modules poet=/a --log-requests"],
        ),
        (
            10,
            ["adaptrt serve 'a model' \\", "    --port 8000 \\", "    --lora-modules poet=/a \\", "    --log-requests"],
        ),
    ],
)
def test_a_command_is_broken_before_its_flags(width: int, lines: list[str]) -> None:
    assert command_lines("adaptrt", WORDS, width) == lines
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == ["adaptrt", *WORDS]


def test_a_line_is_as_wide_as_is_allowed() -> None:
    first = "adaptrt serve 'a model' --port 8000"
    assert command_lines("adaptrt", WORDS, len(f"{first} \\"))[0] == f"{first} \\"
    assert command_lines("adaptrt", WORDS, len(first) + 1)[0] == "adaptrt serve 'a model' \\"
