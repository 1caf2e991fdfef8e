"""Pixels of Pixtral's images against transformers' Pillow processor, and settings that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from adaptrt import CheckpointError, RequestError
from adaptrt._core import DType
from adaptrt.formats.checkpoint.config import CheckpointConfig
from adaptrt.formats.checkpoint.config_file import ConfigFile
from adaptrt.formats.hugging_face.hf_config import HfConfig
from adaptrt.formats.hugging_face.image_processor import PREPROCESSOR_FILE
from adaptrt.formats.hugging_face.longest_edge import longest_edge_tokens, read_longest_edge
from adaptrt.formats.models import pixtral
from adaptrt.formats.models.registry import read_config
from adaptrt.runtime.images.opened import ImageLimits, open_image
from adaptrt.runtime.images.pixels import normalised, resized
from adaptrt.runtime.images.pixtral_images import size_within
from support.seeing import random_image

SIZES = [(1, 1), (1, 50), (50, 1), (33, 57), (28, 28), (95, 21), (20, 44), (13, 15), (140, 28)]
MODES = ("RGB", "L", "RGBA", "P")


def opened(size: tuple[int, int], seed: int, mode: str) -> tuple[Image.Image, Image.Image]:
    image = random_image(*size, seed, mode)
    return image, open_image(image, "image", ImageLimits())


@pytest.mark.parametrize("size", [{"longest_edge": 50}, {"height": 50, "width": 60}])
def test_whole_images_are_those_of_transformers(size: dict[str, int], tmp_path: Path) -> None:
    processor = PixtralImageProcessorPil(size=size)
    processor.save_pretrained(tmp_path)
    settings = read_longest_edge(tmp_path)
    assert settings is not None
    for seed, size_of_image in enumerate(SIZES):
        for mode in MODES:
            image, ours = opened(size_of_image, seed, mode)
            found = normalised([resized(ours, size_within(ours.size, settings, 14), settings)], settings)
            expected = processor(image, patch_size={"height": 14, "width": 14}, return_tensors="np")["pixel_values"]
            np.testing.assert_array_equal(found, expected)
    with pytest.raises(RequestError, match="image is 1 x 9000 pixels, of which none are left within"):
        size_within((1, 9000), settings, 14)


def write(directory: Path, fields: dict[str, Any]) -> Path:
    (directory / PREPROCESSOR_FILE).write_text(json.dumps(fields))
    return directory


@pytest.mark.parametrize(
    ("read", "fields", "complaint"),
    [
        (read_longest_edge, {"image_processor_type": "CLIPImageProcessor"}, "image_processor_type is"),
        (read_longest_edge, {"size": {"longest_edge": 1 << 20}}, r"size\.longest_edge is 1048576"),
        (read_longest_edge, {"do_resize": False}, "do_resize is false"),
        (read_longest_edge, {"crop": 1}, "crop is unknown"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    read: Callable[[Path], Any], fields: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    assert read(tmp_path) is None
    with pytest.raises(CheckpointError, match=complaint):
        read(write(tmp_path, fields))


TEXT = CheckpointConfig(
    architecture="MistralForCausalLM",
    dtype=DType.FLOAT32,
    vocab_size=2,
    max_position_embeddings=2,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_size=4,
    intermediate_size=16,
    norm_epsilon=1.0,
    rotary_base=2.0,
)


def config_of(fields: Any, directory: Path) -> Any:
    config = HfConfig.read(ConfigFile(directory, {**fields, "dtype": "float32"})).config
    assert read_config(config.to_dict(), subject="config") == config
    return config


def test_towers_have_transformers_defaults(tmp_path: Path) -> None:
    config = config_of(pixtral.tower_fields({}, TEXT), tmp_path)
    assert (config.num_hidden_layers, config.merge_size, config.image_token_id) == (25, 2, 10)
    settings = read_longest_edge(write(tmp_path, {"size": {"longest_edge": 100}}))
    assert settings is not None
    assert longest_edge_tokens(settings, config, tmp_path) == 8 * 8


def test_other_towers_are_not_served_or_refused() -> None:
    assert pixtral.tower_fields({"vision_config": {"model_type": "clip_vision_model"}}, TEXT) is None
    with pytest.raises(CheckpointError, match="vision_feature_layer is"):
        pixtral.tower_fields({"vision_feature_layer": [-1, -2]}, TEXT)
