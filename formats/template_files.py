"""Files with the chat templates of a model or an adapter, as transformers saves them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from .._core import AdaptrtError
from ..common.output_directory import holds_only

TEMPLATE_FILE: Final = "chat_template.jinja"
PROCESSOR_TEMPLATE_FILE: Final = "chat_template.json"
"""File in which older processors of vision-language models have {"chat_template": text}."""
TEMPLATES_DIRECTORY: Final = "additional_chat_templates"
"""Directory of named templates: NAME.jinja."""
TEMPLATE_SUFFIX: Final = ".jinja"
MAX_ADDITIONAL_TEMPLATES: Final = 64
_MAX_ENTRIES: Final = 1024
"""Maximum number of directory entries that are read."""


def additional_templates(directory: Path, error: type[AdaptrtError]) -> list[str]:
    """Returns the paths of the named templates of a model or an adapter, relative to its directory and sorted.

    Raises `error` if the directory of templates cannot be listed or has too many entries.
    """
    templates = directory / TEMPLATES_DIRECTORY
    if not templates.is_dir():
        return []
    names = []
    try:
        with os.scandir(templates) as entries:
            for number, entry in enumerate(entries):
                if number == _MAX_ENTRIES:
                    raise error(f"{templates}: has too many entries; expected at most {_MAX_ENTRIES}")
                if entry.name.endswith(TEMPLATE_SUFFIX) and entry.is_file():
                    names.append(f"{TEMPLATES_DIRECTORY}/{entry.name}")
    except OSError as reason:
        raise error(f"{templates}: cannot be listed: {reason.strerror}") from None
    if len(names) > MAX_ADDITIONAL_TEMPLATES:
        raise error(f"{templates}: has {len(names)} templates; expected at most {MAX_ADDITIONAL_TEMPLATES}")
    return sorted(names)


def holds_templates(directory: Path) -> bool:
    """True if a directory is one of named templates and holds nothing else."""
    is_plain = directory.name == TEMPLATES_DIRECTORY and directory.is_dir() and not directory.is_symlink()
    return is_plain and holds_only(directory, lambda name: name.endswith(TEMPLATE_SUFFIX))
