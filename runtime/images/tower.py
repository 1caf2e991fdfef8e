"""Runs a vision tower: turns the tiles of images into rows of a language model, with a request's adapter."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import numpy as np

from ..._core import (
    AdapterError,
    EngineError,
    ExecutorConfig,
    PoolingParams,
    PoolingType,
    PromptTuningConfig,
    Request,
    RequestError,
)
from ...common.json_fields import load_json_object
from ...formats.adapter.invocation import invocation_tokens
from ...formats.adapter.one_version import one_version
from ...formats.adapter.peft_reader import acts_on, read_pooler
from ...formats.adapter.recognise import CONFIG_FILE, MAX_CONFIG_BYTES
from ...formats.engine.engine_config import engine_file
from ...formats.models.clip import ClipConfig
from ...formats.models.gemma3_tower import Gemma3TowerConfig
from ...formats.models.pixtral import PixtralConfig
from ...formats.models.qwen_tower import QwenTowerConfig
from ...formats.models.siglip import SiglipConfig
from ...formats.models.tower import TowerConfig
from ...formats.network.ops import PatchEmbedding
from ..engine import load_engine
from ..executor import Executor
from ..named_adapter import NamedAdapter, check_unchanged
from ..native_engine import NativeEngine
from ..pooled import rows_of
from .gemma3_images import Gemma3Images
from .idefics3_images import Idefics3Images
from .image_model import FloatArray, ImageModel, Tiles
from .llava_images import LlavaImages
from .pixtral_images import PixtralImages
from .qwen_images import QwenImages
from .row_cache import RowCache

_MODELS: Final[dict[type[TowerConfig], type[ImageModel]]] = {
    SiglipConfig: Idefics3Images,
    ClipConfig: LlavaImages,
    Gemma3TowerConfig: Gemma3Images,
    PixtralConfig: PixtralImages,
    QwenTowerConfig: QwenImages,
}

MAX_CACHED_BYTES: Final = 256 << 20
"""Maximum size of all rows that are kept for later requests."""
_MAX_ADAPTERS: Final = 64
"""Maximum number of adapters that the tower keeps."""


def tower_memory(directory: Path) -> int:
    """Returns the bytes that the tower in an engine's directory will take: weights, activations and kept rows.

    Raises EngineError and CheckpointError for files that cannot be used.
    """
    engine = load_engine(directory)
    assert isinstance(engine, NativeEngine)
    return (directory / engine_file(0)).stat().st_size + engine.program.arena_bytes + MAX_CACHED_BYTES


@dataclass(frozen=True, eq=False)
class _TowerAdapter:
    """The part of an adapter that changes an image's rows."""

    name: str | None
    """Name in the tower's executor; None: the adapter does not change the tower's layers."""
    projection: FloatArray | None
    """[outputs, inputs]: the projection with the adapter; None: there is none outside of the program."""
    key: str
    """Differs for adapters with which rows differ."""


@dataclass(frozen=True, eq=False)
class _RunningImage:
    """An image that is in the tower."""

    tiles: Tiles
    part: _TowerAdapter
    requests: deque[int]
    """Numbers of the executor's requests whose results were not taken yet, one for each tile."""
    num_patches: int
    """Number of patches of all tiles."""
    began: float
    """Time when its patches were begun, of time.monotonic()."""


class TowerRunner:
    """The tower in an engine's directory. Thread-safe."""

    def __init__(self, directory: Path, config: ExecutorConfig | None = None) -> None:
        """Loads the tower. config: only its number of threads and kernels are used.

        Raises EngineError and CheckpointError for files that cannot be used.
        """
        self._engine = load_engine(directory)
        of_tower = self._engine.config.pretrained_config
        pooler, patches = self._engine.pooler, self._engine.config.network.patches
        if not isinstance(of_tower, TowerConfig) or patches is None:
            raise EngineError(f"{directory}: is not a vision tower; build the engine again")
        self.model: Final[ImageModel] = _MODELS[type(of_tower)](directory, of_tower, self._tensors(patches))
        self.image_token_id: Final[int] = of_tower.image_token_id
        self._base = _TowerAdapter(None, None if pooler is None else np.asarray(pooler.weight, np.float32), "")
        own = ExecutorConfig()
        if config is not None:
            own.kernels, own.num_threads = config.kernels, config.num_threads
        self._executor = Executor(self._engine, self._engine.model_type, own)
        self._step_tokens: Final[int] = self._engine.config.build_config.max_num_tokens
        self.cache: Final = RowCache(MAX_CACHED_BYTES)
        self.seconds = 0.0
        """Time that images took from their pixels to their rows, summed over images."""
        self._adapters: OrderedDict[int, _TowerAdapter] = OrderedDict()
        self._lock = threading.Lock()
        self._adapter_lock = threading.Lock()
        """Held while an adapter is read, which other images do not wait for. Locked before _lock."""

    def _tensors(self, patches: PatchEmbedding) -> dict[str, FloatArray]:
        found = {field.name: getattr(patches, field.name) for field in fields(patches)}
        return {
            field: self._engine.tensor(str(tensor.name)).reshape(tensor.shape)
            for field, tensor in found.items()
            if tensor is not None
        }

    def rows(self, images: Sequence[Tiles], adapter: NamedAdapter | None) -> list[FloatArray]:
        """Returns float32 [rows, hidden size of the language model] of each image.

        Tiles of several images, and of calls that run at the same time, share steps; equal images are computed once.

        Raises AdapterError for an adapter that the tower cannot use, RequestError if the tower fails.
        """
        part = self._part_of(adapter).key
        keys = [(_digest(tiles), part) for tiles in images]
        return self.cache.rows(keys, lambda places: self._encoded([images[place] for place in places], adapter))

    def _encoded(self, images: Sequence[Tiles], adapter: NamedAdapter | None) -> list[FloatArray]:
        """Returns the rows of each image.

        While an image is computed, the next one is prepared and queued, so that steps are full. More are queued only if
        a step can take all of them, because their patches need memory.
        """
        made: list[FloatArray] = []
        running: deque[_RunningImage] = deque()
        try:
            for tiles in images:
                began = time.monotonic()
                patches = self._patches(tiles)
                size = sum(map(len, patches))
                while len(running) > 1 and size + sum(one.num_patches for one in running) > self._step_tokens:
                    made.append(self._finished(running[0]))
                    running.popleft()
                part, numbers = self._enqueued(patches, adapter)
                running.append(_RunningImage(tiles, part, deque(numbers), size, began))
            while running:
                made.append(self._finished(running[0]))
                running.popleft()
        except BaseException:
            # No other call takes their results.
            for number in (number for image in running for number in image.requests):
                with contextlib.suppress(RequestError):
                    self._result(number)
            raise
        return made

    def _patches(self, tiles: Tiles) -> list[FloatArray]:
        """Returns the rows of the patches of each tile."""
        patches = [self.model.patches(tile) for tile in tiles.pixels]
        longest = self._executor.engine_info.max_input_len
        if any(len(rows) > longest for rows in patches):
            raise RequestError(
                f"an image has {max(map(len, patches))} patches; the engine was built for prompts with images of up to "
                f"{longest}"
            )
        return patches

    def _finished(self, image: _RunningImage) -> FloatArray:
        """Waits for an image. Returns its rows."""
        encoded = [self._result(image.requests.popleft()) for _ in range(len(image.requests))]
        projection = image.part.projection
        rows = [self.model.rows(one, projection, tile) for one, tile in zip(encoded, image.tiles.pixels, strict=True)]
        made = np.ascontiguousarray(np.concatenate(rows), np.float32)
        with self._lock:
            self.seconds += time.monotonic() - image.began
        return made

    def _enqueued(self, patches: Sequence[FloatArray], adapter: NamedAdapter | None) -> tuple[_TowerAdapter, list[int]]:
        """Queues all tiles of an image with the adapter. Returns its part, and the numbers of the requests."""
        while True:
            part = self._part_of(adapter)
            with self._lock:
                # Other calls may have removed it meanwhile.
                if adapter is None or self._adapters.get(adapter.task_id) is part:
                    return part, [self._enqueue(rows, part) for rows in patches]

    def _enqueue(self, patches: FloatArray, part: _TowerAdapter) -> int:
        first = self._executor.engine_info.vocab_size
        request = Request(
            list(range(first, first + len(patches))),
            0,
            pooling_params=PoolingParams(PoolingType.ALL, row_interval=self.model.row_interval),
            prompt_tuning_config=PromptTuningConfig(patches),
        )
        return self._executor.enqueue_request(request, adapter=part.name)

    def _result(self, number: int) -> FloatArray:
        (response,) = self._executor.await_responses(number)
        if response.has_error():
            raise RequestError(f"the vision tower: {response.error_msg}")
        return rows_of(response.result.pooled_output)

    def _part_of(self, adapter: NamedAdapter | None) -> _TowerAdapter:
        if adapter is None:
            return self._base
        if (found := self._known(adapter)) is not None:
            return found
        with self._adapter_lock:
            if (found := self._known(adapter)) is not None:
                return found  # another call has read it
            with one_version(adapter.directory):
                check_unchanged(adapter, self._engine)
                made = self._read(adapter)
            with self._lock:
                self._adapters[adapter.task_id] = made
                while len(self._adapters) > _MAX_ADAPTERS:
                    _, oldest = self._adapters.popitem(last=False)
                    if oldest.name is not None:
                        self._executor.remove_adapter(oldest.name)
            return made

    def _known(self, adapter: NamedAdapter) -> _TowerAdapter | None:
        with self._lock:
            found = self._adapters.get(adapter.task_id)
            if found is not None:
                self._adapters.move_to_end(adapter.task_id)
            return found

    def _read(self, adapter: NamedAdapter) -> _TowerAdapter:
        fields = load_json_object(adapter.directory / CONFIG_FILE, AdapterError, max_bytes=MAX_CONFIG_BYTES)
        pooler = read_pooler(adapter.directory, fields, self._engine.adapted_modules)
        changes_tower = acts_on(adapter.directory, self._engine.adapted_modules.whole_paths)
        if pooler is None and not changes_tower:
            return self._base
        if invocation_tokens(adapter.directory, self._engine.adapted_modules):
            raise AdapterError(
                f"{adapter.directory}: has alora_invocation_tokens and changes the vision tower or the connector; "
                "expected layers of the language model for prompts with images, which come before these tokens"
            )
        key = str(adapter.task_id)
        if changes_tower:
            self._executor.add_adapter(key, adapter.directory)
        projection = self._base.projection
        if pooler is not None and projection is not None:
            projection = pooler.weight_over(projection)
        return _TowerAdapter(key if changes_tower else None, projection, key)

    def shutdown(self) -> None:
        """Ends the tower's executor."""
        self._executor.shutdown()


def _digest(tiles: Tiles) -> bytes:
    return hashlib.sha256(f"{tiles.pixels.shape}".encode() + tiles.pixels.tobytes()).digest()
