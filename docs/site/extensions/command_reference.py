"""Sphinx directive `command-reference`: a section with the flags of every command, read from the commands' parsers."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Any, cast

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from adaptrt.builder.cli import COMMANDS, Command, CommandModule, make_parser


class CommandReference(SphinxDirective):
    """Takes no arguments."""

    def run(self) -> list[nodes.Node]:
        """Returns one section for each command."""
        return [self._section(command) for command in COMMANDS]

    def _section(self, command: Command) -> nodes.section:
        section = nodes.section(ids=[f"adaptrt-{command.name}"])
        section += nodes.title(text=f"adaptrt {command.name}")
        section += nodes.paragraph(text=f"{command.summary}.")
        for group in _parser(command)._action_groups:
            flags = [_flag(action) for action in group._group_actions if action.help != argparse.SUPPRESS]
            if flags:
                section += nodes.rubric(text=(group.title or "flags").capitalize())
                if group.description:
                    section += nodes.paragraph(text=group.description)
                section += nodes.definition_list("", *flags)
        self.state.document.note_implicit_target(section)
        return section


def _parser(command: Command) -> argparse.ArgumentParser:
    return make_parser(command, cast(CommandModule, importlib.import_module(command.module, "adaptrt.builder")))


def _flag(action: argparse.Action) -> nodes.definition_list_item:
    """One flag with its values and its help."""
    text = (action.help or "") % _values_of_help(action) if action.help else ""
    return nodes.definition_list_item(
        "",
        nodes.term("", "", nodes.literal("", ", ".join(_spellings(action)))),
        nodes.definition("", nodes.paragraph(text=text)),
    )


def _spellings(action: argparse.Action) -> Iterator[str]:
    formatter = argparse.HelpFormatter(prog="")
    if not action.option_strings:
        yield formatter._metavar_formatter(action, action.dest)(1)[0]
        return
    values = ""
    if action.nargs != 0:
        values = " " + formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
    for option in action.option_strings:
        yield option + values


def _values_of_help(action: argparse.Action) -> dict[str, Any]:
    """Values of the placeholders in a help text, such as %(default)s."""
    choices = None if action.choices is None else ", ".join(map(str, action.choices))
    return {**vars(action), "choices": choices}


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this when it loads the extension."""
    app.add_directive("command-reference", CommandReference)
    return {"parallel_read_safe": True}
