"""Settings of image processors that cut images into square tiles: preprocessor_config.json of Idefics 3 and SmolVLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..._core import CheckpointError
from ...common.json_fields import JsonFields, load_json_object

PREPROCESSOR_FILE: Final = "preprocessor_config.json"
PROCESSOR_FILE: Final = "processor_config.json"
_NESTED: Final = "image_processor"
_KINDS: Final = tuple(f"{model}ImageProcessor{end}" for model in ("Idefics3", "SmolVLM") for end in ("", "Fast", "Pil"))
_LANCZOS: Final = 1
_RESAMPLES: Final = 6
"""Number of Pillow's filters."""
_NUM_CHANNELS: Final = 3
_HARMLESS: Final = frozenset(
    """
    _auto_class _processor_class _valid_processor_keys data_format default_to_square device disable_grouping do_pad
    image_seq_length input_data_format pad_size processor_class return_tensors size_divisor video_sampling
    """.split()  # noqa: SIM905
)
"""Fields that change no pixel: tiles have one size, so that nothing is padded."""


@dataclass(frozen=True, kw_only=True)
class TileSettings:
    """Rules that turn an image into square tiles of pixels."""

    longest_edge: int | None
    """Length of an image's longer side after the first resizing; None: images are not resized first."""
    tile_size: int
    splits: bool
    """False: each image is one tile."""
    resample: int
    """Pillow's number of the filter."""
    rescale_factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fields: Mapping[str, Any] = field(compare=False, repr=False)
    """All fields of the file, from which an engine's preprocessor_config.json is written."""


def read_tile_settings(directory: Path) -> TileSettings | None:
    """Reads the settings in the directory of a model or of a tower; None: there is no file with them.

    Raises CheckpointError that names every field that cannot be used.
    """
    found = _image_processor_fields(directory)
    if found is None:
        return None
    path, data = found
    fields = JsonFields(data)
    fields.string("image_processor_type", choices=_KINDS, default=_KINDS[0])
    for name in ("do_convert_rgb", "do_rescale", "do_normalize"):
        if not fields.boolean(name, default=True):
            fields.problem(name, "is false; expected true")
    settings = TileSettings(
        longest_edge=_edge(fields, "size", 4 * 364) if fields.boolean("do_resize", default=True) else None,
        tile_size=_edge(fields, "max_image_size", 364),
        splits=fields.boolean("do_image_splitting", default=True),
        resample=fields.integer("resample", minimum=0, maximum=_RESAMPLES - 1, default=_LANCZOS),
        rescale_factor=fields.number("rescale_factor", above=True, default=1 / 255),
        mean=_per_channel(fields, "image_mean"),
        std=_per_channel(fields, "image_std"),
        fields=data,
    )
    if 0.0 in settings.std:
        fields.problem("image_std", "has a zero; expected numbers above 0")
    fields.discard({*_HARMLESS, "size", "return_row_col_info"})
    for name, value in fields.remaining().items():
        if value is None:
            fields.discard((name,))
    fields.finish(str(path), CheckpointError)
    return settings


def image_processor_files(directory: Path) -> list[Path]:
    """Returns the files in a model's directory that may have settings of an image processor."""
    return [path for name in (PREPROCESSOR_FILE, PROCESSOR_FILE) if (path := directory / name).is_file()]


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


def _per_channel(fields: JsonFields, name: str) -> tuple[float, ...]:
    values = fields.numbers(name) if fields.raw(name) is not None else (0.5,) * _NUM_CHANNELS
    if len(values) != _NUM_CHANNELS:
        fields.problem(name, f"has {len(values)} numbers; expected {_NUM_CHANNELS}")
        return (0.5,) * _NUM_CHANNELS
    return values
