"""Compares the base model that an adapter names with the model that an engine was built from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from ..._core import AdapterError
from ...common.json_fields import load_json_object
from ..adapter.recognise import CONFIG_FILE, MAX_CONFIG_BYTES
from .grammar import HUB_PREFIX, gguf_name, hub_name

_LOG: Final = logging.getLogger("adaptrt")


def warn_of_other_base(name: str, adapter: Path, source: str | None) -> None:
    """Logs a warning if an adapter was trained on another repository than the engine was built from.

    name: name of the adapter. adapter: its directory. source: EngineConfig.source. Raises like other_base_model().
    """
    base = other_base_model(adapter, source)
    if base is not None:
        _LOG.warning(
            "%s: adapter '%s' was trained on %s, and the engine was built from %s", adapter, name, base, source
        )


def other_base_model(adapter: Path, source: str | None) -> str | None:
    """Returns the repository that the adapter in a directory names as its base model, if it is not the engine's.

    source: EngineConfig.source. None is returned if either of the two is not a repository of the Hub, because paths
    cannot be compared. Raises AdapterError for a config that cannot be read.
    """
    text = "" if source is None else source.removeprefix(HUB_PREFIX)
    own = gguf_name(text) or hub_name(text)
    if own is None:
        return None
    named = load_json_object(adapter / CONFIG_FILE, AdapterError, max_bytes=MAX_CONFIG_BYTES).get(
        "base_model_name_or_path"
    )
    base = hub_name(named) if isinstance(named, str) else None
    if base is None or base.repository.lower() == own.repository.lower():
        return None
    return base.repository
