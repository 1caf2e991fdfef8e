"""Pixels of LLaVA's images against transformers' Pillow processors, and towers of CLIP that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from adaptrt import CheckpointError, RequestError
from adaptrt.formats.checkpoint.config_file import ConfigFile
from adaptrt.formats.hugging_face.crop_processor import crop_tokens, read_crop_settings
from adaptrt.formats.hugging_face.hf_config import HfConfig
from adaptrt.formats.hugging_face.image_processor import PREPROCESSOR_FILE
from adaptrt.formats.models.clip import ClipConfig, tower_fields
from adaptrt.formats.models.registry import family_of, read_config, smallest_config
from adaptrt.runtime.images.llava_images import cropped
from adaptrt.runtime.images.opened import ImageLimits, open_image
from adaptrt.runtime.images.pixels import normalised
from support.seeing import random_image

SMALL = {"size": {"shortest_edge": 20}, "crop_size": {"height": 20, "width": 20}}
SETTINGS: list[dict[str, Any]] = [
    SMALL,
    {"size": 17, "crop_size": 12},
    {"size": {"height": 15, "width": 22}, "crop_size": {"height": 18, "width": 11}},
    {"do_resize": False, "crop_size": {"height": 9, "width": 30}},
    {**SMALL, "do_center_crop": False, "resample": 2, "rescale_factor": 0.01, "image_mean": [0.1, 0.2, 0.3]},
    {**SMALL, "do_pad": True},
]
SIZES = [(1, 1), (1, 300), (300, 1), (33, 57), (20, 20), (21, 20)]


@pytest.mark.parametrize("fields", SETTINGS)
@pytest.mark.parametrize("kind", [CLIPImageProcessorPil, LlavaImageProcessorPil])
def test_pixels_are_those_of_transformers(kind: type[Any], fields: dict[str, Any], tmp_path: Path) -> None:
    if kind is CLIPImageProcessorPil and "do_pad" in fields:
        fields = SMALL
    processor = kind(**fields)
    processor.save_pretrained(tmp_path)
    settings = read_crop_settings(tmp_path)
    assert settings is not None
    for seed, size in enumerate(SIZES):
        for mode in ("RGB", "L", "RGBA", "P"):
            image = random_image(*size, seed, mode)
            expected = processor(image, return_tensors="np")["pixel_values"]
            found = normalised([cropped(open_image(image, "image", ImageLimits()), settings)], settings)
            np.testing.assert_array_equal(found, expected)


def write(directory: Path, fields: dict[str, Any]) -> Path:
    (directory / PREPROCESSOR_FILE).write_text(json.dumps(fields))
    return directory


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"image_processor_type": "Idefics3ImageProcessor"}, "image_processor_type is"),
        ({"size": {"shortest_edge": 20, "longest_edge": 30}}, "longest_edge"),
        ({"size": {"height": 20}}, r"size\.width is missing"),
        ({"crop_size": {"height": 0, "width": 1}}, r"crop_size\.height is 0"),
        ({"crop_size": 1 << 20}, "crop_size is 1048576"),
        ({"do_flip": True}, "do_flip is unknown"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(fields: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    assert read_crop_settings(tmp_path) is None
    with pytest.raises(CheckpointError, match=complaint):
        read_crop_settings(write(tmp_path, {**SMALL, **fields}))


def test_images_that_would_become_huge_are_refused(tmp_path: Path) -> None:
    image = random_image(1, 30000)
    for fields, complaint in (
        ({"size": {"shortest_edge": 400}}, "image would become 400 x 12000000 pixels"),
        ({"do_pad": True, "image_processor_type": "LlavaImageProcessor"}, "image would become 30000 x 30000 pixels"),
    ):
        settings = read_crop_settings(write(tmp_path, fields))
        assert settings is not None
        with pytest.raises(RequestError, match=complaint):
            cropped(image, settings)


TEXT = smallest_config(family_of("LlamaForCausalLM"))


@pytest.mark.parametrize(("stated", "used"), [(-2, 11), (-1, 12), (-12, 1), (1, 1), (12, 12)])
def test_layers_after_the_one_that_is_read_are_left_out(stated: int, used: int, tmp_path: Path) -> None:
    fields = tower_fields({"vision_feature_layer": stated}, TEXT)
    assert fields is not None
    config = HfConfig.read(ConfigFile(tmp_path, {**fields, "dtype": "float32"})).config
    assert (config.num_hidden_layers, config.num_unused_layers) == (used, 12 - used or None)
    assert read_config(config.to_dict(), subject="config") == config


@pytest.mark.parametrize("stated", [0, 13, -13, [-2, -3], True, None])
def test_other_layers_are_refused(stated: Any) -> None:
    with pytest.raises(CheckpointError, match="expected the number of one of the layers, from 1 or from -1 on"):
        tower_fields({"vision_feature_layer": stated}, TEXT)


def test_other_towers_are_not_served() -> None:
    assert tower_fields({"vision_config": {"model_type": "siglip_vision_model"}}, TEXT) is None


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"crop_size": 20}, "crop_size is 20 x 20; expected 28 x 28"),
        ({"do_center_crop": False, "size": {"shortest_edge": 28}}, "crop_size is that of the image; expected 28 x 28"),
    ],
)
def test_images_must_have_the_size_of_the_tower(fields: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    config = ClipConfig(**{**TEXT.__dict__, "image_size": 28, "patch_size": 7})
    whole = read_crop_settings(write(tmp_path, {"do_center_crop": False, "size": {"height": 28, "width": 28}}))
    assert whole is not None
    assert crop_tokens(whole, config, tmp_path) == 17
    settings = read_crop_settings(write(tmp_path, fields))
    assert settings is not None
    with pytest.raises(CheckpointError, match=complaint):
        crop_tokens(settings, config, tmp_path)
