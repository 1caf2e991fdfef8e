"""Loads models of transformers and adapters of PEFT in less time than their libraries alone."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

# PEFT compiles a template for the README.md of each adapter that it saves, which takes a third of the time.
peft.PeftModel.create_or_update_model_card = lambda *_: None
transformers.utils.logging.disable_progress_bar()

Stamps = tuple[tuple[str, int, int, int], ...]


def load(kind: Any, directory: Path, **settings: Any) -> Any:
    """Returns kind.from_pretrained(directory, **settings). settings: hashable.

    Models are loaded once and then copied, which takes a fifth of the time.
    """
    return copy.deepcopy(_loaded(kind, directory, _stamps(directory), **settings))


def load_adapter(model: Any, directory: Path) -> Any:
    """Puts the adapter of a directory on a model."""
    return peft.PeftModel.from_pretrained(model, directory, torch_dtype=torch.float32)


@functools.lru_cache(maxsize=8)
def _loaded(kind: Any, directory: Path, _: Stamps, **settings: Any) -> Any:
    return kind.from_pretrained(directory, **settings)


def _stamps(directory: Path) -> Stamps:
    """Returns what changes if a test writes a file of the directory again."""
    files = ((path.name, path.stat()) for path in sorted(directory.iterdir()))
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in files)
