"""Copies of adapters in an engine directory, and the checksums that tell whether they are still what was copied."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import xxhash

from .adapter.peft_config import CONFIG_FILE
from .file_digest import add_file

TEMPLATE_FILE: Final = "chat_template.jinja"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"

# What is copied of a PEFT adapter: its config, the first that exists of the two kinds of weights, and those that exist
# of the files that say how its chats are written.
_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
_CHAT_FILES: Final = (TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE)


def copy_adapter(source: Path, destination: Path) -> str:
    """Copies a PEFT adapter's files into a new directory; returns the checksum of the copy."""
    destination.mkdir(parents=True)
    for name in _adapter_files(source):
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
    weights = next((name for name in _WEIGHTS if (directory / name).is_file()), _WEIGHTS[0])
    return [CONFIG_FILE, weights, *(name for name in _CHAT_FILES if (directory / name).is_file())]
