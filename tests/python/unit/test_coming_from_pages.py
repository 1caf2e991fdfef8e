"""Flags on the pages for users of other projects exist. test_documented_code.py runs the code on these pages."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from adaptrt.builder.cli import CommandParser
from adaptrt.builder.commands import engine_flags
from adaptrt.serve import command

ROOT = Path(__file__).parents[3]
PAGES = ("from-vllm", "from-llama-cpp")


def text_of(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    made = CommandParser(prog="adaptrt serve", description="")
    command.add_arguments(made)
    return made


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_known_flags_and_files(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = re.findall(r"^    adaptrt serve ((?:.*\\\n)*.*)", text_of(page), re.MULTILINE)
    assert found
    for line in found:
        args = parser().parse_args(shlex.split(line.replace("\\\n", " ")))
        assert command.options_of(args).lora_modules
        assert engine_flags.engine_options_of(args).max_seq_len == 256


@pytest.mark.parametrize("page", PAGES)
def test_flags_of_the_server_exist(page: str) -> None:
    """The first column of llama.cpp's table contains flags of llama-server."""
    known = {flag.replace("-", "_") for flag in parser()._option_string_actions}
    section = re.search(r"^\| (?:flag of `vllm serve`|llama-server) \|.*?\n\n", text_of(page), re.MULTILINE | re.DOTALL)
    assert section is not None
    rows = [row.strip("|").split(" | ") for row in section[0].splitlines()[2:] if row]
    columns = [cell for row in rows for cell in (row if page == "from-vllm" else row[1:])]
    flags = [flag for cell in columns for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9](?![\w*.-])", cell)]
    others = {"--jinja", "--tp_size"}  # flags of llama.cpp and of convert-checkpoint
    assert len(flags) > 10
    assert [flag for flag in flags if flag not in others and flag.replace("-", "_") not in known] == []
