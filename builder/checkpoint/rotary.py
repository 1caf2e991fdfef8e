"""Rotary position scaling: which kinds there are, and the parameters of each.

The formulas are those of Hugging Face's modeling_rope_utils.py; docs/formats.md names the
parameters of each kind.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ..json_fields import JsonFields, describe


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every angle is divided by `factor`."""

    rope_type: ClassVar[str] = "linear"
    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """The base grows with the sequence once that is longer than max_position_embeddings."""

    rope_type: ClassVar[str] = "dynamic"
    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""

    rope_type: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN. `attention_factor` None: it follows from factor, mscale and mscale_all_dim."""

    rope_type: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


RotaryScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling

ROTARY_SCALING_TYPES = ("linear", "dynamic", "llama3", "yarn")


def rotary_scaling_to_dict(scaling: RotaryScaling | None) -> dict[str, Any] | None:
    """The JSON form: {"rope_type": ..., parameters}; None for no scaling."""
    return None if scaling is None else {"rope_type": scaling.rope_type, **asdict(scaling)}


def read_rotary_scaling(fields: JsonFields, max_position_embeddings: int) -> RotaryScaling | None:
    """Takes the fields of a rope scaling object, in which the kind may be spelled `rope_type` or `type`.

    original_max_position_embeddings is max_position_embeddings where it is not given, as in Hugging Face.
    """
    names = [fields.raw(spelling) for spelling in ("rope_type", "type")]
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
    factor = fields.number("factor", minimum=1.0)
    if rope_type == "linear":
        return LinearScaling(factor=factor)
    if rope_type == "dynamic":
        return DynamicScaling(factor=factor)
    original = fields.optional_integer("original_max_position_embeddings") or max_position_embeddings
    if rope_type == "llama3":
        return _read_llama3(fields, factor, original)
    return _read_yarn(fields, factor, original)


def _read_llama3(fields: JsonFields, factor: float, original: int) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=factor,
        low_freq_factor=fields.number("low_freq_factor", above=True),
        high_freq_factor=fields.number("high_freq_factor", above=True),
        original_max_position_embeddings=original,
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor and not fields.problems:
        fields.problem(
            "high_freq_factor",
            f"is {scaling.high_freq_factor}; it must be above low_freq_factor {scaling.low_freq_factor}",
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
