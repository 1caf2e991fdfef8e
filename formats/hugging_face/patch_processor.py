"""Settings of image processors that resize an image to whole patches: those of Qwen2-VL and its successors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..._core import CheckpointError
from ...common.json_fields import JsonFields
from ..models.qwen_tower import QwenTowerConfig
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

_KINDS: Final = tuple(
    f"{model}ImageProcessor{end}" for model in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL") for end in ("", "Fast", "Pil")
)
MAX_RATIO: Final = 200
"""transformers' limit of the ratio of an image's sides."""
_MIN_PIXELS: Final = 56 * 56
_MAX_PIXELS: Final = 28 * 28 * 1280
_MOST: Final = 1 << 28
"""Limit of both."""
_HARMLESS: Final = HARMLESS | {"min_frames", "max_frames", "fps", "num_frames"}


@dataclass(frozen=True, kw_only=True)
class PatchSettings(ImageSettings):
    """Rules that turn an image into whole squares of merge_size * merge_size patches."""

    min_pixels: int
    max_pixels: int
    """Bounds of the number of pixels after resizing."""
    patch_size: int
    merge_size: int
    num_frames: int
    """Number of equal frames that an image stands for."""

    @property
    def factor(self) -> int:
        """Height and width of the pixels that become one row of the language model."""
        return self.patch_size * self.merge_size

    @property
    def max_squares(self) -> int:
        """Maximum number of squares of factor * factor pixels after resizing.

        Sides are rounded up to whole squares if an image grows, and to one square if it shrinks.
        """
        grown, shrunk = (math.sqrt(pixels) / self.factor for pixels in (self.min_pixels, self.max_pixels))
        side = math.sqrt(MAX_RATIO)
        return int(max(shrunk**2, shrunk * side, (grown * side + 1) * (grown / side + 1)))


def read_patch_settings(directory: Path) -> PatchSettings | None:
    """Reads the settings in the directory of a model or of a tower; None: there is no file with them.

    Raises CheckpointError that names every field that cannot be used.
    """
    found = open_image_processor(directory, _KINDS)
    if found is None:
        return None
    fields = found.fields
    require_resizing(fields, "images must have whole patches")
    shortest, longest = _read_size(fields)
    settings = PatchSettings(
        min_pixels=shortest,
        max_pixels=longest,
        patch_size=fields.integer("patch_size", maximum=1 << 10, default=14),
        merge_size=fields.integer("merge_size", maximum=1 << 5, default=2),
        num_frames=fields.integer("temporal_patch_size", maximum=1 << 5, default=2),
        **read_pixel_rules(fields, resample=BICUBIC, mean=CLIP_MEAN, std=CLIP_STD),
        fields=found.data,
    )
    if settings.max_pixels < max(settings.min_pixels, settings.factor**2):
        fields.problem("size", f"allows up to {longest} pixels; expected at least {max(shortest, settings.factor**2)}")
    fields.discard(_HARMLESS)
    finish(fields, found.path)
    return settings


def _read_size(fields: JsonFields) -> tuple[int, int]:
    """Reads the bounds of the number of pixels: min_pixels and max_pixels replace those of `size`."""
    shortest, longest = _MIN_PIXELS, _MAX_PIXELS
    nested = fields.object("size", optional=True)
    if nested is not None:
        shortest = nested.integer("shortest_edge", maximum=_MOST)
        longest = nested.integer("longest_edge", maximum=_MOST)
        nested.discard(("min_pixels", "max_pixels"))
    return (
        fields.optional_integer("min_pixels", maximum=_MOST) or shortest,
        fields.optional_integer("max_pixels", maximum=_MOST) or longest,
    )


def patch_tokens(settings: PatchSettings, config: QwenTowerConfig, directory: Path) -> int:
    """Returns the maximum number of an image's patches. Raises CheckpointError for settings that do not fit."""
    for name, found, expected in (
        ("patch_size", settings.patch_size, config.patch_size),
        ("merge_size", settings.merge_size, config.merge_size),
        ("temporal_patch_size", settings.num_frames, config.num_frames),
    ):
        if found != expected:
            raise CheckpointError(
                f"{directory}: the image processor's {name} is {found}; expected {expected}, as in vision_config"
            )
    return settings.max_squares * settings.merge_size**2
