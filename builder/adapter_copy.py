"""Copies of adapters in an engine directory, and the checksums that tell whether they are still what was copied."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import xxhash

from .adapter.classifier_head import MODEL_CONFIG_FILE
from .adapter.recognise import CONFIG_FILE, INITIAL_DIRECTORY, MLX_FILE, PICKLE_FILE, SAFETENSORS_FILE
from .file_digest import add_file

TEMPLATE_FILE: Final = "chat_template.jinja"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
TOKENIZER_FILE: Final = "tokenizer.json"

# What is copied of an adapter: its config, its weights, and those that exist of the files that say how its texts are
# cut into tokens, how its chats are written and what its classes are called; and config and weights of the adapter as
# it was when its training began.
_OTHER_FILES: Final = (
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_FILE,
    MODEL_CONFIG_FILE,
)


def copy_adapter(source: Path, destination: Path) -> str:
    """Copies an adapter's files into a new directory; returns the checksum of the copy."""
    destination.mkdir(parents=True)
    for name in _adapter_files(source):
        (destination / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, destination / name)
    return adapter_checksum(destination)


def adapter_checksum(directory: Path) -> str:
    """XXH3-128 of the names, sizes and bytes of an adapter's files. Raises OSError for one that cannot be read."""
    digest = xxhash.xxh3_128()
    for name in _adapter_files(directory):
        path = directory / name
        digest.update(f"{name}:{path.stat().st_size}\n".encode())
        add_file(digest, path)
    return digest.hexdigest()


def _adapter_files(directory: Path) -> list[str]:
    initial = directory / INITIAL_DIRECTORY
    return [
        *_weights_and_config(directory),
        *(name for name in _OTHER_FILES if (directory / name).is_file()),
        *(f"{INITIAL_DIRECTORY}/{name}" for name in (_weights_and_config(initial) if initial.is_dir() else ())),
    ]


def _weights_and_config(directory: Path) -> list[str]:
    own = [name for name in (SAFETENSORS_FILE, PICKLE_FILE) if (directory / name).is_file()][:1]
    return [CONFIG_FILE, *(own + [name for name in (MLX_FILE,) if (directory / name).is_file()] or [SAFETENSORS_FILE])]
