"""Served adapters: found below the roots, loaded and unloaded while the server runs, replaced in place."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .._core import AdaptrtError, LoraConfig, PeftTaskNotCachedError, Request
from ..formats.sources.sum_of_names import parse_sum
from ..runtime.adapter_facts import ReadyAdapter
from ..runtime.named_adapter import UnknownAdapterError
from ..runtime.prompt_tuning import behind_virtual_tokens
from .adapter_names import name_problem
from .adapter_roots import AdapterRoots, RootNames, is_path_of_name
from .async_executor import AsyncExecutor, Generation
from .errors import INVALID_USER_INPUT, ApiError
from .work import WorkKind

LISTED_SECONDS: Final = 5.0
"""Seconds until the list of adapters below the roots is read again."""
TRIES: Final = 8
"""Maximum number of loads for one request, if its adapter is evicted each time before the request is queued."""


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter that the server knows."""

    name: str
    task_id: int
    path: Path
    created: int
    """Time when the adapter was added, in seconds since the epoch."""


class ServedAdapters:
    """Adapters by name, on top of the executor's store and cache. Call all methods on the event loop."""

    def __init__(self, executor: AsyncExecutor, roots: Sequence[Path], reserved: frozenset[str]) -> None:
        """`roots`: directories where adapters are found by name. At run time, no adapter is read outside of them.

        reserved: names of the base model, which no adapter may have.
        """
        self._executor = executor
        self._work = executor.work
        self._store = executor.executor.adapters
        self._roots = AdapterRoots(roots)
        self._reserved: Final = reserved
        self._in_roots = RootNames((), is_complete=True)
        self._listed_at: float | None = None

    def list(self) -> list[ServedAdapter]:
        """Returns the known adapters in the order in which they were added."""
        return [ServedAdapter(one.name, one.task_id, one.directory, one.created) for one in self._store.list()]

    def knows(self, name: str) -> bool:
        """True if list() has an adapter of this name."""
        return self._store.knows(name)

    async def not_loaded(self) -> RootNames:
        """Returns adapters below the roots that no request has asked for. The list may be LISTED_SECONDS old."""
        now = time.monotonic()
        if self._listed_at is None or now - self._listed_at > LISTED_SECONDS:
            self._in_roots = await self._work.run_shared(WorkKind.FILES, None, self._roots.names)
            self._listed_at = now
        taken = self._reserved.union(self._store.names)
        return RootNames(tuple(name for name in self._in_roots.names if name not in taken), self._in_roots.is_complete)

    def is_from(self, name: str, path: str) -> bool:
        """True if the known adapter was loaded from this directory. `path` is absolute or relative to a root."""
        # Links are not resolved: this runs on the event loop, and a client may name any path.
        directories = {os.path.normpath(root / path) for root in self._roots.paths or (Path("/"),)}
        return any(one.name == name and os.path.normpath(one.path) in directories for one in self.list())

    async def find(self, name: str) -> bool:
        """True if the adapter exists, or every adapter of a weighted sum. Adds adapters that are found below the roots.

        Raises ApiError if an adapter exists and cannot be loaded.
        """
        if await self._find_one(name):
            return True
        named = parse_sum(name)
        return named is not None and all([await self._find_one(term) for term in named.names])

    async def _find_one(self, name: str) -> bool:
        if self.knows(name):
            return True
        if name in self._reserved or not is_path_of_name(name):
            return False
        directory = await self._work.run_shared(WorkKind.FILES, None, self._roots.find, name)
        if directory is None:
            return self.knows(name)
        try:
            add = self._executor.executor.add_adapter
            await self._work.run_shared(WorkKind.ADAPTERS, name, add, name, directory)
        except AdaptrtError as error:
            # Another request may have added an adapter of this name in the meantime.
            if not self.knows(name):
                raise ApiError.of(error) from error
        return True

    async def load(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> None:
        """Adds the adapter in a directory below a root. Raises ApiError."""
        directory = await self.directory_to_load(name, path, replace=replace)
        await self._add(name, directory, replace=replace)
        if pinned:
            await self.pin(name)

    async def directory_to_load(self, name: str, path: str, *, replace: bool) -> Path:
        """Returns the directory that load() would read. Raises ApiError if load() would refuse it."""
        _check_name(name, self._reserved)
        if self.knows(name) and not replace:
            raise ApiError(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                kind=INVALID_USER_INPUT,
                param="lora_name",
            )
        directory = await self._work.run(WorkKind.FILES, self._roots.confine, path)
        if directory is None:
            # The answer does not tell whether something exists outside the roots.
            raise ApiError(
                f"lora_path is '{path}'; expected a directory below the server's adapter roots (requests cause no "
                "downloads; lora_modules takes names of the Hub)",
                kind=INVALID_USER_INPUT,
                param="lora_path",
            )
        return directory

    async def add_trusted(self, name: str, path: Path) -> None:
        """Adds an adapter that the command line names, from any directory. Raises ApiError."""
        _check_name(name, self._reserved)
        await self._add(name, path, replace=False)

    async def unload(self, name: str) -> None:
        """Removes the adapter from all cache levels; running requests keep it. Raises ApiError for an unknown name."""
        if not self.knows(name):
            raise unknown_adapter(name)
        try:
            await self._work.run_alone(WorkKind.ADAPTERS, name, self._executor.executor.remove_adapter, name)
        except UnknownAdapterError as error:  # another request unloaded the adapter in the meantime
            raise unknown_adapter(name) from error

    async def pin(self, name: str) -> None:
        """Pins the adapter on the host and device levels of the cache. Raises ApiError if there is no room."""
        try:
            await self._work.run_alone(WorkKind.ADAPTERS, name, self._executor.executor.pin_named_adapter, name)
        except AdaptrtError as error:
            raise ApiError.of(error) from error

    async def ready(self, name: str) -> ReadyAdapter:
        """Returns what requests need to know about an adapter. Reads files in a thread if it is not in memory.

        Raises the same errors as AdapterStore.load.
        """
        known = self._store.ready(name)
        if known is not None:
            return known
        return await self._work.run_shared(WorkKind.ADAPTERS, name, self._store.prepare, name)

    async def submit(self, request: Request, name: str | None) -> Generation:
        """Queues a request with the adapter `name`; loads the adapter first if it is not cached.

        The adapter's virtual tokens precede the prompt in all results; Generation.num_virtual_tokens is their number.

        Raises ApiError, and AdaptrtError as Executor.enqueue_request does.
        """
        if name is None:
            return self._executor.submit(request)
        for _ in range(TRIES):
            ready = await self.ready(name)
            # No await between here and submit(): the name must keep its meaning.
            if request.pooling_params is None:
                self._store.refuse_classifier(name)
            if ready.prompt is not None:
                vocab_size = self._executor.executor.engine_info.vocab_size
                tuned = behind_virtual_tokens(request, ready.prompt, vocab_size, name)
                generation = self._executor.submit(tuned, name)
                generation.num_virtual_tokens = ready.num_virtual_tokens
                return generation
            request.lora_config = self._store.for_request(name, request.input_token_ids)
            try:
                return self._executor.submit(request, name)
            except PeftTaskNotCachedError:
                load = self._executor.executor.load_adapter
                await self._work.run_shared(WorkKind.ADAPTERS, name, load, name)
        raise ApiError.of(
            PeftTaskNotCachedError(f"adapter '{name}' was evicted {TRIES} times before its request began")
        )

    async def submit_task(self, request: Request, lora: LoraConfig) -> Generation:
        """Queues a request with an adapter that a client sends under its own task_id. Stores the adapter first if the
        request has its weights.

        Raises AdaptrtError as Executor.put_adapter and Executor.enqueue_request do.
        """
        request.lora_config = LoraConfig(lora.task_id)
        for _ in range(TRIES):
            if lora.weights is not None:
                await self._work.run(WorkKind.ADAPTERS, self._executor.executor.put_adapter, lora)
            try:
                return self._executor.submit(request, str(lora.task_id))
            except PeftTaskNotCachedError:
                if lora.weights is None:
                    raise
        raise PeftTaskNotCachedError(f"LoRA task {lora.task_id} was evicted {TRIES} times before its request began")

    async def _add(self, name: str, directory: Path, *, replace: bool) -> None:
        try:
            add = self._executor.executor.add_adapter
            await self._work.run_alone(WorkKind.ADAPTERS, name, add, name, directory, replace=replace)
        except AdaptrtError as error:
            raise ApiError.of(error) from error


def unknown_adapter(name: str) -> ApiError:
    """The error for unloading an adapter that is not loaded."""
    return ApiError.not_found(f"The lora adapter '{name}' cannot be found.", param="lora_name")


def _check_name(name: str, model_names: Collection[str]) -> None:
    problem = name_problem(name, model_names)
    if problem is not None:
        raise ApiError(f"lora_name {problem}", kind=INVALID_USER_INPUT, param="lora_name")
