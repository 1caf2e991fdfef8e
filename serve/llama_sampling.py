"""Sampling in the names of llama.cpp, which Ollama's options and Modelfiles have too."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from ..common.shown_value import shown
from ..runtime.sampling_fields import INT32_MAX
from .openai_fields import Fields, MinP, RepetitionPenalty, Stops, Temperature, TopK, TopP, only

_RANDOM_SEEDS: Final = (-1, (1 << 32) - 1)
_WHOLE_CONTEXT: Final = -1
_CHOSEN: Final = "tokens are chosen by top_k, top_p and min_p"
_NAMES: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Names of sampling fields in llama.cpp's API and in OpenAI's. Both have the same meaning."""


class LlamaSampling(Fields):
    """Fields of sampling."""

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    """-1 and 4294967295: a random seed per request."""
    stop: Stops | None = None
    repeat_penalty: RepetitionPenalty | None = None
    """Concerns all tokens of the prompt and the answer; the same holds for the other penalties."""
    repeat_last_n: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """With penalties only -1, the whole context."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    typical_p: Annotated[float, only(1.0, _CHOSEN)] = 1.0
    mirostat: Annotated[int, only(0, _CHOSEN)] = 0
    mirostat_tau: float | None = None
    """No effect: mirostat is off. The same holds for the next field."""
    mirostat_eta: float | None = None

    @model_validator(mode="after")
    def _penalties_of_all_tokens(self) -> LlamaSampling:
        penalties = {
            "repeat_penalty": self.repeat_penalty not in (None, 1.0),
            "presence_penalty": bool(self.presence_penalty),
            "frequency_penalty": bool(self.frequency_penalty),
        }
        given = [name for name, is_given in penalties.items() if is_given]
        if given and self.repeat_last_n not in (None, _WHOLE_CONTEXT):
            raise ValueError(
                f"repeat_last_n is {shown(self.repeat_last_n)} with {given[0]}; expected -1, because penalties concern "
                "all tokens"
            )
        return self

    def sampling(self) -> dict[str, Any]:
        """Returns the fields in the names of OpenAI's API; leaves out those that are not given."""
        values = {name: getattr(self, own) for own, name in _NAMES.items()}
        if self.seed not in _RANDOM_SEEDS:
            values["seed"] = self.seed
        return {name: value for name, value in values.items() if value is not None}
