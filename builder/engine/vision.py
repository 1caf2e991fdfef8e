"""Builds the vision tower of a model whose prompts may have images, in a directory inside of the engine's."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ..._core import QuantAlgo, dtype_name
from ...common.progress import Progress
from ...common.shown_value import shown
from ...formats.checkpoint.config_file import ConfigFile
from ...formats.checkpoint.quantization import QuantConfig
from ...formats.checkpoint.quantizer import QuantizationError
from ...formats.engine.build_config import NATIVE, BuildConfig
from ...formats.engine.engine_config import VISION_DIRECTORY, EngineConfig, engine_file
from ...formats.hugging_face.hf_config import HfConfig
from ...formats.hugging_face.image_processor import PREPROCESSOR_FILE, ImageSettings
from ...formats.hugging_face.tower_images import TOWER_IMAGES
from ...formats.models.registry import family_of
from ...formats.models.seeing import SeeingConfig
from ...formats.models.tower import TowerConfig
from ..compile.native import compile_network
from ..conversion.checkpoint import Checkpoint
from .carried_adapters import with_adapters

_TILES_PER_STEP: Final = 4
"""Maximum number of tiles that a step of the tower computes."""
_TOKENS_PER_STEP: Final = 1 << 14
"""Maximum number of tokens of several tiles in a step of the tower."""
_QUANTIZED: Final = QuantConfig(quant_algo=QuantAlgo.W8A16)
"""Quantisation of towers, as of lm_head, in builds that quantise the language model in any way."""


@dataclass(frozen=True)
class Tower:
    """A tower whose settings fit its network."""

    checkpoint: Checkpoint
    settings: ImageSettings
    tokens_per_tile: int
    """Maximum number of tokens of a prompt of the tower: one for each patch of a tile, and a class token."""

    @property
    def quantization_errors(self) -> tuple[QuantizationError, ...]:
        """Quantisation error of each weight that was quantised while it was read."""
        errors = self.checkpoint.quantization_errors
        return tuple(replace(error, name=f"{VISION_DIRECTORY}.{error.name}") for error in errors)

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
            max_num_tokens=max(self.tokens_per_tile, min(_TILES_PER_STEP * self.tokens_per_tile, _TOKENS_PER_STEP)),
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


def tower_of(checkpoint: Checkpoint, config: BuildConfig, *, is_quantized: bool) -> Tower | str:
    """Returns the tower of a Hugging Face model, or the reason why the engine will only take text.

    is_quantized: True if the build quantises weights; the tower's linear layers become int8.

    Raises CheckpointError for a tower that cannot be used.
    """
    vision = family_of(checkpoint.config.architecture).vision
    if checkpoint.model is None or vision is None:
        return "the source has no vision tower"
    if vision.tower_fields is None:
        return f"images of {checkpoint.config.architecture} are not served"
    if config.backend != NATIVE:
        return f"the backend {config.backend} takes no images"
    assert vision.family is not None
    images = TOWER_IMAGES[vision.family.config_class]
    directory = checkpoint.directory
    data = checkpoint.model.file.data
    found = vision.tower_fields(data, checkpoint.config)
    if found is None:
        return f"towers of {shown(data['vision_config'].get('model_type'))} are not served"
    settings = images.read(directory)
    if settings is None:
        return f"the model has no {PREPROCESSOR_FILE}"
    fields = {**found, "dtype": dtype_name(checkpoint.config.dtype), "torch_dtype": None}
    tower = Checkpoint.of_model(HfConfig.read(ConfigFile(directory, fields)), keeps_published=False)
    assert isinstance(tower.config, TowerConfig)
    tokens = images.tokens(settings, tower.config, directory)
    if tower.config.tokens_per_row is not None:
        # A larger image has no room in a prompt.
        longest = config.max_input_len or config.max_seq_len or checkpoint.config.max_position_embeddings
        tokens = min(tokens, longest * tower.config.tokens_per_row)
    return Tower(tower.quantized(_QUANTIZED) if is_quantized else tower, settings, tokens)


def with_tower(checkpoint: Checkpoint, tower: Tower) -> Checkpoint:
    """Returns the language model's checkpoint for an engine with a tower."""
    config, of_tower = checkpoint.config, tower.checkpoint.config
    assert isinstance(config, SeeingConfig)
    assert isinstance(of_tower, TowerConfig)
    return checkpoint.with_config(config.with_tower(of_tower))
