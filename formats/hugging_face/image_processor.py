"""Settings of image processors in preprocessor_config.json; those of Idefics 3 and SmolVLM cut images into tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..._core import CheckpointError
from ...common.json_fields import JsonFields, load_json_object
from ..models.siglip import SiglipConfig

PREPROCESSOR_FILE: Final = "preprocessor_config.json"
PROCESSOR_FILE: Final = "processor_config.json"
_NESTED: Final = "image_processor"
_KINDS: Final = tuple(f"{model}ImageProcessor{end}" for model in ("Idefics3", "SmolVLM") for end in ("", "Fast", "Pil"))
_LANCZOS: Final = 1
BICUBIC: Final = 3
CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
"""CLIP's, which other processors have as their defaults, too."""
_RESAMPLES: Final = 6
"""Number of Pillow's filters."""
_NUM_CHANNELS: Final = 3
_HALVES: Final = (0.5,) * _NUM_CHANNELS
HARMLESS: Final = frozenset(
    """
    _auto_class _processor_class _valid_processor_keys data_format default_to_square device disable_grouping do_pad
    image_seq_length input_data_format pad_size processor_class return_tensors size_divisor video_sampling
    """.split()
)
"""Fields that change no pixel: tiles have one size, so that nothing is padded."""


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """Rules that every image processor has."""

    resample: int
    """Pillow's number of the filter."""
    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fields: Mapping[str, Any] = field(compare=False, repr=False)
    """All fields of the file, from which an engine's preprocessor_config.json is written."""


@dataclass(frozen=True)
class ProcessorFile:
    """The settings of an image processor as its file has them."""

    path: Path
    data: Mapping[str, Any]
    fields: JsonFields
    kind: str
    """image_processor_type, or its default."""


@dataclass(frozen=True, kw_only=True)
class TileSettings(ImageSettings):
    """Rules that turn an image into square tiles of pixels."""

    longest_edge: int | None
    """Length of an image's longer side after the first resizing; None: images are not resized first."""
    tile_size: int
    splits: bool
    """False: each image is one tile."""


def read_tile_settings(directory: Path) -> TileSettings | None:
    """Reads the settings in the directory of a model or of a tower; None: there is no file with them.

    Raises CheckpointError that names every field that cannot be used.
    """
    found = open_image_processor(directory, _KINDS)
    if found is None:
        return None
    fields = found.fields
    settings = TileSettings(
        longest_edge=_edge(fields, "size", 4 * 364) if fields.boolean("do_resize", default=True) else None,
        tile_size=_edge(fields, "max_image_size", 364),
        splits=fields.boolean("do_image_splitting", default=True),
        **read_pixel_rules(fields, resample=_LANCZOS, mean=_HALVES, std=_HALVES),
        fields=found.data,
    )
    fields.discard({*HARMLESS, "size", "return_row_col_info"})
    finish(fields, found.path)
    return settings


def tile_tokens(settings: TileSettings, config: SiglipConfig, directory: Path) -> int:
    """Returns the number of a tile's patches. Raises CheckpointError for tiles that do not fit the tower."""
    side = settings.tile_size // config.patch_size
    if not 1 <= side <= config.patches_per_side or side % config.merge_size != 0:
        raise CheckpointError(
            f"{directory}: the image processor's max_image_size is {settings.tile_size}, which is {side} patches of "
            f"{config.patch_size} pixels; expected a multiple of scale_factor {config.merge_size}, up to "
            f"{config.patches_per_side} patches"
        )
    return side**2


def read_pixel_rules(
    fields: JsonFields, *, resample: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> dict[str, Any]:
    """Reads the fields of ImageSettings, with the processor's defaults."""
    for name in ("do_convert_rgb", "do_rescale", "do_normalize"):
        if not fields.boolean(name, default=True):
            fields.problem(name, "is false; expected true")
    std = _per_channel(fields, "image_std", std)
    if 0.0 in std:
        fields.problem("image_std", "has a zero; expected numbers above 0")
    return {
        "resample": fields.integer("resample", minimum=0, maximum=_RESAMPLES - 1, default=resample),
        "rescale_factor": fields.number("rescale_factor", above=True, default=1 / 255),
        "mean": _per_channel(fields, "image_mean", mean),
        "std": std,
    }


def finish(fields: JsonFields, path: Path) -> None:
    """Raises CheckpointError for the fields that cannot be used, and for fields that no rule reads and are not null."""
    for name, value in fields.remaining().items():
        if value is None:
            fields.discard((name,))
    fields.finish(str(path), CheckpointError)


def image_processor_files(directory: Path) -> list[Path]:
    """Returns the files in a model's directory that may have settings of an image processor."""
    return [path for name in (PREPROCESSOR_FILE, PROCESSOR_FILE) if (path := directory / name).is_file()]


def open_image_processor(
    directory: Path, kinds: tuple[str, ...], *, null_is_default: bool = False
) -> ProcessorFile | None:
    """Opens the settings in the directory of a model or of a tower; None: there is no file with them.

    kinds: accepted values of image_processor_type; the first is the default. null_is_default: True treats fields that
    are null like missing ones.
    """
    found = _image_processor_fields(directory)
    if found is None:
        return None
    path, data = found
    fields = JsonFields({name: value for name, value in data.items() if not null_is_default or value is not None})
    return ProcessorFile(path, data, fields, fields.string("image_processor_type", choices=kinds, default=kinds[0]))


def require_resizing(fields: JsonFields, why: str) -> None:
    """Reads do_resize, which must be true."""
    if not fields.boolean("do_resize", default=True):
        fields.problem("do_resize", f"is false; expected true, because {why}")


def _image_processor_fields(directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """Returns the fields of an image processor and their file: a file of their own, or the processor's."""
    path = directory / PREPROCESSOR_FILE
    if path.is_file():
        return path, load_json_object(path, CheckpointError)
    path = directory / PROCESSOR_FILE
    nested = load_json_object(path, CheckpointError).get(_NESTED) if path.is_file() else None
    return (path, nested) if isinstance(nested, dict) else None


def _edge(fields: JsonFields, name: str, default: int) -> int:
    if fields.raw(name) is None:
        return default
    nested = fields.object(name)
    return default if nested is None else nested.integer("longest_edge", maximum=1 << 14)


def _per_channel(fields: JsonFields, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    values = fields.numbers(name) if fields.raw(name) is not None else default
    if len(values) != _NUM_CHANNELS:
        fields.problem(name, f"has {len(values)} numbers; expected {_NUM_CHANNELS}")
        return default
    return values
