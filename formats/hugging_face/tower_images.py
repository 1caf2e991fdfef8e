"""Table of the image processors that vision towers need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..models.clip import ClipConfig
from ..models.gemma3_tower import Gemma3TowerConfig
from ..models.pixtral import PixtralConfig
from ..models.qwen_tower import QwenTowerConfig
from ..models.siglip import SiglipConfig
from .crop_processor import crop_tokens, read_crop_settings
from .image_processor import ImageSettings, read_tile_settings, tile_tokens
from .longest_edge import longest_edge_tokens, read_longest_edge
from .pan_and_scan import pan_and_scan_tokens, read_pan_and_scan
from .patch_processor import patch_tokens, read_patch_settings


@dataclass(frozen=True)
class TowerImages:
    """An image processor's settings, and their effect on a tower."""

    read: Callable[[Path], ImageSettings | None]
    """Reads the settings in a directory; None: there is no file with them. Raises CheckpointError."""
    tokens: Callable[[Any, Any, Path], int]
    """Returns the maximum number of tokens of the tower's prompts, from settings, the tower's config and the directory.

    Raises CheckpointError for settings that do not fit the tower.
    """


TOWER_IMAGES: Final[Mapping[type, TowerImages]] = {
    SiglipConfig: TowerImages(read_tile_settings, tile_tokens),
    ClipConfig: TowerImages(read_crop_settings, crop_tokens),
    Gemma3TowerConfig: TowerImages(read_pan_and_scan, pan_and_scan_tokens),
    PixtralConfig: TowerImages(read_longest_edge, longest_edge_tokens),
    QwenTowerConfig: TowerImages(read_patch_settings, patch_tokens),
}
"""Image processors by the class of the tower's config."""
