"""Builds the vision tower of a model whose prompts may have images, in a directory inside of the engine's."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ..._core import CheckpointError, dtype_name
from ...common.progress import Progress
from ...formats.checkpoint.config_file import ConfigFile
from ...formats.engine.build_config import NATIVE, BuildConfig
from ...formats.engine.engine_config import EngineConfig, engine_file
from ...formats.hugging_face.hf_config import HfConfig
from ...formats.hugging_face.image_processor import PREPROCESSOR_FILE, TileSettings, read_tile_settings
from ...formats.models.idefics3 import SeeingConfig
from ...formats.models.registry import family_of
from ...formats.models.siglip import SiglipConfig
from ..compile.native import compile_network
from ..conversion.checkpoint import Checkpoint
from .carried_adapters import with_adapters

_TILES_PER_STEP: Final = 4
"""Maximum number of tiles that a step of the tower computes."""


@dataclass(frozen=True)
class Tower:
    """A tower whose settings fit its network."""

    checkpoint: Checkpoint
    settings: TileSettings
    tokens_per_tile: int
    """Number of a tile's patches."""

    def write(self, directory: Path, config: BuildConfig, progress: Progress) -> None:
        """Fills the new `directory` with the tower's engine and its settings. config: that of the language model."""
        directory.mkdir()
        lora = replace(
            config.lora_config,
            lora_dir=(),
            adapter_names=(),
            lora_target_modules=(),
            max_extra_tokens=0,
            long_lora_scaling_factors=(),
        )
        own = BuildConfig(
            max_batch_size=_TILES_PER_STEP,
            max_num_tokens=_TILES_PER_STEP * self.tokens_per_tile,
            max_input_len=self.tokens_per_tile,
            max_seq_len=self.tokens_per_tile,
            plugin_config=config.plugin_config,
            lora_config=lora,
        ).with_defaults(self.checkpoint.config)
        own = with_adapters(own, self.checkpoint.network)
        compiled = compile_network(self.checkpoint.network, self.checkpoint.ranks[0], own)
        with progress.task("Packing the vision tower", compiled.num_bytes) as advance:
            checksum = compiled.write(directory / engine_file(0), advance)
        EngineConfig.of_this_release(self.checkpoint.config, own, (checksum,), ()).save(directory)
        fields = json.dumps(dict(self.settings.fields), indent=2)
        (directory / PREPROCESSOR_FILE).write_text(fields, encoding="utf-8")


def tower_of(checkpoint: Checkpoint, config: BuildConfig) -> Tower | None:
    """Returns the tower of a Hugging Face model; None: the engine will only take text.

    That is so for models without settings of an image processor, families whose tower is not served, checkpoints, and
    backends other than native. Raises CheckpointError for a tower that cannot be used.
    """
    vision = family_of(checkpoint.config.architecture).vision
    if checkpoint.model is None or vision is None or vision.tower_fields is None or config.backend != NATIVE:
        return None
    directory = checkpoint.directory
    settings = read_tile_settings(directory)
    if settings is None:
        return None
    fields = vision.tower_fields(checkpoint.model.file.data, checkpoint.config)
    fields = {**fields, "dtype": dtype_name(checkpoint.config.dtype), "torch_dtype": None}
    tower = Checkpoint.of_model(HfConfig.read(ConfigFile(directory, fields)), keeps_published=False)
    assert isinstance(tower.config, SiglipConfig)
    return Tower(tower, settings, _tokens_per_tile(settings, tower.config, directory))


def with_tower(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the language model's checkpoint for an engine with a tower."""
    assert isinstance(checkpoint.config, SeeingConfig)
    return checkpoint.with_config(replace(checkpoint.config, has_tower=True))


def _tokens_per_tile(settings: TileSettings, config: SiglipConfig, directory: Path) -> int:
    side = settings.tile_size // config.patch_size
    if not 1 <= side <= config.patches_per_side or side % config.merge_size != 0:
        raise CheckpointError(
            f"{directory}: the image processor's max_image_size is {settings.tile_size}, which is {side} patches of "
            f"{config.patch_size} pixels; expected a multiple of scale_factor {config.merge_size}, up to "
            f"{config.patches_per_side} patches"
        )
    return side**2
