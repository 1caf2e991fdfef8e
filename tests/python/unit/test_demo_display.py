"""Commands of the demo are shown in lines that can be copied, and pictures as coloured text."""

from __future__ import annotations

import shlex

import pytest
from PIL import Image

from adaptrt.tools.demo_display import command_lines, half_blocks

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


def test_a_character_shows_two_pixels() -> None:
    picture = Image.new("RGB", (3, 4))
    pixels = [(x, y, 10 * y + x) for y in range(4) for x in range(3)]
    picture.putdata(pixels)
    text = half_blocks(picture, 3)
    assert text.plain == "▀▀▀\n▀▀▀"
    styles = [span.style for span in text.spans if not isinstance(span.style, str)]
    shown = [tuple(color.triplet for color in (style.color, style.bgcolor)) for style in styles]
    assert shown == [(pixels[6 * line + x], pixels[6 * line + 3 + x]) for line in range(2) for x in range(3)]
    assert half_blocks(picture.resize((40, 10)), 4).plain == "▀▀▀▀"
    assert half_blocks(picture.resize((100, 1)), 2).plain == "▀▀"
