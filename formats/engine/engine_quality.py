"""Quality of an engine on a text, compared with an engine without quantisation and prediction."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ...common.json_fields import JsonFields
from .build_config import BuildConfig


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison with an engine of the same checkpoint that is quantised less and predicts no gates."""

    engine: str
    """Quantisation of that engine, such as bfloat16."""
    perplexity: float
    """Perplexity of that engine."""
    divergence: float
    """Kullback-Leibler divergence of the engine's distributions from the other's, in nats per token."""
    same_choices: float
    """Share of tokens for which both engines have the same most probable token."""


@dataclass(frozen=True, kw_only=True)
class EngineQuality:
    """The `quality` of an engine's config.json."""

    text: str
    """Name of the file."""
    tokens: int
    """Number of tokens that were read, from the beginning of the text."""
    window: int
    """Tokens per window; each token but the first is predicted from the earlier ones in its window."""
    perplexity: float
    reference: Comparison | None = None
    """None if the build quantised nothing and predicts nothing."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)

    @classmethod
    def from_fields(cls, source: JsonFields) -> EngineQuality:
        """Reads what to_dict() returned; notes problems in `source`."""
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
        # Rounding can make the sum of nearly equal distributions negative.
        divergence=source.number("divergence", minimum=-1.0),
        same_choices=source.number("same_choices"),
    )


class QualityMeasure(Protocol):
    """Measures engines. builder/ runs no engines, so runtime/ provides the implementation."""

    def problems(self, config: BuildConfig) -> list[str]:
        """Lists reasons why engines of this config, after with_defaults(), cannot be measured."""

    def measure(self, engine: Path, reference: Path | None) -> EngineQuality:
        """Runs both engine directories, and compares the first with the second. Raises the errors of running them."""
