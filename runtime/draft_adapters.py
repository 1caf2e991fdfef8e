"""Adapters with which a draft engine drafts for the adapters of requests.

An adapter may bring one in its directory `draft`. It then belongs to this version of the adapter. For other adapters,
the draft engine's directory may carry an adapter of the same name.
"""

from __future__ import annotations

from typing import Final

from .._core import AdapterError, LoraConfig
from ..formats.adapter.adapter_copy import adapter_files
from ..formats.adapter.convert import ConvertedAdapter
from ..formats.adapter.one_version import one_version
from ..formats.adapter.recognise import DRAFT_DIRECTORY
from ..formats.adapter.terms import AdapterTerms
from .adapter_store import AdapterStore
from .engine import LoadedEngine
from .lora_config import adapter_of_directory
from .named_adapter import NamedAdapter, check_unchanged

_FIRST_TASK_ID: Final = 1 << 62
"""Added to the task_id of a version: the draft engine's own adapters have the lower ids."""


class DraftAdapters:
    """The draft engine's adapters by the names of the adapters of requests. Thread-safe."""

    def __init__(self, engine: LoadedEngine, target: LoadedEngine, adapters: AdapterStore) -> None:
        """engine: the draft engine. target, adapters: the engine that it drafts for, and its adapters.

        Reads no adapter yet.
        """
        self._engine = engine
        self._target = target
        self._adapters = adapters
        self._carried = AdapterStore(engine)

    def reference(self, name: str) -> LoraConfig | None:
        """Returns a LoraConfig with only the task_id, for requests with the adapter or version `name`.

        None: the draft engine drafts without an adapter, for example for weighted sums. Raises AdapterError for an
        unknown name. Reads no files if the adapter is ready().
        """
        version = self._version_with_draft(name)
        if version is not None:
            return LoraConfig(task_id_of(version))
        carried = self._carried_name(name)
        return None if carried is None else self._carried.reference(carried)

    def load(self, name: str) -> LoraConfig | None:
        """Returns the same with weights, which it reads. Raises like AdapterStore.load."""
        version = self._version_with_draft(name)
        if version is not None:
            return self.read(version)
        carried = self._carried_name(name)
        return None if carried is None else self._carried.load(carried)

    def read(self, version: NamedAdapter) -> LoraConfig | None:
        """Reads the draft adapter of a version whose name may not be known yet. None: it has none.

        Raises AdapterError for one that the draft engine cannot use, EngineError if files have changed.
        """
        if not self._adapters.has_draft(version):
            return None
        directory = version.directory / DRAFT_DIRECTORY
        with one_version(version.directory, adapter_files):
            check_unchanged(version, self._target)
            if self._adapters.virtual_tokens_of(version) is not None:
                raise AdapterError(
                    f"{directory}: drafts after virtual tokens use no adapter; expected no {directory.name}"
                )
            converted = adapter_of_directory(directory, self._engine)
        _check(converted, version)
        return LoraConfig(task_id_of(version), converted.weights, converted.config)

    def _version_with_draft(self, name: str) -> NamedAdapter | None:
        found = self._adapters.find(name)
        return found if isinstance(found, NamedAdapter) and self._adapters.has_draft(found) else None

    def _carried_name(self, name: str) -> str | None:
        own = self._adapters.plain_name(name)
        return own if self._carried.knows(own) else None


def task_id_of(version: NamedAdapter) -> int:
    """Returns the draft engine's task_id for the draft adapter of a version."""
    return _FIRST_TASK_ID + version.task_id


def _check(converted: ConvertedAdapter, version: NamedAdapter) -> None:
    if converted.terms != AdapterTerms():
        raise AdapterError(
            f"{version.directory / DRAFT_DIRECTORY}: changes the vocabulary or the rotary positions; expected an "
            "adapter that does not, because the draft engine has those of its model"
        )
