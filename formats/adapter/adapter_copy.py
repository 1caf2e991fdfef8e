"""Copies adapters into an engine directory, with checksums that show whether a copy has changed."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Final

import xxhash

from ..._core import AdapterError
from ...common.file_digest import Digest, add_file
from ..template_files import TEMPLATE_FILE, additional_templates
from .classifier_head import MODEL_CONFIG_FILE
from .new_embeddings import SAFETENSORS as EMBEDDINGS_FILE
from .one_version import config_and_weights, draft_files, initial_files, one_version
from .proof import PROOF_FILE
from .recognise import CONFIG_FILE, DRAFT_DIRECTORY, SAFETENSORS_FILE

TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
ADDED_TOKENS_FILE: Final = "added_tokens.json"
TOKENIZER_FILE: Final = "tokenizer.json"

# Files that are copied if they exist: tokenizer, chat template, config.json with the names of classes, and the proof.
# The config and weights of the adapter, of its initial adapter and of its draft adapter are copied as well.
_OTHER_FILES: Final = (
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    ADDED_TOKENS_FILE,
    TOKENIZER_FILE,
    MODEL_CONFIG_FILE,
    PROOF_FILE,
)

SENT_FILES: Final = (
    CONFIG_FILE,
    SAFETENSORS_FILE,
    EMBEDDINGS_FILE,
    *_OTHER_FILES,
    f"{DRAFT_DIRECTORY}/{CONFIG_FILE}",
    f"{DRAFT_DIRECTORY}/{SAFETENSORS_FILE}",
)
"""Names of the files that a client may send as an adapter."""


def copy_adapter(source: Path, destination: Path) -> str:
    """Copies an adapter's files into a new directory; returns the checksum of the copy.

    Raises AdapterError if the files change meanwhile.
    """
    destination.mkdir(parents=True)
    with one_version(source, adapter_files):
        for name in adapter_files(source):
            (destination / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, destination / name)
    return adapter_checksum(destination)


def adapter_checksum(directory: Path) -> str:
    """Returns the XXH3-128 of the names, sizes and bytes of an adapter's files.

    Raises OSError if one cannot be read.
    """
    checksum = xxhash.xxh3_128()
    _add_files(directory, checksum)
    return checksum.hexdigest()


def adapter_digests(directory: Path) -> tuple[str, str, int]:
    """Reads an adapter's files once. Returns their checksum, the SHA-256 of the same data in hex, and the size of the
    files in bytes.

    The SHA-256 identifies a version of an adapter; the checksum only finds changes, and is much faster.

    Raises OSError if a file cannot be read.
    """
    checksum, digest = xxhash.xxh3_128(), hashlib.sha256()
    num_bytes = _add_files(directory, checksum, digest)
    return checksum.hexdigest(), digest.hexdigest(), num_bytes


def _add_files(directory: Path, *digests: Digest) -> int:
    """Adds names, sizes and bytes of an adapter's files. Returns the number of bytes of the files."""
    num_bytes = 0
    for name in adapter_files(directory):
        path = directory / name
        size = path.stat().st_size
        for digest in digests:
            digest.update(f"{name}:{size}\n".encode())
        add_file(path, *digests)
        num_bytes += size
    return num_bytes


def adapter_files(directory: Path) -> list[str]:
    """Paths of the files that are copied and that the checksum covers, relative to the adapter's directory.

    Raises AdapterError if the directory of chat templates cannot be listed.
    """
    others = [name for name in _OTHER_FILES if (directory / name).is_file()]
    return [
        *config_and_weights(directory),
        *others,
        *additional_templates(directory, AdapterError),
        *initial_files(directory),
        *draft_files(directory),
    ]
