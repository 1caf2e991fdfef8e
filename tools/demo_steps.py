"""Steps that the parts of the demo share."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rich.console import Console

import adaptrt

from ..builder.cli import main as adaptrt_command
from .demo_display import command_lines

DTYPE: Final = "bfloat16"
BASE: Final = "(none)"
"""Name of the base model in tables."""


class DemoFailure(adaptrt.AdaptrtError):
    """A result of the demo is wrong."""


def run_adaptrt(console: Console, *arguments: object) -> None:
    """Prints an `adaptrt ...` command and runs it in this process."""
    words = [str(argument) for argument in arguments]
    for line in command_lines("$ adaptrt", words, console.width):
        console.print(line, style="dim", markup=False, soft_wrap=True)
    if adaptrt_command(words) != 0:
        raise DemoFailure(f"adaptrt {words[0]} failed")


def build_engine(console: Console, model: Path, engine: Path, **limits: int) -> Path:
    """Builds an engine for LoRA and DoRA adapters with `adaptrt build`; returns its directory."""
    flags = {
        "model_dir": model, "dtype": DTYPE, "output_dir": engine, "lora_plugin": "auto", "dora_plugin": "enable",
        **limits,
    }  # fmt: skip
    arguments = [text for name, value in flags.items() for text in (f"--{name}", value)]
    run_adaptrt(console, "build", *arguments)
    return engine
