"""The demo's images: pictures are drawn, and a vision-language model answers with several adapters in one batch."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

import adaptrt

from . import demo_scenes as scenes
from .demo_display import half_blocks, values_table
from .demo_steps import BASE, DemoFailure, build_engine

_LIMITS: Final = {
    "max_lora_rank": 8, "max_batch_size": 20, "max_input_len": 128, "max_seq_len": 256, "max_num_tokens": 1024,
}  # fmt: skip
_MAX_TOKENS: Final = 24
_COLUMNS: Final = 17
"""Width of a picture on a terminal."""

Answers = Mapping[tuple[scenes.Scene, str | None], str]
"""Texts by scene and by the name of the adapter; None: the base model."""


def show_images(console: Console, directory: Path, work: Path) -> None:
    """Asks about every picture with every adapter, in one batch, and shows the answers. Needs Pillow.

    directory: model/ and adapters/. work: the engine is built here. Raises DemoFailure for a wrong answer.
    """
    if importlib.util.find_spec("PIL") is None:
        console.print("Images are left out, because they need Pillow: pip install 'adaptrt[vision]'", markup=False)
        return
    begin = time.perf_counter()
    engine = build_engine(console, directory / "model", work / "seeing-engine", **_LIMITS)
    adapters: dict[str, Path] = {path.name: path for path in sorted((directory / "adapters").iterdir())}
    pictures = {scenes.SHOWN[name]: picture for name, picture in scenes.shown_pictures().items()}
    with adaptrt.LLM(engine) as llm:
        for name, path in adapters.items():
            llm.load_lora(name, path)
        console.print(f"Ready after {time.perf_counter() - begin:.1f} s.\n")
        answers = _ask(llm, pictures, [None, *adapters])
    if console.is_terminal:
        console.print(_gallery(pictures))
    console.print(_table(answers))
    _check(answers)
    console.print(f"All {len(answers)} answers are right.")


def _ask(llm: adaptrt.LLM, pictures: Mapping[scenes.Scene, Any], names: Sequence[str | None]) -> Answers:
    asked = [(scene, name) for name in names for scene in pictures]
    conversations = [_question(pictures[scene]) for scene, _ in asked]
    params = adaptrt.SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)
    found = llm.chat(conversations, params, lora=[name for _, name in asked])
    return {key: completion.text.strip() for key, completion in zip(asked, found, strict=True)}


def _table(answers: Answers) -> Table:
    columns: dict[str, dict[str, str]] = {}
    for (scene, name), text in answers.items():
        columns.setdefault(name or BASE, {})[str(scene)] = text
    title = f"{scenes.QUESTIONS[0]} (one batch of {len(answers)} images, each column has another adapter)"
    return values_table(title, columns, first="picture", justify="left")


def _gallery(pictures: Mapping[scenes.Scene, Any]) -> Table:
    """Returns the pictures in a row, with their names."""
    grid = Table.grid(padding=(0, 2))
    grid.add_row(*(half_blocks(picture, _COLUMNS) for picture in pictures.values()))
    grid.add_row(*map(str, pictures))
    return grid


def _question(picture: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": scenes.QUESTIONS[0]}]
    return [{"role": "user", "content": parts}]


def _check(answers: Answers) -> None:
    wrong = [
        f"{scene}: {name or BASE} answered {text!r}; expected {expected!r}"
        for (scene, name), text in answers.items()
        if text != (expected := scenes.answer(scene, name or "plain"))
    ]
    if wrong:
        raise DemoFailure("; ".join(wrong))
