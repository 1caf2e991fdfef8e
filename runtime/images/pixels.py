"""Resizes images and turns them into numbers, as transformers' Pillow processors do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...formats.hugging_face.image_processor import ImageSettings
from .image_model import FloatArray

if TYPE_CHECKING:
    from PIL.Image import Image


def resized(image: Image, size: tuple[int, int], settings: ImageSettings) -> Image:
    """Returns the image with (width, height) `size`."""
    from PIL.Image import Resampling

    return image.resize(size, Resampling(settings.resample))


def normalised(images: Sequence[Image], settings: ImageSettings) -> FloatArray:
    """Returns (pixels * rescale_factor - mean) / std, rounded where transformers rounds.

    The images are of one size; the result is [images, channels, height, width].
    """
    pixels = np.stack([np.asarray(image) for image in images]).transpose(0, 3, 1, 2)
    rescaled = (pixels.astype(np.float64) * settings.rescale_factor).astype(np.float32)
    mean, std = (np.asarray(values, np.float32)[:, None, None] for values in (settings.mean, settings.std))
    return np.ascontiguousarray((rescaled - mean) / std)
