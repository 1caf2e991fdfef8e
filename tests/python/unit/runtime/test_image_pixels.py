"""Pixels of images against transformers' Pillow processors, and images that are refused."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from adaptrt import CheckpointError, RequestError
from adaptrt.formats.hugging_face.image_processor import PREPROCESSOR_FILE, read_tile_settings
from adaptrt.runtime.images import patches
from adaptrt.runtime.images.opened import MAX_SCANS, ImageLimits, open_image
from adaptrt.runtime.images.patches import merged_rows
from adaptrt.runtime.images.prompt import expand, take_images
from adaptrt.runtime.images.tiles import cut_tiles
from adaptrt.runtime.images.vision import decode_data_url
from support.seeing import random_image

SMALL = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 28}}
SETTINGS: list[dict[str, Any]] = [
    SMALL,
    {**SMALL, "resample": 2, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "rescale_factor": 0.01},
    {**SMALL, "do_image_splitting": False},
    {**SMALL, "do_resize": False},
]
SIZES = [(1, 1), (1, 300), (300, 1), (33, 57), (28, 28), (29, 28), (64, 48)]
LIMITS = ImageLimits()


@pytest.mark.parametrize("fields", SETTINGS)
@pytest.mark.parametrize("kind", [Idefics3ImageProcessorPil, SmolVLMImageProcessorPil])
def test_pixels_are_those_of_transformers(kind: type[Any], fields: dict[str, Any], tmp_path: Path) -> None:
    processor = kind(**fields)
    processor.save_pretrained(tmp_path)
    settings = read_tile_settings(tmp_path)
    assert settings is not None
    for seed, size in enumerate(SIZES):
        for mode in ("RGB", "L", "RGBA", "P", "LA"):
            image = random_image(*size, seed, mode)
            expected = processor(image, return_row_col_info=True, return_tensors="np")
            found = cut_tiles(open_image(image, "image", LIMITS), settings)
            assert (found.rows, found.columns) == (expected["rows"][0][0], expected["cols"][0][0])
            np.testing.assert_array_equal(found.pixels, expected["pixel_values"][0])


def test_settings_may_be_part_of_the_processor(tmp_path: Path) -> None:
    assert read_tile_settings(tmp_path) is None
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": SMALL, "image_seq_len": 4}))
    found = read_tile_settings(tmp_path)
    assert found is not None
    assert found.tile_size == 28


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type is"),
        ({"do_normalize": False}, "do_normalize is false; expected true"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std has a zero"),
        ({"image_mean": [0.5]}, "image_mean has 1 numbers; expected 3"),
        ({"crop": 5}, "crop is unknown"),
        ({"max_image_size": {"longest_edge": 1 << 20}}, r"max_image_size\.longest_edge is 1048576"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(fields: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    (tmp_path / PREPROCESSOR_FILE).write_text(json.dumps({**SMALL, **fields}))
    with pytest.raises(CheckpointError, match=complaint):
        read_tile_settings(tmp_path)


def png(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_files_are_turned_as_exif_says() -> None:
    image = random_image(5, 3)
    exif = Image.Exif()
    exif[0x0112] = 6
    assert open_image(png(image, exif=exif), "image", LIMITS).size == (3, 5)


def test_images_come_in_many_forms(tmp_path: Path) -> None:
    image = random_image(6, 4)
    expected = np.asarray(image)
    (tmp_path / "image.png").write_bytes(png(image))
    for source in (image, expected, tmp_path / "image.png", png(image), bytearray(png(image))):
        np.testing.assert_array_equal(np.asarray(open_image(source, "image", LIMITS)), expected)
    grey = np.asarray(image.convert("L"))
    for source in (grey, grey[:, :, None]):
        assert open_image(source, "image", LIMITS).mode == "RGB"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (5, "image is 5; expected an image of Pillow"),
        (b"", "cannot be read as an image"),
        (png(random_image(40, 40))[:300], "cannot be read as an image"),
        (png(random_image(4, 4), "TIFF"), "accepted: PNG, JPEG"),
        (np.zeros((2, 2)), r"is an array float64 \[2, 2\]; expected uint8"),
        (np.zeros((2, 2, 5), np.uint8), r"is an array uint8 \[2, 2, 5\]"),
        (np.zeros((0, 2), np.uint8), r"is an array uint8 \[0, 2\]"),
        (Path("/nowhere.png"), "cannot read /nowhere.png"),
    ],
)
def test_other_images_are_refused(source: Any, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        open_image(source, "image", LIMITS)


def test_large_images_are_refused_before_they_are_read() -> None:
    limits = ImageLimits(max_bytes=2000, max_pixels=100)
    # 4 million pixels of one colour are a small file.
    for source in (png(Image.new("1", (2000, 2000)))[:1500], Image.new("L", (11, 10)), np.zeros((11, 10), np.uint8)):
        with pytest.raises(RequestError, match="the maximum is 100 in all"):
            open_image(source, "image", limits)
    with pytest.raises(RequestError, match="has more than 2000 bytes"):
        open_image(png(random_image(40, 40)), "image", limits)
    url = "data:image/png;base64," + base64.b64encode(bytes(2003)).decode()
    with pytest.raises(RequestError, match="has more than 2000 bytes"):
        decode_data_url(url, "image", limits)


WHOLE = [
    *(png(random_image(20, 14, mode=mode), kind) for kind in ("PNG", "WEBP") for mode in ("RGB", "RGBA")),
    *(png(random_image(20, 14, mode=mode), kind) for kind in ("JPEG", "BMP", "GIF") for mode in ("RGB", "L")),
    png(random_image(20, 14), "JPEG", progressive=True),
    png(random_image(20, 14), exif=Image.Exif()),
    png(random_image(20, 14, mode="P"), transparency=3),
]


@given(
    st.sampled_from(WHOLE),
    st.floats(0, 1),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=8),
)
@settings(max_examples=250, deadline=None)
def test_damaged_files_are_refused_or_read(whole: bytes, cut: float, changes: list[tuple[float, int]]) -> None:
    damaged = bytearray(whole[: len(whole) - int(cut**4 * len(whole))])
    for place, value in changes:
        if damaged:
            damaged[int(place * len(damaged))] ^= value
    try:
        made = open_image(damaged, "image", LIMITS)
    except RequestError as error:
        if not str(error).startswith("image "):
            raise
    else:
        assert made.mode == "RGB"
        assert made.width * made.height <= LIMITS.max_pixels


def with_scans(number: int) -> bytes:
    """Returns a progressive JPEG file whose last scan is repeated."""
    whole = png(Image.new("L", (64, 64), 128), "JPEG", progressive=True)
    begin = whole.rindex(b"\xff\xda")
    return whole[:begin] + whole[begin:-2] * number + whole[-2:]


def test_jpeg_files_of_many_scans_are_refused() -> None:
    usual = with_scans(1).count(b"\xff\xda")
    assert open_image(with_scans(MAX_SCANS - usual + 1), "image", LIMITS).size == (64, 64)
    with pytest.raises(RequestError, match="is a JPEG file with more than 32 scans"):
        open_image(with_scans(MAX_SCANS - usual + 2), "image", LIMITS)
    # Neither what follows the image nor the data of a segment is a scan.
    comment = b"\xff\xfe\x01\x00" + b"\xff\xda" * 127
    for file in (with_scans(1) + with_scans(90), with_scans(1)[:2] + comment + with_scans(1)[2:]):
        assert open_image(file, "image", LIMITS).size == (64, 64)


def test_narrow_images_that_would_become_huge_are_refused(tmp_path: Path) -> None:
    (tmp_path / PREPROCESSOR_FILE).write_text(json.dumps({"do_resize": False}))
    settings = read_tile_settings(tmp_path)
    assert settings is not None
    with pytest.raises(RequestError, match="image would become 364 x 300300 pixels by the model's image processor"):
        cut_tiles(random_image(1, 300000), settings)


def test_data_urls() -> None:
    assert decode_data_url("data:image/png;base64,AAEC", "image", LIMITS) == bytes([0, 1, 2])
    for url, complaint in (
        ("data:text/plain;base64,AAEC", "expected data:image/png;base64"),
        ("data:image/png,AAEC", "expected data:image/png;base64"),
        ("data:image/png;base64,A*EC", "is not base64"),
    ):
        with pytest.raises(RequestError, match=complaint):
            decode_data_url(url, "image", LIMITS)


@pytest.mark.parametrize("trained", [4, 8, 26, 27, 32])
def test_positions_are_those_of_transformers(trained: int) -> None:
    """transformers' formula; torch rounds the bounds as its CPU's vectors are wide, but not for these sizes."""
    for side in (trained, trained // 2):
        bounds = torch.arange(1 / trained, 1.0, 1 / trained)
        along = torch.bucketize(
            torch.clamp(torch.arange(side) * (1.0 / torch.tensor(side)), max=1 - 1e-6), bounds, right=True
        )
        expected = (along[:, None] * trained + along[None, :]).reshape(-1)
        np.testing.assert_array_equal(patches.positions_of(side, trained), expected.numpy())


def test_neighbours_are_joined_row_by_row() -> None:
    rows = np.arange(16, dtype=np.float32)[:, None]
    np.testing.assert_array_equal(merged_rows(rows, 2)[:2], [[0, 1, 4, 5], [2, 3, 6, 7]])


def test_images_are_taken_out_of_messages() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "text"},
        {"role": "user", "content": [{"type": "image", "image": 1}, {"type": "text", "text": "a"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "b"}}, {"type": "image", "path": "c"}]},
    ]
    taken = take_images(messages)
    assert taken.images == [1, "b", "c"]
    assert taken.places == ["messages[1].content[0]", "messages[2].content[0]", "messages[2].content[1]"]
    assert taken.messages[1]["content"] == [{"type": "image"}, {"type": "text", "text": "a"}]
    assert messages[1]["content"][0] == {"type": "image", "image": 1}
    for part in ({"type": "image"}, {"type": "image", "image": 1, "path": "x"}, {"type": "image_url", "image_url": 5}):
        with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]"):
            take_images([{"role": "user", "content": [part]}])


def test_every_image_needs_its_token() -> None:
    assert expand("a<image>b<image>", "<image>", ["12", "<image>"]) == "a12b<image>"
    for text in ("a", "<image><image>"):
        with pytest.raises(RequestError, match="for 1 images; expected one for each image"):
            expand(text, "<image>", ["1"])
