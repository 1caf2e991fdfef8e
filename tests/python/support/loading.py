"""Loads models of transformers and adapters of PEFT in less time than their libraries alone."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
import xxhash

# PEFT compiles a template for the README.md of each adapter that it saves, which takes a third of the time.
peft.PeftModel.create_or_update_model_card = lambda *_: None
transformers.utils.logging.disable_progress_bar()

_KEPT_ADAPTERS = 32
_saved: dict[tuple[bytes, bytes], Any] = {}
"""The models that save_adapted() saved last, by the contents of the model and of the adapter."""


def load(kind: Any, directory: Path, **settings: Any) -> Any:
    """Returns kind.from_pretrained(directory, **settings). settings: hashable.

    Models are loaded once and then copied, which takes a fifth of the time.
    """
    return copy.deepcopy(_loaded(kind, directory, contents(directory), **settings))


def load_adapter(model: Any, directory: Path) -> Any:
    """Puts the adapter of a directory on a model."""
    return peft.PeftModel.from_pretrained(model, directory, torch_dtype=torch.float32)


def save_adapted(adapted: Any, model_directory: Path, directory: Path) -> Path:
    """Saves the adapter of a model with an adapter, and keeps the model for find_adapted()."""
    adapted.save_pretrained(directory)
    _saved[contents(model_directory), contents(directory)] = adapted.eval()
    if len(_saved) > _KEPT_ADAPTERS:
        del _saved[next(iter(_saved))]
    return directory


def find_adapted(model_directory: Path, directory: Path) -> Any | None:
    """Returns a model with an adapter if save_adapted() saved it with the contents of these directories.

    Putting an adapter on a model takes longer than loading the model.
    """
    return _saved.get((contents(model_directory), contents(directory)))


def contents(directory: Path) -> bytes:
    """Returns a digest of the files of a directory: a test may write them again."""
    digest = xxhash.xxh3_128()
    for path in sorted(directory.iterdir()):
        if path.is_file():
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.digest()


@functools.lru_cache(maxsize=8)
def _loaded(kind: Any, directory: Path, _: bytes, **settings: Any) -> Any:
    return kind.from_pretrained(directory, **settings)
