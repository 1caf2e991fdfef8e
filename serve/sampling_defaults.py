"""Sampling settings that the model's publisher recommends, for requests that do not set them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from .._core import ConfigError
from ..common.json_fields import load_json_object
from ..formats.hugging_face.hf_config import GENERATION_CONFIG_FILE
from .openai_fields import MinP, RepetitionPenalty, Temperature, TopK, TopP


class SamplingDefaults(BaseModel):
    """Fields of generation_config.json that are used, as in vLLM; others are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None

    @classmethod
    def load(cls, engine_dir: Path) -> SamplingDefaults:
        """Reads the engine directory's settings. Raises ConfigError that names the invalid field."""
        path = engine_dir / GENERATION_CONFIG_FILE
        if not path.is_file():
            return cls()
        try:
            return cls.model_validate(load_json_object(path, ConfigError))
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
            raise ConfigError(f"{path}: " + "; ".join(problems)) from error

    def given(self) -> dict[str, Any]:
        """Returns the settings that are set, by name."""
        return self.model_dump(exclude_none=True)
