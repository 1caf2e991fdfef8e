"""Settings of Pixtral's image processor: an image up to a length of its sides, in whole patches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...common.json_fields import JsonFields
from ..models.pixtral import PixtralConfig
from .image_processor import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    HARMLESS,
    ImageSettings,
    finish,
    open_image_processor,
    read_pixel_rules,
    require_resizing,
)

_KINDS: Final = tuple(f"PixtralImageProcessor{end}" for end in ("", "Fast", "Pil"))
_EDGE: Final = 1024
_MAX_EDGE: Final = 1 << 13


@dataclass(frozen=True, kw_only=True)
class LongestEdgeSettings(ImageSettings):
    """Rules that keep an image's ratio of sides and bound their lengths."""

    height: int
    width: int
    """Bounds of the sides before they are rounded up to whole patches."""


def read_longest_edge(directory: Path) -> LongestEdgeSettings | None:
    """Reads the settings in the directory of a model or of a tower; None: there is no file with them.

    Raises CheckpointError that names every field that cannot be used.
    """
    found = open_image_processor(directory, _KINDS)
    if found is None:
        return None
    fields = found.fields
    require_resizing(fields, "images must have whole patches")
    height, width = _read_size(fields)
    settings = LongestEdgeSettings(
        height=height,
        width=width,
        **read_pixel_rules(fields, resample=BICUBIC, mean=CLIP_MEAN, std=CLIP_STD),
        fields=found.data,
    )
    # transformers' processor replaces the patch size by that of the model's squares of patches.
    fields.discard({*HARMLESS, "patch_size"})
    finish(fields, found.path)
    return settings


def _read_size(fields: JsonFields) -> tuple[int, int]:
    nested = fields.object("size", optional=True)
    if nested is None:
        return _EDGE, _EDGE
    if "longest_edge" in nested:
        edge = nested.integer("longest_edge", maximum=_MAX_EDGE)
        return edge, edge
    return nested.integer("height", maximum=_MAX_EDGE), nested.integer("width", maximum=_MAX_EDGE)


def longest_edge_tokens(settings: LongestEdgeSettings, config: PixtralConfig, directory: Path) -> int:
    """Returns the maximum number of an image's patches."""
    high, wide = (-(-side // config.factor) for side in (settings.height, settings.width))
    return high * wide * config.merge_size**2
