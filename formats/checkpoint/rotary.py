"""Rotary position scaling: its kinds and their parameters.

The formulas are those of Hugging Face's modeling_rope_utils.py; docs/formats.md lists the parameters of each kind.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ...common.json_fields import JsonFields, describe


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Divides every angle by `factor`."""

    rope_type: ClassVar[str] = "linear"
    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """The base grows with the sequence once it is longer than max_position_embeddings."""

    rope_type: ClassVar[str] = "dynamic"
    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Divides long wavelengths by `factor`, keeps short ones, interpolates between them."""

    rope_type: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN. `attention_factor` None: computed from factor, mscale and mscale_all_dim."""

    rope_type: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """Divides each frequency by its own factor: short_factor, or long_factor beyond original_max_position_embeddings.

    `attention_factor` multiplies cosines and sines.
    """

    rope_type: ClassVar[str] = "longrope"
    factor: float
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


@dataclass(frozen=True, kw_only=True)
class ProportionalScaling:
    """Rotates a share of a head's pairs with the frequencies of the whole head, and divides angles by `factor`.

    Only families whose layers have different heads use it. They have its fields in their own configs.
    """

    share: float
    factor: float


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's factor for contexts that are `factor` times as long, by which scores or angles are multiplied."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


RotaryScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling

ROTARY_SCALING_TYPES = ("linear", "dynamic", "llama3", "yarn", "longrope")


def depends_on_length(scaling: RotaryScaling | ProportionalScaling | None) -> bool:
    """True if the angles of a position depend on the length of the prompt."""
    return isinstance(scaling, DynamicScaling | LongRopeScaling)


def reusable_length(scaling: RotaryScaling | None, max_position_embeddings: int) -> int | None:
    """Maximum length of prompts whose angles equal those of shorter prompts; None: no limit."""
    if isinstance(scaling, DynamicScaling):
        return max_position_embeddings
    return scaling.original_max_position_embeddings if isinstance(scaling, LongRopeScaling) else None


def rotary_scaling_to_dict(scaling: RotaryScaling | None) -> dict[str, Any] | None:
    """Returns the JSON form: {"rope_type": ..., parameters}; None for no scaling."""
    if scaling is None:
        return None
    parameters = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(scaling).items()}
    return {"rope_type": scaling.rope_type, **parameters}


def read_rotary_scaling(
    fields: JsonFields, max_position_embeddings: int, original: int | None = None, *, can_be_mrope: bool = False
) -> RotaryScaling | None:
    """Reads a rope scaling object; its kind may be spelled `rope_type` or `type`.

    original: original_max_position_embeddings from outside of the object, for "longrope".
    can_be_mrope: True accepts the kind "mrope", an older name of "default" for models with mrope_section.

    As in Hugging Face, original_max_position_embeddings defaults to max_position_embeddings.
    """
    names = [fields.raw(spelling) for spelling in ("rope_type", "type")]
    if can_be_mrope:
        names = ["default" if name == "mrope" else name for name in names]
    given = sorted({str(name) for name in names if name is not None})
    if len(given) > 1:
        fields.problem("rope_type", f"and type disagree: {' and '.join(given)}")
        return None
    rope_type = given[0] if given else "default"
    if rope_type == "default":
        return None
    if rope_type not in ROTARY_SCALING_TYPES:
        accepted = ", ".join(("default", *ROTARY_SCALING_TYPES))
        fields.problem("rope_type", f"is {describe(rope_type)}; accepted: {accepted}")
        return None
    if rope_type == "longrope":
        return _read_longrope(fields, max_position_embeddings, original)
    factor = fields.number("factor", minimum=1.0)
    if rope_type == "linear":
        return LinearScaling(factor=factor)
    if rope_type == "dynamic":
        return DynamicScaling(factor=factor)
    original = fields.optional_integer("original_max_position_embeddings") or max_position_embeddings
    if rope_type == "llama3":
        return _read_llama3(fields, factor, original)
    return _read_yarn(fields, factor, original)


def read_mrope_sections(fields: JsonFields, rotary_size: int) -> tuple[int, ...]:
    """Returns mrope_section, which assigns pairs of a head to time, height and width.

    A text token has one number for all three positions (only tokens of images and videos differ), so the sections do
    not matter without images: text has plain rotary positions.

    rotary_size: number of rotated elements of a head.
    """
    fields.boolean("mrope_interleaved", default=False)
    sections = fields.integers("mrope_section")
    if len(sections) != 3 or sum(sections) != rotary_size // 2:
        fields.problem(
            "mrope_section",
            f"is {list(sections)}; expected three integers whose sum is half of the head's rotated elements, "
            f"{rotary_size // 2}",
        )
    return sections


def _read_longrope(fields: JsonFields, max_position_embeddings: int, beside: int | None) -> LongRopeScaling:
    """Reads LongRoPE. Like Hugging Face, derives missing factor and attention_factor from the lengths."""
    within = fields.optional_integer("original_max_position_embeddings")
    original = within or beside or max_position_embeddings
    if original < 2:
        fields.problem("original_max_position_embeddings", f"is {original}; expected 2 or more")
        original = 2
    factor = fields.optional_number("factor", minimum=1.0) or max(1.0, max_position_embeddings / original)
    attention = fields.optional_number("attention_factor", above=True)
    if attention is None:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        factor=factor,
        short_factor=_read_factors(fields, "short_factor"),
        long_factor=_read_factors(fields, "long_factor"),
        original_max_position_embeddings=original,
        attention_factor=attention,
    )


def _read_factors(fields: JsonFields, name: str) -> tuple[float, ...]:
    value = fields.raw(name)
    if isinstance(value, list) and value and all(_is_factor(item) for item in value):
        return tuple(float(item) for item in value)
    fields.problem(name, f"is {describe(value)}; expected a list of numbers above 0")
    return ()


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _read_llama3(fields: JsonFields, factor: float, original: int) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=factor,
        low_freq_factor=fields.number("low_freq_factor", above=True),
        high_freq_factor=fields.number("high_freq_factor", above=True),
        original_max_position_embeddings=original,
    )
    if scaling.high_freq_factor < scaling.low_freq_factor and not fields.problems:
        fields.problem(
            "high_freq_factor",
            f"is {scaling.high_freq_factor}; it must be at least low_freq_factor {scaling.low_freq_factor}",
        )
    return scaling


def _read_yarn(fields: JsonFields, factor: float, original: int) -> YarnScaling:
    scaling = YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=fields.optional_number("attention_factor", above=True),
        beta_fast=fields.optional_number("beta_fast", above=True) or YarnScaling.beta_fast,
        beta_slow=fields.optional_number("beta_slow", above=True) or YarnScaling.beta_slow,
        mscale=fields.optional_number("mscale"),
        mscale_all_dim=fields.optional_number("mscale_all_dim"),
        truncate=fields.boolean("truncate", default=True),
    )
    if scaling.beta_fast < scaling.beta_slow:
        fields.problem("beta_fast", f"is {scaling.beta_fast}; it must not be below beta_slow {scaling.beta_slow}")
    return scaling
