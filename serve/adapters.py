"""The adapters that the server knows: found below its roots, loaded and unloaded while it runs, swapped in place."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from .._core import AdaptrtError, LoraConfig, PeftTaskNotCachedError, Request
from ..builder.adapter.recognise import CONFIG_FILE, INITIAL_DIRECTORY
from ..runtime.adapter_sum import parse_sum
from ..runtime.prompt_tuning import behind_virtual_tokens, num_virtual_tokens
from .async_executor import AsyncExecutor, Generation
from .errors import INVALID_USER_INPUT, ApiError

LONGEST_NAME: Final = 256
TRIES: Final = 8
"""How often an adapter that is evicted before its request is queued is loaded anew."""


@dataclass(frozen=True)
class ServedAdapter:
    """One row of what the server knows."""

    name: str
    task_id: int
    path: Path
    created: int
    """When it was added, in seconds since the epoch."""


class ServedAdapters:
    """Adapters by name, over the executor's store and its cache. All methods belong to the loop."""

    def __init__(self, executor: AsyncExecutor, roots: Sequence[Path]) -> None:
        """`roots`: directories below which adapters are found by name, and outside which none is read at run time."""
        self._executor = executor
        self._store = executor.executor.adapters
        self._roots = tuple(Path(os.path.realpath(root)) for root in roots)
        self._created = dict.fromkeys(self._store.names, int(time.time()))
        self._loads: dict[str, asyncio.Task[None]] = {}

    def list(self) -> list[ServedAdapter]:
        """Those that are known, in the order in which they came."""
        served = []
        for name, created in self._created.items():
            adapter = self._store.get(name)
            served.append(ServedAdapter(name, adapter.task_id, adapter.directory, created))
        return served

    def knows(self, name: str) -> bool:
        """Whether it is among list()."""
        return name in self._created

    async def find(self, name: str) -> bool:
        """Whether there is an adapter of this name, or all of a weighted sum; those that lie below a root are added.

        Raises ApiError when it is there and cannot be loaded.
        """
        if await self._find_one(name):
            return True
        named = parse_sum(name)
        return named is not None and all([await self._find_one(term) for term in named.names])

    async def _find_one(self, name: str) -> bool:
        if self.knows(name):
            return True
        directory = self._below_roots(name)
        if directory is None:
            return False
        task = self._loads.get(name)
        if task is None:
            task = asyncio.create_task(self._add(name, directory, replace=False))
            self._loads[name] = task
            task.add_done_callback(lambda _: self._loads.pop(name, None))
        # Others may wait for it as well: it goes on when this one is cancelled.
        await asyncio.shield(task)
        return True

    async def load(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> None:
        """Adds the adapter in a directory, which has to lie below a root. Raises ApiError."""
        directory = self.directory_to_load(name, path, replace=replace)
        await self._add(name, directory, replace=replace)
        if pinned:
            await self.pin(name)

    def directory_to_load(self, name: str, path: str, *, replace: bool) -> Path:
        """The directory that load() would read. Raises ApiError where it would not."""
        _check_name(name)
        if self.knows(name) and not replace:
            raise ApiError(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                kind=INVALID_USER_INPUT,
                param="lora_name",
            )
        return self._confined(path)

    async def add_trusted(self, name: str, path: Path) -> None:
        """Adds an adapter that the command line names, wherever it lies. Raises ApiError."""
        _check_name(name)
        await self._add(name, path, replace=False)

    async def unload(self, name: str) -> None:
        """Forgets it on every level; requests that run with it go on. Raises ApiError for an unknown name."""
        if not self.knows(name):
            raise unknown_adapter(name)
        del self._created[name]
        await self._executor.run(self._executor.executor.remove_adapter, name)

    async def pin(self, name: str) -> None:
        """Keeps it on both levels. Raises ApiError when there is no room."""
        executor = self._executor.executor
        try:
            await self._executor.run(executor.load_adapter, name)
            if await self._executor.run(self._store.num_virtual_tokens, name) == 0:  # others are not in the cache
                await self._executor.run(executor.pin_adapter, self._store.task_id(name))
        except AdaptrtError as error:
            raise ApiError.of(error) from error

    async def submit(self, request: Request, name: str | None) -> Generation:
        """Queues a request with the adapter `name`, which is loaded when it is not cached.

        Virtual tokens stand before its prompt in all results; Generation.num_virtual_tokens says how many.

        Raises ApiError; AdaptrtError as Executor.enqueue_request does.
        """
        if name is None:
            return self._executor.submit(request)
        if request.pooling_params is None:
            self._store.refuse_classifier(name)
        prompt = await self._executor.run(self._store.prompt_of, name)
        if prompt is not None:
            vocab_size = self._executor.executor.engine_info.vocab_size
            generation = self._executor.submit(behind_virtual_tokens(request, prompt, vocab_size, name), name)
            generation.num_virtual_tokens = num_virtual_tokens(prompt)
            return generation
        for _ in range(TRIES):
            request.lora_config = self._store.for_request(name, request.input_token_ids)
            try:
                return self._executor.submit(request, name)
            except PeftTaskNotCachedError:
                await self._executor.run(self._executor.executor.load_adapter, name)
        raise ApiError.of(
            PeftTaskNotCachedError(f"adapter '{name}' was evicted {TRIES} times before its request began")
        )

    async def submit_task(self, request: Request, lora: LoraConfig) -> Generation:
        """Queues a request with the adapter of a client's own task_id, which is stored first if its weights are there.

        Raises AdaptrtError as Executor.put_adapter and Executor.enqueue_request do.
        """
        request.lora_config = LoraConfig(lora.task_id)
        for _ in range(TRIES):
            if lora.weights is not None:
                await self._executor.run(self._executor.executor.put_adapter, lora)
            try:
                return self._executor.submit(request, str(lora.task_id))
            except PeftTaskNotCachedError:
                if lora.weights is None:
                    raise
        raise PeftTaskNotCachedError(f"LoRA task {lora.task_id} was evicted {TRIES} times before its request began")

    async def _add(self, name: str, directory: Path, *, replace: bool) -> None:
        try:
            await self._executor.run(self._executor.executor.add_adapter, name, directory, replace=replace)
        except AdaptrtError as error:
            raise ApiError.of(error) from error
        self._created[name] = int(time.time())

    def _below_roots(self, name: str) -> Path | None:
        """The directory of an adapter that is named by its path from a root; None when there is none."""
        if not _is_path_of_name(name):
            return None
        for root in self._roots:
            directory = root / name
            if (directory / CONFIG_FILE).is_file() and self._is_confined(directory):
                return directory
        return None

    def _confined(self, path: str) -> Path:
        """A directory that a client names: absolute, or as it lies below a root."""
        if "\0" in path:
            raise ApiError("lora_path has a NUL character", kind=INVALID_USER_INPUT, param="lora_path")
        for root in self._roots:
            directory = root / path
            if directory.is_dir() and self._is_confined(directory):
                return directory
        # The same text whether or not something lies there: what is outside is none of a client's business.
        raise ApiError(
            f"lora_path '{path}' is not a directory below the server's adapter roots",
            kind=INVALID_USER_INPUT,
            param="lora_path",
        )

    def _is_confined(self, directory: Path) -> bool:
        """Whether a directory and all its files lie below one root when links are followed."""
        entries = list(directory.iterdir())
        if (directory / INITIAL_DIRECTORY).is_dir():
            entries += (directory / INITIAL_DIRECTORY).iterdir()
        for root in self._roots:
            if not Path(os.path.realpath(directory)).is_relative_to(root):
                continue
            if all(Path(os.path.realpath(entry)).is_relative_to(root) for entry in entries):
                return True
        return False


def unknown_adapter(name: str) -> ApiError:
    """For one that is to be unloaded."""
    return ApiError.not_found(f"The lora adapter '{name}' cannot be found.", param="lora_name")


def is_name(name: str) -> bool:
    """Whether an adapter can have it."""
    return 0 < len(name) <= LONGEST_NAME and name.isprintable()


def _check_name(name: str) -> None:
    if not is_name(name):
        raise ApiError(
            f"lora_name has {len(name)} characters; accepted: 1 to {LONGEST_NAME} that can be printed",
            kind=INVALID_USER_INPUT,
            param="lora_name",
        )


def _is_path_of_name(name: str) -> bool:
    """Whether a model's name can be a path from a root and leads nowhere else."""
    if not is_name(name) or "\\" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and str(path) == name and not {".", ".."} & set(path.parts)
