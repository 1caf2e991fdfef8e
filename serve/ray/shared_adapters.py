"""Adapters of one replica. All replicas make the same changes, and the router learns which adapters are used here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace as with_fields
from http import HTTPStatus
from pathlib import Path
from typing import Final

from ..._core import AdaptrtError, Request
from ...formats.adapter.adapter_copy import SENT_FILES, adapter_digests
from ...formats.sources import Source
from ...runtime.adapter_versions import without_versions
from ...runtime.named_adapter import NamedAdapter
from ..adapters import ServedAdapters, unknown_adapter
from ..async_executor import AsyncExecutor, Generation
from ..errors import UNAVAILABLE, ApiError
from ..options import ServerLimits
from ..remote_adapters import RemoteAdapters
from ..uploaded_adapters import Upload, UploadStore
from ..work import WorkKind
from .adapter_changes import AdapterChange, ChangeLog, Files, Outcome, Refusal

_LOG: Final = logging.getLogger("adaptrt.replica")


class SharedAdapters(ServedAdapters):
    """Adapters of a replica, with changes that all replicas make. Call all methods on the event loop."""

    def __init__(
        self,
        executor: AsyncExecutor,
        roots: Sequence[Path],
        reserved: frozenset[str],
        replica: str,
        change_all: Callable[[AdapterChange], Awaitable[Refusal | None]],
        files_of: Callable[[str], Awaitable[Files]],
        mark_present: Callable[[str], Awaitable[None]],
        remote: RemoteAdapters | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        """change_all: makes a change at all replicas. files_of: returns the files of a sent adapter by its digest;
        empty if they are not needed any more. mark_present: tells the router that an adapter is used here.
        limits: of adapters that clients send; None: the defaults.
        """
        super().__init__(executor, roots, reserved, remote)
        self._replica = replica
        self._change_all = change_all
        self._files_of = files_of
        self._mark_present = mark_present
        limits = ServerLimits() if limits is None else limits
        self._uploads = UploadStore(limits)
        self._log = ChangeLog(limits.versions)
        self._following = asyncio.Lock()
        self._initial: frozenset[str] = frozenset()
        self._failed: dict[str, AdapterChange] = {}
        self._checked: dict[str, Source] = {}
        """Stored files of a sent adapter whose change may follow, by their digest: at most one."""

    @property
    def followed(self) -> ChangeLog:
        """The changes that this replica has made."""
        return self._log

    def finish_start(self) -> None:
        """Marks the end of the start: every replica starts with the adapters that are known now."""
        self._initial = frozenset(adapter.name for adapter in self.list())

    async def resolve(self, name: str, path: str, *, replace: bool) -> str:
        """Returns the path unchanged. Names of stores are not accepted, because each replica would download them."""
        return path

    async def load(self, name: str, path: str | Source, *, replace: bool = False, pinned: bool = False) -> None:
        """Like ServedAdapters.load, at all replicas."""
        directory = await self.directory_to_load(name, path, replace=replace)
        await self._change(AdapterChange(name, str(directory), replace, pinned, is_initial=name in self._initial))

    async def load_sent(self, upload: Upload) -> str:
        """Like ServedAdapters.load_sent, at all replicas, which get the files."""
        try:
            self._check_load(upload.name, replace=upload.load_inplace)
            digest, files = await self._work.run(WorkKind.FILES, _read_sent, upload.source.directory)
        finally:
            if upload.source.lease is not None:
                upload.source.lease.release()
        is_initial = upload.name in self._initial
        await self._change(
            AdapterChange(upload.name, None, upload.load_inplace, upload.pinned, is_initial, digest=digest, files=files)
        )
        return f"{upload.name}@{digest}"

    async def unload(self, name: str) -> None:
        """Like ServedAdapters.unload, at all replicas. At least one of them must know the adapter."""
        await self._change(AdapterChange(name, None, is_initial=name in self._initial))

    async def submit(self, request: Request, name: str | None) -> Generation:
        """Like ServedAdapters.submit. Also tells the router that the adapter is used here."""
        if name is not None:
            await self._mark_present(without_versions(name))
        return await super().submit(request, name)

    async def check(self, change: AdapterChange) -> Outcome:
        """Checks if this replica could make a change; changes nothing. Keeps the files of a sent adapter for
        follow()."""
        was_known = self.knows(change.name)
        source: Path | Source | None = None
        # The coordinator makes one change at a time, so nothing follows an earlier check any more.
        for digest in tuple(self._checked):
            self.forget(digest)
        try:
            if not change.is_unload:
                source = await self._checked_source(change)
                attempt = self._executor.try_adapter
                await self._work.run_alone(
                    WorkKind.ADAPTERS, change.name, attempt, change.name, source, replace=was_known
                )
            if change.digest is not None and isinstance(source, Source):
                self._checked[change.digest], source = source, None
        except ApiError as error:
            return Outcome(self._replica, Refusal.of(error), was_known)
        except AdaptrtError as error:
            return Outcome(self._replica, Refusal.of(ApiError.of(error)), was_known)
        finally:
            _release(source)
        return Outcome(self._replica, None, was_known)

    def forget(self, digest: str) -> None:
        """Deletes the files of a sent adapter that was checked and that no change follows."""
        _release(self._checked.pop(digest, None))

    async def _checked_source(self, change: AdapterChange) -> Path | Source:
        """Returns the adapter of a change that may not be made yet. Raises ApiError if it cannot be loaded here."""
        if change.path is not None:
            return await self.directory_to_load(change.name, change.path, replace=change.replace)
        self._check_load(change.name, replace=change.replace)
        return await self._store_files(change.files)

    async def _store_files(self, files: Files) -> Source:
        """Writes files. Raises ApiError if there is no room."""
        return await self._work.run(WorkKind.FILES, self._uploads.store, dict(files))

    async def _sent_source(self, digest: str) -> Source:
        """Returns the stored files of a sent adapter, those of the check if there was one here.

        Raises ApiError if there is no room, and if the coordinator does not have them either.
        """
        if (checked := self._checked.pop(digest, None)) is not None:
            return checked
        if files := await self._files_of(digest):
            return await self._store_files(files)
        raise ApiError(
            f"the files of the sent adapter {digest} are not here any more; send it again",
            status=HTTPStatus.SERVICE_UNAVAILABLE,
            kind=UNAVAILABLE,
        )

    async def changes(self) -> tuple[AdapterChange, ...]:
        """Returns the changes that this replica has made, with the files of sent adapters as far as they are here."""
        found = []
        for change in self._log.changes:
            if change.digest is None:
                found.append(change)
                continue
            version = self._find_sent(change)
            if version is not None:
                _, files = await self._work.run(WorkKind.FILES, _read_sent, version.directory)
                found.append(with_fields(change, files=files))
        return tuple(found)

    def _find_sent(self, change: AdapterChange) -> NamedAdapter | None:
        if not self.knows(change.name):
            return None
        versions = self._store.versions(change.name)
        return next((one for one in versions if one.facts.digest == change.digest), None)

    async def follow(self, changes: Sequence[AdapterChange]) -> Outcome:
        """Makes the changes that have not been made here, in order.

        If an adapter cannot be loaded, its name is removed here, so that it does not stand for the old adapter. The
        next request for it tries again.
        """
        refusal = None
        async with self._following:
            for change in changes:
                if change.number <= self._log.number:
                    continue
                self._log.add(change)
                try:
                    await self._make(change)
                except ApiError as error:
                    _LOG.error("replica %s cannot follow: adapter '%s': %s", self._replica, change.name, error)
                    refusal = Refusal.of(error)
        return Outcome(self._replica, refusal)

    async def _make(self, change: AdapterChange) -> None:
        self._failed.pop(change.name, None)
        if change.is_unload:
            if self.knows(change.name):
                await super().unload(change.name)
            return
        try:
            source = await self._sent_source(str(change.digest)) if change.path is None else Path(change.path)
            try:
                await self._add(change.name, source, replace=self.knows(change.name))
            except BaseException:
                _release(source)
                raise
            if change.pinned:
                await self.pin(change.name)
        except ApiError:
            if self.knows(change.name):
                await super().unload(change.name)
            self._failed[change.name] = change
            raise

    async def _find_one(self, name: str) -> bool:
        if name in self._failed:
            async with self._following:
                failed = self._failed.get(name)
                if failed is not None:
                    await self._make(failed)
        return await super()._find_one(name)

    async def _change(self, change: AdapterChange) -> None:
        refusal = await self._change_all(change)
        if refusal is not None:
            raise refusal.error()


def _read_sent(directory: Path) -> tuple[str, Files]:
    """Returns the digest of a sent adapter, and its files."""
    files = [(name, directory / name) for name in SENT_FILES if (directory / name).is_file()]
    return adapter_digests(directory)[1], tuple((name, path.read_bytes()) for name, path in files)


def _release(source: Path | Source | None) -> None:
    """Deletes the files of a sent adapter that is not kept."""
    if isinstance(source, Source) and source.lease is not None:
        source.lease.release()


def unknown_everywhere(name: str) -> Refusal:
    """Returns the refusal to unload an adapter that no replica knows."""
    return Refusal.of(unknown_adapter(name))
