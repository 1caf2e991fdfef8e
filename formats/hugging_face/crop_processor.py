"""Settings of image processors that resize an image and keep its centre: those of CLIP and LLaVA."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..._core import CheckpointError
from ...common.json_fields import JsonFields
from ..models.clip import ClipConfig
from .image_processor import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    HARMLESS,
    ImageSettings,
    finish,
    open_image_processor,
    read_pixel_rules,
)

_KINDS: Final = tuple(f"{model}ImageProcessor{end}" for model in ("CLIP", "Llava") for end in ("", "Fast", "Pil"))
_SIDE: Final = 224
_MAX_SIDE: Final = 1 << 14
_HARMLESS: Final = HARMLESS - {"do_pad"} | {"feature_extractor_type"}


@dataclass(frozen=True, kw_only=True)
class CropSettings(ImageSettings):
    """Rules that turn an image into one square of pixels."""

    pads: bool
    """True if images are padded to squares first, in the mean's colour."""
    shortest_edge: int | None
    """Length of the shorter side after resizing; None: `size` is given."""
    size: tuple[int, int] | None
    """(height, width) after resizing; None: the shorter side is given, or images are not resized."""
    crop: tuple[int, int] | None
    """(height, width) of the centre that is kept; None: all of the image."""


def read_crop_settings(directory: Path) -> CropSettings | None:
    """Reads the settings in the directory of a model or of a tower; None: there is no file with them.

    Raises CheckpointError that names every field that cannot be used.
    """
    found = open_image_processor(directory, _KINDS)
    if found is None:
        return None
    fields = found.fields
    edge, size = _read_size(fields) if fields.boolean("do_resize", default=True) else (None, None)
    settings = CropSettings(
        pads=fields.boolean("do_pad", default=False) and found.kind.startswith("Llava"),
        shortest_edge=edge,
        size=size,
        crop=_read_crop(fields) if fields.boolean("do_center_crop", default=True) else None,
        **read_pixel_rules(fields, resample=BICUBIC, mean=CLIP_MEAN, std=CLIP_STD),
        fields=found.data,
    )
    fields.discard({*_HARMLESS, "size", "crop_size"})
    finish(fields, found.path)
    return settings


def crop_tokens(settings: CropSettings, config: ClipConfig, directory: Path) -> int:
    """Returns the number of a tile's patches and the class token. Raises CheckpointError for other sizes of images."""
    side = config.image_size
    made = settings.crop if settings.crop is not None else settings.size
    if made != (side, side):
        shown = "that of the image" if made is None else f"{made[0]} x {made[1]}"
        raise CheckpointError(
            f"{directory}: the image processor's crop_size is {shown}; expected {side} x {side}, the tower's image_size"
        )
    return config.num_positions


def _read_size(fields: JsonFields) -> tuple[int | None, tuple[int, int] | None]:
    """Reads {"shortest_edge": ...}, {"height": ..., "width": ...}, or a number, as older files have it."""
    given = fields.raw("size")
    if given is None:
        return _SIDE, None
    if not isinstance(given, dict):
        return fields.integer("size", maximum=_MAX_SIDE), None
    if "shortest_edge" in given:
        nested = fields.object("size")
        assert nested is not None
        edge = nested.integer("shortest_edge", maximum=_MAX_SIDE)
        return edge, None
    return None, _sides(fields, "size")


def _read_crop(fields: JsonFields) -> tuple[int, int]:
    given = fields.raw("crop_size")
    if isinstance(given, dict):
        return _sides(fields, "crop_size")
    side = fields.integer("crop_size", maximum=_MAX_SIDE, default=_SIDE)
    return side, side


def _sides(fields: JsonFields, name: str) -> tuple[int, int]:
    nested = fields.object(name)
    assert nested is not None
    return nested.integer("height", maximum=_MAX_SIDE), nested.integer("width", maximum=_MAX_SIDE)
