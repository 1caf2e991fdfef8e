"""The adapters that the server knows: found below its roots, loaded and unloaded while it runs, swapped in place."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .._core import AdaptrtError, LoraConfig, PeftTaskNotCachedError, Request
from ..formats.adapter.sum_of_names import parse_sum
from ..runtime.adapter_facts import ReadyAdapter
from ..runtime.named_adapter import UnknownAdapterError
from ..runtime.prompt_tuning import behind_virtual_tokens
from .adapter_names import name_problem
from .adapter_roots import AdapterRoots, RootNames, is_path_of_name
from .async_executor import AsyncExecutor, Generation
from .errors import INVALID_USER_INPUT, ApiError
from .work import WorkKind

LISTED_SECONDS: Final = 5.0
"""How long a list of what the roots hold is shown before they are looked through again."""
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

    def __init__(self, executor: AsyncExecutor, roots: Sequence[Path], reserved: frozenset[str]) -> None:
        """`roots`: directories below which adapters are found by name, and outside which none is read at run time.

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
        """Those that are known, in the order in which they came."""
        return [ServedAdapter(one.name, one.task_id, one.directory, one.created) for one in self._store.list()]

    def knows(self, name: str) -> bool:
        """Whether it is among list()."""
        return self._store.knows(name)

    async def not_loaded(self) -> RootNames:
        """Adapters that the roots hold and no request has asked for, as they were within the last LISTED_SECONDS."""
        now = time.monotonic()
        if self._listed_at is None or now - self._listed_at > LISTED_SECONDS:
            self._in_roots = await self._work.run_shared(WorkKind.FILES, None, self._roots.names)
            self._listed_at = now
        taken = self._reserved.union(self._store.names)
        return RootNames(tuple(name for name in self._in_roots.names if name not in taken), self._in_roots.is_complete)

    def is_from(self, name: str, path: str) -> bool:
        """True if a known adapter was loaded from this directory, absolute or as it lies below a root."""
        # Links are not followed: this runs on the loop, and a client may name any path.
        directories = {os.path.normpath(root / path) for root in self._roots.paths or (Path("/"),)}
        return any(one.name == name and os.path.normpath(one.path) in directories for one in self.list())

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
        if name in self._reserved or not is_path_of_name(name):
            return False
        directory = await self._work.run_shared(WorkKind.FILES, None, self._roots.find, name)
        if directory is None:
            return self.knows(name)
        try:
            add = self._executor.executor.add_adapter
            await self._work.run_shared(WorkKind.ADAPTERS, name, add, name, directory)
        except AdaptrtError as error:
            # Another request may have given the name to an adapter meanwhile.
            if not self.knows(name):
                raise ApiError.of(error) from error
        return True

    async def load(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> None:
        """Adds the adapter in a directory, which has to lie below a root. Raises ApiError."""
        directory = await self.directory_to_load(name, path, replace=replace)
        await self._add(name, directory, replace=replace)
        if pinned:
            await self.pin(name)

    async def directory_to_load(self, name: str, path: str, *, replace: bool) -> Path:
        """The directory that load() would read. Raises ApiError where it would not."""
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
            # The same text whether or not something lies there: what is outside is none of a client's business.
            raise ApiError(
                f"lora_path is '{path}'; expected a directory below the server's adapter roots",
                kind=INVALID_USER_INPUT,
                param="lora_path",
            )
        return directory

    async def add_trusted(self, name: str, path: Path) -> None:
        """Adds an adapter that the command line names, wherever it lies. Raises ApiError."""
        _check_name(name, self._reserved)
        await self._add(name, path, replace=False)

    async def unload(self, name: str) -> None:
        """Forgets it on every level; requests that run with it go on. Raises ApiError for an unknown name."""
        if not self.knows(name):
            raise unknown_adapter(name)
        try:
            await self._work.run_alone(WorkKind.ADAPTERS, name, self._executor.executor.remove_adapter, name)
        except UnknownAdapterError as error:  # another request unloaded it meanwhile
            raise unknown_adapter(name) from error

    async def pin(self, name: str) -> None:
        """Keeps it on both levels. Raises ApiError when there is no room."""
        try:
            await self._work.run_alone(WorkKind.ADAPTERS, name, self._executor.executor.pin_named_adapter, name)
        except AdaptrtError as error:
            raise ApiError.of(error) from error

    async def ready(self, name: str) -> ReadyAdapter:
        """The facts that requests need about an adapter; they are read in a thread if they are not in memory.

        Raises as AdapterStore.load.
        """
        known = self._store.ready(name)
        if known is not None:
            return known
        return await self._work.run_shared(WorkKind.ADAPTERS, name, self._store.prepare, name)

    async def submit(self, request: Request, name: str | None) -> Generation:
        """Queues a request with the adapter `name`, which is loaded when it is not cached.

        Virtual tokens stand before its prompt in all results; Generation.num_virtual_tokens says how many.

        Raises ApiError; AdaptrtError as Executor.enqueue_request does.
        """
        if name is None:
            return self._executor.submit(request)
        for _ in range(TRIES):
            ready = await self.ready(name)
            # From here to submit() the name means the same, and nothing is read.
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
        """Queues a request with the adapter of a client's own task_id, which is stored first if its weights are there.

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
    """For one that is to be unloaded."""
    return ApiError.not_found(f"The lora adapter '{name}' cannot be found.", param="lora_name")


def _check_name(name: str, model_names: Collection[str]) -> None:
    problem = name_problem(name, model_names)
    if problem is not None:
        raise ApiError(f"lora_name {problem}", kind=INVALID_USER_INPUT, param="lora_name")
