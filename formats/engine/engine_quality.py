"""What an engine makes of a text beside one with nothing quantised or predicted, and how a build comes to know it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ...common.json_fields import JsonFields
from .build_config import BuildConfig


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """With an engine of the same checkpoint in which less is quantised, and no gate predicted."""

    engine: str
    """What that engine is made of: bfloat16."""
    perplexity: float
    """Its own."""
    divergence: float
    """Nats a token: Kullback-Leibler divergence of the engine's distributions from those of the other."""
    same_choices: float
    """The part of the tokens for which both hold the same one for the most probable."""


@dataclass(frozen=True, kw_only=True)
class EngineQuality:
    """The `quality` of an engine's config.json."""

    text: str
    """Name of the file."""
    tokens: int
    """Of the text that were read, from its beginning."""
    window: int
    """Tokens of a window; each but the first is predicted from those before it in its window."""
    perplexity: float
    reference: Comparison | None = None
    """None: the build quantised nothing, and predicts nothing."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)

    @classmethod
    def from_fields(cls, source: JsonFields) -> EngineQuality:
        """The inverse of to_dict. What is wrong is noted in `source`."""
        reference = source.object("reference", optional=True)
        return cls(
            text=source.string("text"),
            tokens=source.integer("tokens"),
            window=source.integer("window"),
            perplexity=source.number("perplexity"),
            reference=_comparison(reference) if reference is not None else None,
        )


def _comparison(source: JsonFields) -> Comparison:
    return Comparison(
        engine=source.string("engine"),
        perplexity=source.number("perplexity"),
        # Where the distributions are the same but for rounding, the sum may come out below zero.
        divergence=source.number("divergence", minimum=-1.0),
        same_choices=source.number("same_choices"),
    )


class QualityMeasure(Protocol):
    """Measures engines. builder/ runs none, so that runtime/ provides it."""

    def problems(self, config: BuildConfig) -> list[str]:
        """Why engines of this config, after with_defaults(), could not be measured."""

    def measure(self, engine: Path, reference: Path | None) -> EngineQuality:
        """Runs both engine directories, and compares the first with the second. Raises what running them raises."""
