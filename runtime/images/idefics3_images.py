"""Images of Idefics 3 and SmolVLM: square tiles, whose neighbouring rows are joined and projected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..._core import EngineError
from ...formats.hugging_face.image_processor import read_tile_settings
from ...formats.models.siglip import SiglipConfig
from .image_model import FloatArray, ImageModel, Tiles
from .patches import PatchRows, merged_rows, positions_of
from .tiles import cut_tiles

if TYPE_CHECKING:
    from PIL.Image import Image

_TOKEN: Final = "<image>"
_AROUND: Final = "<fake_token_around_image>"
_WHOLE: Final = "<global-img>"


class Idefics3Images(ImageModel):
    """Rules of Idefics 3 and SmolVLM."""

    place = _TOKEN

    def __init__(self, directory: Path, config: Any, tensors: Mapping[str, FloatArray]) -> None:
        """Raises EngineError if the directory has no settings of an image processor."""
        super().__init__(directory, config, tensors)
        settings = read_tile_settings(directory)
        if settings is None:
            raise EngineError(f"{directory}: has no settings of an image processor; build the engine again")
        self._settings = settings
        self._config: SiglipConfig = config
        self._patches = PatchRows(tensors["weight"], tensors["bias"])
        self._positions = tensors["positions"]

    def tiles(self, image: Image, subject: str) -> Tiles:
        """Returns the tiles of an image; the last one is the whole image."""
        return cut_tiles(image, self._settings, subject)

    def patches(self, pixels: FloatArray) -> FloatArray:
        """Returns the rows of a tile's patches, with the positions of a smaller or equal tile."""
        positions = positions_of(pixels.shape[1] // self._config.patch_size, self._config.patches_per_side)
        return np.ascontiguousarray(self._patches.of(pixels) + self._positions[positions], np.float32)

    def rows(self, encoded: FloatArray, projection: FloatArray | None, pixels: FloatArray) -> FloatArray:
        """Joins neighbouring rows and projects them."""
        assert projection is not None
        made: FloatArray = merged_rows(encoded, self._config.merge_size) @ projection.T
        return made

    def num_rows(self, tiles: Tiles) -> int:
        """Returns the number of rows of all tiles."""
        return len(tiles.pixels) * self._rows_per_tile

    @property
    def _rows_per_tile(self) -> int:
        side: int = self._settings.tile_size // self._config.patch_size // self._config.merge_size
        return side * side

    def text(self, tiles: Tiles) -> str:
        """Returns the tokens of an image's tiles, row by row, then those of the whole image."""
        rows = _TOKEN * self._rows_per_tile
        whole = f"{_AROUND}{_WHOLE}{rows}{_AROUND}"
        if tiles.rows == 0:
            return whole
        lines = (
            "".join(f"{_AROUND}<row_{row + 1}_col_{column + 1}>{rows}" for column in range(tiles.columns))
            for row in range(tiles.rows)
        )
        return "".join(f"{line}\n" for line in lines) + "\n" + whole
