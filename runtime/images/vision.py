"""Prompts with images for an engine that has a vision tower."""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..._core import ExecutorConfig, RequestError
from ...common.shown_value import shown
from ...formats.engine.engine_config import VISION_DIRECTORY
from ...formats.models.seeing import SeeingConfig
from ..adapter_store import AdapterStore
from ..adapter_versions import without_versions
from ..loaded_engine import LoadedEngine
from ..named_adapter import NamedAdapter
from .image_model import ImageModel, Tiles
from .opened import ImageLimits, digest_of, open_image
from .prompt import PreparedMessages, PromptImages, expand
from .tower import TowerRunner, tower_memory

if TYPE_CHECKING:
    from PIL.Image import Image

_DATA: Final = "data:"
_BASE64: Final = ";base64"


@dataclass(frozen=True)
class VisionStats:
    """Numbers since the start."""

    num_images: int
    """Images of all prompts."""
    num_pixels: int
    """Their pixels, as the callers gave them."""
    seconds: float
    """Time of the tower, summed over images; images that it encodes together count each."""
    num_hits: int
    """Images whose rows were kept, or were just being computed for another prompt."""
    num_misses: int
    num_cached_bytes: int
    """Size of the rows that are kept now."""


def takes_images(engine: LoadedEngine) -> bool:
    """True if the engine has a vision tower."""
    config = engine.config.pretrained_config
    return isinstance(config, SeeingConfig) and config.has_tower


def memory_for_images(engine: LoadedEngine, limits: ImageLimits | None = None) -> int:
    """Returns the bytes to leave free for the tower, which is loaded after the executor; 0 if there are no images.

    Raises EngineError.
    """
    if not takes_images(engine) or (limits is not None and limits.max_images == 0):
        return 0
    return tower_memory(engine.directory / VISION_DIRECTORY)


class Vision:
    """Makes prompts with images. The tower is loaded by load(), or with the first image. Thread-safe."""

    def __init__(
        self,
        engine: LoadedEngine,
        adapters: AdapterStore,
        config: ExecutorConfig | None = None,
        limits: ImageLimits | None = None,
    ) -> None:
        """config: of the language model's executor; the tower uses the same kernels."""
        self._engine = engine
        self._adapters = adapters
        self._config = config
        self._limits = ImageLimits() if limits is None else limits
        self._tower: TowerRunner | None = None
        self._num_images = 0
        self._num_pixels = 0
        self._lock = threading.Lock()

    def load(self) -> None:
        """Loads the tower if the engine has one and prompts may have images. Raises EngineError."""
        if self.takes_images and self._limits.max_images > 0:
            self._running()

    def stats(self) -> VisionStats:
        """Returns the numbers so far."""
        tower = self._tower
        if tower is None:
            return VisionStats(self._num_images, self._num_pixels, 0.0, 0, 0, 0)
        cache = tower.cache
        return VisionStats(
            self._num_images, self._num_pixels, tower.seconds, cache.num_hits, cache.num_misses, cache.num_bytes
        )

    def prompt(
        self,
        prepared: PreparedMessages,
        lora: str | None,
        render: Callable[[list[Any]], str],
        tokens: Callable[[str], list[int]],
        *,
        paths: bool,
        with_rows: bool = True,
        with_digests: bool = False,
    ) -> tuple[list[int], PromptImages | None]:
        """Returns the tokens of a conversation with images, and the images' rows.

        render: returns the text of messages; tokens: returns the tokens of a text. paths: True accepts paths of files.
        with_rows: False: the tower does not run, and no rows are returned. with_digests: True: with digests of the
        images' pixels, for receipts.

        Raises RequestError for images that cannot be used, and for engines without a tower; AdapterError for an adapter
        that the tower cannot use.
        """
        self.check(len(prepared.images))
        tower = self._running()
        adapter = self._adapter(lora)
        tiles, digests = self._tiles(prepared, tower.model, paths=paths, with_digests=with_digests)
        model = tower.model
        ids = tokens(expand(render(prepared.messages), model.place, [model.text(one) for one in tiles]))
        expected = sum(map(model.num_rows, tiles))
        image_token = tower.image_token_id
        if (count := ids.count(image_token)) != expected:
            raise RequestError(
                f"the prompt has {count} tokens {image_token} for {expected} rows of images; expected a tokenizer "
                "with the model's image tokens, and no such tokens in texts"
            )
        if not with_rows:
            return ids, None
        rows = np.concatenate(tower.rows(tiles, adapter))
        return ids, replace(model.prompt_images(rows, tiles), digests=digests)

    def check(self, num_images: int) -> None:
        """Raises RequestError if the engine has no tower, or for more images than a request may have."""
        if not self.takes_images:
            raise RequestError(
                f"{self._engine.directory}: takes no images; expected an engine of a vision-language model that was "
                "built from its Hugging Face directory, such as SmolVLM"
            )
        if num_images > self._limits.max_images:
            raise RequestError(f"the messages have {num_images} images; expected at most {self._limits.max_images}")

    def shutdown(self) -> None:
        """Ends the tower."""
        with self._lock:
            if self._tower is not None:
                self._tower.shutdown()

    @property
    def place(self) -> str:
        """Text that stands for an image in rendered prompts. Loads the tower."""
        return self._running().model.place

    @property
    def takes_images(self) -> bool:
        """True if the engine has a tower."""
        return takes_images(self._engine)

    def _running(self) -> TowerRunner:
        with self._lock:
            if self._tower is None:
                self._tower = TowerRunner(self._engine.directory / VISION_DIRECTORY, self._config)
            return self._tower

    def _adapter(self, lora: str | None) -> NamedAdapter | None:
        if lora is None:
            return None
        found = self._adapters.find(lora)
        if not isinstance(found, NamedAdapter):
            raise RequestError(f"lora is '{lora}', a weighted sum; expected one adapter for prompts with images")
        if self._adapters.num_virtual_tokens(lora) > 0:
            name = without_versions(lora)
            raise RequestError(f"lora is '{name}', an adapter of virtual tokens; expected a LoRA for images")
        return found

    def _tiles(
        self, prepared: PreparedMessages, model: ImageModel, *, paths: bool, with_digests: bool
    ) -> tuple[list[Tiles], tuple[str, ...]]:
        """Returns the tiles of each image, and the digest of its pixels, or no digests."""
        limit = self._limits.max_all_pixels
        made: list[Tiles] = []
        digests: list[str] = []
        num_pixels = 0
        for image, place in zip(prepared.images, prepared.places, strict=True):
            opened = self._opened(image, place, paths=paths)
            num_pixels += opened.width * opened.height
            if num_pixels > limit:
                raise RequestError(f"the images have more than {limit} pixels together, the maximum")
            made.append(model.tiles(opened, place))
            if with_digests:
                digests.append(digest_of(opened))
        with self._lock:
            self._num_images += len(made)
            self._num_pixels += num_pixels
        return made, tuple(digests)

    def _opened(self, image: Any, subject: str, *, paths: bool) -> Image:
        """Returns an image in mode RGB."""
        if isinstance(image, str) and image.startswith(_DATA):
            image = decode_data_url(image, subject, self._limits)
        elif not paths and not isinstance(image, bytes):
            raise RequestError(f"{subject} is {shown(image)}; expected a data: URL")
        elif isinstance(image, str) and "://" in image:
            raise RequestError(f"{subject} is {shown(image)}; expected a data: URL or the path of a file")
        elif isinstance(image, str):
            image = Path(image)
        return open_image(image, subject, self._limits)


def decode_data_url(url: str, subject: str, limits: ImageLimits) -> bytes:
    """Returns the bytes of data:image/...;base64,... Raises RequestError for another form, and above max_bytes."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(_BASE64):
        raise RequestError(f"{subject} is {shown(url)}; expected data:image/png;base64,...")
    if len(data) > (limits.max_bytes + 2) // 3 * 4:
        raise RequestError(f"{subject} has more than {limits.max_bytes} bytes, the maximum")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{subject} is not base64: {error}") from None
