"""The `adaptrt` program: a table of commands, each imported only when it is called.

A command is a module with `add_arguments(parser)` and `run(args) -> int`. It raises AdaptrtError for a user's mistake.
The program then prints one line to stderr and exits with status 2. Any other exception is a defect and keeps its
traceback.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, Protocol, cast

from .._core import AdaptrtError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class CommandModule(Protocol):
    """Interface of a command's module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the command's flags."""

    def run(self, args: argparse.Namespace) -> int:
        """Does the work and returns the exit status."""


class Command(NamedTuple):
    """One row of the table of commands."""

    name: str
    module: str  # relative to this package
    summary: str


COMMANDS = (
    Command(
        "convert-checkpoint",
        ".commands.convert_checkpoint",
        "Convert a Hugging Face model directory to a checkpoint",
    ),
    Command("build", ".commands.build", "Compile a Hugging Face model or a checkpoint into an engine"),
    Command(
        "hf-lora-convert",
        "..tools.hf_lora_convert",
        "Convert a PEFT adapter to the tensors that requests carry",
    ),
    Command(
        "normalize-dora",
        "..tools.normalize_weights",
        "Normalise a DoRA adapter's magnitudes by its base model",
    ),
    Command("serve", "..serve.command", "Serve an engine and its adapters over HTTP"),
    Command("create", "..serve.create_command", "Create a model on a running server from a Modelfile"),
    Command("inspect", "..tools.inspect", "Describe a checkpoint, an engine or an adapter"),
    Command("chat", "..tools.chat", "Chat with a model and its adapters in the terminal"),
    Command("cache", ".commands.cache", "List or delete the engines that were built on first use"),
    Command("bench", "..tools.bench.command", "Measure an engine, compared with the machine's limits"),
    Command("prove", "..tools.prove", "Write the log probs that an adapter must give where it is served"),
    Command("replay", "..tools.replay", "Make the answers of a receipt again, and compare their bits"),
    Command("perplexity", "..tools.perplexity", "Measure and compare engines' perplexity on a text"),
)


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that accepts underscores or dashes in every long flag, and no abbreviations."""

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parses like ArgumentParser.parse_args, after converting each long flag to its declared spelling."""
        declared = {_spelling_free(flag): flag for flag in self._option_string_actions if flag.startswith("--")}
        arguments = list(sys.argv[1:] if args is None else args)
        for index, argument in enumerate(arguments):
            if argument == "--":
                break
            flag, equals, value = argument.partition("=")
            if flag.startswith("--"):
                arguments[index] = declared.get(_spelling_free(flag), flag) + equals + value
        return super().parse_args(arguments, namespace)

    def error(self, message: str) -> NoReturn:
        """Exits with one line that says what is wrong and where to find help."""
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(EXIT_USER_ERROR)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `adaptrt <command> ...` and returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return _report_user_errors(lambda: _dispatch(arguments))


def run_command(module: CommandModule, argv: Sequence[str], *, prog: str, description: str) -> int:
    """Parses a command's flags and runs it. `python -m adaptrt.tools.<tool>` calls it too."""
    parser = CommandParser(prog=prog, description=description)
    module.add_arguments(parser)
    args = parser.parse_args(argv)
    return _report_user_errors(lambda: module.run(args))


def _dispatch(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else EXIT_USER_ERROR
    if arguments[0] in ("-V", "--version"):
        from .._version import __version__

        print(f"adaptrt {__version__}")
        return 0
    for command in COMMANDS:
        if arguments[0].replace("_", "-") == command.name:
            module = cast(CommandModule, importlib.import_module(command.module, __package__))
            return run_command(module, arguments[1:], prog=f"adaptrt {command.name}", description=command.summary)
    names = ", ".join(command.name for command in COMMANDS)
    print(f"adaptrt: error: unknown command '{arguments[0]}'; commands: {names}", file=sys.stderr)
    return EXIT_USER_ERROR


def _report_user_errors(run: Callable[[], int]) -> int:
    _print_any_name()
    try:
        status = run()
        sys.stdout.flush()
        return status
    except AdaptrtError as error:
        print(f"adaptrt: error: {_printable(str(error))}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:
        # The reader of the pipe, such as head, has exited. Without this, Python fails again when it flushes stdout at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_USER_ERROR
    except OSError as error:
        # The user can fix a full disk, or a file that cannot be read or written. An OSError without a file name is a
        # defect.
        if error.filename is None:
            raise
        print(f"adaptrt: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("adaptrt: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _print_any_name() -> None:
    """Escapes characters that stdout's encoding lacks: file names need not be text, and printing must not fail after
    the work."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _printable(text: str) -> str:
    """Escapes control characters: names of tensors and files are untrusted, and a terminal would obey them."""
    return "".join(
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in text
    )


def _spelling_free(flag: str) -> str:
    return flag.replace("_", "-")


def _help() -> str:
    width = max(len(command.name) for command in COMMANDS)
    lines = [
        "usage: adaptrt <command> [flags]",
        "",
        "Compile a language model once, serve any mix of LoRA and DoRA adapters over it.",
        "",
        "commands:",
        *(f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS),
        "",
        "Run adaptrt <command> --help for a command's flags, adaptrt --version for the version.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
