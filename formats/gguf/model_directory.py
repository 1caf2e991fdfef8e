"""A GGUF file as a Hugging Face model directory: its files are derived from the metadata, and the weights are links."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..template_files import TEMPLATE_FILE, TEMPLATE_SUFFIX, TEMPLATES_DIRECTORY
from .config_fields import config_fields, find_architecture
from .gguf_file import SUFFIX, GgufModel, part_paths
from .metadata import Metadata
from .pooling import read_pooling
from .tokenizer import read_tokenizer

_STEM: Final = "model"
_WHOLE: Final = _STEM + SUFFIX
_FIRST_PART: Final = re.compile(r"model-00001-of-\d{5}\.gguf")
_PART_NUMBER: Final = re.compile(r"-\d{5}-of-\d{5}$")
_TEMPLATE: Final = "tokenizer.chat_template"
_TEMPLATE_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SAMPLING: Final[Mapping[str, str]] = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Recommended sampling, with the fields of generation_config.json."""
_UNUSED_SAMPLING: Final = tuple(
    f"general.sampling.{name}"
    for name in (
        "sequence",
        "xtc_probability",
        "xtc_threshold",
        "penalty_last_n",
        "mirostat",
        "mirostat_tau",
        "mirostat_eta",
    )
)


def is_gguf_file(path: Path) -> bool:
    """True for a file with the suffix of GGUF files."""
    return path.suffix.lower() == SUFFIX and path.is_file()


def weight_links(directory: Path) -> list[str]:
    """Names of the GGUF files in a directory of write_model_directory(), the first part first; empty if there are none.

    Raises CheckpointError for a missing part.
    """
    if (directory / _WHOLE).exists():
        return [_WHOLE]
    firsts = sorted(path for path in directory.glob(f"{_STEM}-00001-of-*{SUFFIX}") if _FIRST_PART.fullmatch(path.name))
    return [path.name for path in part_paths(firsts[0])] if firsts else []


def gguf_file_of(directory: Path) -> Path | None:
    """Returns the GGUF file that a directory of write_model_directory() stands for; None for other directories."""
    for path in (directory / _WHOLE, *directory.glob(f"{_STEM}-00001-of-*{SUFFIX}")):
        if path.is_symlink() and path.readlink().is_absolute():
            return path.readlink()
    return None


def label_of(path: Path) -> str:
    """Returns the name of a GGUF file without its suffix and the number of its part."""
    return _PART_NUMBER.sub("", path.stem)


def write_model_directory(path: Path, directory: Path) -> None:
    """Fills an empty directory with the files of a Hugging Face model, and with links to a GGUF file and its parts.

    path: the file, or any part of a split one.

    Raises CheckpointError that lists every metadata key that is missing, unknown or not supported; OSError.
    """
    model = GgufModel(path.absolute())
    metadata = Metadata(model.metadata, str(model.path))
    architecture = find_architecture(model, metadata)
    config = config_fields(model, metadata, architecture)
    tokenizer = read_tokenizer(metadata, config["vocab_size"])
    templates = _read_templates(metadata)
    sampling = _read_sampling(metadata)
    pooling = read_pooling(model, metadata, architecture)
    metadata.finish()
    if tokenizer is not None:
        config = {
            **config,
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": list(tokenizer.end_ids),
            "pad_token_id": config.get("pad_token_id", tokenizer.pad_id),
        }
        _write_json(directory / "tokenizer.json", tokenizer.tokenizer)
        _write_json(directory / "tokenizer_config.json", tokenizer.config)
    if sampling:
        _write_json(directory / "generation_config.json", {"do_sample": True, **sampling})
    for name, text in templates.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    for place, content in pooling.items():
        (directory / place).parent.mkdir(exist_ok=True)
        _write_json(directory / place, content)
    _write_json(directory / "config.json", config)
    for number, part in enumerate(model.paths, start=1):
        count = len(model.paths)
        name = _WHOLE if count == 1 else f"{_STEM}-{number:05d}-of-{count:05d}{SUFFIX}"
        (directory / name).symlink_to(part)


def _read_templates(metadata: Metadata) -> dict[str, str]:
    """Texts of the chat templates, by the names of their files."""
    found = {}
    default = metadata.text(_TEMPLATE)
    if default is not None:
        found[TEMPLATE_FILE] = default
    for name in metadata.texts(f"{_TEMPLATE}s"):
        if not _TEMPLATE_NAME.fullmatch(name):
            metadata.problem(f"{_TEMPLATE}s", f"has the name {name!r}; expected letters, digits, '_' and '-'")
            continue
        text = metadata.text(f"{_TEMPLATE}.{name}")
        if text is not None:
            found[f"{TEMPLATES_DIRECTORY}/{name}{TEMPLATE_SUFFIX}"] = text
    return found


def _read_sampling(metadata: Metadata) -> dict[str, float]:
    metadata.ignore(_UNUSED_SAMPLING)
    return {
        field: metadata.number(key, positive=False) for key, field in _SAMPLING.items() if metadata.raw(key) is not None
    }


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
