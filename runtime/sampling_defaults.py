"""Sampling settings that the model's publisher recommends, for requests that do not set them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .._core import ConfigError
from ..common.json_fields import load_json_object
from ..formats.hugging_face.hf_config import GENERATION_CONFIG_FILE
from .sampling_fields import SAMPLING_FIELDS, unaccepted


@dataclass(frozen=True)
class SamplingDefaults:
    """Fields of generation_config.json that are used, as in vLLM; others are ignored."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def load(cls, directory: Path) -> SamplingDefaults:
        """Reads the settings in a directory; none without the file. Raises ConfigError that names invalid fields."""
        path = directory / GENERATION_CONFIG_FILE
        if not path.is_file():
            return cls()
        content = load_json_object(path, ConfigError)
        names = [field.name for field in fields(cls)]
        given = {name: content[name] for name in names if content.get(name) is not None}
        problems = [unaccepted(name, value, SAMPLING_FIELDS[name]) for name, value in given.items()]
        if found := [problem for problem in problems if problem is not None]:
            raise ConfigError(f"{path}: " + "; ".join(found))
        return cls(**given)

    def given(self) -> dict[str, Any]:
        """Returns the settings that are set, by name."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in settings.items() if value is not None}

    @property
    def samples(self) -> bool:
        """True if they say how to draw tokens."""
        return bool(self.given().keys() - {"repetition_penalty"})
