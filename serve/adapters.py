"""Served adapters: found below the roots, loaded and unloaded while the server runs, replaced in place."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .._core import AdaptrtError, LoraConfig, PeftTaskNotCachedError, Request
from ..formats.sources import Source
from ..formats.sources.downloads import CacheFullError
from ..formats.sources.grammar import remote_name
from ..formats.sources.sum_of_names import parse_sum
from ..runtime.adapter_facts import ReadyAdapter
from ..runtime.adapter_versions import parse_version, short_version_name, without_versions
from ..runtime.named_adapter import NamedAdapter, UnknownAdapterError
from ..runtime.prompt_tuning import behind_virtual_tokens
from .adapter_names import name_problem
from .adapter_roots import AdapterRoots, RootNames, is_path_of_name
from .async_executor import AsyncExecutor, Generation
from .errors import INVALID_USER_INPUT, ApiError
from .options import ServerOptions
from .records import current_request
from .remote_adapters import RemoteAdapters
from .uploaded_adapters import Upload
from .work import WorkKind

LISTED_SECONDS: Final = 5.0
"""Seconds until the list of adapters below the roots is read again."""
RECENT_SECONDS: Final = 30.0
"""Time after its last request during which an adapter from a remote root is not unloaded to make room."""
TRIES: Final = 8
"""Maximum number of loads for one request, if its adapter is evicted each time before the request is queued."""
DRAFT_TRIES: Final = 2
"""Number of these loads after which the draft engine drafts without the adapter, which only costs speed."""


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

    def __init__(
        self,
        executor: AsyncExecutor,
        roots: Sequence[Path],
        reserved: frozenset[str],
        remote: RemoteAdapters | None = None,
    ) -> None:
        """`roots`: directories where adapters are found by name. At run time, no adapter is read outside of them.

        reserved: names of the base model, which no adapter may have. remote: stores that requests may download from;
        None: requests cause no downloads.
        """
        self._executor = executor
        self._work = executor.work
        self._store = executor.executor.adapters
        self._roots = AdapterRoots(roots)
        self._reserved: Final = reserved
        self._in_roots = RootNames((), is_complete=True)
        self._listed_at: float | None = None
        self._remote = remote
        self._last_found: OrderedDict[str, float] = OrderedDict()
        """Adapters from remote roots, with the time of their last request; the oldest first."""
        self._sources: dict[str, str] = {}
        """Names of the sources that clients loaded adapters from."""

    @classmethod
    def of_options(cls, executor: AsyncExecutor, options: ServerOptions, reserved: frozenset[str]) -> ServedAdapters:
        """Returns the adapters of a server with these options."""
        local, remote = roots_of(options)
        return cls(executor, local, reserved, remote)

    def list(self) -> list[ServedAdapter]:
        """Returns the known adapters in the order in which they were added."""
        return [ServedAdapter(one.name, one.task_id, one.directory, one.created) for one in self._store.list()]

    def list_versions(self) -> tuple[tuple[NamedAdapter, bool], ...]:
        """Returns the current version of each adapter with True, and its old ones with False."""
        old = self._store.list_old()
        rows = []
        for one in self._store.list():
            rows.append((one, True))
            rows += [(version, False) for version in reversed(old) if version.name == one.name]
        return tuple(rows)

    def shown_names(self) -> Iterator[tuple[str, int]]:
        """Yields name and task_id of all versions. The names of old versions have some digits of their digests."""
        for one, is_current in self.list_versions():
            yield (one.name if is_current else short_version_name(one)), one.task_id

    def shown_sums(self) -> Iterator[tuple[str, int]]:
        """Yields name and task_id of the weighted sums that requests have used."""
        for one in self._store.list_sums():
            terms = []
            for adapter, weight in one.terms:
                is_current = self._store.knows(adapter.name) and self._store.get(adapter.name) == adapter
                terms.append(f"{adapter.name if is_current else short_version_name(adapter)}:{weight!r}")
            yield "+".join(terms), one.task_id

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
        names = tuple(name for name in self._in_roots.names if name not in taken)
        # Stores are not listed: that can take minutes.
        return RootNames(names, self._in_roots.is_complete and not (self._remote and self._remote.has_roots))

    def is_from(self, name: str, path: str) -> bool:
        """True if the known adapter was loaded from this directory. `path` is absolute or relative to a root."""
        if (source := self._sources.get(name)) is not None:
            found = remote_name(path)
            return found is not None and str(found) == source
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

    async def current_version(self, name: str) -> str | None:
        """Returns NAME@DIGEST for an adapter, a version or a weighted sum; None if it does not exist, like find().

        The result keeps its meaning if the adapter is replaced: the version stays at least until the request that this
        task answers ends. Raises like find().
        """
        if not await self.find(name):
            return None
        try:
            version = self._store.version_name(name)
            if version is None:
                await self._work.run_shared(WorkKind.ADAPTERS, name, self._store.prepare, name)
                version = self._store.version_name(name)
            record = current_request.get()
            if record is not None and version is not None:
                record.versions += self._store.hold(version)
        except AdaptrtError as error:
            raise ApiError.of(error) from error
        return version

    async def _find_one(self, name: str) -> bool:
        if not self.knows(name) and await self._find_version(name):
            return True
        if self.knows(name):
            if name in self._last_found:
                self._note_found(name)
            return True
        if name in self._reserved or not is_path_of_name(name):
            return False
        directory = await self._work.run_shared(WorkKind.FILES, None, self._roots.find, name)
        if directory is None and self._remote is not None and self._remote.has_roots:
            source = await self._download(self._remote.find, name)
            return (source is not None and await self._add_found(name, source)) or self.knows(name)
        return (directory is not None and await self._add_found(name, directory)) or self.knows(name)

    async def _find_version(self, name: str) -> bool:
        """True if `name` is NAME@DIGITS of a version that requests can ask for. Finds the adapter below the roots."""
        parsed = parse_version(name)
        if parsed is None:
            return False
        try:
            if not self._store.has_version(name) and await self._find_one(parsed[0]):
                await self.ready(parsed[0])  # reads the digest
            if parsed[0] in self._last_found:
                self._note_found(parsed[0])
            found = self._store.has_version(name)
        except AdaptrtError as error:
            raise ApiError.of(error) from error
        return found

    async def _add_found(self, name: str, directory: Path | Source) -> bool:
        """Adds an adapter from below a root. Raises ApiError."""
        try:
            add = self._executor.add_adapter
            await self._work.run_shared(WorkKind.ADAPTERS, name, add, name, directory)
        except AdaptrtError as error:
            # Another request may have added an adapter of this name in the meantime.
            if not self.knows(name):
                raise ApiError.of(error) from error
        if isinstance(directory, Source):
            self._note_found(name)
        return True

    def _note_found(self, name: str) -> None:
        self._last_found[name] = time.monotonic()
        self._last_found.move_to_end(name)

    async def _download(self, function: Callable[..., Source | None], *args: Hashable) -> Source | None:
        """Calls a method of RemoteAdapters in a thread, which is stopped with its clients.

        If the cache of downloads is full, unloads adapters from remote roots that no request used lately. Raises
        ApiError.
        """
        while True:
            try:
                return await self._work.run_stoppable(WorkKind.DOWNLOADS, args, function, *args)
            except CacheFullError as error:
                if not await self._unload_oldest():
                    raise ApiError.overloaded(str(error)) from error
            except AdaptrtError as error:
                raise ApiError.of(error) from error

    async def _unload_oldest(self) -> bool:
        """Unloads the adapter from a remote root whose last request is the longest ago. False: there is none."""
        for name, found in self._last_found.items():
            if time.monotonic() - found < RECENT_SECONDS:
                return False
            del self._last_found[name]
            if self.knows(name):
                await self.unload(name)
            return True
        return False

    async def resolve(self, name: str, path: str, *, replace: bool) -> str | Source:
        """Downloads the adapter if load() would. Returns its source, which load() takes; for other paths, the path.

        Raises ApiError. The download ends if the caller is cancelled.
        """
        self._check_load(name, replace=replace)
        if self._remote is None or await self._work.run(WorkKind.FILES, self._roots.confine, path) is not None:
            return path
        found = self._remote.allowed_name(path)
        if found is None:
            return path
        source = await self._download(self._remote.fetch, found)
        assert source is not None
        return source

    async def load(self, name: str, path: str | Source, *, replace: bool = False, pinned: bool = False) -> None:
        """Adds the adapter in a directory below a root, or from a source that resolve() returned. Raises ApiError."""
        directory = await self.directory_to_load(name, path, replace=replace)
        await self._add(name, directory, replace=replace)
        if isinstance(path, Source):
            self._sources[name] = path.given
        if pinned:
            await self.pin(name)

    async def load_sent(self, upload: Upload) -> str:
        """Adds an adapter that a client has sent. Returns NAME@DIGEST. Raises ApiError."""
        try:
            self._check_load(upload.name, replace=upload.load_inplace)
            await self._add(upload.name, upload.source, replace=upload.load_inplace)
        except BaseException:
            if upload.source.lease is not None:
                upload.source.lease.release()
            raise
        if upload.pinned:
            await self.pin(upload.name)
        return self._store.version_name(upload.name) or upload.name

    def _check_load(self, name: str, *, replace: bool) -> None:
        """Raises ApiError if load() would refuse the name."""
        _check_name(name, self._reserved)
        if self.knows(name) and not replace:
            raise ApiError(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                kind=INVALID_USER_INPUT,
                param="lora_name",
            )

    async def directory_to_load(self, name: str, path: str | Source, *, replace: bool) -> Path | Source:
        """Returns the directory that load() would read. Raises ApiError if load() would refuse it."""
        self._check_load(name, replace=replace)
        if isinstance(path, Source):
            return path
        directory = await self._work.run(WorkKind.FILES, self._roots.confine, path)
        if directory is None:
            # The answer does not tell whether something exists outside the roots.
            raise ApiError(
                f"lora_path is '{path}'; expected a directory below the server's adapter roots, or a name that the "
                "server's allowed_adapter_sources has",
                kind=INVALID_USER_INPUT,
                param="lora_path",
            )
        return directory

    async def add_trusted(self, name: str, path: Path | Source, *, replace: bool = False) -> None:
        """Adds an adapter that the command line or the server itself names, from any directory. Raises ApiError."""
        _check_name(name, self._reserved)
        await self._add(name, path, replace=replace)

    async def unload(self, name: str) -> None:
        """Removes the adapter from all cache levels; running requests keep it. Raises ApiError for an unknown name."""
        if not self.knows(name):
            raise unknown_adapter(name)
        try:
            await self._work.run_alone(WorkKind.ADAPTERS, name, self._executor.executor.remove_adapter, name)
            self._forget_source(name)
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

        Raises ApiError, also if the request's tenant may not have it, and AdaptrtError as Executor.enqueue_request
        does.
        """
        return await self._admit(request, name, lambda: self._submit(request, name))

    async def _admit(
        self, request: Request, name: str | None, submit: Callable[[], Awaitable[Generation]]
    ) -> Generation:
        """Calls `submit` once the request's tenant may have it."""
        gate = self._executor.gate
        if gate is None:
            return await submit()
        admitted = await gate.enter(request, None if name is None else without_versions(name))
        try:
            generation = await submit()
        except BaseException:
            admitted.end()
            raise
        # No response can arrive before this: the loop has not run since the request was queued.
        generation.admitted = admitted
        admitted.begin()
        return generation

    async def _submit(self, request: Request, name: str | None) -> Generation:
        if name is None:
            return self._executor.submit(request)
        shown = without_versions(name)
        self._store.mark_used(name)
        for number in range(TRIES):
            ready = await self.ready(name)
            # No await between here and submit(): the name must keep its meaning.
            if request.pooling_params is None:
                self._store.refuse_classifier(name)
            if ready.prompt is not None:
                vocab_size = self._executor.executor.engine_info.vocab_size
                tuned = behind_virtual_tokens(request, ready.prompt, vocab_size, shown)
                generation = self._executor.submit(tuned, shown)
                generation.num_virtual_tokens = ready.num_virtual_tokens
                return generation
            request.lora_config = self._store.for_request(name, request.input_token_ids)
            has_draft = request.lora_config is not None and number < DRAFT_TRIES
            request.draft_lora_config = self._executor.executor.draft_reference(name) if has_draft else None
            try:
                return self._executor.submit(request, shown)
            except PeftTaskNotCachedError:
                load = self._executor.load_adapter
                await self._work.run_shared(WorkKind.ADAPTERS, name, load, name)
        raise ApiError.of(
            PeftTaskNotCachedError(f"adapter '{shown}' was evicted {TRIES} times before its request began")
        )

    async def submit_task(self, request: Request, lora: LoraConfig) -> Generation:
        """Queues a request with an adapter that a client sends under its own task_id. Stores the adapter first if the
        request has its weights.

        Raises ApiError if the request's tenant may not have it, and AdaptrtError as Executor.put_adapter and
        Executor.enqueue_request do.
        """
        return await self._admit(request, str(lora.task_id), lambda: self._submit_task(request, lora))

    async def _submit_task(self, request: Request, lora: LoraConfig) -> Generation:
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

    def _forget_source(self, name: str) -> None:
        self._last_found.pop(name, None)
        self._sources.pop(name, None)

    async def _add(self, name: str, directory: Path | Source, *, replace: bool) -> None:
        try:
            add = self._executor.add_adapter
            await self._work.run_alone(WorkKind.ADAPTERS, name, add, name, directory, replace=replace)
            self._forget_source(name)
        except AdaptrtError as error:
            raise ApiError.of(error) from error


def roots_of(options: ServerOptions) -> tuple[list[Path], RemoteAdapters | None]:
    """Returns the local roots, and the stores that requests may download from; None: there are none."""
    local = [root for root in options.adapter_roots if isinstance(root, Path)]
    remote = [root for root in options.adapter_roots if not isinstance(root, Path)]
    if not remote and not options.allowed_adapter_sources.kinds:
        return local, None
    return local, RemoteAdapters(remote, options.allowed_adapter_sources, options.limits)


def unknown_adapter(name: str) -> ApiError:
    """The error for unloading an adapter that is not loaded."""
    return ApiError.not_found(f"The lora adapter '{name}' cannot be found.", param="lora_name")


def _check_name(name: str, model_names: Collection[str]) -> None:
    problem = name_problem(name, model_names)
    if problem is not None:
        raise ApiError(f"lora_name {problem}", kind=INVALID_USER_INPUT, param="lora_name")
