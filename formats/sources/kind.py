"""Kinds of directories that a name may stand for."""

from __future__ import annotations

from enum import Enum

from ..._core import AdapterError, AdaptrtError, ConfigError
from ..adapter.recognise import CONFIG_FILE as ADAPTER_CONFIG_FILE
from ..checkpoint.config import CONFIG_FILE


class Kind(Enum):
    """The kind of a source; it decides which files are needed."""

    MODEL = "model"
    ADAPTER = "adapter"

    @property
    def config_file(self) -> str:
        """File that every directory of this kind has."""
        return CONFIG_FILE if self is Kind.MODEL else ADAPTER_CONFIG_FILE

    @property
    def error(self) -> type[AdaptrtError]:
        """Class of the errors about a name of this kind."""
        return ConfigError if self is Kind.MODEL else AdapterError
