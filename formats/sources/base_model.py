"""Compares the base model that an adapter names with the model that an engine was built from."""

from __future__ import annotations

from pathlib import Path

from ..._core import AdapterError
from ...common.json_fields import load_json_object
from ..adapter.recognise import CONFIG_FILE, MAX_CONFIG_BYTES
from .grammar import HUB_PREFIX, hub_name


def other_base_model(adapter: Path, source: str | None) -> str | None:
    """Returns the repository that the adapter in a directory names as its base model, if it is not the engine's.

    source: EngineConfig.source. None is returned if either of the two is not a repository of the Hub, because paths
    cannot be compared. Raises AdapterError for a config that cannot be read.
    """
    own = None if source is None else hub_name(source.removeprefix(HUB_PREFIX))
    if own is None:
        return None
    named = load_json_object(adapter / CONFIG_FILE, AdapterError, max_bytes=MAX_CONFIG_BYTES).get(
        "base_model_name_or_path"
    )
    base = hub_name(named) if isinstance(named, str) else None
    if base is None or base.repository.lower() == own.repository.lower():
        return None
    return base.repository
