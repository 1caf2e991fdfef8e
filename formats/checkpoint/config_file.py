"""The config.json of a directory: read once, and handed to everything that asks what the directory holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._core import AdaptrtError, CheckpointError
from ...common.json_fields import load_json_object
from .config import CONFIG_FILE, PRODUCER


@dataclass(frozen=True)
class ConfigFile:
    """The JSON object in a directory's config.json, whose fields are not checked yet."""

    directory: Path
    data: Mapping[str, Any]

    @classmethod
    def read(cls, directory: Path, error: type[AdaptrtError] = CheckpointError) -> ConfigFile:
        """Raises `error` for a file that cannot be read or does not hold one JSON object."""
        return cls(directory, load_json_object(directory / CONFIG_FILE, error))

    @property
    def path(self) -> Path:
        """The file; errors begin with it."""
        return self.directory / CONFIG_FILE

    @property
    def is_of_engine(self) -> bool:
        """True for the directory of an engine."""
        return "build_config" in self.data

    @property
    def is_of_checkpoint(self) -> bool:
        """True for a directory that AdaptRT wrote: of a checkpoint, unless it is an engine's."""
        producer = self.data.get("producer")
        return isinstance(producer, dict) and producer.get("name") == PRODUCER

    @property
    def is_of_hugging_face(self) -> bool:
        """True for the directory of a Hugging Face model."""
        return "architectures" in self.data
