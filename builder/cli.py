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
    usage: str = ""  # the arguments that must be given, for commands with dozens of flags; empty: argparse's usage
    dashes: bool = False  # True: help and errors write flags with dashes, as vLLM does, and not as TensorRT-LLM does


COMMANDS = (
    Command(
        "convert-checkpoint",
        ".commands.convert_checkpoint",
        "Convert a Hugging Face model directory to a checkpoint",
        usage="--model_dir MODEL --output_dir DIR [flags]",
    ),
    Command(
        "build",
        ".commands.build",
        "Compile a model or a checkpoint into an engine",
        usage="(--model_dir MODEL | --checkpoint_dir DIR) [flags]",
    ),
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
    Command(
        "serve",
        "..serve.command",
        "Serve a model or an engine, with adapters, over HTTP",
        usage="MODEL [flags]",
        dashes=True,
    ),
    Command(
        "create",
        "..serve.create_command",
        "Create a model on a running server from a Modelfile",
        dashes=True,
    ),
    Command("inspect", "..tools.inspect", "Describe a checkpoint, an engine or an adapter"),
    Command(
        "chat",
        "..tools.chat",
        "Chat with a model and its adapters in the terminal",
        usage="MODEL [--lora NAME] [flags]",
    ),
    Command("cache", ".commands.cache", "List or delete cached engines and downloads"),
    Command(
        "bench",
        "..tools.bench.command",
        "Measure an engine, compared with the machine's limits",
        usage="ENGINE [flags]",
    ),
    Command("prove", "..tools.prove", "Write an adapter's proof: log probs that servers check"),
    Command("replay", "..tools.replay", "Repeat the requests of a receipt and compare the bits"),
    Command("perplexity", "..tools.perplexity", "Measure and compare engines' perplexity on a text"),
)


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that accepts underscores or dashes in every long flag, and no abbreviations."""

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def write_dashes(self) -> None:
        """Writes all flags with dashes in help and errors. Parsing does not change."""
        for action in self._actions:
            action.option_strings = [_with_dashes(option) for option in action.option_strings]

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parses like ArgumentParser.parse_args, after converting each long flag to its declared spelling."""
        declared = {_with_dashes(flag): flag for flag in self._option_string_actions if flag.startswith("--")}
        arguments = list(sys.argv[1:] if args is None else args)
        for index, argument in enumerate(arguments):
            if argument == "--":
                break
            flag, equals, value = argument.partition("=")
            if flag.startswith("--"):
                arguments[index] = declared.get(_with_dashes(flag), flag) + equals + value
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
    return _run(module, parser, argv)


def make_parser(command: Command, module: CommandModule) -> CommandParser:
    """Returns the parser of a command in the table, whose module is imported."""
    parser = CommandParser(prog=f"adaptrt {command.name}", description=f"{command.summary}.")
    if command.usage:
        parser.usage = f"%(prog)s {command.usage}"
    module.add_arguments(parser)
    if command.dashes:
        parser.write_dashes()
    return parser


def _run(module: CommandModule, parser: CommandParser, argv: Sequence[str]) -> int:
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
            return _run(module, make_parser(command, module), arguments[1:])
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


def _with_dashes(flag: str) -> str:
    return flag.replace("_", "-")


def _help() -> str:
    width = max(len(command.name) for command in COMMANDS)
    lines = [
        "usage: adaptrt <command> [flags]",
        "",
        "Compile a language model once, and serve any mix of LoRA and DoRA adapters.",
        "",
        "commands:",
        *(f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS),
        "",
        "adaptrt <command> --help lists its flags. adaptrt --version shows the version.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
