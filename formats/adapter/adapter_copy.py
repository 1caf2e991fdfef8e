"""Copies of adapters in an engine directory, and the checksums that tell whether they are still what was copied."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import xxhash

from ..._core import AdapterError
from ...common.file_digest import add_file
from ..template_files import TEMPLATE_FILE, additional_templates
from .classifier_head import MODEL_CONFIG_FILE
from .one_version import config_and_weights, initial_files, one_version

TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
ADDED_TOKENS_FILE: Final = "added_tokens.json"
TOKENIZER_FILE: Final = "tokenizer.json"

# What is copied of an adapter: its config, its weights, and those that exist of the files that say how its texts are
# cut into tokens, how its chats are written and what its classes are called; and config and weights of the adapter as
# it was when its training began.
_OTHER_FILES: Final = (
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    ADDED_TOKENS_FILE,
    TOKENIZER_FILE,
    MODEL_CONFIG_FILE,
)


def copy_adapter(source: Path, destination: Path) -> str:
    """Copies an adapter's files into a new directory; returns the checksum of the copy.

    Raises AdapterError for files that are changed meanwhile.
    """
    destination.mkdir(parents=True)
    with one_version(source, adapter_files):
        for name in adapter_files(source):
            (destination / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, destination / name)
    return adapter_checksum(destination)


def adapter_checksum(directory: Path) -> str:
    """XXH3-128 of the names, sizes and bytes of an adapter's files. Raises OSError for one that cannot be read."""
    digest = xxhash.xxh3_128()
    for name in adapter_files(directory):
        path = directory / name
        digest.update(f"{name}:{path.stat().st_size}\n".encode())
        add_file(digest, path)
    return digest.hexdigest()


def adapter_files(directory: Path) -> list[str]:
    """Paths of an adapter's files that are copied along and make its checksum, relative to its directory.

    Raises AdapterError for a directory of chat templates that cannot be listed.
    """
    others = [name for name in _OTHER_FILES if (directory / name).is_file()]
    return [
        *config_and_weights(directory),
        *others,
        *additional_templates(directory, AdapterError),
        *initial_files(directory),
    ]
