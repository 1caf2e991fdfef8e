"""Settings of Gemma 3's image processor: a square image, and crops of images that are much wider than high."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..._core import CheckpointError
from ...common.json_fields import JsonFields
from ..models.gemma3_tower import Gemma3TowerConfig
from .image_processor import HARMLESS, ImageSettings, finish, open_image_processor, read_pixel_rules, require_resizing

_KINDS: Final = tuple(f"Gemma3ImageProcessor{end}" for end in ("", "Fast", "Pil"))
_BILINEAR: Final = 2
_HALVES: Final = (0.5, 0.5, 0.5)
_SIDE: Final = 224
_MAX_SIDE: Final = 1 << 14
_MIN_CROP: Final = 256
_MAX_CROPS: Final = 4
_MIN_RATIO: Final = 1.2
"""transformers' defaults of crops."""


@dataclass(frozen=True, kw_only=True)
class PanAndScanSettings(ImageSettings):
    """Rules that turn an image into one square, and into squares of its crops."""

    side: int
    """Height and width of the squares."""
    crops: bool
    """False: each image is one square."""
    min_crop_size: int
    max_num_crops: int
    min_ratio: float
    """Least ratio of an image's sides at which it is cropped."""


def read_pan_and_scan(directory: Path) -> PanAndScanSettings | None:
    """Reads the settings in the directory of a model or of a tower; None: there is no file with them.

    Raises CheckpointError that names every field that cannot be used.
    """
    # transformers writes null for its defaults.
    found = open_image_processor(directory, _KINDS, null_is_default=True)
    if found is None:
        return None
    fields = found.fields
    require_resizing(fields, "the tower reads images of one size")
    settings = PanAndScanSettings(
        side=_read_side(fields),
        crops=fields.boolean("do_pan_and_scan", default=False),
        min_crop_size=fields.integer("pan_and_scan_min_crop_size", default=_MIN_CROP),
        max_num_crops=fields.integer("pan_and_scan_max_num_crops", minimum=2, maximum=1 << 8, default=_MAX_CROPS),
        min_ratio=fields.number("pan_and_scan_min_ratio_to_activate", above=True, default=_MIN_RATIO),
        **read_pixel_rules(fields, resample=_BILINEAR, mean=_HALVES, std=_HALVES),
        fields=found.data,
    )
    fields.discard({*HARMLESS, "image_seq_length"})
    finish(fields, found.path)
    return settings


def _read_side(fields: JsonFields) -> int:
    nested = fields.object("size", optional=True)
    if nested is None:
        return _SIDE
    height, width = (nested.integer(name, maximum=_MAX_SIDE) for name in ("height", "width"))
    if height != width:
        nested.problem("width", f"is {width}; expected {height}, the height")
    return height


def pan_and_scan_tokens(settings: PanAndScanSettings, config: Gemma3TowerConfig, directory: Path) -> int:
    """Returns the number of a square's patches. Raises CheckpointError for other sizes than the tower's."""
    if settings.side != config.image_size:
        raise CheckpointError(
            f"{directory}: the image processor's size is {settings.side} x {settings.side}; expected "
            f"{config.image_size} x {config.image_size}, the tower's image_size"
        )
    return config.patches_per_side**2
