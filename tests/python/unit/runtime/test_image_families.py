"""Pixels of Gemma 3's and Pixtral's images against transformers' Pillow processors, and settings that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from adaptrt import CheckpointError, RequestError
from adaptrt.formats.checkpoint.config_file import ConfigFile
from adaptrt.formats.hugging_face.hf_config import HfConfig
from adaptrt.formats.hugging_face.image_processor import PREPROCESSOR_FILE
from adaptrt.formats.hugging_face.longest_edge import longest_edge_tokens, read_longest_edge
from adaptrt.formats.hugging_face.pan_and_scan import pan_and_scan_tokens, read_pan_and_scan
from adaptrt.formats.models import gemma3_tower, pixtral
from adaptrt.formats.models.registry import family_of, read_config, smallest_config
from adaptrt.runtime.images.gemma3_images import Gemma3Images, crops_of
from adaptrt.runtime.images.opened import ImageLimits, open_image
from adaptrt.runtime.images.pixels import normalised, resized
from adaptrt.runtime.images.pixtral_images import size_within
from support.seeing import random_image

SIZES = [(1, 1), (1, 50), (50, 1), (33, 57), (28, 28), (95, 21), (20, 44), (13, 15), (140, 28), (72, 20)]
MODES = ("RGB", "L", "RGBA", "P")
CROPS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 10,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


def opened(size: tuple[int, int], seed: int, mode: str) -> tuple[Image.Image, Image.Image]:
    image = random_image(*size, seed, mode)
    return image, open_image(image, "image", ImageLimits())


@pytest.mark.parametrize("fields", [{}, CROPS, {**CROPS, "pan_and_scan_max_num_crops": 2, "resample": 3}])
def test_squares_and_crops_are_those_of_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    processor = Gemma3ImageProcessorPil(size={"height": 28, "width": 28}, **fields)
    processor.save_pretrained(tmp_path)
    settings = read_pan_and_scan(tmp_path)
    assert settings is not None
    for seed, size in enumerate(SIZES):
        for mode in MODES:
            image, ours = opened(size, seed, mode)
            squares = [resized(one, (28, 28), settings) for one in (ours, *crops_of(ours, settings))]
            expected = processor(image, return_tensors="np")["pixel_values"]
            np.testing.assert_array_equal(normalised(squares, settings), expected)


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


def test_crops_have_transformers_words(tmp_path: Path) -> None:
    config = config_of(gemma3_tower.tower_fields({"mm_tokens_per_image": 4}, TEXT), tmp_path)
    weight = np.zeros((1, 3, 2, 2), np.float32)
    names = ("bias", "positions", "pooled_norm", "pooled_projection")
    images = Gemma3Images(write(tmp_path, CROPS), config, {"weight": weight, **dict.fromkeys(names, weight)})
    sequence = "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n"
    stand_in: Any = SimpleNamespace(full_image_sequence=sequence)
    for size, count in (((30, 30), 0), ((30, 95), 3)):
        tiles = images.tiles(random_image(*size), "image")
        assert len(tiles.pixels) == 1 + count
        assert images.num_rows(tiles) == 4 * (1 + count)
        assert images.text(tiles) == Gemma3Processor.replace_image_token(stand_in, {"num_crops": [count]}, 0)


def write(directory: Path, fields: dict[str, Any]) -> Path:
    (directory / PREPROCESSOR_FILE).write_text(json.dumps(fields))
    return directory


def test_null_stands_for_defaults_of_gemma3(tmp_path: Path) -> None:
    settings = read_pan_and_scan(write(tmp_path, {"do_convert_rgb": None, "do_pan_and_scan": None}))
    assert settings is not None
    assert (settings.side, settings.crops, settings.min_crop_size, settings.max_num_crops) == (224, False, 256, 4)


@pytest.mark.parametrize(
    ("read", "fields", "complaint"),
    [
        (read_pan_and_scan, {"image_processor_type": "CLIPImageProcessor"}, "image_processor_type is"),
        (read_pan_and_scan, {"size": {"height": 28, "width": 27}}, r"size\.width is 27; expected 28"),
        (read_pan_and_scan, {"do_resize": False}, "do_resize is false"),
        (read_pan_and_scan, {"pan_and_scan_max_num_crops": 1}, "pan_and_scan_max_num_crops is 1"),
        (read_pan_and_scan, {"crop": 1}, "crop is unknown"),
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


TEXT = smallest_config(family_of("MistralForCausalLM"))


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
    config = config_of(gemma3_tower.tower_fields({"mm_tokens_per_image": 49}, TEXT), tmp_path)
    assert (config.pool_size, config.image_token_id) == (2, 262144)
    squares = read_pan_and_scan(write(tmp_path, {}))
    assert squares is not None
    assert pan_and_scan_tokens(squares, config, tmp_path) == 14 * 14
    squares = read_pan_and_scan(write(tmp_path, {"size": {"height": 28, "width": 28}}))
    assert squares is not None
    with pytest.raises(CheckpointError, match="size is 28 x 28; expected 224 x 224, the tower's image_size"):
        pan_and_scan_tokens(squares, config, tmp_path)


def test_other_towers_are_not_served_or_refused(tmp_path: Path) -> None:
    for module in (gemma3_tower, pixtral):
        assert module.tower_fields({"vision_config": {"model_type": "clip_vision_model"}}, TEXT) is None
    with pytest.raises(CheckpointError, match="mm_tokens_per_image is 50; expected squares of patches"):
        config_of(gemma3_tower.tower_fields({"mm_tokens_per_image": 50}, TEXT), tmp_path)
    with pytest.raises(CheckpointError, match="vision_feature_layer is"):
        pixtral.tower_fields({"vision_feature_layer": [-1, -2]}, TEXT)
