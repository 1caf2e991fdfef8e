"""Pixels, patches and positions of Qwen's images against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from adaptrt import CheckpointError, RequestError
from adaptrt.formats.hugging_face.patch_processor import PatchSettings, read_patch_settings
from adaptrt.runtime.images import qwen_images
from adaptrt.runtime.images.opened import ImageLimits, open_image
from adaptrt.runtime.images.qwen_images import QwenImages, smart_size, with_positions
from support.seeing import random_image

SMALL = {"patch_size": 4, "min_pixels": 300, "max_pixels": 3000}
SETTINGS: list[dict[str, Any]] = [
    SMALL,
    {"patch_size": 3, "merge_size": 3, "size": {"shortest_edge": 200, "longest_edge": 2000}, "resample": 2,
     "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "rescale_factor": 0.01},
]  # fmt: skip
SIZES = [(1, 1), (1, 150), (150, 1), (33, 57), (8, 8), (9, 8), (64, 48), (401, 3)]
LIMITS = ImageLimits()


def settings_of(fields: dict[str, Any], directory: Path) -> PatchSettings:
    Qwen2VLImageProcessorPil(**fields).save_pretrained(directory)
    found = read_patch_settings(directory)
    assert found is not None
    return found


def model_of(settings: PatchSettings, directory: Path, **fields: Any) -> QwenImages:
    """Returns the rules of a tower with random weights, whose rows have 6 elements."""
    random = np.random.default_rng(0)
    shape = (6, 3, settings.num_frames, settings.patch_size, settings.patch_size)
    tensors = {"weight": random.standard_normal(shape).astype(np.float32)}
    if side := fields.get("positions_per_side", 0):
        tensors["positions"] = random.standard_normal((side * side, 6)).astype(np.float32)
    config = SimpleNamespace(
        patch_size=settings.patch_size,
        merge_size=settings.merge_size,
        image_token_id=7,
        **{"has_windows": False, **fields},
    )
    return QwenImages(directory, config, tensors)


@pytest.mark.parametrize("fields", SETTINGS)
def test_patches_are_those_of_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    settings = settings_of(fields, tmp_path)
    model, processor = model_of(settings, tmp_path), Qwen2VLImageProcessorPil(**fields)
    weight = np.repeat(model._weight.T.reshape(6, 3, 1, -1) / settings.num_frames, settings.num_frames, axis=2)
    for seed, size in enumerate(SIZES):
        for mode in ("RGB", "L", "RGBA", "P"):
            image = random_image(*size, seed, mode)
            expected = processor(image, return_tensors="np")
            tiles = model.tiles(open_image(image, "image", LIMITS), "image")
            (grid,) = expected["image_grid_thw"]
            sides = model.sides(tiles)
            assert [1, *(side * settings.merge_size for side in sides)] == grid.tolist()
            assert model.num_rows(tiles) <= settings.max_squares
            pixels = expected["pixel_values"].reshape(-1, 3, settings.num_frames, settings.patch_size**2)
            rows = np.einsum("pcfx,wcfx->pw", pixels.astype(np.float64), weight)
            np.testing.assert_allclose(model.patches(tiles.pixels[0])[:, :6], rows, atol=1e-4)
            # The same pixels, bit by bit, in the order of the image.
            frame = pixels[:, :, 0].reshape(
                *sides, settings.merge_size, settings.merge_size, 3, settings.patch_size, settings.patch_size
            )
            whole = frame.transpose(4, 0, 2, 5, 1, 3, 6).reshape(tiles.pixels[0].shape)
            np.testing.assert_array_equal(tiles.pixels[0], whole)


@pytest.mark.parametrize("window", [0, 1, 2, 3])
@pytest.mark.parametrize("sides", [(1, 1), (2, 6), (7, 5)])
def test_coordinates_are_those_of_transformers(window: int, sides: tuple[int, int]) -> None:
    merge = 2
    thw = torch.tensor([[1, sides[0] * merge, sides[1] * merge]])
    positions = get_vision_position_ids(thw, merge).reshape(-1, merge * merge, 2)
    grid = qwen_images._Grid(sides[0] * merge, sides[1] * merge, merge, window)
    if window:
        order, ends = get_vision_window_index(thw, merge, window * merge * 10, 10)
        windows = np.repeat(np.arange(len(ends) - 1), np.diff(ends.numpy()))
        np.testing.assert_array_equal(np.diff(grid.coordinates[:, 2]) != 0, np.diff(windows) != 0)
    else:
        order = torch.arange(sides[0] * sides[1])
        assert not grid.coordinates[:, 2].any()
    np.testing.assert_array_equal(grid.squares, order.numpy())
    np.testing.assert_array_equal(grid.coordinates[:, :2], positions[order].reshape(-1, 2).numpy())
    assert (grid.coordinates[:, 3] == -1).all()
    np.testing.assert_array_equal(grid.patches, grid.coordinates[:, 0] * sides[1] * merge + grid.coordinates[:, 1])


@pytest.mark.parametrize("sides", [(1, 1), (4, 9), (9, 5)])
def test_learned_positions_are_interpolated_as_in_transformers(sides: tuple[int, int]) -> None:
    table = np.random.default_rng(1).standard_normal((25, 3)).astype(np.float32)
    indices, weights = get_vision_interpolation_indices_and_weights(torch.tensor([[1, *sides]]), 5, align_corners=True)
    expected = (torch.from_numpy(table)[indices] * weights[:, :, None]).sum(1)
    np.testing.assert_allclose(qwen_images._interpolated(table, 5, *sides), expected.numpy(), atol=1e-6)


def test_positions_in_prompts_are_those_of_transformers() -> None:
    sides = [(2, 3), (4, 1), (1, 1)]
    image, text = 9, 1
    prompt = [text, text]
    for height, width in sides:
        prompt += [*[image] * (height * width), text, text, text]
    config = transformers.Qwen2_5_VLConfig(
        text_config={"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8,
                     "vocab_size": 16, "num_key_value_heads": 1},
        vision_config={"depth": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 8, "out_hidden_size": 8},
    )  # fmt: skip
    model = transformers.Qwen2_5_VLModel(config)
    ids = torch.tensor([prompt])
    grids = torch.tensor([[1, 2 * height, 2 * width] for height, width in sides])
    expected, delta = model.get_rope_index(ids, (ids == image).int(), grids)
    rows = np.zeros((sum(height * width for height, width in sides), 2), np.float32)
    found = with_positions(rows, np.array(prompt), image, sides)
    places = np.flatnonzero(np.array(prompt) == image)
    np.testing.assert_array_equal(found[:, 2:5], expected[:, 0, places].numpy().T)
    assert found[-1, 5] - (places[-1] + 1) == delta.item()


def test_rows_are_in_the_order_of_the_image(tmp_path: Path) -> None:
    model = model_of(settings_of(SMALL, tmp_path), tmp_path, has_windows=True, window_rows=2)
    pixels = np.zeros((3, 5 * 8, 3 * 8), np.float32)
    order = qwen_images._Grid(10, 6, 2, 2).squares
    encoded = order.astype(np.float32)[:, None]
    assert model.row_interval == 4
    assert (np.diff(order) != 1).any()
    np.testing.assert_array_equal(model.rows(encoded, None, pixels), np.arange(15)[:, None])


def test_narrow_images_are_refused(tmp_path: Path) -> None:
    settings = settings_of(SMALL, tmp_path)
    with pytest.raises(RequestError, match="image is 201 x 1 pixels; expected a side up to 200 times"):
        smart_size((201, 1), settings, "image")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"do_resize": False}, "do_resize is false; expected true"),
        ({"size": {"shortest_edge": 9}}, "longest_edge is missing"),
        ({"max_pixels": 1000}, "size allows up to 1000 pixels; expected at least 3136"),
        ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type is .CLIPImageProcessor"),
        ({"colours": 3}, "colours"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(fields: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=complaint):
        read_patch_settings(tmp_path)


def test_older_files_bound_pixels_by_fields_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "preprocessor_config.json"
    for fields, expected in (({}, (3136, 1003520)), ({"min_pixels": 784, "max_pixels": 1568}, (784, 1568))):
        file.write_text(json.dumps(fields))
        found = read_patch_settings(tmp_path)
        assert found is not None
        assert (found.min_pixels, found.max_pixels) == expected
        assert (found.resample, found.patch_size, found.merge_size, found.num_frames) == (3, 14, 2, 2)


def test_no_image_has_more_squares_than_its_settings_allow(tmp_path: Path) -> None:
    settings = settings_of({"patch_size": 4, "min_pixels": 3000, "max_pixels": 3000}, tmp_path)
    squares = []
    for size in [(1, 200), (199, 1), (3, 3), (500, 500), (4000, 20)]:
        width, height = smart_size(size, settings, "image")
        squares.append(width * height // settings.factor**2)
    assert max(squares) <= settings.max_squares < 2 * max(squares)


def test_models_without_settings_have_none(tmp_path: Path) -> None:
    assert read_patch_settings(tmp_path) is None
